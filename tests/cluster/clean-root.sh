#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command in a fresh root of a Debian release; see usage below.
set -u
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

usage() {
    cat <<'END'
Usage: tests/cluster/clean-root.sh [options] [COMMAND [ARGUMENT...]]

Makes a minimal root of a Debian release with debootstrap, installs packages in
it, copies this tree to /src and runs COMMAND there as root, with its own
processes and mounts, which end with it. Needs root, debootstrap and the mirror
of this machine's own apt sources. Without COMMAND: builds ep-overlap against
the release's Slurm and runs the tests on private clusters, and says which
passed.

  -s SUITE     bookworm has Slurm 22.05, trixie 24.11 [trixie]
  -p PACKAGES  what to install ["./quickstart.sh packages"]
  -r DIR       the root, kept; made if it is not there [a temporary one]
  -b SOURCE    a folder of this machine, seen as /mnt, read-only
  -t SECONDS   limit for COMMAND [1800]
  --help       this text

Returns COMMAND's status; 2 bad usage, 69 something is missing, 70 the root
could not be made, 124 the limit was reached.
END
}

say() { echo "clean-root.sh: $*" >&2; }

suite=trixie packages=$("$top/quickstart.sh" packages | tr '\n' ' ') root='' bind='' limit=1800 keep=1
while [ $# -gt 0 ]; do
    case $1 in
    -s | -p | -r | -b | -t)
        [ $# -ge 2 ] || { say "$1 takes a value" && exit 2; }
        case $1 in
        -s) suite=$2 ;;
        -p) packages=$2 ;;
        -r) root=$2 ;;
        -b) bind=$(realpath -e -- "$2") || exit 2 ;;
        -t) limit=$2 ;;
        esac
        shift 2
        ;;
    --help | -h) usage && exit 0 ;;
    --) shift && break ;;
    -*) say "unknown option '$1'; try --help" && exit 2 ;;
    *) break ;;
    esac
done
[[ $limit =~ ^[0-9]{1,5}$ ]] || { say "-t takes seconds, not '$limit'" && exit 2; }
[ "$(id -u)" = 0 ] || { say "only root can make one" && exit 69; }
for tool in debootstrap unshare chroot apt-get timeout; do
    command -v "$tool" >/dev/null || { say "$tool was not found (Debian and Ubuntu: debootstrap util-linux)" && exit 69; }
done
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main' | grep -v security | head -n 1)
[ -n "$mirror" ] || { say "apt names no mirror on this machine" && exit 69; }

if [ -z "$root" ]; then
    keep=0
    root=$(mktemp -d "${TMPDIR:-/tmp}/epo-root.XXXXXX") || exit 70
fi
mkdir -p "$root" && chmod 755 "$root" && root=$(realpath -e -- "$root") || exit 70
child=
# shellcheck disable=SC2317 # called by the traps
finish() {
    local status=$?
    [ -z "$child" ] || { kill "$child" && wait "$child"; } 2>/dev/null
    [ "$keep" = 1 ] || rm -rf --one-file-system "$root"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM HUP

inside() { # seconds command...: with processes and mounts of its own, no variable of ours
    local seconds=$1
    shift
    # shellcheck disable=SC2016
    timeout -k 10 "$seconds" unshare --mount --pid --uts --fork --kill-child bash -c '
        root=$1 bind=$2 && shift 2 &&
        mount --make-rprivate / && mount --bind "$root" "$root" && cd "$root" &&
        mount -t proc proc proc && mount --rbind /dev dev && mount --rbind /sys sys && mount -t tmpfs -o mode=1777 tmpfs dev/shm &&
        { [ -z "$bind" ] || mount -o bind,ro "$bind" mnt; } &&
        hostname epo-root && mkdir -p .old && pivot_root . .old && umount -l .old && rmdir .old &&
        exec chroot . /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 SHELL=/bin/bash \
            DEBIAN_FRONTEND=noninteractive sh -c "cd /src && exec \"\$@\"" sh "$@"
    ' unshare "$root" "$bind" "$@" </dev/null &
    child=$!
    wait "$child"
    local status=$?
    child=
    return $status
}

if [ ! -e "$root/etc/debian_version" ]; then
    say "making a root of $suite in $root"
    components=main
    ! grep -qx 'ID=ubuntu' /etc/os-release || components=main,universe # there Slurm is in universe
    timeout 600 debootstrap --variant=minbase --components="$components" "$suite" "$root" "$mirror" >"$root/debootstrap.log" 2>&1 ||
        { tail -n 5 "$root/debootstrap.log" >&2 && say "debootstrap failed" && exit 70; }
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" # no package starts a daemon
    chmod 755 "$root/usr/sbin/policy-rc.d"
    echo '127.0.0.1 epo-root localhost' >"$root/etc/hosts"
fi
rm -rf "${root:?}/src" && mkdir "$root/src" || exit 70
if [ -e "$top/.git" ]; then list=(git ls-files -coz --exclude-standard); else list=(find . -path ./build -prune -o -type f -print0); fi
(cd "$top" && "${list[@]}" | tar --null -cf - -T -) | tar -C "$root/src" --no-same-owner -xf - || exit 70
if [ -n "$packages" ]; then
    say "installing packages"
    # shellcheck disable=SC2086
    inside 900 apt-get install -y -q --no-install-recommends $packages >"$root/apt.log" 2>&1 ||
        { tail -n 5 "$root/apt.log" >&2 && say "apt-get failed" && exit 70; }
fi
[ $# -gt 0 ] || set -- bash tests/cluster/clean-root-tests.sh
say "running: $*"
inside "$limit" "$@"
