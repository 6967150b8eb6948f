#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2016 # texts for other shells
# shellcheck disable=SC2030,SC2031 # each test exports its own
load common.sh

# A python and a torchrun that print their arguments, one a line.
recorder() {
    mkdir -p bin
    printf '#!/bin/sh\nprintf "[%%s]\\n" "$@"\n' >bin/python
    chmod 755 bin/python
    cp bin/python bin/torchrun
    PATH=$PWD/bin:$PATH
    unset "${!EP_OVERLAP_@}" "${!SLURM_@}" RANK OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK
    export EP_OVERLAP_DECISION=on EP_OVERLAP_DISPATCHER=alltoall EP_OVERLAP_DELAY_WGRAD=0
    export EP_OVERLAP_GIVEN=overlap
}
moe=(--bf16 --num-experts 8 --expert-model-parallel-size 4)
is() { [ "$output" = "$1" ] || { printf 'found:\n%s\nwanted:\n%s\n' "$output" "$1" && false; }; }
has() { [[ $output == *"$1"* ]] || { printf 'not found: %s\n%s\n' "$1" "$output" && false; }; }
record() { run --separate-stderr "$tool" exec -- "$@"; }

@test "what is missing is added; blanks, quotes and stars stay" {
    recorder
    record python pretrain_gpt.py "${moe[@]}" --save "a b" "it's \"*\"" ''
    [ "$status" = 0 ]
    is "[pretrain_gpt.py]
[--bf16]
[--num-experts]
[8]
[--expert-model-parallel-size]
[4]
[--save]
[a b]
[it's \"*\"]
[]
[--overlap-moe-expert-parallel-comm]
[--moe-token-dispatcher-type]
[alltoall]"
    output=$stderr
    has 'on, megatron-lm (added --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall): python'
}

@test "inside a shell's text, before its redirection and pipe" {
    recorder
    record bash -c 'cd . && python pretrain_gpt.py --bf16 --num-experts 8 --expert-model-parallel-size 4 "a  b" 2>&1 | sed s/^/x/'
    [ "$status" = 0 ]
    has 'x[a  b]
x[--overlap-moe-expert-parallel-comm]
x[--moe-token-dispatcher-type]
x[alltoall]'
}

@test "arguments that are there already stay, once" {
    recorder
    record torchrun --nproc-per-node=8 pretrain_gpt.py "${moe[@]}" --moe-token-dispatcher-type=flex \
        --overlap-moe-expert-parallel-comm --moe-router-dtype fp32
    [ "$status" = 0 ]
    [ "$(grep -c dispatcher-type <<<"$output")" = 1 ]
    [ "$(grep -c overlap-moe <<<"$output")" = 1 ]
    output=$stderr
    has 'nothing is missing'
}

@test "--moe-enable-deepep names deepep as older versions do, and no flag of newer ones is added" {
    recorder
    export EP_OVERLAP_GIVEN='overlap dispatcher' EP_OVERLAP_DISPATCHER=flex EP_OVERLAP_FLEX_BACKEND=deepep
    record python pretrain_gpt.py "${moe[@]}" --moe-enable-deepep
    [ "$status" = 0 ]
    [[ $output != *backend* && $output == *"[--moe-token-dispatcher-type]
[flex]"* ]]
    export EP_OVERLAP_FLEX_BACKEND=hybridep
    record python pretrain_gpt.py "${moe[@]}" --moe-enable-deepep
    [ "$status" = 1 ]
    output=$stderr
    has '--ep-dispatcher=flex:hybridep contradicts the argument --moe-enable-deepep'
}

@test "contradictions: both sides are named, nothing runs" {
    recorder
    export EP_OVERLAP_GIVEN='overlap dispatcher delay_wgrad'
    record python pretrain_gpt.py "${moe[@]}" --moe-token-dispatcher-type flex --delay-wgrad-compute
    [ "$status" = 1 ]
    is ''
    output=$stderr
    has '--ep-dispatcher=alltoall contradicts the argument --moe-token-dispatcher-type flex'
    has '--no-delay-wgrad contradicts the argument --delay-wgrad-compute'
    record python train.py comm_overlap.overlap_moe_expert_parallel_comm=false
    [ "$status" = 1 ]
    output=$stderr
    has '--ep-overlap=on contradicts the argument comm_overlap.overlap_moe_expert_parallel_comm=false'
}

@test "all rules that forbid it, together" {
    recorder
    record python pretrain_gpt.py --num-experts 8 --pipeline-model-parallel-size 2 --recompute-granularity full
    [ "$status" = 1 ]
    is ''
    output=$stderr
    for rule in OVL-001 OVL-004 OVL-006 OVL-007; do has "error $rule: "; done
}

@test "other programs, undecided ones, no decision, off: unchanged, one line" {
    recorder
    printf 'echo ran\n' >run.sh
    record bash run.sh
    is ran
    [[ $stderr == *'undecided, nothing is added: a shell'\''s script is not read: "run.sh"'* ]]
    record python train.py --bf16
    is '[train.py]
[--bf16]'
    [[ $stderr == *'not Megatron-LM or Bridge, nothing is added'* ]]
    EP_OVERLAP_DECISION=off EP_OVERLAP_REASON=because record python pretrain_gpt.py
    is '[pretrain_gpt.py]'
    [[ $stderr == *'off (because), nothing is added'* ]]
    unset EP_OVERLAP_DECISION
    record python pretrain_gpt.py
    is '[pretrain_gpt.py]'
    [[ $stderr == *'not on in this step'* && $(wc -l <<<"$stderr") = 1 ]]
}

@test "auto adds to what enables overlap, and never refuses" {
    recorder
    export EP_OVERLAP_GIVEN=auto
    record python pretrain_gpt.py "${moe[@]}"
    [ "$status" = 0 ]
    [[ $output != *overlap-moe* && $stderr == *'auto: the arguments do not enable overlap'* ]]
    record python pretrain_gpt.py "${moe[@]}" --overlap-moe-expert-parallel-comm
    has '[alltoall]'
    record python pretrain_gpt.py --overlap-moe-expert-parallel-comm
    [ "$status" = 0 ]
    is '[pretrain_gpt.py]
[--overlap-moe-expert-parallel-comm]'
    [[ $stderr == *'auto: rules forbid overlap'* ]]
}

@test "only rank 0 speaks, every rank refuses" {
    recorder
    SLURM_PROCID=3 record python pretrain_gpt.py "${moe[@]}"
    [ "$status" = 0 ]
    [ -z "$stderr" ]
    SLURM_PROCID=3 record python pretrain_gpt.py
    [ "$status" = 1 ]
    [ "$(wc -l <<<"$stderr")" = 1 ]
}

@test "the command's own status, signal, 126 and 127" {
    recorder
    record sh -c 'exit 77'
    [ "$status" = 77 ]
    record sh -c 'kill -9 $$'
    [ "$status" = 137 ]
    record "$PWD"
    [ "$status" = 126 ]
    run -127 "$tool" exec -- no-such-program
    run -127 "$tool" exec -- ./no-such-program
    printf '#!/no/such/interpreter\n' >x && chmod 755 x
    run -127 "$tool" exec -- ./x
    # as env and nohup: the kernel tells them alike
}

@test "--dry-run --json tells programs what would run, and why nothing would" {
    export EP_OVERLAP_DECISION=on EP_OVERLAP_DISPATCHER=alltoall EP_OVERLAP_DELAY_WGRAD=0
    run --separate-stderr "$tool" exec --dry-run --json -- python pretrain_gpt.py "${moe[@]}" 'a "b'
    [ "$status" = 0 ]
    is_json
    [[ $output == *'"framework": "megatron-lm"'*'"runs": true'*'"contradictions": []'*'"added": ['*'--overlap-moe-expert-parallel-comm'*'"command": ['*'"a \"b"'* ]]
    run --separate-stderr "$tool" exec --dry-run --json -- python pretrain_gpt.py "${moe[@]}" --delay-wgrad-compute
    [ "$status" = 1 ]
    is_json
    [[ $output == *'"runs": false'*'"--no-delay-wgrad contradicts the argument --delay-wgrad-compute'* ]]
    run "$tool" exec --json -- true
    [ "$status" = 2 ]
}

@test "usage, a decision that is none, a node without the plugin" {
    recorder
    run "$tool" exec
    [ "$status" = 2 ]
    run "$tool" exec --frobnicate -- true
    [ "$status" = 2 ]
    run "$tool" exec --dry-run -- python pretrain_gpt.py "${moe[@]}" "a b"
    [ "${lines[-1]}" = "python pretrain_gpt.py --bf16 --num-experts 8 --expert-model-parallel-size 4 'a b' --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall" ]
    EP_OVERLAP_DECISION=maybe run "$tool" exec -- true
    [ "$status" = 2 ]
    EP_OVERLAP_DISPATCHER=fax run "$tool" exec -- true
    [ "$status" = 2 ]
    has 'found "fax"'
    unset EP_OVERLAP_DECISION
    export SLURM_EP_OVERLAP_STEP='1 7 0 1 1 1 0 1 0 0 5 0 0 x' SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURMD_NODENAME=n2
    run "$tool" exec -- true
    [ "$status" = 1 ]
    has 'node n2 has no ep-overlap plugin'
    SLURM_EP_OVERLAP_STEP='1 7 0 1 0 0 0 1 0 0 1 0 0 a default' run "$tool" exec -- true
    [ "$status" = 0 ]
    SLURM_STEP_ID=1 run "$tool" exec -- true
    [ "$status" = 0 ]
}
