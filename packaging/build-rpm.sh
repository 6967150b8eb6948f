#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds RPM packages from a dist tarball of this tree; see usage below.
set -u
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<'END'
Usage: packaging/build-rpm.sh [options] OUTPUT

Makes a dist tarball, builds the packages ep-overlap, -libs, -devel and -slurm
from it and puts them, with the spec file, into the folder OUTPUT. Downloads
nothing. ep-overlap-slurm is for the Slurm release whose headers are installed
here, and the packages' release says so: build them once per release.

  -g DIR       with the engine for NVIDIA GPUs, by the CUDA Toolkit in DIR (12.4 or
               newer; /usr/local/cuda) and, for communication beyond one host, the
               header of NCCL where it is found; else the packages hold the engine
               for machines without GPUs alone
  -a LIST      GPU architectures to compile for, "80 90a" [what configure takes]
  -t TARBALL   a tarball that is there already (ep-overlap-VERSION.tar.xz)
  -p DIR       Slurm's plugin folder [%{_libdir}/slurm]
  -f           do not look whether the build's packages are installed as RPMs:
               to try it on a machine that has them from elsewhere
  --help       this text
END
}

fail() { echo "build-rpm.sh: $*" >&2 && exit 1; }

tarball='' cuda='' more=()
while [ $# -gt 0 ]; do
    case $1 in
    -t) [ $# -ge 2 ] || { usage >&2 && exit 2; } && tarball=$(realpath -e -- "$2") && shift 2 || exit 2 ;;
    -g) [ $# -ge 2 ] || { usage >&2 && exit 2; } && cuda=$2 && more+=(--define "cuda $2") && shift 2 ;;
    -a) [ $# -ge 2 ] || { usage >&2 && exit 2; } && more+=(--define "cuda_arch $2") && shift 2 ;;
    -p) [ $# -ge 2 ] || { usage >&2 && exit 2; } && more+=(--define "slurm_plugindir $2") && shift 2 ;;
    -f) more+=(--nodeps) && shift ;;
    --help | -h) usage && exit 0 ;;
    -*) usage >&2 && exit 2 ;;
    *) break ;;
    esac
done
[ $# = 1 ] || { usage >&2 && exit 2; }
[ -z "$cuda" ] || [ -x "$cuda/bin/nvcc" ] || fail "no CUDA Toolkit in $cuda (bin/nvcc); without -g the packages serve machines without GPUs"
mkdir -p "$1" && output=$(cd "$1" && pwd) || exit 1
command -v rpmbuild >/dev/null || fail "rpmbuild was not found (rpm-build; Debian and Ubuntu: rpm)"
slurm=$(printf '#include <slurm/slurm_version.h>\nversion SLURM_VERSION_NUMBER\n' | ${CC:-cc} -E -P - 2>/dev/null | awk '/^version/ { print $2 }')
[[ $slurm =~ ^0x[0-9a-f]{6}$ ]] || fail "Slurm's headers were not found (slurm-devel; Debian and Ubuntu: libslurm-dev)"
slurm=$(printf '%d.%02d' $((slurm >> 16)) $((slurm >> 8 & 255)))

work=$(mktemp -d "${TMPDIR:-/tmp}/epo-rpm.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
# shellcheck source=packaging/dist.sh
. "$top/packaging/dist.sh"
[ -n "$tarball" ] || tarball=$(dist_make "$work") || exit 1
version=$(basename "$tarball" .tar.xz) && version=${version#ep-overlap-}
mkdir -p "$work"/rpm/{SOURCES,SPECS} && cp -- "$tarball" "$work/rpm/SOURCES/" || exit 1
tar -xOf "$tarball" "ep-overlap-$version/packaging/rpm/ep-overlap.spec" | sed "s/@VERSION@/$version/" >"$work/rpm/SPECS/ep-overlap.spec"
[ -s "$work/rpm/SPECS/ep-overlap.spec" ] || fail "$tarball has no packaging/rpm/ep-overlap.spec"
echo "build-rpm.sh: building, which takes minutes; what it says is in $work/log" >&2
rpmbuild -bb --define "_topdir $work/rpm" --define "slurm_release $slurm" "${more[@]}" "$work/rpm/SPECS/ep-overlap.spec" >"$work/log" 2>&1 || {
    tail -n 40 "$work/log" >&2
    fail "rpmbuild failed"
}
cp -- "$work"/rpm/RPMS/*/*.rpm "$work/rpm/SPECS/ep-overlap.spec" "$output/" || exit 1
(cd "$output" && printf '%s\n' "$output"/ep-overlap*-"$version-1.slurm$slurm"*.rpm)
