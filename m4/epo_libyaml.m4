# SPDX-License-Identifier: Apache-2.0
# EPO_LIBYAML: libyaml 0.1.4 or newer, for Bridge's configurations.
AC_DEFUN([EPO_LIBYAML], [
  PKG_CHECK_MODULES([LIBYAML], [yaml-0.1 >= 0.1.4], [],
    [AC_MSG_ERROR([libyaml 0.1.4 or newer is needed; Debian and Ubuntu: libyaml-dev, RPM: libyaml-devel, or --disable-tools])])
])
