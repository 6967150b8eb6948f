#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154,SC2016 # work, output: plugin_common.bash and bats; texts for other shells
# The job scripts of the PyTorch and Megatron-Core examples as they are, on a cluster of two
# nodes without GPUs. A stand-in takes Python's place where there is no PyTorch: it says so,
# tells what the step set, and prints made-up figures in the programs' own lines.

bats_require_minimum_version 1.5.0
load plugin_common

stand_in() {
    chmod 755 "$work"
    mkdir -m 755 "$work/bin"
    mkdir -m 777 "$work/jobs"
    cat >"$work/bin/python" <<'END'
#!/bin/bash
# A stand-in for Python with PyTorch, for tests of the job scripts: it trains nothing.
[ "$1" = -u ] && shift
program=$(basename "$1") && shift
preloaded=none
[[ $LD_PRELOAD == *libep_overlap_intercept* ]] && preloaded=interposer
[[ $LD_PRELOAD == *libep_overlap.so* ]] && [ $preloaded = none ] && preloaded=library
found=$(IFS=:; for d in $PYTHONPATH; do [ -e "$d/deep_ep/__init__.py" ] && echo drop-in; done | head -n 1)
echo "stand-in $program rank $SLURM_PROCID of $SLURM_NTASKS: decision ${EP_OVERLAP_DECISION:-none}," \
    "dispatcher ${EP_OVERLAP_DISPATCHER:-none}, wgrad ${EP_OVERLAP_DELAY_WGRAD:-none}, preload $preloaded," \
    "deep_ep ${found:-none}, arguments $*"
[ -n "$STAND_IN_STATUS" ] && [ "$EP_OVERLAP_DECISION" = on ] && exit "$STAND_IN_STATUS"
[ "$SLURM_PROCID" = $((SLURM_NTASKS - 1)) ] || exit 0
ms=20.0
[ "$EP_OVERLAP_DECISION" = on ] && ms=10.0
case $program in
torch_alltoall.py)
    echo "all-to-all    64.0 MB even     $ms ms   100.0 GB/s to other ranks"
    echo "every element as its sender sent it" ;;
*)
    for i in 1 2 3 4; do
        echo " iteration        $i/       4 | consumed samples: $((i * 4)) | elapsed time per iteration (ms): $ms | global batch size: 4 | lm loss: 1.0E+00 |"
    done ;;
esac
END
    chmod 755 "$work/bin/python"
    export PATH=$work/bin:$PATH
    unset PYTHON # (the scripts would prefer it)
}

job() { # SCRIPT [sbatch's options] -- [arguments]
    local script=$1 options=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    printf 'cd $work/jobs; batch -o $work/out %s %s %s; echo "job rc $?"; cat $work/out' \
        "--ntasks-per-node=2 --gpus-per-node=0 ${options[*]}" "$top/jobscripts/$script.sbatch" "$*"
}
line() { grep -qE -- "$1" <<<"$output" || { echo "no line: $1" && echo "$output" && false; }; }

@test "torch-alltoall: the same program twice, sizes side by side" {
    stand_in
    cluster -- "$(job torch-alltoall -- --sizes 64)
echo == broken
export STAND_IN_STATUS=3; $(job torch-alltoall -- --sizes 64)"
    between '' '== broken'
    has 'job rc 0'
    for rank in 0 1; do
        line "^stand-in torch_alltoall.py rank $rank of 2: decision (off|none), .*, preload none, .*, arguments --sizes 64\$"
        line "^stand-in torch_alltoall.py rank $rank of 2: decision on, .*, arguments --sizes 64\$"
    done
    line '^64.0 MB even +20.000 +10.000 +2.00$'
    between '== broken' ''
    has 'job rc 1'
}

@test "torch-moe: four arms and their comparison; an arm that fails is told" {
    stand_in
    cluster -- "$(job torch-moe -- --steps 4); cat torch-moe-*.log
echo == broken
export STAND_IN_STATUS=3 ARMS='off library'; $(job torch-moe -- --steps 4)
echo == usage
export ARMS=none; $(job torch-moe -- --steps 4)"
    between '' '== broken'
    has 'job rc 0'
    line '^stand-in torch_moe.py rank 1 of 2: decision (off|none), .*, preload none, .*, arguments --layer torch --steps 4$'
    line '^stand-in torch_moe.py rank 1 of 2: decision on, .*, wgrad (off|none|0), .*, arguments --layer torch --steps 4$'
    line '^stand-in torch_moe.py rank 1 of 2: decision on, .*, arguments --layer ep_overlap --steps 4$'
    line '^stand-in torch_moe.py rank 1 of 2: decision on, .*, wgrad (on|1), .*, arguments --layer ep_overlap --steps 4$'
    times 3 ' 0.0100 s     2.000x'
    between '== broken' '== usage'
    has 'library: ended with status 3'
    has 'job rc 1'
    between '== usage' ''
    has 'ARMS: none: off, on, library or library+wgrad'
    has 'job rc 2'
}

@test "megatron-core-moe: the drop-in is there for flex alone" {
    stand_in
    cluster -- "export DROPIN=$top/python/dropin; $(job megatron-core-moe -- --steps 4); cat megatron-core-moe-*.log"
    has 'job rc 0'
    line '^stand-in megatron_core_moe.py rank 0 of 2: decision (off|none), .*, deep_ep none, arguments --dispatcher alltoall --steps 4$'
    line '^stand-in megatron_core_moe.py rank 0 of 2: decision on, dispatcher alltoall, .*, deep_ep none, arguments --dispatcher alltoall --steps 4$'
    line '^stand-in megatron_core_moe.py rank 0 of 2: decision on, dispatcher flex, .*, deep_ep drop-in, arguments --dispatcher flex --steps 4$'
    line '^stand-in megatron_core_moe.py rank 0 of 2: decision on, dispatcher flex, .*, deep_ep drop-in, arguments --dispatcher flex --backend hybridep --steps 4$'
    times 3 ' 0.0100 s     2.000x'
}

@test "the programs themselves on the CPU, without GPUs" {
    python=${PYTHON:-python3}
    "$python" -c 'import torch' 2>/dev/null || skip "no PyTorch here: nothing of the programs was run"
    chmod 755 "$work"
    mkdir -m 777 "$work/jobs"
    # six runs, each of which imports torch twice
    cluster_limit=300 cluster -- "export PYTHON=$python PROGRAM=$top/python/examples/torch_alltoall.py
$(job torch-alltoall -- --sizes 1 --loops 3)
export PYTHONPATH=$top/python PROGRAM=$top/python/examples/torch_moe.py
$(job torch-moe -- --steps 4 --tokens 64 --hidden 32 --ffn 32 --experts 4 --top-k 2); cat torch-moe-*.log"
    times 2 'job rc 0'
    has 'every element as its sender sent it'
    times 3 'identical as printed, 4 iterations'
}
