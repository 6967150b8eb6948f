#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes ./configure. Needs autoconf 2.71, automake 1.16, libtool 2.4.7, pkg-config.
set -eu
cd "$(dirname "$0")"
for tool in autoconf automake libtoolize pkg-config; do
    command -v "$tool" >/dev/null 2>&1 || {
        echo "autogen.sh: $tool is not installed; on Debian or Ubuntu: apt-get install autoconf automake libtool pkg-config" >&2
        exit 1
    }
done
mkdir -p build-aux
exec autoreconf --install --force --warnings=all,no-obsolete,no-portability,no-override
