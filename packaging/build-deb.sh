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

  -g DIR       with the engine for NVIDIA GPUs, by the CUDA Toolkit in DIR (12.4 or
               newer; /usr/local/cuda) and, for communication beyond one host, the
               header of NCCL where it is found; else the packages hold the engine
               for machines without GPUs alone
  -a LIST      GPU architectures to compile for, "80 90a" [what configure takes]
  -t TARBALL   a tarball that is there already (ep-overlap-VERSION.tar.xz)
  -c           run the unit tests as a part of it
  --help       this text
END
}

fail() { echo "build-deb.sh: $*" >&2 && exit 1; }

tarball='' options=nocheck EPO_CUDA='' EPO_CUDA_ARCH=''
while [ $# -gt 0 ]; do
    case $1 in
    -t) [ $# -ge 2 ] || { usage >&2 && exit 2; } && tarball=$(realpath -e -- "$2") && shift 2 || exit 2 ;;
    -g) [ $# -ge 2 ] || { usage >&2 && exit 2; } && EPO_CUDA=$2 && shift 2 ;;
    -a) [ $# -ge 2 ] || { usage >&2 && exit 2; } && EPO_CUDA_ARCH=$2 && shift 2 ;;
    -c) options='' && shift ;;
    --help | -h) usage && exit 0 ;;
    -*) usage >&2 && exit 2 ;;
    *) break ;;
    esac
done
[ $# = 1 ] || { usage >&2 && exit 2; }
[ -z "$EPO_CUDA" ] || [ -x "$EPO_CUDA/bin/nvcc" ] || fail "no CUDA Toolkit in $EPO_CUDA (bin/nvcc); without -g the packages serve machines without GPUs"
export EPO_CUDA EPO_CUDA_ARCH
mkdir -p "$1" && output=$(cd "$1" && pwd) || exit 1
# What is missing, all together.
need="build-essential debhelper dpkg-dev xz-utils pkg-config libconfig-dev libopenblas-dev libslurm-dev libsqlite3-dev libyajl-dev libyaml-dev slurm-client"
[ -n "$tarball" ] || need="$need autoconf automake libtool"
[ -n "$options" ] || need="$need libcunit1-dev"
missing=
for name in $need; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" = installed ] && continue
    case $name in
    libopenblas-dev) [ "$(dpkg-query -W -f '${db:Status-Status}' libblas-dev 2>/dev/null)" = installed ] && continue ;;
    pkg-config) command -v pkg-config >/dev/null && continue ;;
    esac
    missing="$missing $name"
done
[ -z "$missing" ] || fail "packages are missing: apt-get install --no-install-recommends$missing"
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
echo "build-deb.sh: building, which takes minutes; what it says is in $work/log" >&2
DEB_BUILD_OPTIONS="$options parallel=$(nproc)" DEB_BUILD_PROFILES="$options" dpkg-buildpackage -b -us -uc >"$work/log" 2>&1 || {
    tail -n 40 "$work/log" >&2
    fail "dpkg-buildpackage failed"
}
cd "$work" && cp -- *.deb *.changes *.buildinfo "$output/" || exit 1
(cd "$output" && printf '%s\n' "$output"/*"_$version-1+slurm${slurm}"_*.deb)
