# SPDX-License-Identifier: Apache-2.0
# EPO_SANITIZERS: --enable-sanitizer=thread|address,undefined for every object.
AC_DEFUN([EPO_SANITIZERS], [
  AC_ARG_ENABLE([sanitizer], [AS_HELP_STRING([--enable-sanitizer=LIST], [build with -fsanitize=LIST])],
    [], [enable_sanitizer=no])
  AS_IF([test "x$enable_sanitizer" != xno], [
    EPO_CFLAGS="$EPO_CFLAGS -fsanitize=$enable_sanitizer -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
    EPO_LDFLAGS="-fsanitize=$enable_sanitizer"
  ])
  AM_CONDITIONAL([SANITIZED], [test "x$enable_sanitizer" != xno])
])
