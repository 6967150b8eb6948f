#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds Debian packages from a dist tarball of this tree; see usage below.
set -u
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<'END'
Usage: packaging/build-deb.sh [options] OUTPUT

Makes a dist tarball, builds the packages libep-overlap0, libep-overlap-dev,
ep-overlap and ep-overlap-slurm from it and puts them into the folder OUTPUT.
Downloads nothing. ep-overlap-slurm is for the Slurm release whose headers are
installed here (libslurm-dev), and the packages' version says so: build them
once per release, on or in a root of that distribution.

  -t TARBALL   a tarball that is there already (ep-overlap-VERSION.tar.xz)
  -c           run the unit tests as a part of it
  --help       this text
END
}

fail() { echo "build-deb.sh: $*" >&2 && exit 1; }

tarball='' options=nocheck
while [ $# -gt 0 ]; do
    case $1 in
    -t) [ $# -ge 2 ] || { usage >&2 && exit 2; } && tarball=$(realpath -e -- "$2") && shift 2 || exit 2 ;;
    -c) options='' && shift ;;
    --help | -h) usage && exit 0 ;;
    -*) usage >&2 && exit 2 ;;
    *) break ;;
    esac
done
[ $# = 1 ] || { usage >&2 && exit 2; }
mkdir -p "$1" && output=$(cd "$1" && pwd) || exit 1
for tool in dpkg-buildpackage dh xz; do
    command -v "$tool" >/dev/null || fail "$tool was not found (Debian and Ubuntu: apt-get install --no-install-recommends debhelper dpkg-dev xz-utils)"
done
slurm=$(dpkg-query -W -f '${Version}' libslurm-dev 2>/dev/null | sed -nE 's/^([0-9]+:)?([0-9]+\.[0-9]+).*/\2/p')
[ -n "$slurm" ] || fail "Slurm's headers are not installed (libslurm-dev)"

work=$(mktemp -d "${TMPDIR:-/tmp}/epo-deb.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
# shellcheck source=packaging/dist.sh
. "$top/packaging/dist.sh"
[ -n "$tarball" ] || tarball=$(dist_make "$work") || exit 1
version=$(basename "$tarball" .tar.xz) && version=${version#ep-overlap-}
tar -C "$work" -xf "$tarball" || exit 1
cd "$work/ep-overlap-$version" || fail "$tarball has no folder ep-overlap-$version"
cp -r packaging/debian debian || exit 1
date=$(date -R ${SOURCE_DATE_EPOCH:+--date="@$SOURCE_DATE_EPOCH"})
sed -e "s/@VERSION@/$version-1+slurm$slurm/; s/@UPSTREAM@/$version/; s/@SLURM@/$slurm/; s/@DATE@/$date/" \
    debian/changelog.in >debian/changelog && rm debian/changelog.in
sed -i 's/(native)/(quilt)/' debian/source/format
DEB_BUILD_OPTIONS="$options parallel=$(nproc)" DEB_BUILD_PROFILES="$options" dpkg-buildpackage -b -us -uc >"$work/log" 2>&1 || {
    tail -n 40 "$work/log" >&2
    fail "dpkg-buildpackage failed"
}
cd "$work" && cp -- *.deb *.changes *.buildinfo "$output/" || exit 1
(cd "$output" && printf '%s\n' "$output"/*"_$version-1+slurm${slurm}"_*.deb)
