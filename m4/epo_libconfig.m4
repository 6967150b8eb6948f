# SPDX-License-Identifier: Apache-2.0
# EPO_LIBCONFIG: libconfig 1.5 or newer, for the site's configuration.
AC_DEFUN([EPO_LIBCONFIG], [
  PKG_CHECK_MODULES([LIBCONFIG], [libconfig >= 1.5], [],
    [AC_MSG_ERROR([libconfig 1.5 or newer is needed; Debian and Ubuntu: libconfig-dev, RPM: libconfig-devel])])
])
