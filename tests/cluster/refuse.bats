#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # work, output: plugin_common.bash and bats
# Steps that a node cannot serve: all nodes of a step come to the same end, each reason is said
# once, and slurmd's log never counts as on what was not.

bats_require_minimum_version 1.5.0
load plugin_common

# own_site FILE: n2's slurmd starts anew with FILE as its site configuration.
own='own_site() {
    local d=$EPO_CLUSTER_DIR/etc
    kill "$(cat "$EPO_CLUSTER_DIR/run/slurmd.n2.pid")"
    cp "$1" $d/n2.ep_overlap.conf && chmod 644 $d/n2.ep_overlap.conf
    sed "s|conf=[^ ]*|conf=$d/n2.ep_overlap.conf|" $d/plugstack.conf >$d/n2.plugstack.conf
    sed "s|^PlugStackConfig=.*|PlugStackConfig=$d/n2.plugstack.conf|" $d/slurm.conf >$d/n2.conf
    for try in $(seq 50); do [ -e "$EPO_CLUSTER_DIR/run/slurmd.n2.pid" ] || break; sleep 0.1; done
    SLURM_CONF=$d/n2.conf slurmd -N n2 -f $d/n2.conf >/dev/null 2>&1 </dev/null
    for try in $(seq 100); do [ "$(sinfo -h -o %T)" = idle ] && break; sleep 0.1; done
}
'

@test "a default, and the library missing on one node: a step of both ends, n1 alone is on" {
    echo 'version = 1; defaults = { overlap = "on"; };' >"$work/c.conf"
    echo 'version = 1; defaults = { overlap = "on"; }; preload = { path = "/gone/libep_overlap.so"; };' >"$work/n2.conf"
    cluster -c "$work/c.conf" -- "$own"'own_site $work/n2.conf
t srun -N2 -n2 printenv EP_OVERLAP_DECISION
echo == one; t srun -w n1 -n2 printenv EP_OVERLAP_DECISION
echo == two; t srun -w n2 -n2 printenv EP_OVERLAP_DECISION'
    between '' '== one'
    times 1 '^ep-overlap: n2: the library cannot be preloaded: /gone'
    has_not 'rc 0'
    between '== one' '== two'
    times 2 '^on$'
    between '== two' ''
    times 2 '^off$'
    times 1 '^rc 0'
    grep -q 'error: ep-overlap: step 1.0: refused: the library cannot be preloaded: /gone' "$work/slurmd.log"
    grep -q 'ep-overlap: step 3.0: off (the library cannot be preloaded: /gone' "$work/slurmd.log"
}

@test "on_failed_request = warn: told by each node, and slurmd's log does not count it as on" {
    echo 'version = 1; on_failed_request = "warn"; preload = { path = "/gone/libep_overlap.so"; };' >"$work/c.conf"
    cluster -c "$work/c.conf" -- 't srun -N2 -n4 --ep-overlap=on printenv EP_OVERLAP_DECISION'
    ended 0
    times 4 '^off$'
    for node in n1 n2; do times 1 "^ep-overlap: $node: off instead of on: the library cannot"; done
    [ "$(grep -c 'ep-overlap: step 1.0: off instead of on (the library' "$work/slurmd.log")" = 2 ]
    run grep 'ep-overlap: step [0-9.]*: on' "$work/slurmd.log"
    [ -z "$output" ]
    echo 'version = 1; on_failed_request = "warn"; checks = { require_gpu = true; };' >"$work/c.conf"
    cluster -c "$work/c.conf" -- 't srun -n2 --ep-overlap=on printenv EP_OVERLAP_DECISION'
    times 2 '^off$'
    grep -q 'error: ep-overlap: step 1.0: was off instead of on, and does not count as on: the step holds no GPU' "$work/slurmd.log"
}

@test "what the program's arguments lack is said once per step, whatever ends it first" {
    printf '#!/bin/sh\nexit 0\n' >"$work/python" && chmod 755 "$work" "$work/python"
    cluster -n 4 -- 'PATH=$work:$PATH; p="python pretrain_gpt.py --num-experts 8"
t srun -N4 -n8 --ep-overlap=on $p
echo == kill
t srun -K1 -N4 -n8 --ep-overlap=on $p
echo == het; t srun -N1 --ep-overlap=on $p : -N2 $p
echo == end'
    for part in '|== kill' '== kill|== het' '== het|== end'; do
        between "${part%|*}" "${part#*|}"
        times 1 'ep-overlap: n[1-4]: ARG-OVERLAP: '
        times 1 'ep-overlap: n[1-4]: OVL-001: '
        has_not 'rc 0'
    done
    grep -q 'error: ep-overlap: step 1.0: was refused by a task: ARG-OVERLAP' "$work/slurmd.log"
}

@test "a backend that needs GPUs, in a step without: the status line says what runs instead" {
    cluster -- 't srun -n2 --ep-overlap=on --ep-dispatcher=flex:deepep printenv EP_OVERLAP_DISPATCHER'
    times 2 '^flex$'
    times 1 'no GPUs: host engine, with its own flex instead of deepep)$'
}

@test "a step with GPUs, where no engine for them is installed: the status line of our programs says so" {
    cluster -g 2 -- 'lib=$EPO_CLUSTER_DIR/lib/ep-overlap
        run() { t srun -n1 --gpus=1 --ep-overlap=on "$@"; }
        rm -f "$lib/engine_cuda.so"
        run ep-train --steps 1 --no-measure
        run sh -c "exit 3" pretrain_gpt.py
        touch "$lib/engine_cuda.so"
        run ep-overlap --version'
    times 2 '^ep-overlap: on, .*; no CUDA engine installed'
    times 1 '^rc 0: srun .* ep-train'
    between 'exit 3' ''
    has_not 'no CUDA engine'
}
