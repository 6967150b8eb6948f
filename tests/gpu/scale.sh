#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ep-overlap bench at EP = 1, 2, 4, 8 as far as there are GPUs, workloads Q and D, both
# dispatchers, serial, overlapped and with delayed weight gradients; a table, a picture
# where matplotlib is, and the cost model (tests/bench/model.py) fitted at EP = 1 and 2 and
# held against 4 and 8.  One line per case, as run.sh reads them.
#
#   scale.sh [-f] [-n ROUNDS] [-w 'q d'] [BUILD]    build-gpu
#     -f   EP = 4 and 8 even so, their ranks on the GPUs that there are: a STAND-IN that
#          tries this script and the results' bits; small, its times say nothing
#     EPO_TOOL, EPO_ENGINE   another ep-overlap, and "host" to try this without a GPU
set -u
cd "$(dirname "$0")/../.." || exit 2
shared=0 rounds=7 workloads='q d'
while getopts fn:w: option; do
    case $option in
        f) shared=1 ;;
        n) rounds=$OPTARG ;;
        w) workloads=$OPTARG ;;
        *) sed -n '3,15s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
build=${1:-build-gpu}
engine=${EPO_ENGINE:-cuda}
tool=${EPO_TOOL:-$build/ep-overlap}
python=${PYTHON:-python3}
out=$build/results/scale
rm -rf "${out:?}" && mkdir -p "$out/fit" || exit 2
failed=0
result() { # case ok|FAIL|skip text
    printf 'case\t%s\t%s\t%s\n' "$1" "$2" "$3"
    [ "$2" != FAIL ] || failed=1
}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$engine" = cuda ] || gpus=$(nproc)
if [ -z "${EPO_TOOL:-}" ] && ! make -s -f tests/gpu/build.mk -j"$(nproc)" O="$build" ${ARCH:+ARCH="$ARCH"} ${CUDA:+CUDA="$CUDA"} tools >"$out/build.log" 2>&1; then
    result build FAIL "$(tail -1 "$out/build.log")"
    exit 1
fi

bench() { # EP WORKLOAD [TOKENS: for the model alone]
    local name=$2-ep$1 more=() limit=120
    if [ -n "${3:-}" ]; then
        name=fit/$name-t$3
        more=(--tokens "$3")
    fi
    if [ "$gpus" -lt "$1" ]; then
        if [ "$shared" = 0 ]; then
            result "$name" skip "needs $1 GPUs, $gpus here"
            return
        fi
        name=$name-standin
        more=(--tokens 256)
    fi
    [ "$engine" = cuda ] || more=(--tokens "$((${3:-4096} / 64))" --hidden 64 --ffn 64)
    # At EP = 1 as many experts as a rank has at EP = 2: the same GEMMs, no exchange.
    [ "$1" != 1 ] || case $2 in
        q) more+=(--experts 64) ;;
        d) more+=(--experts 128) ;;
    esac
    if timeout -k 3 "$limit" "$tool" bench --engine "$engine" --ranks "$1" --workload "$2" --repeat "$rounds" --timeout 30 "${more[@]}" --json >"$out/$name.json" 2>"$out/$name.log"; then
        result "$name" ok "$(grep -c '"identical": true' "$out/$name.json") arms with their serial arm's bits"
        # The options above change the workload's name.
        sed -i "s/\"workload\": \"custom\"/\"workload\": \"$2\"/" "$out/$name.json"
    else
        result "$name" FAIL "status $?: $(tail -1 "$out/$name.log")"
        rm -f "$out/$name.json"
    fi
}
for workload in $workloads; do
    for ep in 1 2 4 8; do bench "$ep" "$workload"; done
done
for tokens in 512 1024 16384; do
    for ep in 1 2; do bench "$ep" q "$tokens"; done
done

reports=("$out"/*.json)
[ -e "${reports[0]}" ] || { result table FAIL "no report was made"; exit 1; }
if "$python" tests/gpu/scale.py --svg "$out/scale.svg" "${reports[@]}" >"$out/table.md" 2>"$out/table.log"; then
    result table ok "$(grep -c '^| [a-z]* | [0-9]' "$out/table.md") lines$(sed 's/^/, /' "$out/table.log")"
else
    result table FAIL "$(tail -1 "$out/table.log")"
fi
fit=("$out"/fit/*.json) hold=()
for report in "${reports[@]}"; do
    case $report in
        *-standin.json) ;;
        *-ep[12].json) fit+=("$report") ;;
        *) hold+=(--hold "$report") ;;
    esac
done
if "$python" tests/bench/model.py fit "${hold[@]}" --save "$out/model.json" "${fit[@]}" >"$out/model.txt" 2>"$out/model.log"; then
    result model ok "$(grep -E '^(fitted|held)' "$out/model.txt" | paste -sd'; ')"
elif [ "$gpus" -lt 2 ]; then
    result model skip "needs 2 GPUs, $gpus here"
else
    result model FAIL "$(tail -1 "$out/model.log")"
fi
sed 's/^/# /' "$out/table.md" "$out/model.txt"
exit "$failed"
