# SPDX-License-Identifier: Apache-2.0
# EPO_VECTOR: flags in VECTOR_CFLAGS under which loops over rows vectorise at -O2.
# (-O3 would not do: a user's CFLAGS come behind it and win.)
AC_DEFUN([EPO_VECTOR], [
  VECTOR_CFLAGS=
  epo_save=$CFLAGS
  for flag in -ftree-vectorize -fvect-cost-model=dynamic -fno-trapping-math -fno-math-errno; do
    AC_MSG_CHECKING([whether $CC takes $flag])
    CFLAGS="$epo_save -Werror $flag"
    AC_COMPILE_IFELSE([AC_LANG_PROGRAM([], [])],
      [AC_MSG_RESULT([yes]); VECTOR_CFLAGS="$VECTOR_CFLAGS $flag"], [AC_MSG_RESULT([no])])
  done
  CFLAGS=$epo_save
  AC_SUBST([VECTOR_CFLAGS])
])
