#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The grouped GEMM on a machine with a GPU, in one call: builds, checks 20,000 random
# shapes against fp64, looks for bad accesses, times it beside torch._grouped_mm and
# cuBLAS, and prints the table last.  Under 4 minutes.
#   run.sh [OUTDIR]       results and objects [build-gemm]
#   CASES, PYTHON         random shapes [20000]; a python3 that has torch [python3]
#   PREBUILT              a folder in which build.sh has run already
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-build-gemm}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
bin=${PREBUILT:-$out}
if [ -z "${PREBUILT:-}" ] && ! sh "$here/build.sh" "$out"; then
    exit 1
fi
failed=0
timeout 120 "$bin/test_grouped_gemm" --cases "${CASES:-20000}" --seed 11 || failed=1
timeout 60 "$bin/test_chain" --cases 2000 --seed 11 --time 1 || failed=1
if command -v compute-sanitizer >/dev/null; then
    timeout 120 compute-sanitizer --tool memcheck --error-exitcode 1 \
        "$bin/test_grouped_gemm" --cases 25 --seed 12 >"$out/sanitizer.log" 2>&1 || failed=1
    tail -n 2 "$out/sanitizer.log"
else
    echo "run.sh: compute-sanitizer is not here: left out"
fi
if "$python" -c 'import torch' 2>/dev/null; then
    timeout 180 "$python" "$here/bench_grouped_gemm.py" "$bin/libepo_gemm.so" --json "$out/bench.json" || failed=1
    timeout 120 "$python" "$here/bench_grouped_gemm.py" "$bin/libepo_gemm.so" --shape D,mixtral,gptoss \
        --only rivals --styles even --json "$out/bench-models.json" || failed=1
else
    echo "run.sh: $python has no torch: nothing was timed"
fi
[ $failed = 0 ] && echo "run.sh: all right" || echo "run.sh: FAILED"
exit $failed
