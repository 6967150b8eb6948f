# SPDX-License-Identifier: Apache-2.0
# EPO_SQLITE: SQLite 3.7.15 or newer, for Nsight Systems' exports.
AC_DEFUN([EPO_SQLITE], [
  PKG_CHECK_MODULES([SQLITE], [sqlite3 >= 3.7.15], [],
    [AC_MSG_ERROR([SQLite 3.7.15 or newer is needed; Debian and Ubuntu: libsqlite3-dev, RPM: sqlite-devel, or --disable-tools])])
])
