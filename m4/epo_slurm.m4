# SPDX-License-Identifier: Apache-2.0
# EPO_SLURM: SPANK headers (Slurm 22.05 or newer) and the plugin folder.
AC_DEFUN([EPO_SLURM], [
  AC_ARG_WITH([slurm], [AS_HELP_STRING([--with-slurm@<:@=DIR@:>@], [Slurm's prefix; --without-slurm builds library and tools only])],
    [], [with_slurm=check])
  AC_ARG_WITH([slurm-plugin-dir], [AS_HELP_STRING([--with-slurm-plugin-dir=DIR], [where the plugin is installed @<:@LIBDIR/slurm@:>@])],
    [SLURM_PLUGIN_DIR=$withval], [SLURM_PLUGIN_DIR='${libdir}/slurm'])
  have_slurm=no
  SLURM_CPPFLAGS=
  AS_CASE([$with_slurm], [no|yes|check], [], [
    SLURM_CPPFLAGS="-isystem $with_slurm/include"
    AS_IF([test ! -r "$with_slurm/include/slurm/spank.h"],
      [AC_MSG_ERROR([there is no $with_slurm/include/slurm/spank.h; give Slurm's prefix, or --without-slurm])])])
  AS_IF([test "x$with_slurm" != xno], [
    epo_save=$CPPFLAGS; CPPFLAGS="$CPPFLAGS $SLURM_CPPFLAGS"
    AC_CHECK_HEADER([slurm/spank.h], [have_slurm=yes], [], [#include <stddef.h>])
    AC_COMPUTE_INT([epo_slurm_num], [SLURM_VERSION_NUMBER], [#include <slurm/slurm.h>], [epo_slurm_num=0])
    CPPFLAGS=$epo_save
    AS_IF([test "$have_slurm" = yes && test "$epo_slurm_num" -lt 1443072],
      [AC_MSG_ERROR([Slurm 22.05 or newer is needed (SLURM_VERSION_NUMBER found: $epo_slurm_num)])])
    AS_IF([test "$have_slurm" = no && test "x$with_slurm" != xcheck],
      [AC_MSG_ERROR([slurm/spank.h was not found; Debian and Ubuntu: libslurm-dev, RPM: slurm-devel, or --without-slurm])])
  ])
  dnl ends a step that a node refuses; beside the headers' prefix, else on PATH
  AC_ARG_VAR([SCANCEL], [absolute path of Slurm's scancel on the nodes])
  epo_slurm_path=/usr/bin:/usr/local/bin:/opt/slurm/bin:$PATH
  AS_CASE([$with_slurm], [no|yes|check], [], [epo_slurm_path=$with_slurm/bin:$epo_slurm_path])
  AC_PATH_PROG([SCANCEL], [scancel], [/usr/bin/scancel], [$epo_slurm_path])
  AC_SUBST([SLURM_CPPFLAGS])
  AC_SUBST([SLURM_PLUGIN_DIR])
  AM_CONDITIONAL([HAVE_SLURM], [test "$have_slurm" = yes])
])
