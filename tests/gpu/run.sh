#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the CUDA engine and its tests from the tree on a machine with GPUs, with
# nothing but GNU make, gcc and the CUDA Toolkit, and runs:
#
#   probe      the node's facts against nvidia-smi                  1 GPU
#   units      operations against fp64, errors, late peers          1 GPU
#   products   the experts' products, each way (EP_OVERLAP_CUDA_GEMM), against
#              cuBLASLt's on the same inputs                         1 GPU
#   ways       operations and layers with the portable kernels, which serve other
#              GPUs, and with cuBLASLt, in place of those for sm_90   1 GPU or more
#   sm80       the same with what is compiled for sm_80 (PTX, which the driver takes
#              here too; another build), portable kernels           1 GPU or more
#   flex       flex's kernels against maps of the CPU and fp64     1 GPU or more
#   threads    layers, ranks as threads, all arms bit for bit        1 GPU or more
#   near       the same for flex, own rows expanded beside the others' way however
#              few they are                                        1 GPU or more
#   graph      plan, forward and backward in a CUDA graph, replayed   1 GPU or more
#   bulk       10,000 random small layers (EPO_GPU_LAYERS), and 2,000  1 GPU or more
#              of shapes at the edges
#   dense      ep-train's dense parts against the CPU's               1 GPU
#   processes  the same, ranks as processes over CUDA IPC            1 GPU or more
#   nccl       the same, peers by ncclSend and ncclRecv; ranks that    1 GPU or more
#              share a GPU go over sockets
#   features   groups from a communicator, two micro-batches, ...      1 GPU or more
#   wire       layers and features with e4m3 on the wire               1 GPU or more
#   nodes      flex across two nodes played in one machine, NCCL       1 GPU or more
#              between them; as on several machines, too
#   endure     a stopped rank named, with CUDA_DEVICE_MAX_CONNECTIONS  1 GPU or more
#              1 and 32; a rank that never comes; a capture while NCCL
#              is waited for; 60 groups made and destroyed; 1,000 repeats of a layer
#              bit for bit
#   sanitizer  memcheck and racecheck of small cases                 1 GPU
#   bench      workload Q, serial and overlapped in turns, and       2 GPUs (1: no exchange)
#              PyTorch's eager layer where there is PyTorch
#   strong     the layer beside our dispatch, torch._grouped_mm and    2 GPUs
#              one pass of SwiGLU, in turns
#   sweep      bench for 64, 512, 4096 and 16384 tokens            2 GPUs
#   deep       workload D: hidden 7168, 256 experts                   2 GPUs
#   fp32       Q, weight gradients added up in fp32                   2 GPUs
#   scale      ep-overlap bench at EP = 1, 2, 4, 8, workloads Q and D, and the cost
#              model (scale.sh)                              as many GPUs as there are
#   slow       a slow fabric: NCCL through shared memory, widths      2 GPUs
#              that take as long to send as to compute
#   tools      ep-overlap bench and ep-train, without Slurm (tools.sh)  1 GPU or more
#   slurm      srun --ep-overlap=on ep-train: the loss of off, bit for bit; Slurm from
#              build-debs where none is installed (slurm.sh)         1 GPU or more
#   python     the torch binding, in CUDA graphs too, the deep_ep drop-in, and Megatron-Core
#              over it where there is Megatron-Core; two ranks       1 GPU or more
#   record     torch jobs under the interposer: what the recorder says beside torch.profiler,
#              and that nobody notices it (record.py, preload.py)     1 GPU or more
#
#   run.sh [PHASE...]     all of them; -n CASES [12], -s SEED, -o FOLDER for results,
#                         -S: in `scale`, ranks share GPUs where there are too few, labelled
#
# Prints a table, one JSON object, and last what was skipped and why. Status 0: no
# case failed. Under 12 minutes.
set -u
cd "$(dirname "$0")/../.." || exit 2
build=${EPO_GPU_BUILD:-build-gpu}
cases=12
seed=
out=
standin=()
usage() { sed -n '3,/^set -u/{/^set -u/d;s/^# \{0,1\}//p}' tests/gpu/run.sh; }
for word; do
    [ "$word" != --help ] || { usage; exit 0; }
done
while getopts n:s:o:Sh option; do
    case $option in
        n) cases=$OPTARG ;;
        s) seed=$OPTARG ;;
        o) out=$OPTARG ;;
        S) standin=(-f) ;;
        h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
phases=${*:-probe units products ways sm80 flex threads near processes nccl features graph bulk dense wire nodes endure sanitizer bench strong sweep deep fp32 scale slow tools slurm python record}
out=${out:-$build/results}
mkdir -p "$out" || exit 2
: >"$out/cases.tsv"
: >"$out/skipped"
cuda=${CUDA:-/usr/local/cuda}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export LD_LIBRARY_PATH=$cuda/lib64:${LD_LIBRARY_PATH:-}

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

# ---- build ----
start=$SECONDS
if ! make -s -f tests/gpu/build.mk -j"$(nproc)" O="$build" ARCH="$arch" CUDA="$cuda" >"$out/build.log" 2>&1; then
    tail -20 "$out/build.log" >&2
    echo "run.sh: the build failed; $out/build.log has it all" >&2
    exit 1
fi
echo "built in $((SECONDS - start)) s for $gpus x $name (sm_$arch)"

# A program's lines go to its log; results are gathered with the phase before them.
run() { # PHASE SECONDS COMMAND...
    local phase=$1 limit=$2 status
    shift 2
    timeout -k 5 "$limit" "$@" >"$out/$phase.log" 2>&1
    status=$?
    grep '^case' "$out/$phase.log" | sed "s/^case/$phase/" >>"$out/cases.tsv"
    if [ $status = 124 ] || [ $status = 137 ]; then
        printf '%s\t%s\tFAIL\tstopped after %s s\n' "$phase" "$1" "$limit" >>"$out/cases.tsv"
    elif [ $status != 0 ] && ! grep -q '	FAIL	' "$out/$phase.log"; then
        printf '%s\t%s\tFAIL\tstatus %s: %s\n' "$phase" "$1" $status "$(tail -1 "$out/$phase.log")" >>"$out/cases.tsv"
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
    local phase=$1 limit=$2 name status
    shift 2
    name=$(basename "$1" .py)
    timeout -k 5 "$limit" "${PYTHON:-python3}" "$@" >"$out/$name.log" 2>&1
    status=$?
    case $status in
        0) printf '%s\t%s\tok\t%s\n' "$phase" "$name" "$(tail -1 "$out/$name.log")" ;;
        124 | 137) printf '%s\t%s\tFAIL\tstopped after %s s\n' "$phase" "$name" "$limit" ;;
        *) printf '%s\t%s\tFAIL\tstatus %s: %s\n' "$phase" "$name" "$status" "$(tail -1 "$out/$name.log")" ;;
    esac >>"$out/cases.tsv"
}

torch_here() { # PHASE
    "${PYTHON:-python3}" -c 'import torch' 2>/dev/null && return 0
    skip "$1" "no PyTorch here"
    return 1
}

two_gpus() { # PHASE WHY
    [ "$gpus" -ge 2 ] && return 0
    skip "$1" "needs 2 GPUs, $gpus here"
    return 1
}

# Rank 1 is in NCCL's making a communicator for longer than the others wait.
late_nccl() {
    local real said flags
    read -ra flags <<<"${NCCL_CFLAGS:-}"
    real=$(ldconfig -p | sed -n 's/.*libnccl\.so\.2 .*=> //p' | head -n 1)
    mkdir -p "$build/late"
    if [ -z "$real" ]; then
        skip nccl "no libnccl.so.2 in the loader's cache: no late communicator"
        return
    fi
    if ! "${CC:-gcc}" -shared -fPIC -O1 -I"$cuda/include" "${flags[@]}" tests/gpu/late_nccl.c -o "$build/late/libnccl.so.2" -ldl; then
        printf 'nccl\tlate communicator\tFAIL\tlate_nccl.c does not compile\n' >>"$out/cases.tsv"
        return
    fi
    LATE_NCCL_REAL=$real LATE_NCCL_RANK=1 LATE_NCCL_S=10 LAYER_TIMEOUT_S=2 EP_OVERLAP_CUDA_PEER=0 \
        LD_LIBRARY_PATH=$build/late:$LD_LIBRARY_PATH timeout -k 2 30 "$build/layer" processes 2 1 >"$out/late.log" 2>&1
    said=$(grep -m1 'making a communicator of 2 ranks: not complete after 2 s' "$out/late.log")
    if [ -n "$said" ]; then
        printf 'nccl\tlate communicator\tok\t%s\n' "$said" >>"$out/cases.tsv"
    else
        printf 'nccl\tlate communicator\tFAIL\t%s\n' "$(tail -1 "$out/late.log")" >>"$out/cases.tsv"
    fi
}

for phase in $phases; do
    case $phase in
        probe) run probe 90 tests/gpu/probe.sh "$build/probe" ;;
        units) run units 90 "$build/units" ;;
        products) run products 90 "$build/products" check 300 ${seed:+"$seed"} ;;
        ways)
            for way in portable cublaslt; do
                export EP_OVERLAP_CUDA_GEMM=$way
                run "$way-units" 60 "$build/units"
                run "$way-layer" 90 "$build/layer" threads 2 "$((cases / 2))" ${seed:+"$seed"}
            done
            unset EP_OVERLAP_CUDA_GEMM
            # A library that is none: the portable kernels serve, and who asked for it hears why.
            mkdir -p "$build/no-lt"
            "${CC:-gcc}" -shared -x c /dev/null -o "$build/no-lt/libcublasLt.so.13"
            LD_LIBRARY_PATH=$build/no-lt:$LD_LIBRARY_PATH run no-lt-units 60 "$build/units"
            LD_LIBRARY_PATH=$build/no-lt:$LD_LIBRARY_PATH EP_OVERLAP_CUDA_GEMM=cublaslt \
                timeout 60 "$build/units" >"$out/no-lt.log" 2>&1
            if grep -q 'EP_OVERLAP_CUDA_GEMM=cublaslt: libcublasLt.so.13 lacks cublasLtCreate' "$out/no-lt.log"; then
                printf 'no-lt\tcublaslt without it\tok\t%s\n' "$(grep -m1 lacks "$out/no-lt.log" | cut -f4)" >>"$out/cases.tsv"
            else
                printf 'no-lt\tcublaslt without it\tFAIL\t%s\n' "$(tail -1 "$out/no-lt.log")" >>"$out/cases.tsv"
            fi
            ;;
        sm80)
            # The sm_90 kernels are in it, as always, and are not used.
            if GENCODE='-gencode=arch=compute_80,code=compute_80' make -s -f tests/gpu/build.mk -j"$(nproc)" \
                O="$build-sm80" CUDA="$cuda" "$build-sm80/units" "$build-sm80/layer" >"$out/build-sm80.log" 2>&1; then
                export EP_OVERLAP_CUDA_GEMM=portable
                run sm80-units 90 "$build-sm80/units"
                run sm80-layer 90 "$build-sm80/layer" threads 2 "$((cases / 2))" ${seed:+"$seed"}
                unset EP_OVERLAP_CUDA_GEMM
            else
                printf 'sm80\tbuild\tFAIL\t%s\n' "$(tail -1 "$out/build-sm80.log")" >>"$out/cases.tsv"
            fi
            ;;
        flex)
            run flex 90 "$build/bench_flex" check ${seed:+"$seed"}
            [ "$gpus" -ge 2 ] || skip flex "times across a link need 2 GPUs, $gpus here: both ranks were on one"
            timeout -k 5 60 "$build/bench_flex" time >"$out/flex_time.log" 2>&1 ||
                printf 'flex\ttimes\tFAIL\t%s\n' "$(tail -1 "$out/flex_time.log")" >>"$out/cases.tsv"
            ;;
        threads)
            run threads2 90 "$build/layer" threads 2 "$cases" ${seed:+"$seed"}
            run threads4 90 "$build/layer" threads 4 "$((cases / 2))" ${seed:+"$seed"}
            [ "$gpus" -lt 8 ] || run threads8 90 "$build/layer" threads 8 "$((cases / 2))" ${seed:+"$seed"}
            ;;
        near)
            export EP_OVERLAP_CUDA_NEAR=1
            run near2 90 "$build/layer" threads 2 "$cases" ${seed:+"$seed"}
            run near4 90 "$build/layer" threads 4 "$((cases / 2))" ${seed:+"$seed"}
            run near2p 90 "$build/layer" processes 2 "$((cases / 2))" ${seed:+"$seed"}
            unset EP_OVERLAP_CUDA_NEAR
            ;;
        processes)
            run processes 90 "$build/layer" processes 2 "$cases" ${seed:+"$seed"}
            for ranks in 4 8; do
                [ "$gpus" -lt "$ranks" ] || run "processes$ranks" 90 "$build/layer" processes "$ranks" "$((cases / 2))" ${seed:+"$seed"}
            done
            ;;
        nccl)
            for ranks in 2 4 8; do
                if [ "$ranks" -le 4 ] || [ "$gpus" -ge "$ranks" ]; then
                    EP_OVERLAP_CUDA_PEER=0 run "nccl$ranks" 90 "$build/layer" processes "$ranks" "$((cases / 2))" ${seed:+"$seed"}
                fi
            done
            late_nccl
            ;;
        features) run features 90 "$build/features" ;;
        graph)
            for dispatcher in alltoall flex; do
                run "graph-$dispatcher" 60 "$build/graph" processes 2 100 $dispatcher bits own errors
                run "graph-threads-$dispatcher" 60 "$build/graph" threads 2 10 $dispatcher bits time
            done
            run graph-margin 60 "$build/graph" processes 2 2 margin
            run graph-e4m3 60 "$build/graph" processes 2 20 e4m3 bits own
            # What waits in a kernel must not stand before what it waits for, nor be alone on the GPU.
            CUDA_DEVICE_MAX_CONNECTIONS=1 run graph-connections1 60 "$build/graph" threads 2 10 bits own errors
            CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} run graph-shared 60 "$build/graph" processes 2 4 bits own errors
            ;;
        bulk)
            run bulk 80 "$build/bulk" "${EPO_GPU_LAYERS:-10000}" "${seed:-0x1000}" 0 70
            run edges 30 "$build/bulk" 2000 "${seed:-0x1000}" 0 10 1 1 edges
            ;;
        dense) run dense 30 "$build/dense" ${seed:+"$seed"} ;;
        wire)
            run wire2 60 "$build/layer" threads 2 "$cases" "${seed:-0x8e4}" 9 e4m3
            run wire4 60 "$build/layer" processes 4 "$((cases / 2))" "${seed:-0x8e4}" 9 e4m3
            run wire 90 "$build/features" e4m3 saved tp groups schedule control shifted
            run wire-late 60 "$build/endure" e4m3 late
            ;;
        nodes)
            # NCCL takes a second to begin: few arms. Threads on one GPU it refuses.
            run nodes2 60 "$build/layer" processes 2 4 "${seed:-0x21}" 3 nodes=2
            run nodes4 60 "$build/layer" processes 4 4 "${seed:-0x22}" 3 nodes=2
            EP_OVERLAP_NODES_APART=1 run apart4 60 "$build/layer" processes 4 2 "${seed:-0x22}" 3 nodes=2
            run nodesw 60 "$build/layer" processes 2 2 "${seed:-0x24}" 3 e4m3 nodes=2
            two_gpus nodes4t && run nodes4t 60 "$build/layer" threads 4 4 "${seed:-0x23}" 3 nodes=2
            ;;
        endure)
            for connections in 1 32; do
                CUDA_DEVICE_MAX_CONNECTIONS=$connections run "stopped$connections" 60 "$build/endure" stopped 3
            done
            run late 60 "$build/endure" late
            EP_OVERLAP_CUDA_PEER=0 run nccl-late 60 "$build/endure" late
            run watched 30 "$build/endure" watched
            run churn 60 "$build/endure" churn 2 60
            run repeats 60 "$build/endure" repeats 2
            run repeats4 60 "$build/endure" repeats 4 250
            ;;
        sanitizer)
            if ! command -v compute-sanitizer >/dev/null 2>&1; then
                PATH=$PATH:$cuda/bin
            fi
            if ! command -v compute-sanitizer >/dev/null 2>&1; then
                skip sanitizer "no compute-sanitizer here"
            else
                export LAYER_TIMEOUT_S=200
                sanitize memcheck 60 "$build/layer" threads 2 3 0x1 2
                sanitize racecheck 90 "$build/layer" threads 2 1 0x1 2
                unset LAYER_TIMEOUT_S
            fi
            ;;
        scale)
            ARCH=$arch CUDA=$cuda run scale 400 tests/gpu/scale.sh "${standin[@]}" "$build"
            sed -n 's/^# //p' "$out/scale.log"
            ;;
        tools) ARCH=$arch CUDA=$cuda run tools 170 tests/gpu/tools.sh "$build" ;;
        slurm) ARCH=$arch CUDA=$cuda run slurm 170 tests/gpu/slurm.sh "$build" ;;
        bench)
            if [ "$gpus" -lt 2 ]; then
                skip bench "exchange needs 2 GPUs, $gpus here: experts alone are timed"
                measure bench 100 "$build/bench" 1 4096 2048 768 64 8 7
            else
                measure bench 100 "$build/bench" -l Q 2 4096 2048 768 128 8 9
                if "${PYTHON:-python3}" -c 'import torch' 2>/dev/null; then
                    measure torch 100 "${PYTHON:-python3}" tests/gpu/bench_torch.py 2 4096 2048 768 128 8 9
                else
                    skip bench "no PyTorch here: no eager layer to compare with"
                fi
            fi
            ;;
        strong)
            if torch_here strong && two_gpus strong; then
                make -s -f tests/gpu/build.mk O="$build" ARCH="$arch" CUDA="$cuda" "$build/libep_overlap.so" >>"$out/build.log" 2>&1
                PYTHONPATH=python EP_OVERLAP_LIBRARY=$(realpath "$build/libep_overlap.so") \
                    measure strong 60 "${PYTHON:-python3}" tests/gpu/bench_strong.py 2 4096 2048 768 128 8 9
            fi
            ;;
        sweep)
            two_gpus sweep && for tokens in 64 512 4096 16384; do
                measure "sweep$tokens" 60 "$build/bench" -l "T$tokens" \
                    -a alltoall:serial,alltoall:auto,flex:serial,flex:auto 2 "$tokens" 2048 768 128 8 15
            done
            ;;
        deep)
            two_gpus deep && measure deep 100 "$build/bench" -l D \
                -a alltoall:serial,alltoall:auto,alltoall:4d,flex:serial,flex:auto 2 4096 7168 2048 256 8 7
            ;;
        fp32)
            two_gpus fp32 && measure fp32 60 "$build/bench" -l Q-fp32 -w fp32 \
                -a alltoall:serial,alltoall:auto,alltoall:4d,flex:serial,flex:auto 2 4096 2048 768 128 8 7
            ;;
        slow) # three sizes of messages
            export EP_OVERLAP_CUDA_PEER=0 NCCL_P2P_DISABLE=1
            if two_gpus slow; then
                measure slow-long 40 "$build/bench" -l slow-long \
                    -a alltoall:serial,alltoall:auto,alltoall:4,alltoall:8 2 16384 1024 8192 16 4 5
                measure slow-wide 60 "$build/bench" -l slow-wide -n 16 \
                    -a alltoall:serial,alltoall:auto,alltoall:8,alltoall:8d 2 4096 4096 8192 16 4 3
                measure slow 40 "$build/bench" -l slow \
                    -a alltoall:serial,alltoall:auto,alltoall:4,alltoall:5,alltoall:4d 2 4096 1024 8192 16 4 7
            fi
            unset EP_OVERLAP_CUDA_PEER NCCL_P2P_DISABLE
            ;;
        python)
            if torch_here python; then
                make -s -f tests/gpu/build.mk O="$build" ARCH="$arch" CUDA="$cuda" "$build/libep_overlap.so" >>"$out/build.log" 2>&1
                python_path=${PYTHONPATH:-}
                export EP_OVERLAP_LIBRARY PYTHONPATH=python:python/dropin${PYTHONPATH:+:$PYTHONPATH}
                EP_OVERLAP_LIBRARY=$(realpath "$build/libep_overlap.so")
                for name in layer graph deep_ep; do
                    whole python 130 tests/gpu/python_$name.py
                done
                if "${PYTHON:-python3}" -c 'import megatron.core' 2>/dev/null; then
                    whole python 80 tests/gpu/megatron_moe.py
                else
                    skip python "no Megatron-Core here: not over its dispatchers"
                fi
                export PYTHONPATH=$python_path
                unset EP_OVERLAP_LIBRARY
            fi
            ;;
        record)
            if torch_here record; then
                make -s -f tests/gpu/intercept.mk O="$build" "$build/libep_overlap_intercept.so" >>"$out/build.log" 2>&1
                whole record 240 tests/gpu/record.py "$build/libep_overlap_intercept.so" --together
                whole record 180 tests/gpu/preload.py "$build/libep_overlap_intercept.so" --together
            fi
            ;;
        *) echo "run.sh: no phase $phase" >&2; exit 2 ;;
    esac
done

# ---- the table, the JSON, the skipped ----
grep '	FAIL	' "$out/cases.tsv" | cut -c1-300
[ -e "$out/flex_time.log" ] && cat "$out/flex_time.log"
[ ${#benches[@]} -gt 0 ] && grep -hv '^json' "${benches[@]}"
echo
printf '%-12s %6s %6s\n' phase ok FAIL
awk -F'\t' '{ok[$1]+=($3=="ok"); bad[$1]+=($3=="FAIL"); if (!($1 in n)) {n[$1]=1; order[++k]=$1}}
    END {for (i=1;i<=k;i++) printf "%-12s %6d %6d\n", order[i], ok[order[i]], bad[order[i]]}' "$out/cases.tsv"
{
    printf '{"gpu":"%s","gpus":%d,"seconds":%d,"ok":%d,"failed":%d,"bench":[' "$name" "$gpus" $((SECONDS - start)) \
        "$(grep -c '	ok	' "$out/cases.tsv")" "$(grep -c '	FAIL	' "$out/cases.tsv")"
    [ ${#benches[@]} -gt 0 ] && sed -n 's/^json\t//p' "${benches[@]}" | paste -sd, -
    echo ']}'
} | tr -d '\n' >"$out/gpu.json"
echo
cat "$out/gpu.json"
echo
awk -F'\t' '$3 == "skip" {print $1 ", " $2 ": " $4}' "$out/cases.tsv" >>"$out/skipped"
if [ -s "$out/skipped" ]; then
    sed 's/^/skipped: /' "$out/skipped"
else
    echo "skipped: nothing"
fi
! grep -q '	FAIL	' "$out/cases.tsv"
