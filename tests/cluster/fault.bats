#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # work, output: plugin_common.bash and bats
# A node's slurmd dies under a running step of ranks on two nodes.

bats_require_minimum_version 1.5.0
load plugin_common

# What the scripts use: the step in the background, its node n2's processes, slurmd anew.
functions='
export EP_OVERLAP_TIMEOUT=5 EP_OVERLAP_BLAS_THREADS=1 CUDA_VISIBLE_DEVICES=
train() { # steps
    srun -N2 -n4 --ntasks-per-node=2 -K1 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad ep-train --steps "$1" --no-measure >$work/train 2>&1 &
    step=$!
    for try in $(seq 300); do grep -q "iteration *3/" $work/train && return; sleep 0.1; done
    cat $work/train; echo "the step did not start"
}
tasks_of() { # node: pids of this cluster
    local pid
    for pid in $(pgrep -x ep-train); do
        tr "\0" "\n" 2>/dev/null </proc/$pid/environ | grep -qx "SLURMD_NODENAME=$1" &&
            tr "\0" "\n" 2>/dev/null </proc/$pid/environ | grep -qx "SLURM_CONF=$SLURM_CONF" && echo $pid
    done
}
slurmd_kill() { kill -9 $(cat $EPO_CLUSTER_DIR/run/slurmd.n2.pid); }
slurmd_start() {
    slurmd -N n2 -f "$SLURM_CONF" </dev/null >>$EPO_CLUSTER_DIR/log/slurmd.n2.out 2>&1
    for try in $(seq 200); do
        scontrol update nodename=n2 state=resume 2>/dev/null
        [ "$(sinfo -h -n n2 -o %T)" = idle ] && return
        sleep 0.1
    done
    sinfo
}
'

@test "slurmd is killed: the step goes on and ends well, the next one runs" {
    cluster -n 2 -- "$functions"'
train 60
slurmd_kill
wait $step; echo "step $?"
tail -n 3 $work/train
slurmd_start
t srun -N2 -n4 --ep-overlap=on ep-train --steps 3 --no-measure'
    has 'rc 0'
    has 'step 0'
}

@test "a node dies with slurmstepd and tasks: the other ranks name whom they waited for, the next step runs" {
    cluster -n 2 -- "$functions"'
train 100000
dead=$(tasks_of n2)
stepd=$(for pid in $dead; do awk "/^PPid/ { print \$2 }" /proc/$pid/status; done | sort -u)
before=$(date +%s%N)
slurmd_kill
kill -9 $stepd $dead
for try in $(seq 200); do [ -z "$(tasks_of n1)" ] && break; sleep 0.05; done
echo "the others ended after $((($(date +%s%N) - before) / 1000000)) ms; left: $(tasks_of n1)."
for try in $(seq 50); do grep -q "tasks 0-1: Exited with exit code 1" $work/train && break; sleep 0.1; done
kill $step # Slurm would wait a minute for what n2 does not say any more
scancel -u "$(id -un)"
wait $step; echo "step $?"
slurmd_start
grep -v iteration $work/train
t srun -N2 -n4 --ep-overlap=on ep-train --steps 3 --no-measure'
    has 'left: .'
    times 2 '^ep-train: rank [01]: rank [23] (pid [0-9]* on n2) ended without closing the group; rank [01] waited for it in [a-z]'
    has 'n1: tasks 0-1: Exited with exit code 1'
    has_not 'step 0'
    has 'rc 0'
    echo "$output" | grep 'the others ended' >&3
}
