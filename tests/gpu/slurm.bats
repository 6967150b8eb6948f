#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# tests/gpu/slurm.sh where there is no GPU: it says so, and all but the GPU is tried with
# the host engine in a cluster with stand-ins.

setup() { top=$(cd "$BATS_TEST_DIRNAME/../.." && pwd); }

@test "slurm.sh without a GPU: the reason, and nothing else" {
    [ ! -e /dev/nvidiactl ] || skip "there is a GPU here"
    run "$top/tests/gpu/slurm.sh" "$BATS_TEST_TMPDIR/gpu"
    [ "$status" = 0 ]
    [ "$output" = "$(printf 'case\tslurm\tskip\tno GPU here (nvidia-smi -L lists none)')" ]
}

@test "slurm.sh with the host engine: losses, weights, bench under srun" {
    EPO_STEPS=4 EPO_ENGINE=host BENCH_OPTIONS="--tokens 16 --hidden 16 --ffn 16" EP_OVERLAP_BLAS_THREADS=1 \
        run timeout 300 "$top/tests/gpu/slurm.sh" "$BATS_TEST_TMPDIR/gpu"
    echo "$output"
    [ "$status" = 0 ]
    for case in alltoall-on alltoall-wgrad flex-on flex-wgrad bf16-on; do
        grep -q "^case	$case	ok	.*bit by bit those of ${case%-*}-off" <<<"$output"
    done
    grep -q "^case	bench	ok	.*6 arms with the same bits" <<<"$output"
}

@test "slurm.sh finds what it is for: other losses are a failure" {
    # overlapped runs begin with other weights
    cat >"$BATS_TEST_TMPDIR/train" <<'END'
#!/bin/sh
[ "$EP_OVERLAP_DECISION" != on ] || set -- --seed 2 "$@"
exec ep-train "$@"
END
    chmod -R a+rX "$BATS_TEST_TMPDIR" && chmod +x "$BATS_TEST_TMPDIR/train"
    EPO_TRAIN=$BATS_TEST_TMPDIR/train EPO_STEPS=4 EPO_ENGINE=host BENCH_OPTIONS="--tokens 16 --hidden 16 --ffn 16" EP_OVERLAP_BLAS_THREADS=1 \
        run timeout 300 "$top/tests/gpu/slurm.sh" "$BATS_TEST_TMPDIR/gpu"
    echo "$output"
    [ "$status" = 1 ]
    grep -q "^case	alltoall-off	ok	" <<<"$output"
    grep -q "^case	alltoall-on	FAIL	losses differ from alltoall-off" <<<"$output"
}

@test "slurm.sh scripts: the job scripts to their ends, and what they print is looked at" {
    # in Python's place, with made-up figures in the programs' own lines
    cat >"$BATS_TEST_TMPDIR/python" <<'END'
#!/bin/bash
[ "$1" = -c ] && exit 0
program=$(basename "$2")
[ "$SLURM_PROCID" = 1 ] || exit 0
loss=4
case $program in
torch_alltoall.py)
    echo "all-to-all    64.0 MB even     20.0 ms   100.0 GB/s to other ranks"
    [ "$EP_OVERLAP_DECISION" != on ] ||
        echo "ep-overlap: NCCL messages of rank 0: 8.0 MB in 1 communicators, 9 all-to-all exchanges (8.0 MB); ${CARRIED:-3.0} MB carried by copy engines; left to NCCL mostly for: late peer (4.0 MB), small message (1.0 MB)"
    [ -n "$BAD_ELEMENTS" ] || echo "every element as its sender sent it" ;;
*)
    for i in 1 2; do
        [ "$EP_OVERLAP_DECISION" != on ] || [[ $* != *"--layer torch"* ]] || loss=${LOSS_ON:-4}
        echo " iteration        $i/       2 | consumed samples: $i | elapsed time per iteration (ms): 1.0 | global batch size: 4 | lm loss: $loss.0E+00 |"
    done ;;
esac
END
    chmod -R a+rX "$BATS_TEST_TMPDIR" && chmod +x "$BATS_TEST_TMPDIR/python"
    export EPO_ENGINE=host EPO_PARTS=scripts EPO_CARRIED=1 PYTHON=$BATS_TEST_TMPDIR/python
    run timeout 200 "$top/tests/gpu/slurm.sh" "$BATS_TEST_TMPDIR/gpu"
    echo "$output"
    cat "$BATS_TEST_TMPDIR"/gpu/results/slurm/*.out
    [ "$status" = 1 ] # (the second script says nothing of bytes)
    grep -q "^case	torch-alltoall carried	ok	3.0 of 8.0 MB, 4.0 left for late peers" <<<"$output"
    grep -q "^case	torch-moe carried	FAIL	none of 0 MB: no line says so" <<<"$output"
    grep -q "^case	torch-alltoall	ok	.*64.0 MB even 20.000 20.000 1.00" <<<"$output"
    grep -q "^case	torch-moe	ok	2 losses, on as off: 4.0E+00" <<<"$output"
    grep -q "^case	megatron-core-moe	skip	" <<<"$output"
    BAD_ELEMENTS=1 LOSS_ON=5 CARRIED=1.9 EPO_SCRIPTS="alltoall moe" run timeout 200 "$top/tests/gpu/slurm.sh" "$BATS_TEST_TMPDIR/gpu"
    echo "$output"
    [ "$status" = 1 ]
    [[ $output != *megatron* ]]
    grep -q "^case	torch-alltoall carried	FAIL	1.9 of 8.0 MB: ep-overlap: NCCL messages" <<<"$output" # not a quarter
    grep -q "^case	torch-alltoall	FAIL	" <<<"$output"
    grep -q "^case	torch-moe	FAIL	losses of on and off differ: 2 5.0E+00 against 2 4.0E+00" <<<"$output"
}
