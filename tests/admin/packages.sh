#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the packages, compares what they install, has lintian and rpmlint look at them, and
# installs the Debian ones in a clean root; see usage below.
set -u
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

usage() {
    cat <<'END'
Usage: tests/admin/packages.sh [OUTPUT]

  1. a dist tarball, and Debian and RPM packages from it
  2. deb, rpm and "make install DESTDIR" of the current build install the same files
  3. what the plugin loads and runs is in the package that docs/admin.md names
     (tests/admin/named.sh)
  4. what lintian and rpmlint find; errors of lintian fail
  5. the Debian packages in a clean root of this machine's release: a cluster loads
     the plugin from where the package put it (tests/admin/installed.sh)

Needs dpkg-dev and debhelper; rpm, cpio, lintian, rpmlint and (as root) debootstrap where
they are there, and says what was left out. Keeps the packages in OUTPUT.
END
}

case ${1:-} in
--help | -h) usage && exit 0 ;;
-*) usage >&2 && exit 2 ;;
esac
work=$(mktemp -d "${TMPDIR:-/tmp}/epo-packages.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
output=${1:-$work/packages}
mkdir -p "$output"/deb "$output"/rpm || exit 1
failures=0
failed() { echo "FAILED: $*" && failures=$((failures + 1)); }
without() { command -v "$1" >/dev/null || { echo "left out, $1 is not installed: $2" && false; }; }

# Names as the three call the same file; without what is each packager's own.
normal() {
    sed -E 's|^\./|/|; s|^/usr/local/|/usr/|; s|^/usr/etc/|/etc/|
        s|^/usr/lib64/|LIB/|; s|^/usr/lib/[^/]+-linux-gnu/|LIB/|; s|^/usr/lib/([^/]*ep[-_]overlap\|slurm\|pkgconfig)|LIB/\1|
        s|^LIB/slurm(-wlm)?/|PLUGINS/|; s|(/man[1-9]/.*)\.gz$|\1|' |
        grep -vE '\.la$|/\.build-id|/share/licenses/|/share/doc/[^/]*/(copyright|changelog\.Debian\.gz)$' | sort -u
}
files_of_deb() { for package in "$output"/deb/*.deb; do [[ $package == *-dbgsym_* ]] || dpkg-deb -c "$package" | awk '$1 !~ /^d/ { print $6 }'; done | normal; }
files_of_rpm() { for package in "$output"/rpm/*.rpm; do rpm -qp --qf '[%{FILEMODES:perms} %{FILENAMES}\n]' "$package" | awk '$1 !~ /^d/ { print $2 }'; done | normal; }

echo "== tarball and Debian packages"
top=$top bash -c '. "$top/packaging/dist.sh" && dist_make "$1"' bash "$work" >"$work/tarball" || exit 1
tarball=$(cat "$work/tarball")
"$top/packaging/build-deb.sh" -t "$tarball" "$output/deb" || exit 1
files_of_deb >"$work/deb"
grep -qx 'PLUGINS/ep_overlap.so' "$work/deb" || failed "no plugin in the Debian packages"
if without rpmbuild "RPM packages"; then
    echo "== RPM packages"
    "$top/packaging/build-rpm.sh" -f -t "$tarball" "$output/rpm" || failed "the RPM packages"
    files_of_rpm >"$work/rpm"
    diff -u --label deb --label rpm "$work/deb" "$work/rpm" || failed "RPM and Debian packages install different files"
fi
build=${EPO_BUILD_DIR:-$top/build}
if [ -f "$build/Makefile" ]; then
    make -C "$build" install DESTDIR="$work/dest" >"$work/install.log" 2>&1 || { tail "$work/install.log" && failed "make install DESTDIR"; }
    # packages put the two configuration files into place
    { (cd "$work/dest" && find . ! -type d) && echo /etc/ep_overlap.conf && echo /etc/slurm/plugstack.conf.d/zz-ep-overlap.conf; } |
        normal | grep -v '/engine_cuda\.so$' >"$work/install"
    diff -u --label deb --label install "$work/deb" "$work/install" || failed "make install and packages install different files"
fi
echo "== $(wc -l <"$work/deb") files installed"

echo "== what the plugin loads and runs"
"$top/tests/admin/named.sh" "$output/deb" || failed "the Debian packages' library or probe"
if [ -s "$work/rpm" ] && without cpio "the RPM packages' library and probe"; then
    "$top/tests/admin/named.sh" "$output/rpm" || failed "the RPM packages' library or probe"
fi

if without lintian "its findings"; then
    echo "== lintian"
    lintian --fail-on error --allow-root "$output"/deb/*.changes 2>&1 | grep -v 'root privileges' || true
    [ "${PIPESTATUS[0]}" = 0 ] || failed "lintian"
fi
if without rpmlint "its findings" && [ -s "$work/rpm" ]; then
    echo "== rpmlint"
    rpmlint "$output"/rpm/*.rpm "$output"/rpm/*.spec 2>&1 | grep -E ': [EW]: | checked;' | sed -E 's/^[^:]*: //' | awk '{ print $1, $2 }' | sort | uniq -c
fi

suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
if [ "$(id -u)" != 0 ]; then
    echo "left out, needs root: the packages in a clean root"
elif without debootstrap "the packages in a clean root"; then
    echo "== the Debian packages in a clean root of $suite"
    "$top/tests/cluster/clean-root.sh" -s "$suite" -p "slurmctld slurmd slurm-client munge" -b "$output/deb" -t 300 \
        bash tests/admin/installed.sh /mnt || failed "the packages in a clean root"
fi
echo "$failures failed"
[ "$failures" = 0 ]
