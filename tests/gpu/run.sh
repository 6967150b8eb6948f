#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the CUDA engine and its tests from the tree on a machine with GPUs, with
# nothing but GNU make, gcc and the CUDA Toolkit, and runs (seconds as two H200 usually take):
#
#   probe      3 s   the node's facts against nvidia-smi              1 GPU
#   units      9 s   operations against fp64, errors, late peers      1 GPU
#   products   9 s   the experts' products, each way (EP_OVERLAP_CUDA_GEMM), against
#                    cuBLASLt's on the same inputs                     1 GPU
#   ways      40 s   operations and layers with the portable kernels, which serve other
#                    GPUs, and with cuBLASLt, in place of those for sm_90   1 GPU or more
#   sm80     100 s   the same with what is compiled for sm_80 (PTX, which the driver takes
#                    here too; another build), portable kernels       1 GPU or more
#   flex      20 s   flex's kernels against maps of the CPU and fp64 1 GPU or more
#   threads   28 s   layers, ranks as threads, all arms bit for bit    1 GPU or more
#   budgets   15 s   the same on all SMs, on 100 and on 32             1 GPU or more
#   near      20 s   the same for flex, own rows expanded beside the others' way however
#                    few they are, and rows that go home one by one  1 GPU or more
#   graph    270 s   plan, forward and backward in a CUDA graph, in up to 4 chunks, replayed (EPO_GRAPH:
#                    some of its commands, as "threads-flex e4m3")
#                                                                      1 GPU or more
#   bulk      30 s   10,000 random small layers (EPO_GPU_LAYERS), and 2,000 of shapes at
#                    the edges                                         1 GPU or more
#   dense      3 s   ep-train's dense parts against the CPU's         1 GPU
#   processes 15 s   layers, ranks as processes over CUDA IPC          1 GPU or more
#   nccl      80 s   the same, peers by ncclSend and ncclRecv; a rank that makes its communicator
#                    late; ranks that share a GPU go over sockets      1 GPU or more
#   comm      12 s   groups from a job's communicator                  1 GPU or more
#   features  20 s   two micro-batches, two groups in a step, ...      1 GPU or more
#   wire      40 s   layers and features with e4m3 on the wire       1 GPU or more
#   nodes    100 s   flex across two nodes played in one machine, NCCL between them; as on
#                    several machines, too                             1 GPU or more
#   repeats   10 s   1,000 repeats of a layer, bit for bit             1 GPU or more
#   endure    75 s   a stopped rank named, with CUDA_DEVICE_MAX_CONNECTIONS 1 and 32; a rank
#                    that never comes; a capture while NCCL is waited for; 60 groups made and
#                    destroyed                                         1 GPU or more
#   sanitizer 60 s   memcheck and racecheck of small cases             1 GPU
#   bench     15 s   workload Q, serial and overlapped in turns; with one hardware queue
#                    (CUDA_DEVICE_MAX_CONNECTIONS=1), too       2 GPUs (1: no link is crossed)
#   torch     20 s   PyTorch's eager layer beside it                    2 GPUs
#   strong    10 s   the layer beside our dispatch, torch._grouped_mm and one pass of
#                    SwiGLU, in turns                                2 GPUs
#   sweep     25 s   bench for 64, 512, 4096 and 16384 tokens        2 GPUs
#   deep      10 s   workload D: hidden 7168, 256 experts               2 GPUs
#   fp32       8 s   Q, weight gradients added up in fp32               2 GPUs
#   scale    200 s   ep-overlap bench at EP = 1, 2, 4, 8, workloads Q and D, and the cost
#                    model (scale.sh)                              as many GPUs as there are
#   slow      35 s   a slow fabric: NCCL through shared memory, widths that take as long to
#                    send as to compute                              2 GPUs
#   tools     50 s   ep-overlap bench and ep-train, without Slurm (tools.sh)   1 GPU or more
#   slurm     40 s   srun --ep-overlap=on ep-train: the loss of off, bit for bit; Slurm from
#                    build-debs where none is installed (slurm.sh)   1 GPU or more
#   scripts  100 s   the job scripts of python/examples under that Slurm (slurm.sh; EPO_SCRIPTS:
#                    some of them)                                    1 GPU or more
#   python    60 s   the torch binding, in CUDA graphs too, the deep_ep drop-in; two ranks
#                                                                      1 GPU or more
#   megatron  15 s   Megatron-Core's dispatchers over it              1 GPU or more
#   random    50 s   120,000 random all-to-alls of an unmodified torch program, half of them with
#                    messages of all sizes carried (EPO_CALLS: of each half); plain, observed,
#                    expandable segments (intercept.py; -s: other calls; gather.py adds runs
#                    up)                                             1 GPU or more
#   jobs     110 s   its other cases: most is carried, sizes that disagree, graphs, groups, aborts, churn (EPO_JOBS:
#                    some, as "groups:0 abort")                       1 GPU or more
#   speed     20 s   64 MB, beside GEMMs, an eager layer trained        2 GPUs
#   small     25 s   what a small message costs under the interposer    1 GPU or more
#   record   120 s   what the recorder says beside torch.profiler (record.py; EPO_RECORD: some of
#                    its parts)                                      1 GPU or more
#   preload   60 s   that nobody notices the interposer (preload.py; EPO_PRELOAD: some of its
#                    parts)                                          1 GPU or more
#   examples 110 s   python/examples to their ends, without Slurm      1 GPU or more
#
#   run.sh [PHASE[=SECONDS]...]     all of them, the phase in SECONDS at most; -n CASES [12], -s SEED, -o FOLDER for results,
#                         -S: in `scale`, ranks share GPUs where there are too few, labelled
#                         -t SECONDS: of all: no phase begins that usually takes longer than is
#                         left, none gets more than half as long again and 20 s, limits are cut to that
#                         -r: what is done in FOLDER, of the same tree, is not done again
#                         -l: only the names of the phases and their usual seconds
#
# Each command has a limit; what it leaves behind is killed, and the next one begins. What the GPUs hold is
# told before each phase; a phase that leaves memory or programs on them has failed. Behind each phase a
# line `result phase=... ok=... fail=... seconds=...`; in the end a table, one JSON object, and
# last what was skipped and why. Status 0: no case failed.
set -u
cd "$(dirname "$0")/../.." || exit 2
build=${EPO_GPU_BUILD:-build-gpu}
cases=12
seed=
out=
standin=()
usage() { sed -n '3,/^set -u/{/^set -u/d;s/^# \{0,1\}//p}' tests/gpu/run.sh; }
usual() { # PHASE: its usual seconds; none: all phases with theirs
    sed -n 's/^#   \([a-z0-9]*\) *\([0-9]*\) s  .*/\1 \2/p' tests/gpu/run.sh | sed -n "${1:+s/^$1 //}p"
}
for word; do
    [ "$word" != --help ] || { usage; exit 0; }
done
left=100000 resume=0
while getopts n:s:o:t:Srlh option; do
    case $option in
        n) cases=$OPTARG ;;
        s) seed=$OPTARG ;;
        o) out=$OPTARG ;;
        t) left=$OPTARG ;;
        r) resume=1 ;;
        S) standin=(-f) ;;
        l) usual; exit 0 ;;
        h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
phases=${*:-probe units products ways sm80 flex threads budgets near processes nccl comm features graph bulk dense wire nodes repeats endure sanitizer bench torch strong sweep deep fp32 scale slow tools slurm scripts python megatron random jobs speed small record preload examples}
declare -A most=() # of phases, where it is asked for
words=$phases phases=
for word in $words; do
    phase=${word%%=*}
    [ "$word" = "$phase" ] || most[$phase]=${word#*=}
    [[ ${most[$phase]:-1} =~ ^[0-9]+$ ]] || { echo "run.sh: $phase takes a number of seconds, not '${most[$phase]}'" >&2; exit 2; }
    phases+="$phase "
    [ -n "$(usual "$phase")" ] || { echo "run.sh: no phase $phase (run.sh -l lists them)" >&2; exit 2; }
done
[[ $left =~ ^[0-9]+$ ]] || { echo "run.sh: -t takes a number of seconds, not '$left'" >&2; exit 2; }
out=${out:-$build/results}
mkdir -p "$out" || exit 2
state=$(find lib python spank tools tests/gpu tests/fault -type f ! -name '*.pyc' -print0 2>/dev/null | LC_ALL=C sort -z | xargs -0 cat | sha256sum | cut -c1-12)
if [ $resume = 0 ] || [ "$(cat "$out/state" 2>/dev/null)" != "$state" ]; then
    rm -f "$out"/*.done "$out/cases.tsv"
fi
echo "$state" >"$out/state"
: >>"$out/cases.tsv"
: >"$out/skipped"
cuda=${CUDA:-/usr/local/cuda}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} PYTHONUNBUFFERED=1
export EPO_TEST_WHERE=${EPO_TEST_WHERE:-12} # ranks that stand so long print their stacks (where.h)
export LD_LIBRARY_PATH=$cuda/lib64:${LD_LIBRARY_PATH:-}
start=$SECONDS
until=$((start + left)) phase_until=$((start + left))

skip() { # PHASE WHY
    printf '%s: %s\n' "$1" "$2" >>"$out/skipped"
}

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" = 0 ]; then
    echo "run.sh: no GPU here (nvidia-smi -L lists none): nothing was run" >&2
    exit 2
fi
name=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0)
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
[ "$arch" = 90 ] && arch=90a

# Lines of cases.tsv, or of a program's log, with the verdict in the third column: the last one is text, whatever it holds.
verdicts() { # VERDICT [FILE]
    awk -F'\t' -v verdict="$1" '$3 == verdict' "${@:2}"
}

# What the GPUs hold: MB of each ("0 4"), and programs ("PID, MB, NAME").
gpu_used() { nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits 2>/dev/null | tr -d ' ' | tr , ' '; }
gpu_programs() { nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv,noheader 2>/dev/null; }
used_first=$(gpu_used) programs_first=$(gpu_programs)
# Tells what they hold before a phase. More than at the start, and not gone in 12 s: the phase before has failed.
gpus_before() { # PHASE, THE ONE BEFORE
    local used programs more until_gone=$((SECONDS + 12))
    while :; do
        used=$(gpu_used)
        programs=$(gpu_programs | grep -vxF -e "$programs_first" -e '')
        more=$(awk 'NR == FNR { had[$1] = $2; next } $2 > had[$1] + 500 { printf "%d MB of GPU %s ", $2 - had[$1], $1 }' \
            <(echo "$used_first") <(echo "$used"))$(tr '\n' ';' <<<"$programs" | sed 's/^;*$//')
        [ -n "$more" ] || break
        [ $SECONDS -lt $until_gone ] || break
        sleep 0.5
    done
    echo "gpus before=$1 used_mb=$(cut -d' ' -f2 <<<"$used" | paste -sd,) programs=$(grep -c . <<<"$programs") of_others=$(grep -c . <<<"$programs_first")"
    [ -n "$more" ] || return 0
    printf '%s\tleft on the GPUs\tFAIL\t%s\n' "${2:-before}" "$more" | tee -a "$out/cases.tsv"
    rm -f "$out/$2.done"
}

kill_session() { # SESSION
    local file of
    for file in /proc/[0-9]*/stat; do
        { read -r of <"$file"; } 2>/dev/null || continue
        read -ra of <<<"${of##*) }" # state, parent, group, session, ...
        [ "${of[3]}" != "$1" ] || kill -KILL "${file//[!0-9]/}" 2>/dev/null
    done
}

session=
stopped=0
trap 'stopped=1; until=0; phase_until=0; [ -z "$session" ] || kill_session "$session"' TERM INT HUP

# ---- build ----
# One program that does not compile takes its own phases along, not the others.
wants() { # PHASE...: one of these is asked for
    local one
    for one; do [[ " $phases " == *" $one "* ]] && return 0; done
    return 1
}
# What is read the first time takes its time: while the compilers run it costs none.
warm() {
    timeout 60 cat "$cuda"/lib64/libcublasLt.so.1[23] "$(ldconfig -p | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -n 1)" >/dev/null 2>&1 &
    timeout 100 "${PYTHON:-python3}" -c 'import torch, torch._dynamo, torch.distributed, torch.profiler, torch.utils.data
torch.ones(1, device="cuda")
import megatron.core.models.gpt.moe_module_specs' >/dev/null 2>&1 &
}
targets=("$build"/{units,layer,bulk,graph,bench,features,products,endure,engine_cuda.so})
wants dense && targets+=("$build/dense")
wants flex && targets+=("$build/bench_flex")
wants strong python megatron examples && targets+=("$build/libep_overlap.so")
wants tools slurm scripts && targets+=(tools)
warm
if wants random jobs speed small record preload examples scripts; then
    timeout 300 make -s -f tests/gpu/intercept.mk -j4 O="$build" CUDA="$cuda" "$build/libep_overlap_intercept.so" "$build/intercept_copy.fatbin" \
        >"$out/build-intercept.log" 2>&1 || printf 'build\tthe interposer\tFAIL\t%s\n' "$(tail -1 "$out/build-intercept.log")" >>"$out/cases.tsv" &
fi
if ! timeout 400 make -k -s -f tests/gpu/build.mk -j"$(nproc)" O="$build" ARCH="$arch" CUDA="$cuda" "${targets[@]}" >"$out/build.log" 2>&1; then
    tail -20 "$out/build.log" >&2
    echo "run.sh: the build failed; $out/build.log has it all; what was built is run" >&2
    printf 'build\tengine and programs\tFAIL\t%s\n' "$(grep -m1 -i error "$out/build.log")" >>"$out/cases.tsv"
fi
wait
interposer=$build/libep_overlap_intercept.so
echo "built in $((SECONDS - start)) s for $gpus x $name (sm_$arch), state $state"

# COMMAND in a session of its own, LIMIT seconds at most and no longer than is left of all; what it
# leaves behind is killed.
bounded() { # LOG LIMIT COMMAND...
    local log=$1 limit=$2 status
    shift 2
    limit=${EPO_TEST_LIMIT:-$limit} # (tests of this script)
    [ "$limit" -le $((phase_until - SECONDS)) ] || limit=$((phase_until - SECONDS))
    if [ "$limit" -lt 1 ]; then
        echo "no time was left" >"$log"
        return 124
    fi
    # Lines of ours come as they are made; a script's programs would get what stdbuf preloads, too.
    [[ $1 != "$build"/* ]] || set -- stdbuf -oL "$@"
    setsid timeout -k 5 "$limit" "$@" >"$log" 2>&1 </dev/null &
    session=$!
    wait "$session"
    status=$?
    kill_session "$session"
    session=
    return "$status"
}
share() { # MOST: seconds that the phase still has, a few kept back for what follows a command
    local rest=$((phase_until - SECONDS - 12))
    echo $((rest < $1 ? (rest > 1 ? rest : 1) : $1))
}

# A program's lines go to its log; results are gathered with the phase before them.
run() { # PHASE SECONDS COMMAND...
    local phase=$1 limit=$2 status begun=$SECONDS what
    shift 2
    bounded "$out/$phase.log" "$limit" "$@"
    status=$?
    what=$(basename -a -- "${@:1:2}" | tr '\n' ' ')
    grep -a '^case	' "$out/$phase.log" | sed "s/^case/$phase/" >>"$out/cases.tsv"
    grep -a '^result' "$out/$phase.log"
    if [ $status = 124 ] || [ $status = 137 ]; then
        printf '%s\t%s\tFAIL\tstopped after %s s\n' "$phase" "$what" $((SECONDS - begun)) >>"$out/cases.tsv"
    elif [ $status = 77 ]; then
        skip "$phase" "$(tail -1 "$out/$phase.log")"
    elif [ $status = 0 ] && ! grep -aq '^case	' "$out/$phase.log"; then
        printf '%s\t%s\tok\tcame to its end\n' "$phase" "$what" >>"$out/cases.tsv"
    elif [ $status != 0 ] && [ -z "$(grep -a '^case	' "$out/$phase.log" | verdicts FAIL)" ]; then
        printf '%s\t%s\tFAIL\tstatus %s: %s\n' "$phase" "$what" $status "$(tail -1 "$out/$phase.log")" >>"$out/cases.tsv"
    fi
}

# Racecheck does not follow mbarriers, which order the grouped GEMM's shared memory, and
# sees hazards there that are none; told to leave those kernels out, it crashes. So it
# gets fp32, whose products are cuBLAS's; gemm/run.sh has those kernels.
sanitize() { # TOOL SECONDS COMMAND...
    local tool=$1 limit=$2
    shift 2
    # It runs one kernel at a time: a stream that waits for a peer would hold up the peer.
    EP_OVERLAP_CUDA_WAIT=host CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} run "$tool" "$limit" \
        compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 "$@"
    sed -i 's/^case/#/' "$out/$tool.log"
    if grep -q 'ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards' "$out/$tool.log"; then
        printf '%s\t%s\tok\t%s\n' "$tool" "$*" "$(grep SUMMARY "$out/$tool.log" | tail -1)" >>"$out/cases.tsv"
    else
        printf '%s\t%s\tFAIL\t%s\n' "$tool" "$*" "$(grep SUMMARY "$out/$tool.log" | tail -1)" >>"$out/cases.tsv"
    fi
}

benches=()
measure() { # NAME SECONDS COMMAND...
    benches+=("$out/$1.log")
    run "$@"
}

# A Python program without `case` lines is one case: its status.
whole() { # PHASE SECONDS PROGRAM [ARGUMENT...]
    local name
    name=$(basename "$3" .py)
    shown "$1" "$2" "$name" "${PYTHON:-python3}" "${@:3}"
}
shown() { # PHASE SECONDS NAME COMMAND...
    local phase=$1 limit=$2 name=$3 status begun=$SECONDS
    shift 3
    bounded "$out/$name.log" "$limit" "$@"
    status=$?
    case $status in
        0) printf '%s\t%s\tok\t%s\n' "$phase" "$name" "$(tail -1 "$out/$name.log")" ;;
        77) printf '%s\t%s\tskip\t%s\n' "$phase" "$name" "$(tail -1 "$out/$name.log")" ;;
        124 | 137) printf '%s\t%s\tFAIL\tstopped after %s s\n' "$phase" "$name" $((SECONDS - begun)) ;;
        *) printf '%s\t%s\tFAIL\tstatus %s: %s\n' "$phase" "$name" "$status" "$(tail -1 "$out/$name.log")" ;;
    esac >>"$out/cases.tsv"
}

. tests/gpu/phases.sh || exit 2

done_already=()
last=
for phase in $phases; do
    [ $stopped = 0 ] || { skip "$phase" "a signal came before it"; continue; }
    if [ -e "$out/$phase.done" ]; then
        done_already+=("$phase")
        continue
    fi
    takes=$(usual "$phase") bound=$((until - SECONDS))
    [ "$left" = 100000 ] || bound=$((takes * 3 / 2 + 20))
    [ -z "${most[$phase]:-}" ] || bound=${most[$phase]}
    [ "$takes" -le "$bound" ] || takes=$bound
    if [ "$takes" -gt $((until - SECONDS)) ]; then
        skip "$phase" "usually takes $takes s, $((until - SECONDS)) s were left"
        echo "result phase=$phase state=$state left_out=no-time-left"
        continue
    fi
    gpus_before "$phase" "$last"
    last=$phase
    before=$(wc -l <"$out/cases.tsv") began=$SECONDS phase_until=$((SECONDS + bound))
    [ "$phase_until" -le "$until" ] || phase_until=$until
    phase_run "$phase"
    said() { tail -n +$((before + 1)) "$out/cases.tsv" | verdicts "$1" | wc -l; }
    echo "result phase=$phase state=$state ok=$(said ok) fail=$(said FAIL) skip=$(said skip) seconds=$((SECONDS - began)) at=$((SECONDS - start))"
    tail -n +$((before + 1)) "$out/cases.tsv" | verdicts FAIL | cut -c1-300
    [ "$(said FAIL)" != 0 ] || [ "$(said ok)" = 0 ] || : >"$out/$phase.done"
done
[ -z "$last" ] || gpus_before end "$last"
trap - TERM INT HUP

# ---- the table, the JSON, the skipped ----
verdicts FAIL "$out/cases.tsv" | cut -c1-300
[ -e "$out/flex_time.log" ] && cat "$out/flex_time.log"
[ ${#benches[@]} -gt 0 ] && grep -hv '^json' "${benches[@]}"
echo
printf '%-12s %6s %6s\n' phase ok FAIL
awk -F'\t' '{ok[$1]+=($3=="ok"); bad[$1]+=($3=="FAIL"); if (!($1 in n)) {n[$1]=1; order[++k]=$1}}
    END {for (i=1;i<=k;i++) printf "%-12s %6d %6d\n", order[i], ok[order[i]], bad[order[i]]}' "$out/cases.tsv"
{
    printf '{"gpu":"%s","gpus":%d,"seconds":%d,"ok":%d,"failed":%d,"bench":[' "$name" "$gpus" $((SECONDS - start)) \
        "$(verdicts ok "$out/cases.tsv" | wc -l)" "$(verdicts FAIL "$out/cases.tsv" | wc -l)"
    [ ${#benches[@]} -gt 0 ] && sed -n 's/^json\t//p' "${benches[@]}" | paste -sd, -
    echo ']}'
} | tr -d '\n' >"$out/gpu.json"
echo
cat "$out/gpu.json"
echo
awk -F'\t' '$3 == "skip" {print $1 ", " $2 ": " $4}' "$out/cases.tsv" >>"$out/skipped"
[ ${#done_already[@]} = 0 ] || echo "done before, counted above: ${done_already[*]}"
if [ -s "$out/skipped" ]; then
    sed 's/^/skipped: /' "$out/skipped"
else
    echo "skipped: nothing"
fi
[ -z "$(verdicts FAIL "$out/cases.tsv")" ]
