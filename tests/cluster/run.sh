#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command in a throw-away Slurm cluster of its own; see usage below.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/cluster/common.sh
. "$here/common.sh"

usage() {
    cat <<'END'
Usage: tests/cluster/run.sh [options] COMMAND [ARGUMENT...]

Starts a private Slurm cluster on this machine (loopback, no systemd, root or
not), with the staged ep-overlap plugin in its plugstack.conf and the staged
commands on PATH; runs COMMAND in it; stops it; returns COMMAND's status.
Any number of them run at once.

  -n N         virtual nodes, n1 .. nN [2]
  -u N         CPUs that each node pretends to have [8]
  -g N         GPUs a node: stand-ins that carry the scheduling only [0]
  -G           the GPUs are this machine's own, split over the nodes
  -c FILE      site configuration: a private, trusted copy of FILE; @libdir@ and
               @bindir@ stand for the staged folders, and a file that says
               nothing about "preload" gets the staged library's path
  -C FILE      site configuration used where it lies, as it is
  -P           leave the plugin out
  -a ARGS      more arguments for the plugin in plugstack.conf
  -x LINES     more lines for slurm.conf (\n parts them)
  -e SECONDS   credentials live so long, and so long a requeued job waits [120]
  -t SECONDS   end COMMAND after that time, status 124 [600]
  -k           keep the cluster's folder (logs) when COMMAND fails
  -v           say what is done
  --slurm DIR  Slurm's prefix [/usr]
  --help       this text

The build is found through EPO_BUILD_DIR, else build/; it is brought up to date
and staged first. EPO_STAGE_DIR names a staged tree to be used as it is.
COMMAND finds in its environment: SLURM_CONF, EPO_CLUSTER_DIR (etc/, log/),
EPO_STAGE_DIR, EPO_PLUGIN (empty without), EPO_LIBDIR, EPO_BINDIR.
Own failures: 2 bad usage, 69 something is missing, 70 the cluster or the build
did not come up, 124 the limit was reached.
END
}

need_number() { # option value lowest highest
    [[ $2 =~ ^[0-9]{1,5}$ ]] && [ "$2" -ge "$3" ] && [ "$2" -le "$4" ] && return
    usage_error "$1 takes a number from $3 to $4, not '$2'"
}

usage_error() {
    say "$1"
    echo "Try '$0 --help'." >&2
    exit 2
}

nodes=2 cpus=8 gpus=0 real_gpus=0 conf='' conf_in_place=0 plugin=1 plugin_args='' extra='' expire=120 limit=600 keep=0 verbose=0
prefix=/usr
while [ $# -gt 0 ]; do
    case $1 in
    -n | -u | -g | -c | -C | -a | -x | -e | -t | --slurm)
        [ $# -ge 2 ] || usage_error "$1 takes a value"
        case $1 in
        -n) need_number "$1" "$2" 1 50 && nodes=$2 ;;
        -u) need_number "$1" "$2" 1 4096 && cpus=$2 ;;
        -g) need_number "$1" "$2" 0 64 && gpus=$2 ;;
        -c) conf=$2 conf_in_place=0 ;;
        -C) conf=$2 conf_in_place=1 ;;
        -a) plugin_args=$2 ;;
        -x) extra=$extra$2$'\n' ;;
        -e) need_number "$1" "$2" 5 86400 && expire=$2 ;;
        -t) need_number "$1" "$2" 1 86400 && limit=$2 ;;
        --slurm) prefix=$2 ;;
        esac
        shift 2
        ;;
    -G) real_gpus=1 && shift ;;
    -P) plugin=0 && shift ;;
    -k) keep=1 && shift ;;
    -v) verbose=1 && shift ;;
    --help | -h) usage && exit 0 ;;
    --) shift && break ;;
    -*) usage_error "unknown option '$1'" ;;
    *) break ;;
    esac
done
[ $# -ge 1 ] || usage_error "no command given"
[ -z "$conf" ] || [ "$conf_in_place" = 1 ] || [ -r "$conf" ] || usage_error "-c: cannot read '$conf'"
[ -z "$conf" ] || conf=$(realpath -ms -- "$conf")

export PATH=$prefix/bin:$prefix/sbin:$PATH:/usr/sbin:/sbin
if [ "$prefix" != /usr ]; then
    export LD_LIBRARY_PATH=$prefix/lib:$prefix/lib/slurm${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
missing=
for tool in slurmctld slurmd srun scontrol munged flock timeout setsid; do
    command -v "$tool" >/dev/null || missing="$missing $tool"
done
if [ -n "$missing" ]; then
    say "not found:$missing"
    say "on Debian and Ubuntu: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge util-linux coreutils"
    exit 69
fi
if [ "$real_gpus" = 1 ]; then
    have=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
    [ "$have" -gt 0 ] || { say "-G: this machine has no /dev/nvidia0 (use -g N for stand-ins)" && exit 69; }
    [ "$gpus" -gt 0 ] || gpus=$(((have + nodes - 1) / nodes))
    [ "$gpus" -le "$have" ] || { say "-g $gpus: this machine has $have GPUs" && exit 69; }
fi

# --- the staged install -----------------------------------------------------
stage_find || exit $?

# --- the cluster, and the reaper that removes it whatever becomes of us ------
base=${TMPDIR:-/tmp}
[ ${#base} -le 70 ] || base=/tmp # the path of munge's socket has 107 bytes at most
[[ $base != *[[:space:]\"\'\\]* ]] || base=/tmp # slurm.conf and plugstack.conf split on blanks and know no quotes
dir=$(mktemp -d "$base/epo-cluster.XXXXXX") || exit 70
chmod 755 "$dir"
(umask 022 && mkdir "$dir"/{etc,log,run,dev}) || exit 70
# The reaper waits for the end of this pipe, so it also cleans up after kill -9.
exec {alive}> >(trap '' INT HUP TERM QUIT && close_descriptors_above 2 && exec env -u SLURM_CONF -u EPO_CLUSTER_DIR \
    setsid --wait bash "$here/cluster-down.sh" --when-closed "$dir")
reaper=$!
job=
# shellcheck disable=SC2317 # called by the traps
finish() { # [signal's number]
    local status=$?
    trap - EXIT
    trap '' INT TERM HUP QUIT
    [ $# = 0 ] || status=$((128 + $1))
    [ -z "$job" ] || kill -TERM "$job" 2>/dev/null # timeout hands it on
    if [ "$status" != 0 ] && [ "$keep" = 1 ]; then
        : >"$dir/keep"
        say "kept: $dir"
    fi
    exec {alive}>&-
    wait "$reaper"
    exit "$status"
}
trap finish EXIT
for signal in 1 2 3 15; do
    # shellcheck disable=SC2064
    trap "finish $signal" $signal
done

plugstack_write || exit $?
export EPO_CLUSTER_DIR=$dir SLURM_CONF=$dir/etc/slurm.conf
CLUSTER_NODES=$nodes CLUSTER_CPUS=$cpus CLUSTER_GPUS=$gpus CLUSTER_REAL_GPUS=$real_gpus CLUSTER_EXTRA=$extra \
    CLUSTER_EXPIRE=$expire \
    bash "$here/cluster-up.sh" "$dir" {alive}>&- || exit 70
[ "$verbose" = 0 ] || say "$(cat "$dir/up")"

# --- the command: in the background, so that a signal to us is handled at once --------
if [ -n "$EPO_PLUGIN$EPO_BINDIR" ]; then
    export PATH=$EPO_BINDIR:$PATH LD_LIBRARY_PATH=$EPO_LIBDIR${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
begin=$SECONDS
foreground=
[ ! -t 0 ] || foreground=--foreground # it may read the terminal
timeout $foreground -k 5 "$limit" "$@" <&0 {alive}>&- &
job=$!
wait "$job"
status=$?
job=
if [ $((SECONDS - begin)) -ge "$limit" ] && { [ "$status" = 124 ] || [ "$status" = 137 ]; }; then
    say "ended after $limit s (-t SECONDS allows more): $*"
    status=124
fi
exit "$status"
