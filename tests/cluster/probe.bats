#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # work, output: plugin_common.bash and bats
# What a node's GPUs do to a step, with a stand-in for NVML that shows each node others.

bats_require_minimum_version 1.5.0
load plugin_common

# site NVML-TABLE [CHECKS] [MORE]
site() {
    umask 022
    chmod 755 "$work"
    cp -L "${EPO_BUILD_DIR:-$top/build}/tests/fake/.libs/fake_nvml.so" "$work/"
    printf '%s\n' "$1" >"$work/nvml.table"
    cat >"$work/c.conf" <<END
version = 1;
checks = { timeout_ms = ${timeout:-20000}; nvml_path = "$work/fake_nvml.so"; ${2:-} };
${3:-}
END
}

@test "probe: a step over H100 nodes goes on, one over H100 and L40S ends, naming the node" {
    site $'n1 h100 2\nn2 h100 2'
    cluster -g 2 -c "$work/c.conf" -- 't srun -N2 -n4 --gpus-per-node=2 --ep-overlap=on --ep-dispatcher=flex:deepep printenv EP_OVERLAP_DECISION'
    ended 0
    times 4 '^on$'
    has_not ': found '
    site $'n1 h100 2\nn2 l40s 2 nop2p'
    cluster -g 2 -c "$work/c.conf" -- 't srun -N2 -n4 --gpus-per-node=2 --ep-overlap=on --ep-dispatcher=flex sleep 60
t srun -N2 -n4 --gpus-per-node=2 --ep-overlap=on printenv EP_OVERLAP_DECISION
t srun -N2 -n4 --ep-overlap=on --ep-dispatcher=flex printenv EP_OVERLAP_DECISION'
    times 1 '^ep-overlap: n2: NODE-P2P: found node.all_gpus_p2p = False'
    has_not 'ep-overlap: n1: NODE'
    has_not 'rc 0: srun -N2 -n4 --gpus-per-node=2 --ep-overlap=on --ep-dispatcher=flex sleep'
    has 'rc 0: srun -N2 -n4 --gpus-per-node=2 --ep-overlap=on printenv'
    times 8 '^on$' # alltoall; and without GPUs, where no gate applies
}

@test "probe: every kind of GPU, asked for what it cannot and can" {
    site $'n1 gb200 2\nn2 v100 2'
    mkdir -p "$work/cuda/bin" # a toolkit, for hybridep's own compilation
    printf '#!/bin/sh\n' >"$work/cuda/bin/nvcc" && chmod 755 "$work/cuda/bin/nvcc"
    export CUDA_HOME=$work/cuda
    cluster -g 2 -c "$work/c.conf" -- 'r() { t srun -w "$1" -n1 --gpus=2 --ep-overlap=on --ep-dispatcher=flex:$2 true; }
r n1 deepep; r n1 hybridep; r n2 deepep; r n2 hybridep'
    times 1 'ep-overlap: n1: DSP-046: '
    has 'rc 0: srun -w n1 -n1 --gpus=2 --ep-overlap=on --ep-dispatcher=flex:hybridep'
    times 1 'ep-overlap: n2: DSP-002: '
    times 1 'ep-overlap: n2: DSP-003: '
    times 1 '^rc 0'
}

@test "probe: a driver that is too old, with all other violations" {
    site $'* h100 2' 'minimum = { driver = "580"; cuda = "13.0"; };'
    cluster -g 2 -c "$work/c.conf" -- 't srun -n2 --gpus=2 -N1 --ep-overlap=on python3 pretrain_gpt.py --num-experts 8 --overlap-moe-expert-parallel-comm --recompute-granularity full'
    has 'MIN-DRIVER: found node.driver_version = 570.86.15 (NVML); needed node.driver_version >= 580'
    has 'MIN-CUDA: '
    has 'OVL-001: found '
    has 'OVL-007: found '
    has_not 'rc 0'
}

@test "probe: an NVML that hangs or crashes costs the limit, and the reason is told" {
    timeout=1500 site $'n1 hang 0\nn2 crash 0'
    cluster -g 2 -c "$work/c.conf" -- 't srun -w n1 -n2 --gpus=2 --ep-overlap=on --ep-dispatcher=flex printenv EP_OVERLAP_DECISION
t srun -w n2 -n1 --gpus=2 --ep-overlap=on --ep-dispatcher=flex printenv EP_OVERLAP_DECISION'
    ended 0
    times 3 '^on$'
    times 2 'warning NODE-PROBE: found the probe was stopped while it asked NVML'
    timeout=1500 site $'* stuck 0' 'on_unknown = "fail";'
    cluster -g 2 -c "$work/c.conf" -- 't srun -n2 -N1 --gpus=2 --ep-overlap=on sleep 60; ps -eo args | grep -c "[e]p-overlap-probe"'
    times 1 'NODE-PROBE: found the probe was stopped the probe did not end within 1500 ms'
    has_not 'rc 0: srun'
    times 1 '^0$' # nothing is left of it
}

@test "probe: tasks that see one GPU each are told how to see all" {
    site $'* h100 4'
    cluster -n 1 -g 4 -c "$work/c.conf" -- 't srun -n4 --gpus-per-task=1 --ep-overlap=on --ep-dispatcher=flex bash -c "echo \$CUDA_VISIBLE_DEVICES of \$SLURM_STEP_GPUS"
t srun -n4 --gpus-per-task=1 --gpu-bind=none --ep-overlap=on --ep-dispatcher=flex printenv EP_OVERLAP_DECISION
t srun -n1 --gpus-per-task=1 --ep-overlap=on --ep-dispatcher=flex printenv EP_OVERLAP_DECISION'
    times 5 '^on$' # not bound, and one task alone
    has_not 'host engine'
    has_not 'rc 0: srun -n4 --gpus-per-task=1 --ep-overlap=on'
    has 'NODE-BIND'
    has '--gpu-bind=none'
}

@test "probe: a node that contradicts its class fails an auto step" {
    site $'n1 h100 2\nn2 l40s 2' '' 'node_classes = ( { class = "h100"; nodes = "n[1-2]"; overlap = "on"; } );'
    cluster -g 2 -c "$work/c.conf" -- 't srun -N2 -n2 --gpus-per-node=2 --ep-overlap=auto sleep 60
t srun -w n1 -n1 --gpus=2 --ep-overlap=auto printenv EP_OVERLAP_DECISION'
    times 1 '^ep-overlap: n2: NODE-CLASS: found gpu_name = NVIDIA L40S'
    has_not 'rc 0: srun -N2'
    times 1 '^on$'
}

@test "ep-overlap check in a step shows what the step has" {
    site $'n1 h100 2\nn2 l40s 2 nop2p'
    cluster -g 2 -c "$work/c.conf" -- 't srun -w n1 -n1 --gpus=2 ep-overlap check; t srun -w n2 -n1 --gpus=1 ep-overlap check --node'
    times 2 '^rc 0'
    has 'GPUs           2 (NVML, CUDA_VISIBLE_DEVICES)'
    has '0: NVIDIA L40S; 1: NVIDIA L40S'
    has 'ep_overlap.conf'
    has 'built for Slurm'
}
