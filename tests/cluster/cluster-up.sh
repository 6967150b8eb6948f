#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cluster-up.sh DIR: starts a cluster in DIR (made by run.sh, which also gives the CLUSTER_*
# variables and SLURM_CONF); it tries other ports when they turn out to be taken.
# Needs a slurmd that takes -N (multiple slurmd; Debian's does).
set -u
dir=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/cluster/common.sh
. "$here/common.sh"
nodes=$CLUSTER_NODES cpus=$CLUSTER_CPUS gpus=$CLUSTER_GPUS
me=$(id -un) host=$(hostname)
host=${host%%.*}
version=$(slurmd -V | awk '{ print $2 }')
umask 022

# Ports below the ephemeral range, so that no outgoing connection takes one in between.
ports_choose() { # attempt -> port: nodes + 1 free ones in a row
    local slot try used
    used=$(awk 'FNR > 1 { split($2, a, ":"); print a[length(a)] }' /proc/net/tcp /proc/net/tcp6 2>/dev/null | sort -u)
    for try in $(seq 0 339); do
        slot=$((($$ + 97 * $1 + try) % 340))
        port=$((10240 + 64 * slot))
        ports_are_free "$port" "$used" && return 0
    done
    say "no $((nodes + 1)) free TCP ports in a row between 10240 and 32000"
    return 1
}

ports_are_free() { # first used
    local i
    for i in $(seq "$1" $(($1 + nodes))); do
        [[ $2 == *$(printf '%04X' "$i")* ]] && return 1
    done
    return 0
}

# Loopback only, where the host's name is 127.0.0.1; srun listens on the name's address, so
# otherwise (127.0.1.1, a LAN address, no address at all) nothing can be tied to loopback.
# The cluster's own munge key guards it either way.
loopback_only() {
    [ "$(getent ahostsv4 "$host" 2>/dev/null | awk 'NR == 1 { print $1 }')" = 127.0.0.1 ]
}

slurm_conf() {
    local i list=
    cat <<END
ClusterName=epo
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge/sock,cred_expire=$CLUSTER_EXPIRE
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$me
SlurmdUser=$me
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
ReturnToService=2
InactiveLimit=0
KillWait=2
MinJobAge=300
Waittime=0
UnkillableStepTimeout=60
SlurmdTimeout=60
SlurmctldTimeout=60
BatchStartTimeout=10
MessageTimeout=10
TCPTimeout=2
SlurmdParameters=config_overrides
PlugStackConfig=$dir/etc/plugstack.conf
MailProg=/bin/true
END
    loopback_only && echo "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
    [ "$gpus" = 0 ] || echo "GresTypes=gpu"
    for i in $(seq "$nodes"); do
        list=$list${list:+,}n$i
        echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=$cpus Boards=1 SocketsPerBoard=1" \
            "CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=4000$([ "$gpus" = 0 ] || echo " Gres=gpu:h100:$gpus") State=UNKNOWN"
    done
    echo "PartitionName=debug Nodes=$list Default=YES MaxTime=UNLIMITED State=UP OverSubscribe=NO"
    printf '%b' "$CLUSTER_EXTRA"
}

# A GPU must resolve to a character device; Slurm numbers it by the digits of its name.
gres_conf() {
    local i g have first
    [ "$gpus" -gt 0 ] || return 0
    have=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
    [ "$CLUSTER_REAL_GPUS" = 1 ] || have=$gpus
    for g in $(seq 0 $((have - 1))); do
        if [ "$CLUSTER_REAL_GPUS" = 1 ]; then ln -sfn "/dev/nvidia$g" "$dir/dev/nvidia$g"; else ln -sfn /dev/null "$dir/dev/nvidia$g"; fi
    done
    for i in $(seq "$nodes"); do
        first=$(((i - 1) * gpus))
        [ $((first + gpus)) -le "$have" ] || first=0
        echo "NodeName=n$i Name=gpu Type=h100 File=$dir/dev/nvidia[$first-$((first + gpus - 1))]"
    done
}

munge_start() {
    mkdir -p "$dir/munge"
    [ -e "$dir/munge/key" ] || head -c 128 /dev/urandom >"$dir/munge/key"
    chmod 400 "$dir/munge/key"
    munged --force --key-file="$dir/munge/key" --socket="$dir/munge/sock" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed" --num-threads=4 </dev/null >>"$dir/log/munged.out" 2>&1
}

# Everything configured and started under one lock of the machine, held until the ports are
# bound. A folder that everybody may open serves as the lock, so that no file is left behind.
daemons_start() { # attempt
    local i
    exec {lock}</tmp
    flock -w 120 "$lock" || { say "another cluster has been starting for 120 s" && return 1; }
    ports_choose "$1" || return 1
    rm -rf "${dir:?}/state" "${dir:?}/spool"
    mkdir -p "$dir/state" "$dir/spool"
    slurm_conf >"$dir/etc/slurm.conf"
    gres_conf >"$dir/etc/gres.conf"
    # From 24.05 on slurmd insists on a working cgroup otherwise, even with linuxproc and none.
    if [ "${version%%.*}" -ge 24 ]; then echo "CgroupPlugin=disabled"; else echo "CgroupPlugin=cgroup/v1"; fi >"$dir/etc/cgroup.conf"
    slurmctld -c -f "$SLURM_CONF" </dev/null >>"$dir/log/slurmctld.out" 2>&1 {lock}<&- || return 1
    for i in $(seq "$nodes"); do
        slurmd -N "n$i" -f "$SLURM_CONF" </dev/null >>"$dir/log/slurmd.n$i.out" 2>&1 {lock}<&- &
    done
    wait
    wait_for_ports
    exec {lock}<&-
}

wait_for_ports() {
    local i open
    for _ in $(seq 50); do
        open=0
        for i in $(seq "$port" $((port + nodes))); do
            grep -qi "$(printf ':%04X 0*:0000 0A' "$i")" /proc/net/tcp && open=$((open + 1))
        done
        [ "$open" -gt "$nodes" ] && return 0
        sleep 0.05
    done
}

wait_until_idle() {
    local begin=$SECONDS
    while [ $((SECONDS - begin)) -lt 30 ] && process_is "$(cat "$dir/run/slurmctld.pid" 2>/dev/null)" slurmctld; do
        [ "$(timeout 3 sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$nodes" ] && return 0
        sleep 0.1
    done
    return 1
}

ports_were_taken() { grep -qsi "address already in use" "$dir"/log/*; }

report_failure() {
    local file
    say "the cluster did not come up. The daemons' last lines:"
    for file in "$dir"/log/*; do
        [ -s "$file" ] || continue
        echo "--- ${file##*/}" >&2
        tail -n 8 "$file" >&2
    done
}

close_descriptors_above 2
cd "$dir" || exit 1
munge_start || { report_failure && exit 1; }
for attempt in 1 2 3; do
    if daemons_start "$attempt" && wait_until_idle; then
        echo "up: slurm $version, $nodes nodes, port $port, $dir" >"$dir/up"
        exit 0
    fi
    ports_were_taken || break
    bash "$here/cluster-down.sh" --slurm-only "$dir"
    [ "$attempt" = 3 ] || rm -f "$dir"/log/slurm*
done
report_failure
exit 1
