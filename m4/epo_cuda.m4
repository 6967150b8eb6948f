# SPDX-License-Identifier: Apache-2.0
# EPO_CUDA: the CUDA Toolkit (12.4 or newer), for the CUDA engine.
AC_DEFUN([EPO_CUDA], [
  AC_ARG_WITH([cuda], [AS_HELP_STRING([--with-cuda@<:@=DIR@:>@], [CUDA Toolkit, for the CUDA engine @<:@off@:>@])],
    [], [with_cuda=no])
  have_cuda=no
  AM_CONDITIONAL([HAVE_CUDA], [test "$have_cuda" = yes])
])
