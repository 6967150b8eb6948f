# SPDX-License-Identifier: Apache-2.0
# EPO_CLUSTER_TESTS: bats and Slurm's daemons, for the tests that start a private cluster.
AC_DEFUN([EPO_CLUSTER_TESTS], [
  AC_ARG_ENABLE([cluster-tests], [AS_HELP_STRING([--disable-cluster-tests], [leave the tests on private Slurm clusters out of make check @<:@on if bats and slurmd are found@:>@])],
    [], [enable_cluster_tests=check])
  AC_PATH_PROG([BATS], [bats])
  AC_PATH_PROG([epo_slurmctld], [slurmctld], [], [$PATH:/usr/sbin:/sbin])
  AC_PATH_PROG([epo_munged], [munged], [], [$PATH:/usr/sbin:/sbin])
  epo_missing=
  AS_IF([test -z "$BATS"], [epo_missing="bats"])
  AS_IF([test -z "$epo_slurmctld"], [epo_missing="$epo_missing slurmctld slurmd slurm-client"])
  AS_IF([test -z "$epo_munged"], [epo_missing="$epo_missing munge"])
  AS_CASE([$enable_cluster_tests:$have_slurm:$epo_missing],
    [no:*], [],
    [*:yes:], [enable_cluster_tests=yes],
    [yes:no:*], [AC_MSG_ERROR([--enable-cluster-tests needs the plugin, and --without-slurm or a missing slurm/spank.h leaves it out])],
    [yes:*], [AC_MSG_ERROR([cluster tests need (Debian and Ubuntu): apt-get install --no-install-recommends $epo_missing])],
    [check:no:*], [enable_cluster_tests="no (the plugin is not built)"],
    [enable_cluster_tests="no (missing: $epo_missing)"])
  AM_CONDITIONAL([HAVE_BATS], [test -n "$BATS"])
  AM_CONDITIONAL([CLUSTER_TESTS], [test "x$enable_cluster_tests" = xyes])
])
