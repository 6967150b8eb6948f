# SPDX-License-Identifier: Apache-2.0
# EPO_CUNIT: CUnit 2.1, for the unit tests.
AC_DEFUN([EPO_CUNIT], [
  AC_ARG_ENABLE([tests], [AS_HELP_STRING([--disable-tests], [do not build the unit tests])],
    [], [enable_tests=yes])
  AS_IF([test "x$enable_tests" != xno], [
    PKG_CHECK_MODULES([CUNIT], [cunit >= 2.1], [],
      [AC_MSG_ERROR([CUnit 2.1 or newer is needed for the tests; Debian and Ubuntu: libcunit1-dev, RPM: CUnit-devel, or --disable-tests])])
  ])
  AM_CONDITIONAL([TESTS_ON], [test "x$enable_tests" != xno])
])
