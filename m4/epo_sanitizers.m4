# SPDX-License-Identifier: Apache-2.0
# EPO_SANITIZERS: --enable-sanitizer=thread|address,undefined for every object.  The C
# library's checked calls (_FORTIFY_SOURCE) are for builds without: they hide calls from a
# sanitizer, and need optimisation.
AC_DEFUN([EPO_SANITIZERS], [
  AC_ARG_ENABLE([sanitizer], [AS_HELP_STRING([--enable-sanitizer=LIST], [build with -fsanitize=LIST])],
    [], [enable_sanitizer=no])
  AS_IF([test "x$enable_sanitizer" != xno], [
    EPO_CFLAGS="$EPO_CFLAGS -fsanitize=$enable_sanitizer -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
    EPO_LDFLAGS="-fsanitize=$enable_sanitizer"
  ], [
    EPO_HARDENING_FLAG([-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2], [[#include <string.h>
      int epo_probe;]])
  ])
  AM_CONDITIONAL([SANITIZED], [test "x$enable_sanitizer" != xno])
])
