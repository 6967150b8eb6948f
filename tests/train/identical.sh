#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Serial, overlapped and overlapped with delayed weight gradients: the same losses
# and the same final weights, bit for bit, for 1, 2, 4, 8 chunks, each dispatcher,
# 2 and 4 ranks; dispatchers agree within the type's tolerance.
set -u
train=${top_builddir:-.}/tools/ep-train/ep-train
work=$(mktemp -d) || exit 99
trap 'rm -rf "$work"' EXIT
failed=0
for name in $(env | sed -n 's/^\(EP_OVERLAP_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
export EP_OVERLAP_TIMEOUT=30 EP_OVERLAP_BLAS_THREADS=1 # small shapes on few cores
export CUDA_VISIBLE_DEVICES='' # the host engine, also where there is a GPU

# A text of its own, so that the test does not depend on the distribution's.
awk 'BEGIN { for (i = 0; i < 900; i++) printf "%d and %d make %d.\n", i, i * 7 % 31, i + i * 7 % 31 }' >"$work/text"

# NAME RANKS OPTIONS...: $work/NAME.{w,loss} or a failure
train() {
    name=$1
    ranks=$2
    shift 2
    if ! timeout 120 "$train" --launch "$ranks" --steps 3 --batch 7 --seq 9 --micro-batches 3 \
        --layers 2 --hidden 24 --ffn 40 --experts 16 --top-k 3 --no-measure \
        --save-weights "$work/$name.w" "$@" "$work/text" >"$work/$name.out" 2>"$work/$name.err"; then
        echo "FAILED: $name: $(cat "$work/$name.err")"
        failed=1
        return 1
    fi
    sed -n 's/.*\(iteration *[0-9]*\)\/.*\(lm loss: .*grad norm: [0-9.]*\).*/\1 \2/p' "$work/$name.out" >"$work/$name.loss"
    [ "$(wc -l <"$work/$name.loss")" = 3 ] && [ -s "$work/$name.w" ] && return 0
    echo "FAILED: $name: no three iteration lines or no weights"
    failed=1
    return 1
}

same() { # NAME REFERENCE
    if cmp "$work/$1.w" "$work/$2.w" && diff "$work/$1.loss" "$work/$2.loss"; then
        same_count=$((same_count + 1))
    else
        echo "FAILED: $1 differs from $2"
        failed=1
    fi
}

was() { # NAME WORDS: the opening line says them, so the run was what the test means
    grep -q "^ep-train: $2" "$work/$1.out" && return 0
    echo "FAILED: $1 was not '$2': $(grep -m1 '^ep-train: overlap' "$work/$1.out")"
    failed=1
}

compare() { # RANKS DTYPE DISPATCHER CHUNKS...
    ranks=$1 dtype=$2 dispatcher=$3
    shift 3
    set_of="$ranks.$dtype.$dispatcher"
    train "$set_of.off" "$ranks" --dtype "$dtype" --dispatcher "$dispatcher" --overlap off || return
    was "$set_of.off" "overlap off, dispatcher $dispatcher"
    for n in "$@"; do
        train "$set_of.on$n" "$ranks" --dtype "$dtype" --dispatcher "$dispatcher" --overlap on \
            --no-delay-wgrad --chunks "$n" && same "$set_of.on$n" "$set_of.off"
        was "$set_of.on$n" "overlap on, dispatcher $dispatcher, weight gradients at once, $n chunk"
        train "$set_of.late$n" "$ranks" --dtype "$dtype" --dispatcher "$dispatcher" --overlap on \
            --delay-wgrad --chunks "$n" && same "$set_of.late$n" "$set_of.off"
        was "$set_of.late$n" "overlap on, dispatcher $dispatcher, weight gradients delayed, $n chunk"
    done
}

# Losses of two runs within a relative tolerance.
near() { # NAME OTHER TOLERANCE
    paste "$work/$1.loss" "$work/$2.loss" | tr -d '|' | awk -v most="$3" '
        { n++; a = b = 0; for (i = 1; i <= NF; i++) if ($i == "loss:") { b = a; a = $(i + 1) }
          d = a - b; if (d < 0) d = -d; if (!(a > 0 && b > 0 && d <= most * a)) bad = 1 }
        END { exit bad || n != 3 }' && return 0
    echo "FAILED: losses of $1 and $2 differ by more than $3"
    failed=1
}

same_count=0
compare 2 fp32 alltoall 1 2 4 8
compare 2 fp32 flex 1 2 4 8
compare 4 fp32 alltoall 1 2 4 8
compare 4 fp32 flex 1 2 4 8
compare 2 bf16 alltoall 4
compare 2 bf16 flex 4
echo "$same_count runs identical to their serial run"
near 2.fp32.flex.off 2.fp32.alltoall.off 1e-5
near 4.fp32.flex.off 2.fp32.alltoall.off 1e-5
near 2.bf16.flex.off 2.fp32.flex.off 2e-2
near 2.bf16.flex.off 2.bf16.alltoall.off 1e-2
train other 2 --overlap off --seed 2
cmp -s "$work/other.w" "$work/2.fp32.alltoall.off.w" && echo "FAILED: the seed changes nothing" && failed=1
[ $same_count = 36 ] || failed=1
exit $failed
