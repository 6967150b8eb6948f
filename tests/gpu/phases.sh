# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154 # the variables are of run.sh, which reads this
# What each phase of run.sh runs, by its functions: run, measure, shown, whole, skip, bounded, share.

# (To import it would take seconds each time.)
has_module() { # NAME
    "${PYTHON:-python3}" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null
}
torch_here() { # PHASE
    has_module torch && return 0
    skip "$1" "no PyTorch here"
    return 1
}

megatron_here() { # PHASE
    torch_here "$1" || return 1
    has_module megatron.core && return 0
    skip "$1" "no Megatron-Core here: nothing over its dispatchers"
    return 1
}

# The binding and the drop-in, from the tree, for what follows.
python_path=${PYTHONPATH:-}
bound_python() {
    export PYTHONPATH=python:python/dropin${python_path:+:$python_path}
    EP_OVERLAP_LIBRARY=$(realpath "$build/libep_overlap.so")
    export EP_OVERLAP_LIBRARY
}

interposed() { # PHASE SECONDS PARTS...
    local phase=$1 limit
    limit=$(share "$2")
    shift 2
    torch_here "$phase" || return
    # One line of rank 0 tells what was carried; nothing is recorded.
    EPO_RESULTS=1 EP_OVERLAP_RECORD_WINDOW=9000-9001s run "$phase" $((limit + 10)) "${PYTHON:-python3}" tests/gpu/intercept.py \
        "$interposer" --together --within "$limit" ${seed:+--seed "$((seed))"} "$@"
}

# What a job script starts, without Slurm.
example() { # NAME LIBRARY PROGRAM [ARGUMENT...]
    local name=$1 library=$2
    shift 2
    shown examples 70 "$name" env ${library:+LD_PRELOAD="$(realpath "$library")" EP_OVERLAP_INTERPOSE=accelerate EP_OVERLAP_RECORD=1} \
        "${PYTHON:-python3}" tests/gpu/launch.py -l 60 "python/examples/$1" "${@:2}"
}
losses() { sed -n 's/.*iteration *\([0-9]*\)\/.*\(lm loss: [0-9.E+-]*\).*/\1 \2/p' "$out/$1.log"; }

two_gpus() { # PHASE WHY
    [ "$gpus" -ge 2 ] && return 0
    skip "$1" "needs 2 GPUs, $gpus here"
    return 1
}

graph_part() { [ -z "${EPO_GRAPH:-}" ] || [[ " $EPO_GRAPH " == *" $1 "* ]]; }

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
        LD_LIBRARY_PATH=$build/late:$LD_LIBRARY_PATH bounded "$out/late.log" 30 "$build/layer" processes 2 1
    said=$(grep -am1 -o 'rank [0-9]*: [^	]*making a communicator of 2 ranks: not complete after 2 s.*' "$out/late.log")
    if [ -n "$said" ]; then
        printf 'nccl\tlate communicator\tok\t%s\n' "$said" >>"$out/cases.tsv"
    else
        printf 'nccl\tlate communicator\tFAIL\t%s\n' "$(tail -1 "$out/late.log")" >>"$out/cases.tsv"
    fi
}

phase_run() { # PHASE
    local phase=$1 name both_serial=alltoall:serial,alltoall:auto,flex:serial,flex:auto
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
                bounded "$out/no-lt.log" 60 "$build/units"
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
            bounded "$out/flex_time.log" 60 "$build/bench_flex" time ||
                printf 'flex\ttimes\tFAIL\t%s\n' "$(tail -1 "$out/flex_time.log")" >>"$out/cases.tsv"
            ;;
        threads)
            run threads-cold 60 "$build/layer" threads 2 8 0x67fb8c272297dcf6 3 from=7 # performance-log, 2.7
            run threads2 90 "$build/layer" threads 2 "$cases" ${seed:+"$seed"}
            run threads4 90 "$build/layer" threads 4 "$((cases / 2))" ${seed:+"$seed"}
            [ "$gpus" -lt 8 ] || run threads8 90 "$build/layer" threads 8 "$((cases / 2))" ${seed:+"$seed"}
            ;;
        near)
            export EP_OVERLAP_CUDA_NEAR=1
            run near2 90 "$build/layer" threads 2 "$cases" ${seed:+"$seed"}
            run near4 90 "$build/layer" threads 4 "$((cases / 2))" ${seed:+"$seed"}
            run near2p 90 "$build/layer" processes 2 "$((cases / 2))" ${seed:+"$seed"}
            export EP_OVERLAP_CUDA_FLEX_HOME=1 # else as it is measured
            run home2 90 "$build/layer" threads 2 "$cases" "${seed:-0x71}" 9 home
            run home4 90 "$build/layer" threads 4 "$((cases / 2))" "${seed:-0x72}" 2 home
            run home2p 90 "$build/layer" processes 2 "$((cases / 2))" "${seed:-0x73}" 2 home
            unset EP_OVERLAP_CUDA_NEAR EP_OVERLAP_CUDA_FLEX_HOME
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
                    # Each arm makes a communicator, which takes a second, and more over sockets.
                    EP_OVERLAP_CUDA_PEER=0 run "nccl$ranks" 40 "$build/layer" processes "$ranks" "$((cases / 3))" "${seed:-$RANDOM}" $((ranks > 2 ? 2 : 4))
                fi
            done
            late_nccl
            ;;
        comm) run comm 60 "$build/features" comm ;;
        features) run features 90 "$build/features" groups beside saved capture memory tp own shifted scarce overflow schedule control differ ;;
        budgets)
            run budgets2 60 "$build/layer" threads 2 6 "${seed:-0xb5}" 9 budgets
            run budgets2p 60 "$build/layer" processes 2 3 "${seed:-0xb6}" 9 budgets
            ;;
        graph)
            # Two seconds a case where ranks are processes. One that hangs has a limit of its own.
            for dispatcher in flex alltoall; do
                graph_part "threads-$dispatcher" && run "graph-threads-$dispatcher" 25 "$build/graph" threads 2 10 $dispatcher bits time
            done
            graph_part e4m3 && run graph-e4m3 70 "$build/graph" processes 2 20 e4m3 bits own
            graph_part margin && run graph-margin 60 "$build/graph" processes 2 2 margin
            # What waits in a kernel must not stand before what it waits for, nor be alone on the GPU.
            graph_part connections1 && CUDA_DEVICE_MAX_CONNECTIONS=1 run graph-connections1 30 "$build/graph" threads 2 10 bits own errors
            graph_part shared && CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} run graph-shared 90 "$build/graph" processes 2 4 bits own errors
            for dispatcher in flex alltoall; do
                graph_part "errors-$dispatcher" && run "graph-errors-$dispatcher" 30 "$build/graph" processes 2 4 $dispatcher errors
                graph_part "$dispatcher" && run "graph-$dispatcher" 70 "$build/graph" processes 2 100 $dispatcher bits own
            done
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
            ;;
        repeats)
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
        slurm) ARCH=$arch CUDA=$cuda EPO_SECONDS=$(share 150) run slurm 170 tests/gpu/slurm.sh "$build" ;;
        scripts)
            if torch_here scripts; then
                ARCH=$arch CUDA=$cuda EPO_PARTS=scripts EPO_SECONDS=$(share 230) run scripts 250 tests/gpu/slurm.sh "$build"
            fi
            ;;
        bench)
            if [ "$gpus" -lt 2 ]; then
                skip bench "a link needs 2 GPUs, $gpus here: one rank alone, and ranks that share it, are timed"
                measure bench 100 "$build/bench" 1 4096 2048 768 64 8 7
                measure bench32 60 "$build/bench" -s -l Q-shared -a "$both_serial" 2 4096 2048 768 128 8 7
            else
                measure bench 100 "$build/bench" -l Q 2 4096 2048 768 128 8 9
            fi
            # Megatron-LM's scripts set it: no kernel may wait there for what is behind it, or read over PCIe.
            CUDA_DEVICE_MAX_CONNECTIONS=1 measure bench1 60 "$build/bench" -s -l Q-one-queue -a "$both_serial" 2 4096 2048 768 128 8 7
            ;;
        torch)
            if torch_here torch && two_gpus torch; then
                measure torch 100 "${PYTHON:-python3}" tests/gpu/bench_torch.py 2 4096 2048 768 128 8 9
            fi
            ;;
        strong)
            if torch_here strong && two_gpus strong; then
                PYTHONPATH=python EP_OVERLAP_LIBRARY=$(realpath "$build/libep_overlap.so") \
                    measure strong 60 "${PYTHON:-python3}" tests/gpu/bench_strong.py 2 4096 2048 768 128 8 9
            fi
            ;;
        sweep)
            two_gpus sweep && for tokens in 64 512 4096 16384; do
                measure "sweep$tokens" 60 "$build/bench" -l "T$tokens" \
                    -a "$both_serial" 2 "$tokens" 2048 768 128 8 15
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
                bound_python
                for name in layer graph deep_ep; do
                    whole python 130 tests/gpu/python_$name.py
                done
            fi
            ;;
        megatron)
            if megatron_here megatron; then
                bound_python
                whole megatron 80 tests/gpu/megatron_moe.py
                grep -ah 'dispatcher alone\|against alltoall' "$out/megatron_moe.log"
            fi
            ;;
        random)
            interposed random 240 random:1 random:0 random:2 random:3 random:4 --calls "${EPO_CALLS:-60000}"
            [ ! -e "$out/random.log" ] || cat "$out/random.log" >>"$out/random.all" # with what was run before
            "${PYTHON:-python3}" tests/gpu/gather.py "$out/random.all"
            ;;
        jobs)
            # shellcheck disable=SC2086
            interposed jobs 240 ${EPO_JOBS:-carries mismatch graph groups abort churn}
            ;;
        speed) two_gpus speed && interposed speed 200 speed gemm:1 ;;
        small) interposed small 160 small ;;
        record)
            if torch_here record; then
                # shellcheck disable=SC2086
                run record 240 "${PYTHON:-python3}" tests/gpu/record.py "$interposer" ${EPO_RECORD:-} --together
            fi
            ;;
        preload)
            if torch_here preload; then
                # shellcheck disable=SC2086
                run preload 200 "${PYTHON:-python3}" tests/gpu/preload.py "$interposer" ${EPO_PRELOAD:-} --together
            fi
            ;;
        examples)
            if torch_here examples; then
                bound_python
                for way in "" "$interposer"; do
                    example "alltoall${way:+-carried}" "$way" torch_alltoall.py --sizes 4,64 --loops 10
                    example "moe${way:+-carried}" "$way" torch_moe.py --steps 20
                done
                if [ "$(losses moe)" = "$(losses moe-carried)" ] && [ -n "$(losses moe)" ]; then
                    printf 'examples\tloss\tok\t%s with and without the interposer\n' "$(losses moe | tail -1)"
                else
                    printf 'examples\tloss\tFAIL\t%s without, %s with the interposer\n' "$(losses moe | tail -1)" "$(losses moe-carried | tail -1)"
                fi >>"$out/cases.tsv"
                example moe-library "" torch_moe.py --layer ep_overlap --steps 20
                if megatron_here examples; then
                    example megatron-alltoall "$interposer" megatron_core_moe.py --steps 10
                    example megatron-deepep "" megatron_core_moe.py --dispatcher flex --steps 10
                    example megatron-hybridep "" megatron_core_moe.py --dispatcher flex --backend hybridep --steps 10
                fi
            fi
            ;;
    esac
}
