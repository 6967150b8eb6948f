#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How much overlap brings where communication takes about as long as the experts'
# work: two ranks on this machine, one BLAS thread each, an emulated link whose
# speed is found from the work measured first. A benchmark, not a test: the
# numbers are this machine's, and noise on it is noise in them.
set -u

usage() {
    cat <<'END'
Usage: tests/bench/overlap.sh [options]

  --pairs N        interleaved pairs of serial and overlapped passes [7]
  --ratio X        communication over computation to aim at [1]
  --latency US     of the emulated link [20]
  --chunks N       expert groups of a pass [8]
  --launcher CMD   what starts two ranks, e.g. "srun -n2"
                   [ep-train's own --launch 2]
  --json FOLDER    keep each run's figures there
  --require X      status 1 if a speed-up stays below X

ep-train is found through EP_TRAIN, else build/, else PATH.
END
}

pairs=7 ratio=1 latency=20 chunks=8 launcher='' keep='' require=0
while [ $# -gt 0 ]; do
    case $1 in
    --pairs | --ratio | --latency | --chunks | --launcher | --json | --require)
        [ $# -ge 2 ] || { usage >&2 && exit 2; }
        case $1 in
        --pairs) pairs=$2 ;;
        --ratio) ratio=$2 ;;
        --latency) latency=$2 ;;
        --chunks) chunks=$2 ;;
        --launcher) launcher=$2 ;;
        --json) keep=$2 ;;
        --require) require=$2 ;;
        esac
        shift 2
        ;;
    --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
    esac
done
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
train=${EP_TRAIN:-$top/build/tools/ep-train/ep-train}
[ -x "$train" ] || train=$(command -v ep-train) || { echo "no ep-train: build it, or set EP_TRAIN" >&2 && exit 69; }
work=$(mktemp -d) || exit 70
trap 'rm -rf "$work"' EXIT
export EP_OVERLAP_BLAS_THREADS=1
unset EP_OVERLAP_HOST_LINK EP_OVERLAP_CHUNKS

# Wide enough that the experts' work, not this program's own, is what is measured.
shape=(--hidden 256 --ffn 256 --experts 16 --top-k 2 --seq 64 --batch 32 --layers 2 --micro-batches 2 --chunks "$chunks")

bench() { # NAME OPTIONS...: $work/NAME.json
    local name=$1 start=()
    shift
    if [ -n "$launcher" ]; then
        read -r -a start <<<"$launcher"
        "${start[@]}" "$train" --bench "$pairs" "${shape[@]}" --json "$work/$name.json" "$@" >"$work/$name.out" 2>&1
    else
        "$train" --launch 2 --bench "$pairs" "${shape[@]}" --json "$work/$name.json" "$@" >"$work/$name.out" 2>&1
    fi || { cat "$work/$name.out" >&2 && exit 1; }
}

figure() { # NAME KEY [PART]: a number of the JSON
    sed -n "s/^  \"$2\": //p" "$work/$1.json" | sed -n "s/.*\"${3:-}\": \([0-9.e+-]*\).*/\1/p; s/^\([0-9.e+-]*\),\$/\1/p" | head -n 1
}

bench calibrate --overlap on --dispatcher flex
link=$(awk -v least="$(figure calibrate dispatch_least_ms)" -v also="$(figure calibrate combine_least_ms)" \
    -v rate="$(figure calibrate rate_gbs)" -v work="$(figure calibrate ffn_alone_ms)" -v ratio="$ratio" \
    'BEGIN { printf "%.4g", (least + also) * rate / (work * ratio) }')
echo "the experts' work alone takes $(figure calibrate ffn_alone_ms) ms; a link of $link GB/s + $latency us makes"
echo "the least communication about $ratio times as long; $pairs interleaved pairs, medians (least .. most):"
echo
printf '%-26s %10s %10s   %-24s %8s %10s %10s\n' "" "T_serial" "T_on" "speed-up" "at most" "exposed" "efficiency"
export EP_OVERLAP_HOST_LINK=$link,$latency
failed=0
for dispatcher in flex alltoall; do
    for delay in --no-delay-wgrad --delay-wgrad; do
        name=$dispatcher$delay
        bench "$name" --overlap on --dispatcher "$dispatcher" "$delay"
        [ -z "$keep" ] || { mkdir -p "$keep" && cp "$work/$name.json" "$keep/"; }
        awk -v name="$dispatcher ${delay#--}" -v serial="$(figure "$name" t_serial_ms median)" \
            -v on="$(figure "$name" t_on_ms median)" -v speed="$(figure "$name" speedup median)" \
            -v least="$(figure "$name" speedup least)" -v most="$(figure "$name" speedup most)" \
            -v floor="$(figure "$name" t_floor_ms)" -v exposed="$(figure "$name" exposed_ms)" \
            -v efficiency="$(figure "$name" efficiency)" -v require="$require" 'BEGIN {
            printf "%-26s %7.1f ms %7.1f ms   %.2f x (%.2f .. %.2f)     %6.2f x %7.1f ms %8.0f %%\n", name,
                serial, on, speed, least, most, serial / floor, exposed, 100 * efficiency
            exit !(speed >= require) }' || failed=1
    done
done
exit $failed
