#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ep-overlap bench and ep-train on this machine's GPUs without Slurm: ranks as threads, and
# as processes that ep-train starts. One line per case, as tests/gpu/run.sh reads them.
#
#   tools.sh [BUILD]     build-gpu
set -u
cd "$(dirname "$0")/../.." || exit 2
build=${1:-build-gpu}
out=$build/results/tools
rm -rf "${out:?}" && mkdir -p "$out" || exit 2
failed=0
result() { # case ok|FAIL text
    printf 'case\t%s\t%s\t%s\n' "$1" "$2" "$3"
    [ "$2" = ok ] || failed=1
}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
shared=()
[ "$gpus" != 1 ] || shared=(--ranks 2) # both on the one GPU
if [ "$gpus" = 0 ]; then
    printf 'case\ttools\tskip\tno GPU here (nvidia-smi -L lists none)\n'
    exit 0
fi
if ! make -s -f tests/gpu/build.mk -j"$(nproc)" O="$build" ${ARCH:+ARCH="$ARCH"} ${CUDA:+CUDA="$CUDA"} tools >"$out/build.log" 2>&1; then
    result build FAIL "$(tail -1 "$out/build.log")"
    exit 1
fi

bench() { # case options...: every arm with the serial arm's bits
    local name=$1 arms
    shift
    if timeout -k 3 40 "$build/ep-overlap" bench --engine cuda --timeout 10 --json "${shared[@]}" "$@" >"$out/$name.json" 2>"$out/$name.log"; then
        arms=$(grep -c '"identical": true' "$out/$name.json")
        result "$name" ok "$arms arms with the same bits: $(sed -n 's/.*"bits": "\(.*\)".*/\1/p' "$out/$name.json" | sort -u | tr '\n' ' ')"
    else
        result "$name" FAIL "status $?: $(tail -1 "$out/$name.log")"
    fi
}
bench bench-small --workload small --repeat 3
bench bench-q --workload q --repeat 5
# The bits do not depend on the number of SMs and chunks.
for sms in 32 100; do
    bench "bench-sms$sms" --workload small --type bf16 --chunks 1,2,4 --sms "$sms" --repeat 1
done
bits() { sed -n 's/.*"bits": "\(.*\)".*/\1/p' "$out/$1.json" | sort -u; }
if [ -n "$(bits bench-sms32)" ] && [ "$(bits bench-sms32)" = "$(bits bench-sms100)" ]; then
    result sms ok "the same bits on 32 and on 100 SMs, in 1, 2 and 4 chunks"
else
    result sms FAIL "32 SMs: $(bits bench-sms32 | tr '\n' ' ') 100 SMs: $(bits bench-sms100 | tr '\n' ' ')"
fi

train() { # name options...
    local name=$1
    shift
    timeout -k 3 40 "$build/ep-train" --launch 2 --engine cuda --steps 10 --no-measure --save-weights "$out/$name.weights" "$@" LICENSE >"$out/$name.log" 2>&1
}
if train off --overlap off && train on --overlap on --delay-wgrad && grep -q 'cuda engine, 2 ranks' "$out/on.log"; then
    if cmp -s "$out/off.weights" "$out/on.weights"; then
        result train ok "10 steps on and off end in the same weights, bit by bit"
    else
        result train FAIL "10 steps on and off end in other weights"
    fi
else
    result train FAIL "$(tail -1 "$out/off.log") $(tail -1 "$out/on.log" 2>/dev/null)"
fi
exit "$failed"
