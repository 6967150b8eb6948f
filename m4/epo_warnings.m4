# SPDX-License-Identifier: Apache-2.0
# EPO_HARDENING_FLAG(FLAG, PROGRAM): adds FLAG to EPO_CFLAGS where the compiler takes it for
# PROGRAM without a warning, with the user's own flags behind it.
AC_DEFUN([EPO_HARDENING_FLAG], [
  AC_MSG_CHECKING([whether $CC takes $1])
  epo_saved_cflags=$CFLAGS
  CFLAGS="-Werror $1 $CFLAGS"
  AC_COMPILE_IFELSE([AC_LANG_SOURCE([$2])],
    [AC_MSG_RESULT([yes]); EPO_CFLAGS="$EPO_CFLAGS $1"], [AC_MSG_RESULT([no])])
  CFLAGS=$epo_saved_cflags
])

# EPO_WARNINGS: warning and hardening flags in EPO_CFLAGS; --enable-werror.
AC_DEFUN([EPO_WARNINGS], [
  AC_ARG_ENABLE([werror], [AS_HELP_STRING([--enable-werror], [make warnings errors (CI does)])],
    [], [enable_werror=no])
  EPO_CFLAGS="-std=gnu11 -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wwrite-strings -Wvla -fno-common -fvisibility=hidden -fstack-protector-strong"
  EPO_CFLAGS="$EPO_CFLAGS -include \$(top_srcdir)/lib/core/libc.h"
  EPO_HARDENING_FLAG([-fstack-clash-protection], [[int epo_probe;]])
  EPO_HARDENING_FLAG([-fcf-protection=full], [[int epo_probe;]])
  AS_IF([test "x$enable_werror" = xyes], [EPO_CFLAGS="$EPO_CFLAGS -Werror"])
  EPO_LDFLAGS="-Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack"
  AC_SUBST([EPO_CFLAGS])
  AC_SUBST([EPO_LDFLAGS])
])
