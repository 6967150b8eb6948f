# SPDX-License-Identifier: Apache-2.0
# EPO_TOOLS: whether the toolkit (the ep-overlap command) is built; asks for what it reads with.
AC_DEFUN([EPO_TOOLS], [
  AC_ARG_ENABLE([tools], [AS_HELP_STRING([--disable-tools], [leave out the ep-overlap command])],
    [], [enable_tools=yes])
  AS_IF([test "x$enable_tools" != xno], [
    EPO_LIBYAML
    EPO_SQLITE
    EPO_YAJL
  ])
  AM_CONDITIONAL([TOOLS_ON], [test "x$enable_tools" != xno])
])
