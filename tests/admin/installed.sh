#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# installed.sh DIR: in a clean root (tests/cluster/clean-root.sh), as root: installs the Debian
# packages of DIR and starts a cluster whose Slurm reads /etc/slurm/plugstack.conf as the packages
# left it; then removes them again. Nothing of the tree is used but tests/cluster/run.sh.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
failures=0
work=$(mktemp -d) || exit 1
check() { # what command...
    local what=$1
    shift
    if "$@"; then
        echo "ok: $what"
    else
        failures=$((failures + 1))
        echo "NOT OK: $what; the last command said:"
        tail -n 20 "$work/out"
    fi
}
in_cluster() { # command...: in a cluster that takes the plugin from the system
    unset EPO_BUILD_DIR EPO_STAGE_DIR
    timeout 100 tests/cluster/run.sh -P -t 60 -x 'PlugStackConfig=/etc/slurm/plugstack.conf\n' "$@" >"$work/out" 2>&1
    status=$?
}
said() { grep -qE -- "$1" "$work/out"; }
quietly() { "$@" >"$work/out" 2>&1; }

# (as nodes have them: what is for compiling comes later)
mapfile -t packages < <(find "$1" -name '*.deb' ! -name '*-dbgsym_*' ! -name '*-dev_*' | sort)
[ "${#packages[@]}" = 3 ] || { echo "expected 3 packages beside that for compiling in $1" && exit 1; }
apt-get install -y -q --no-install-recommends "${packages[@]}" >"$work/apt.log" 2>&1 || { tail -n 20 "$work/apt.log" && exit 1; }

in_cluster srun -N2 -n4 --ep-overlap=on --ep-dispatcher=flex sh -c 'printenv EP_OVERLAP_DECISION LD_PRELOAD'
check "srun with the installed plugin" said '^on$'
check "the installed library is preloaded" said '^/usr/lib/[^/]+/libep_overlap\.so'
in_cluster srun -n2 --ep-overlap=on --delay-wgrad ep-train --steps 3 --no-measure
check "ep-train in two ranks" said 'iteration +3/'
in_cluster srun -n1 sh -c 'env | grep -c EP_OVERLAP_'
check "without an option nothing is set" said '^0$'
printf '#!/bin/sh\n#SBATCH -n2 --ep-overlap=on\nsrun printenv EP_OVERLAP_DECISION\n' >"$work/job"
# shellcheck disable=SC2016
in_cluster bash -c 'sbatch -Q -o "$0.out" "$0"; for i in $(seq 100); do [ -z "$(squeue -h)" ] && break; sleep 0.1; done; cat "$0.out"' "$work/job"
check "#SBATCH lines" said '^on$'
in_cluster srun --help
check "srun --help lists the options" said '--ep-dispatcher=name'
in_cluster ep-overlap check
check "ep-overlap check finds the plugin and its Slurm release" said 'built for Slurm [0-9]+\.[0-9]+'
in_cluster /usr/share/ep-overlap/samples/node-health.sh
check "the node health sample finds the node fit" [ "$status" = 0 ]
check "the toolkit runs" quietly ep-overlap explain OVL-006
check "the man pages are there" test -e /usr/share/man/man8/ep_overlap.8.gz -a -e /usr/share/man/man5/ep_overlap.conf.5.gz
check "README's links to pages lead there" sh -c 'cd /usr/share/doc/ep-overlap && grep -q "](docs/admin.md)" README.md && test -e docs/admin.md -a -e docs/overlap.svg'
check "root alone can write the configuration" [ "$(stat -c %U%a /etc/ep_overlap.conf)" = root644 ]

echo 'version = 1; policy = ( { action = "deny"; message = "not yet"; } );' >/etc/ep_overlap.conf
in_cluster srun --ep-overlap=on true
check "a changed configuration counts at once" said 'denied by the site.*: not yet'
# an upgrade to the same version keeps it
DEBIAN_FRONTEND=noninteractive dpkg --force-confdef --force-confold -i "${packages[@]}" >"$work/apt.log" 2>&1 || cat "$work/apt.log"
check "an upgrade keeps the site's configuration" grep -q 'not yet' /etc/ep_overlap.conf

# what compiling takes
dpkg -i "$1"/libep-overlap-dev_*.deb >"$work/apt.log" 2>&1 || cat "$work/apt.log"
check "header, link and pkg-config file come with the package for compiling" sh -c 'test -e /usr/include/ep_overlap.h && test -e /usr/lib/*/libep_overlap.so && test -e /usr/lib/*/pkgconfig/ep_overlap.pc'

apt-get purge -y -q ep-overlap-slurm ep-overlap libep-overlap-dev libep-overlap0 >"$work/apt.log" 2>&1 || cat "$work/apt.log"
in_cluster srun -n2 hostname
check "after removal srun works" [ "$status" = 0 ]
in_cluster srun --ep-overlap=on true
check "after removal the options are unknown" said 'unrecognized option'
left=$(find / -xdev \( -path /src -o -path /proc -o -path /mnt -o -path /tmp \) -prune -o \( -name '*ep[-_]overlap*' -o -name 'ep-train*' \) -print)
check "nothing is left: ${left:-nothing}" [ -z "$left" ]
echo "$failures failed"
[ "$failures" = 0 ]
