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
