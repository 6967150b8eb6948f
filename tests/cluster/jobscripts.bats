#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154,SC2016 # work, output: plugin_common.bash and bats; texts for other shells
# The job scripts as they are, submitted to a cluster of two nodes.  Frameworks, nsys,
# torchrun and pyxis are stand-ins here, which say so.

bats_require_minimum_version 1.5.0
load plugin_common

# Commands that the scripts call and this machine lacks.
stand_ins() {
    chmod 755 "$work"
    mkdir "$work/bin" "$work/jobs"
    chmod 777 "$work/jobs"
    command_file python 'while [ "${1#-}" != "$1" ]; do shift; done
case $1 in */run_recipe.py) framework=bridge ;; *) framework=megatron-lm ;; esac
shift
exec '"$top"'/tests/cluster/standin/train.sh $framework "$@"'
    command_file torchrun 'n=1
while [ "${1#-}" != "$1" ]; do case $1 in --nproc-per-node=*) n=${1#*=} ;; esac; shift; done
for local in $(seq 0 $((n - 1))); do
    RANK=$((SLURM_NODEID * n + local)) LOCAL_RANK=$local WORLD_SIZE=$((SLURM_NNODES * n)) python "$@" || exit
done'
    command_file nsys 'case $1 in
profile)
    while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do
        case $1 in --output=*) out=${1#*=} ;; esac
        shift
    done
    "$@" || exit
    echo "a stand-in for nsys recorded nothing: $EP_OVERLAP_DECISION" >"$out.nsys-rep" ;;
export)
    for word; do case $word in --output=*) out=${word#*=} ;; esac; done
    grep -q "nothing: on" "${!#}" && start=0 || start=100000000
    python3 -c "
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute(\"CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)\")
db.execute(\"INSERT INTO StringIds VALUES (1, \\\"ncclDevKernel_SendRecv\\\"), (2, \\\"nvjet_x\\\")\")
db.execute(\"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, \\\"end\\\" INTEGER, deviceId INTEGER, streamId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER)\")
db.execute(\"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, 16777216, 1, 1), (0, 100000000, 0, 8, 16777216, 2, 2)\", (int(sys.argv[2]), int(sys.argv[2]) + 100000000))
db.commit()" "$out" $start ;;
esac'
    export PATH=$work/bin:$PATH
}
command_file() { # NAME CODE
    printf '#!/bin/bash\n# A stand-in, for tests of the job scripts.\n%s\n' "$2" >"$work/bin/$1"
    chmod 755 "$work/bin/$1"
}

# job SCRIPT [sbatch's options] -- [arguments]: submits it, shows its output.
job() {
    local script=$1 options=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    printf 'cd $work/jobs; batch -o $work/out %s %s %s; echo "job rc $?"; cat $work/out' \
        "${options[*]}" "$top/jobscripts/$script.sbatch" "$*"
}
line() { grep -qE -- "$1" <<<"$output" || { echo "no line: $1" && echo "$output" && false; }; }

@test "correctness-first A/B: three arms of ep-train, the verdict" {
    mkdir -m 777 "$work/jobs" && chmod 755 "$work"
    cluster -- "$(job ab-correctness -N2 -n4 --)
grep -h '^ep-train: overlap o' ep-ab-*/baseline.log ep-ab-*/overlap.log ep-ab-*/overlap+wgrad.log"
    line '^ep-train: overlap off, dispatcher alltoall, weight gradients at once, .* 4 ranks'
    line '^ep-train: overlap on, dispatcher alltoall, weight gradients at once, .* 4 ranks'
    line '^ep-train: overlap on, dispatcher alltoall, weight gradients delayed, .* 4 ranks'
    times 2 'yes        loss consistent          identical as printed, 8 iterations'
    times 2 'yes        comparison sound '
    times 2 'yes        run complete             8 of 8 iterations'
    times 3 '  window         3-8, 6 lines'
    line '^overlap: (NO|nothing against it)' # which of them is the machine'\''s matter
    line '^overlap[+]wgrad: (NO|nothing against it)'
    line '^job rc [01]$'
}

@test "production A/B: flex, the winner once more over a later window" {
    mkdir -m 777 "$work/jobs" && chmod 755 "$work"
    # its own program, of one layer: ranks that wait for each other wait long where much else runs
    program=$(sed -nE 's/^\[ \$# -gt 0 \] \|\| program=\((.*)\)$/\1/p' "$top/jobscripts/ab-production.sbatch")
    [ -n "$program" ]
    cluster -- "$(job ab-production -N2 -n4 -- "$program" --layers 1 --micro-batches 1)"
    times 2 '  window         5-20, 16 lines'
    times 1 '  window         41-50, 10 lines'
    times 2 'yes        run complete             50 of 50 iterations'
    line '^again: (NO|nothing against it)'
    line '^job rc [01]$'
    has 'srun --ep-overlap=off ep-overlap exec -- ep-train'
    has 'srun --ep-overlap=on --ep-dispatcher=flex --no-delay-wgrad ep-overlap exec'
}

@test "an A/B whose arms differ in more than overlap, and one whose program fails, are no" {
    stand_ins
    command_file odd 'exec ep-train --steps 8 --no-measure --experts $([ "$EP_OVERLAP_DECISION" = on ] && echo 4 || echo 8)'
    command_file broken 'echo broken; exit 3'
    cluster -- "$(job ab-correctness -n4 -- odd)
echo == broken
$(job ab-correctness -n2 -- broken)"
    between '' '== broken'
    has 'job rc 4'
    has 'cannot be compared'
    between '== broken' ''
    has 'job rc 3'
    times 3 'ended with status 3'
}

@test "matched profile capture: one rank, two arms, shares and a picture" {
    stand_ins
    cluster -- "$(job profile -N2 -n4 -- python pretrain_gpt.py --bf16 --num-experts 8 --expert-model-parallel-size 4)
ls ep-profile-*; grep -h stand-in ep-profile-*/baseline.log; grep -hE 'stand-in|exec: on' ep-profile-*/overlap.log"
    has 'job rc 0'
    line 'expert communication +100.000 ms +100.000 ms'
    line 'overlapped share +0.00 % +100.00 %'
    for name in baseline overlap; do for end in sqlite nsys-rep log; do line "^$name.$end\$"; done; done
    line '^overlap.svg$'
    times 8 '^stand-in rank [0-3] of 4'
    times 4 'overlap-moe-expert-parallel-comm]'
    has 'ep-overlap exec: on, megatron-lm (added '
}

@test "preflight: every node, alike or not, the options, the arguments" {
    stand_ins
    cluster -- "$(job preflight --)
echo == lint
$(job preflight -- python pretrain_gpt.py --num-experts 8 --overlap-moe-expert-parallel-comm)
echo == node
printf '#!/bin/bash\n[ \"\$1\" = check ] && [ \"\$SLURMD_NODENAME\" = n2 ] && echo odd node && exit 1\nexec \"\$EPO_BINDIR/ep-overlap\" \"\$@\"\n' >\$work/bin/ep-overlap
chmod 755 \$work/bin/ep-overlap; PATH=\$work/bin:\$PATH
$(job preflight --)"
    between '' '== lint'
    has 'accepted on 2 nodes'
    has 'preflight: go ahead'
    has 'job rc 0'
    has_not 'differs from'
    between '== lint' '== node'
    has 'error    OVL-001'
    has 'preflight: NOT fit'
    has 'job rc 1'
    between '== node' ''
    has 'n2: ep-overlap check answered 1:'
    has 'n2: odd node'
    has 'n2 differs from n1:'
    has 'job rc 1'
}

megatron='/x/pretrain_gpt.py --bf16 --num-experts 8 --expert-model-parallel-size 4 --data "a b"'
vector='[[]--bf16][[]--num-experts][[]8][[]--expert-model-parallel-size][[]4][[]--data][[]a b]'

@test "Megatron-LM: srun and torchrun, each arm" {
    stand_ins
    cluster -- "export ARM=overlap+wgrad; $(job megatron-lm -n4 --ntasks-per-node=2 --gpus-per-node=0 -- "$megatron"); cat megatron-*-overlap+wgrad.log
echo == torchrun
export LAUNCH=torchrun ARM=overlap; $(job megatron-lm -n4 --ntasks-per-node=2 --gpus-per-node=0 -- "$megatron"); cat megatron-*-overlap.log
echo == baseline
export ARM=baseline; $(job megatron-lm -n4 --ntasks-per-node=2 --gpus-per-node=0 -- "$megatron"); cat megatron-*-baseline.log
echo == usage
export ARM=none; $(job megatron-lm -n4 --ntasks-per-node=2 --gpus-per-node=0 -- "$megatron")"
    added='[[]--overlap-moe-expert-parallel-comm][[]--moe-token-dispatcher-type][[]alltoall]'
    between '' '== torchrun'
    has 'job rc 0'
    for rank in 0 1 2 3; do line "^stand-in rank $rank of 4, local $((rank % 2)), n1: ${vector}${added}[[]--delay-wgrad-compute]\$"; done
    has 'mean 31.2000 s'
    between '== torchrun' '== baseline'
    has 'job rc 0'
    for rank in 0 1 2 3; do line "^stand-in rank $rank of 4, local $((rank % 2)), n1: $vector$added\$"; done
    has 'mean 31.3100 s'
    between '== baseline' '== usage'
    has 'job rc 0'
    for rank in 0 1 2 3; do line "^stand-in rank $rank of 4, local $((rank % 2)), n1: $vector\$"; done
    has 'mean 41.2500 s'
    between '== usage' ''
    has 'job rc 2'
    has 'ARM=none: baseline, overlap or overlap+wgrad'
}

@test "Megatron-LM in a container: image, mounts, variables; no ep-overlap inside" {
    stand_ins
    srun=$(command -v srun)
    # a stand-in for pyxis: its options are told and taken away; the image has no ep-overlap
    command_file srun 'options=()
for word; do
    shift
    case $word in --container-*) echo "pyxis stand-in: $word" ;; *) options+=("$word") ;; esac
done
EP_OVERLAP_TOOL=/not/in/the/image exec '"$srun"' "${options[@]}"'
    cluster -- "PATH=\$work/bin:\$PATH IMAGE=image.sqsh MOUNTS=/data:/data; export IMAGE MOUNTS
$(job megatron-lm -n4 --ntasks-per-node=2 --gpus-per-node=0 -- "$megatron"); cat megatron-*-overlap.log"
    has 'job rc 0'
    has 'pyxis stand-in: --container-image=image.sqsh'
    line 'pyxis stand-in: --container-mounts=(/.*):\1:ro,/data:/data$'
    has 'pyxis stand-in: --container-env=MASTER_ADDR,MASTER_PORT,EP_OVERLAP_TOOL'
    for rank in 0 1 2 3; do line "^stand-in rank $rank of 4, .*: ${vector}[[]--overlap-moe-expert-parallel-comm]"; done
}

@test "Megatron-Bridge: the baseline says no in so many words, both arms compared" {
    stand_ins
    cluster -- "$(job megatron-bridge -n4 --ntasks-per-node=2 --gpus-per-node=0 -- /x/run_recipe.py model.num_moe_experts=8 model.expert_model_parallel_size=4 model.bf16=true); cat bridge-*.log
echo == torchrun
export LAUNCH=torchrun ARMS=overlap+wgrad; $(job megatron-bridge -n4 --ntasks-per-node=2 --gpus-per-node=0 -- /x/run_recipe.py model.num_moe_experts=8 model.expert_model_parallel_size=4 model.bf16=true); cat bridge-*-overlap+wgrad.log"
    given='[[]model.num_moe_experts=8][[]model.expert_model_parallel_size=4][[]model.bf16=true]'
    between '' '== torchrun'
    has 'job rc 0'
    for rank in 0 1 2 3; do
        line "^stand-in rank $rank of 4, .*: ${given}[[]comm_overlap.overlap_moe_expert_parallel_comm=false][[]comm_overlap.delay_wgrad_compute=false]\$"
        line "^stand-in rank $rank of 4, .*: ${given}[[]comm_overlap.overlap_moe_expert_parallel_comm=true]"
    done
    has '1.317x'
    has 'overlap: nothing against it'
    between '== torchrun' ''
    has 'job rc 0'
    for rank in 0 1 2 3; do line "^stand-in rank $rank of 4, .*: $given.*[[]comm_overlap.delay_wgrad_compute=true]"; done
}

@test "sbatch --export=PATH, more tasks a node, a requeued job: nothing is lost, doubled or old" {
    stand_ins
    cluster -- "$(job megatron-lm -n4 --ntasks-per-node=2 --gpus-per-node=0 --export=PATH -- "$megatron"); cat megatron-*-overlap.log
echo == preflight
$(job preflight -n8 --ntasks-per-node=4 --)
cat ep-preflight-*/*.txt | grep '^  engines '
echo == again
mkdir -m 777 ep-ab-3; printf ' iteration 3/ 8 | of the run before |\\n' | tee ep-ab-3/overlap.log ep-ab-3/overlap+wgrad.log; chmod 666 ep-ab-3/*
printf '#!/bin/bash\\n[[ \$* != *--ep-overlap=on* ]] || exit 1\\nexec $(command -v srun) \"\$@\"\\n' >\$work/bin/srun
chmod 755 \$work/bin/srun; PATH=\$work/bin:\$PATH
$(job ab-correctness -n2 --); ls ep-ab-3"
    between '' '== preflight'
    has 'job rc 0'
    for rank in 0 1 2 3; do line "^stand-in rank $rank of 4, local $((rank % 2)), n1: "; done
    has '--overlap-moe-expert-parallel-comm]'
    between '== preflight' '== again'
    has 'preflight: go ahead'
    has_not 'differs from'
    has_not "can't honor --ntasks-per-node"
    times 2 '^  engines '
    between '== again' ''
    has 'overlap: ended with status 1'
    line '^baseline.log$'
    has_not $'\noverlap.log'
}
