# SPDX-License-Identifier: Apache-2.0
# EPO_NCCL: NCCL's header (2.18 or newer), for the CUDA engine. The library itself is opened at
# run time: the job's own. Sets NCCL_CPPFLAGS; conditional HAVE_NCCL. After EPO_CUDA.
AC_DEFUN([EPO_NCCL], [
  AC_ARG_WITH([nccl], [AS_HELP_STRING([--with-nccl@<:@=DIR@:>@], [NCCL's header, for the CUDA engine @<:@with CUDA, if found@:>@])],
    [], [with_nccl=check])
  have_nccl=no
  AS_IF([test "$have_cuda" = no], [
    AS_IF([test "x$with_nccl" != xno && test "x$with_nccl" != xcheck],
      [AC_MSG_ERROR([--with-nccl serves the CUDA engine alone: add --with-cuda, or leave it out])])
    with_nccl=no])
  AS_IF([test "x$with_nccl" != xno], [
    AS_CASE([$with_nccl], [yes|check], [NCCL_CPPFLAGS=], [
      NCCL_CPPFLAGS="-isystem $with_nccl/include"
      AS_IF([test ! -r "$with_nccl/include/nccl.h"], [AC_MSG_ERROR([there is no $with_nccl/include/nccl.h])])])
    epo_save=$CPPFLAGS; CPPFLAGS="$CPPFLAGS $NCCL_CPPFLAGS $CUDA_CPPFLAGS"
    AC_CHECK_HEADER([nccl.h], [have_nccl=yes])
    AC_COMPUTE_INT([epo_nccl_code], [NCCL_VERSION_CODE], [#include <nccl.h>], [epo_nccl_code=0])
    CPPFLAGS=$epo_save
    AS_IF([test "$have_nccl" = no && test "x$with_nccl" != xcheck],
      [AC_MSG_ERROR([nccl.h was not found; Debian and Ubuntu with NVIDIA's repository: libnccl-dev, or --with-nccl=DIR, or --without-nccl])])
    AS_IF([test "$have_nccl" = yes && test "$epo_nccl_code" -lt 21800],
      [AC_MSG_ERROR([NCCL 2.18 or newer is needed, nccl.h has NCCL_VERSION_CODE $epo_nccl_code; --with-nccl=DIR or --without-nccl])])
    AS_IF([test "$have_nccl" = yes], [AC_DEFINE([HAVE_NCCL], [1], [NCCL's header is there.])])
  ])
  AC_SUBST([NCCL_CPPFLAGS])
  AM_CONDITIONAL([HAVE_NCCL], [test "$have_nccl" = yes])
])
