# SPDX-License-Identifier: Apache-2.0
# EPO_YAJL: yajl 2.0.0 or newer, a streaming JSON parser, for Chrome traces.
AC_DEFUN([EPO_YAJL], [
  PKG_CHECK_MODULES([YAJL], [yajl >= 2.0.0], [],
    [AC_MSG_ERROR([yajl 2.0.0 or newer is needed; Debian and Ubuntu: libyajl-dev, RPM: yajl-devel, or --disable-tools])])
])
