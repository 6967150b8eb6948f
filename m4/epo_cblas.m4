# SPDX-License-Identifier: Apache-2.0
# EPO_CBLAS: a CBLAS for the host engine (OpenBLAS, BLIS, MKL's or the reference).
AC_DEFUN([EPO_CBLAS], [
  AC_ARG_ENABLE([host-engine], [AS_HELP_STRING([--disable-host-engine], [leave out the engine for machines without GPU])],
    [], [enable_host_engine=yes])
  AS_IF([test "x$enable_host_engine" != xno], [
    PKG_CHECK_MODULES([CBLAS], [openblas], [], [
      PKG_CHECK_MODULES([CBLAS], [cblas], [], [
        AC_CHECK_LIB([blas], [cblas_sgemm], [CBLAS_LIBS=-lblas; CBLAS_CFLAGS=],
          [AC_MSG_ERROR([no CBLAS was found; Debian and Ubuntu: libopenblas-dev, RPM: openblas-devel, or --disable-host-engine])])])])
  ])
  AC_SUBST([CBLAS_CFLAGS])
  AC_SUBST([CBLAS_LIBS])
  AM_CONDITIONAL([HOST_ENGINE], [test "x$enable_host_engine" != xno])
])
