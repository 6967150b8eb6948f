# SPDX-License-Identifier: Apache-2.0
# EPO_WARNINGS: warning and hardening flags in EPO_CFLAGS; --enable-werror.
AC_DEFUN([EPO_WARNINGS], [
  AC_ARG_ENABLE([werror], [AS_HELP_STRING([--enable-werror], [make warnings errors (CI does)])],
    [], [enable_werror=no])
  EPO_CFLAGS="-std=gnu11 -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wwrite-strings -Wvla -fno-common -fvisibility=hidden -fstack-protector-strong"
  EPO_CFLAGS="$EPO_CFLAGS -include \$(top_srcdir)/lib/core/libc.h"
  AS_IF([test "x$enable_werror" = xyes], [EPO_CFLAGS="$EPO_CFLAGS -Werror"])
  EPO_LDFLAGS="-Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack"
  AC_SUBST([EPO_CFLAGS])
  AC_SUBST([EPO_LDFLAGS])
])
