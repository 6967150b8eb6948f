#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# ep-train as a user runs it on one machine: the loss falls, the figures are there,
# and everything that is wrong ends in one line, its status, and soon.
# shellcheck disable=SC2317 # functions called by name
set -u
train=${top_builddir:-.}/tools/ep-train/ep-train
work=$(mktemp -d) || exit 99
trap 'rm -rf "$work"' EXIT
failed=0
for name in $(env | sed -n 's/^\(EP_OVERLAP_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
export EP_OVERLAP_TIMEOUT=20 EP_OVERLAP_BLAS_THREADS=1
export CUDA_VISIBLE_DEVICES='' # the host engine, also where there is a GPU
check() { # NAME COMMAND...
    name=$1
    shift
    if "$@"; then
        echo "ok: $name"
    else
        echo "FAILED: $name"
        failed=1
    fi
}
awk 'BEGIN { for (i = 0; i < 900; i++) printf "%d and %d make %d.\n", i, i * 7 % 31, i + i * 7 % 31 }' >"$work/text"

# --- a run ---------------------------------------------------------------------
timeout 120 "$train" --launch 2 --steps 30 --batch 8 --seq 32 --overlap on --dispatcher flex \
    --delay-wgrad --chunks 2 --json "$work/run.json" "$work/text" >"$work/run.out" 2>"$work/run.err"
check "status 0" test $? = 0
check "nothing on stderr" test ! -s "$work/run.err"
check "30 iteration lines" test "$(grep -c '^ \[.*iteration .*lm loss: .*number of nan iterations:   0 |$' "$work/run.out")" = 30
check "the first line says what was decided" grep -q '^ep-train: overlap on, dispatcher flex, weight gradients delayed, 2 chunks, host engine, 2 ranks$' "$work/run.out"
for figure in 'loss' 'step' 'in MoE calls' 'T_serial' 'T_on' 'FFN_alone' 'T_floor' 'speed-up' 'exposed' \
    'efficiency' 'overlapped' 'wire' 'local passes' 'delayed wgrad' 'memory' 'versions'; do
    check "figure: $figure" grep -q "^  $figure  *[-0-9e]" "$work/run.out"
done
falls() {
    sed -n 's/.*lm loss: \([0-9.E+-]*\).*/\1/p' "$1" | awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < 0.7 * first) }'
}
check "the loss falls by more than 30 %" falls "$work/run.out"
json() { # EXPRESSION
    if command -v python3 >/dev/null; then
        python3 -c "import json, sys; d = json.load(open('$work/run.json')); sys.exit(not ($1))"
    else
        echo "(left out: no python3)"
    fi
}
check "JSON: floor and times fit together" json "0 < d['t_floor_ms'] == max(d['ffn_best_ms'], d['dispatch_least_ms'] + d['combine_least_ms']) and d['ffn_best_ms'] <= d['ffn_alone_ms'] and d['t_serial_ms']['least'] <= d['t_serial_ms']['median'] <= d['t_serial_ms']['most']"
check "JSON: where it ran" json "d['device'] == 'host' and d['dense_on'] == 'host' and d['sms'] == 0 and d['gpu_used_mb'] == 0"
check "JSON: bytes, unions, settings" json "d['dispatch_bytes'] > 0 and d['combine_bytes'] > 0 and d['union_overlapped_ns'] + d['union_exposed_ns'] == d['union_comm_ns'] and d['ranks'] == 2 and d['overlap'] == 1 and d['chunks_used'] == 2 and d['last_loss'] < d['first_loss']"

# --- one rank, more ranks than sequences, SGD, bf16 ----------------------------
runs() { timeout 120 "$train" --steps 3 --seq 16 --no-measure "$@" "$work/text" >"$work/out" 2>"$work/err"; }
check "one rank, no launcher" runs
check "ranks without tokens" runs --launch 4 --batch 2 --overlap on
check "SGD and bf16" runs --launch 2 --optimizer sgd --dtype bf16
check "the engine by name" runs --engine host
last_loss() { sed -n 's/.*lm loss: \([0-9.E+-]*\).*/\1/p' "$work/out" | tail -1; }
runs --launch 4 --dispatcher flex --overlap on
one=$(last_loss)
EP_OVERLAP_NODES=0,0,1,1 runs --launch 4 --dispatcher flex --overlap on --chunks 2
check "two nodes: status 0" test $? = 0
near() { awk -v a="$1" -v b="$2" 'BEGIN { d = a - b; exit !(a > 0 && (d < 0 ? -d : d) < 1e-4 * a) }'; }
check "two nodes: the loss of one" near "$one" "$(last_loss)"
EP_OVERLAP_NODES=0,1,1,1 runs --launch 4 --dispatcher flex
check "nodes that differ: status 1" test $? = 1
check "nodes that differ: the reason" grep -q 'the nodes of a group must have the same number of ranks' "$work/err"
runs --engine cuda --launch 2
check "no GPU to use: status 1" test $? = 1
check "no GPU to use: the reason, once" grep -qE '^ep-train: (no GPU to use|no NVIDIA driver here|.*engine_cuda.so)' "$work/err"
check "no GPU to use: one line" test "$(wc -l <"$work/err")" = 1
check "--bench trains nothing" runs --launch 2 --bench 2 --overlap on
check "--bench prints the comparison" grep -q '^  T_floor' "$work/out"
runs --launch 2 --lr 1e25 --steps 8
check "a loss that is no number: status 1" test $? = 1
check "a loss that is no number: said" grep -q '[1-9] of 8 steps were skipped' "$work/err"
check "a loss that is no number: said once" test "$(wc -l <"$work/err")" = 1
check "a loss that is no number: counted in each line" test "$(grep -c 'skipped iterations:   1 ' "$work/out")" -ge 1

# --- what is wrong -------------------------------------------------------------
# WORDS STATUS OPTIONS...: one line on stderr with WORDS, that status, in time
wrong() {
    words=$1 want=$2
    shift 2
    begin=$(date +%s)
    timeout 60 "$train" --steps 2 "$@" >"$work/out" 2>"$work/err"
    status=$?
    took=$(($(date +%s) - begin))
    lines=$(wc -l <"$work/err")
    [ "$status" = "$want" ] && [ "$lines" = 1 ] && grep -qF -- "$words" "$work/err" && [ "$took" -lt 15 ] && return 0
    echo "   status $status, $lines lines, $took s: $(cat "$work/err")"
    return 1
}
: >"$work/empty"
printf 'short' >"$work/short"
check "no such text" wrong "/nonexistent/text cannot be read" 1 --launch 2 /nonexistent/text
check "empty text" wrong "is empty" 1 --launch 2 "$work/empty"
check "folder as text" wrong "is a folder" 1 --launch 2 "$work"
check "text shorter than a batch" wrong "has 5 bytes" 1 --launch 2 "$work/short"
check "no such option" wrong "--frob: no such option" 2 --launch 2 --frob
check "bad value" wrong '--steps: found "-1"' 2 --steps -1
check "experts not divisible by ranks: the experts" wrong "9" 2 --launch 2 --experts 9 "$work/text"
check "experts not divisible by ranks: the ranks" grep -qw 2 "$work/err"
check "delay without overlap" wrong "need overlap" 2 --launch 2 --overlap off --delay-wgrad "$work/text"
check "weights into nowhere" wrong "/nonexistent/w cannot be written" 1 --launch 2 --no-measure --save-weights /nonexistent/w "$work/text"
check "JSON into nowhere" wrong "/nonexistent/j cannot be written" 1 --launch 2 --no-measure --json /nonexistent/j "$work/text"
EP_OVERLAP_CHUNKS=many
export EP_OVERLAP_CHUNKS
check "bad variable" wrong 'EP_OVERLAP_CHUNKS: found "many"' 2 --launch 2 --overlap on "$work/text"
unset EP_OVERLAP_CHUNKS
RANK=1
export RANK
check "half a launcher" wrong 'WORLD_SIZE is not set' 2 "$work/text"
unset RANK

# --- a rank that dies: the others end and say so --------------------------------
EP_OVERLAP_TIMEOUT=5 timeout 60 "$train" --launch 3 --experts 6 --steps 100000 --no-measure "$work/text" >"$work/out" 2>"$work/err" &
pid=$!
for _ in $(seq 100); do
    grep -q 'iteration' "$work/out" && break
    sleep 0.1
done
# timeout's child is the launcher, its children are the ranks
children() { cat "/proc/$1/task/$1/children"; }
launcher=$(children $pid)
victim=$(children "${launcher% }" | awk '{ print $NF }')
check "ranks are there to kill" kill -9 "${victim:-none}"
begin=$(date +%s)
wait $pid
status=$?
check "a killed rank: status 137" test $status = 137
check "a killed rank: ends soon" test $(($(date +%s) - begin)) -lt 20
check "a killed rank: named" grep -q 'rank [0-9] was ended by signal 9' "$work/err"
[ $failed = 0 ] || { echo "status $status:"; cat "$work/err"; }
exit $failed
