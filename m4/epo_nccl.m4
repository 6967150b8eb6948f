# SPDX-License-Identifier: Apache-2.0
# EPO_NCCL: NCCL's headers (2.18 or newer), for the CUDA engine.
AC_DEFUN([EPO_NCCL], [
  AC_ARG_WITH([nccl], [AS_HELP_STRING([--with-nccl@<:@=DIR@:>@], [NCCL headers, for the CUDA engine @<:@with CUDA@:>@])],
    [], [with_nccl=check])
])
