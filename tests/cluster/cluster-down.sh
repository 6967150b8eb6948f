#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cluster-down.sh [--when-closed | --slurm-only] DIR: ends everything that belongs to the
# cluster in DIR and removes DIR (left in place if DIR/keep exists).
#   --when-closed  first waits for the end of standard input: the one who started it is gone
#   --slurm-only   only the Slurm daemons, DIR stays
# Only processes that carry the cluster's own EPO_CLUSTER_DIR, or stand in its pid files and
# still run under the daemon's name, are touched.
set -u
mode=all
case $1 in --*) mode=$1 && shift ;; esac
dir=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/cluster/common.sh
. "$here/common.sh"
[ -d "$dir/run" ] || { say "$dir is no cluster's folder" && exit 2; }
[ "$mode" != --when-closed ] || cat >/dev/null

members() { # pids started in this cluster's environment
    grep -lsz -xF "EPO_CLUSTER_DIR=$dir" /proc/[0-9]*/environ 2>/dev/null | awk -F/ -v me="$$" '$3 != me { print $3 }'
}

daemon_stop() { # pid file
    local pid name=${1##*/}
    name=${name%%.*}
    pid=$(cat "$1" 2>/dev/null)
    rm -f "$1"
    [[ $pid =~ ^[0-9]+$ ]] && process_is "$pid" "$name" || return 0
    kill -TERM "$pid" 2>/dev/null
    for _ in $(seq 100); do
        process_is "$pid" "$name" || return 0
        sleep 0.02
    done
    kill -KILL "$pid" 2>/dev/null
}

# Jobs end by the book first: slurmstepd takes its tasks along.
jobs_cancel() {
    [ -n "$(timeout 3 squeue -h 2>/dev/null)" ] || return 0
    timeout 5 squeue -h -o %A 2>/dev/null | xargs -r timeout 5 scancel 2>/dev/null
    for _ in $(seq 40); do
        [ -n "$(timeout 3 squeue -h 2>/dev/null)" ] || return 0
        sleep 0.1
    done
}

tree() { # pids -> themselves and all below
    local pid
    for pid in "$@"; do
        echo "$pid"
        # shellcheck disable=SC2046
        tree $(cat "/proc/$pid/task"/*/children 2>/dev/null)
    done
}

sweep() {
    local pids
    for _ in $(seq 20); do
        pids=$(members)
        [ -n "$pids" ] || return 0
        # shellcheck disable=SC2086,SC2046
        kill -KILL $(tree $pids) 2>/dev/null
        sleep 0.05
    done
}

export SLURM_CONF=$dir/etc/slurm.conf
if [ "$mode" != --slurm-only ] && process_is "$(cat "$dir/run/slurmctld.pid" 2>/dev/null)" slurmctld; then
    jobs_cancel
fi
for file in "$dir"/run/slurmd.*.pid "$dir"/run/slurmctld.pid; do
    [ -e "$file" ] && daemon_stop "$file" &
done
wait
[ "$mode" = --slurm-only ] && exit 0
[ -e "$dir/run/munged.pid" ] && daemon_stop "$dir/run/munged.pid"
sweep
[ -e "$dir/keep" ] || rm -rf "$dir"
