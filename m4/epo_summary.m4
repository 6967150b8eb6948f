# SPDX-License-Identifier: Apache-2.0
# EPO_SUMMARY: what was decided, at the end of configure.
AC_DEFUN([EPO_SUMMARY], [
  AC_MSG_NOTICE([
  $PACKAGE_STRING
    SPANK plugin   $have_slurm (into $SLURM_PLUGIN_DIR)
    host engine    $enable_host_engine ($CBLAS_LIBS)
    CUDA engine    $have_cuda${epo_archs:+ for $epo_archs}, NCCL $have_nccl
    toolkit        $enable_tools
    unit tests     $enable_tests
    cluster tests  $enable_cluster_tests])
])
