#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# srun --ep-overlap=on ep-train under a real Slurm with this machine's GPUs: the loss of
# overlapped runs has the bits of runs without, and the node's facts are what NVML says.
# One line per case, as tests/gpu/run.sh reads them.
#
#   slurm.sh [BUILD] [DEBS]   build-gpu, build-debs (tests/cluster/fetch-slurm.sh fills it)
#
# Where Slurm is not installed it is unpacked from DEBS into BUILD/slurm (root; two links
# in /usr, to the paths compiled into Slurm, are removed in the end). EPO_ENGINE=host does
# the same with the host engine of the build in EPO_BUILD_DIR, on stand-in GPUs, to try the
# script where there is no GPU; EPO_TRAIN names another ep-train, EPO_STEPS its steps. EPO_PARTS:
# of "alltoall flex bf16 tools" (the node's facts, a step without GPUs, bench) and "scripts" (the job
# scripts of python/examples, with PYTHON, in PYTHONPATH what they need beside PyTorch: Megatron-Core),
# those that are to run [all but the last]; EPO_SCRIPTS: of "alltoall moe megatron" [all]; EPO_CARRIED=1: an
# accelerated arm must have carried most of its bytes [1 where each rank has a GPU]; EPO_SECONDS: the limit of all of it (100).
set -u
cd "$(dirname "$0")/../.." || exit 2
top=$PWD build=${1:-build-gpu} debs=${2:-build-debs}
case $build in /*) ;; *) build=$top/$build ;; esac
engine=${EPO_ENGINE:-cuda} ranks=2 steps=${EPO_STEPS:-20}
links='' BOUND=''
parts=" ${EPO_PARTS:-alltoall flex bf16 tools} " seconds=${EPO_SECONDS:-100}
out=$build/results/slurm
rm -rf "${out:?}" && mkdir -p "$out" || exit 2

no() { # why: nothing can be said here
    printf 'case\tslurm\tskip\t%s\n' "$*"
    exit 0
}
result() { # case ok|FAIL text
    printf 'case\t%s\t%s\t%s\n' "$1" "$2" "$3"
    [ "$2" = ok ] || failed=1
}
failed=0

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
must_carry=${EPO_CARRIED:-$([ "$engine" = cuda ] && [ "$gpus" -ge "$ranks" ] && echo 1)}
if [ "$engine" = cuda ] && [ "$gpus" = 0 ]; then
    no "no GPU here (nvidia-smi -L lists none)"
fi

# ---- Slurm ----
# shellcheck disable=SC2317 # by the trap
clean() { for link in $links; do rm -f "$link"; done; }
trap clean EXIT
if ! command -v slurmctld >/dev/null 2>&1; then
    ls "$debs"/slurmctld_*.deb >/dev/null 2>&1 || no "no slurmctld here and none in $debs (tests/cluster/fetch-slurm.sh elsewhere)"
    [ "$(id -u)" = 0 ] || no "only root can put Slurm where it was compiled for"
    for link in /usr/lib/x86_64-linux-gnu/slurm-wlm /usr/sbin/slurmstepd; do
        [ -e "$link" ] || links="$links $link"
    done
    tests/cluster/unpack-slurm.sh "$debs" "$build/slurm" >"$out/unpack.log" 2>&1 || {
        result unpack FAIL "$(tail -1 "$out/unpack.log")"
        exit 1
    }
    # shellcheck source=/dev/null
    . "$build/slurm/env.sh"
fi

# ---- the staged install ----
if [ "$engine" = cuda ]; then
    if ! make -s -f tests/gpu/build.mk -j"$(nproc)" O="$build" ${ARCH:+ARCH="$ARCH"} ${CUDA:+CUDA="$CUDA"} stage >"$out/build.log" 2>&1; then
        result build FAIL "$(tail -1 "$out/build.log")"
        exit 1
    fi
    export EPO_STAGE_DIR=$build/stage
    [ "$ranks" -le "$gpus" ] || ranks_note=" (2 ranks share 1 GPU)"
    gpu_options=(-g "$((gpus < ranks ? gpus : ranks))" -G)
    step=(-n "$ranks" "--gpus=$((gpus < ranks ? gpus : ranks))")
    [ "$gpus" -lt "$ranks" ] || export BOUND="-n $ranks --gpus-per-task=1" # each task sees its own GPU alone
else
    gpu_options=(-g 2)
    step=(-n "$ranks")
fi

# One cluster for all; what each command says goes to a file.
cluster() { timeout -k 5 "$seconds" tests/cluster/run.sh -n 1 "${gpu_options[@]}" -t $((seconds - 5)) -k "$@"; }
asked() { [[ $parts == *" $1 "* ]]; }
if asked scripts; then
    python=${PYTHON:-$(command -v python3)}
    has_module() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null; }
    has_module torch || no "no PyTorch here (PYTHON=$python): nothing for the job scripts to run"
    export PYTHON=$python PYTHONPATH=$top/python${PYTHONPATH:+:$PYTHONPATH} DROPIN=$top/python/dropin
    if [ "$engine" = cuda ]; then
        export SCRIPTS_alltoall="--sizes 4,64 --loops 10" SCRIPTS_moe="--steps 20" SCRIPTS_megatron="--steps 10"
        batch="--nodes=1 --ntasks-per-node=$ranks --gpus-per-node=$((gpus < ranks ? gpus : ranks))"
        has_module megatron.core || unset SCRIPTS_megatron
    else
        export SCRIPTS_alltoall="--sizes 1 --loops 3" SCRIPTS_moe="--steps 4 --tokens 64 --hidden 32 --ffn 32 --experts 4 --top-k 2"
        batch="--nodes=1 --ntasks-per-node=$ranks --gpus-per-node=0"
    fi
    export BATCH=$batch
    for name in alltoall moe megatron; do
        [[ " ${EPO_SCRIPTS:-alltoall moe megatron} " == *" $name "* ]] || unset "SCRIPTS_$name"
    done
fi
cat >"$out/steps.sh" <<'STEPS'
out=$1 steps=$2 engine=$3 parts=$4
shift 4
# A job script to its end; one that does not come to it is cancelled, and the next one begins. (sbatch --wait
# asks after 2, 8 and then each 32 s.)
script() { # NAME PROGRAM SECONDS [ARGUMENT...]
    name=$1 program=$2 seconds=$3 begin=$SECONDS
    shift 3
    job=$(PROGRAM=$PWD/python/examples/$program timeout -k 5 30 sbatch --parsable --chdir="$out" --output="$out/$name.out" \
        $BATCH "jobscripts/$name.sbatch" "$@" 2>"$out/$name.log")
    ends='' # "0:0", or the status and signal it ended by
    while [ -n "$job" ] && [ -z "$ends" ] && [ $((SECONDS - begin)) -lt "$seconds" ]; do
        sleep 0.3
        ends=$(timeout 10 scontrol show job "$job" | sed -n '/JobState=\(PENDING\|CONFIGURING\|RUNNING\|COMPLETING\)/q;s/.* ExitCode=\([0-9:]*\).*/\1/p')
    done
    [ "$ends" != 0:0 ] || ends=0
    echo "status ${ends:-none, no end} after $((SECONDS - begin)) s" >>"$out/$name.log"
    scancel --quiet --full --signal=KILL --name="$name" 2>/dev/null
    for try in $(seq 100); do [ -n "$(squeue -h)" ] || break; sleep 0.1; done
}
asked() { [[ $parts == *" $1 "* ]]; }
train() { # name srun's options... -- ep-train's options...
    name=$1
    shift
    options=
    while [ "$1" != -- ]; do options="$options $1" && shift; done
    shift
    # shellcheck disable=SC2086
    timeout -k 5 40 srun "$@" $options "${EPO_TRAIN:-ep-train}" --engine "$engine" --steps "$steps" --no-measure --save-weights "$out/$name.weights" \
        $more "$PWD/LICENSE" >"$out/$name.log" 2>&1 || echo "status $?" >>"$out/$name.log"
}
step="$*"
# shellcheck disable=SC2086
{
    ! asked tools || timeout 30 srun $step -n1 ep-overlap check --node >"$out/check.txt" 2>&1
    if asked alltoall; then
        more="--dispatcher alltoall" train alltoall-off --ep-overlap=off -- $step
        more= train alltoall-on --ep-overlap=on --ep-dispatcher=alltoall -- $step
        more= train alltoall-wgrad --ep-overlap=on --ep-dispatcher=alltoall --delay-wgrad -- $step
        [ -z "$BOUND" ] || more= train alltoall-bound --ep-overlap=on --ep-dispatcher=alltoall -- $BOUND
    fi
    if asked flex; then
        more="--dispatcher flex" train flex-off --ep-overlap=off -- $step
        more= train flex-on --ep-overlap=on --ep-dispatcher=flex -- $step
        more= train flex-wgrad --ep-overlap=on --ep-dispatcher=flex --delay-wgrad -- $step
    fi
    if asked bf16; then
        more="--dtype bf16 --hidden 128 --ffn 256 --dispatcher alltoall" train bf16-off --ep-overlap=off -- $step
        more="--dtype bf16 --hidden 128 --ffn 256" train bf16-on --ep-overlap=on --ep-dispatcher=alltoall -- $step
    fi
    if asked scripts; then
        slow=$([ "$engine" = cuda ] && echo 1 || echo 3) # CPUs have several of these at once
        [ -z "${SCRIPTS_alltoall:-}" ] || script torch-alltoall torch_alltoall.py $((60 * slow)) $SCRIPTS_alltoall
        [ -z "${SCRIPTS_moe:-}" ] || script torch-moe torch_moe.py $((100 * slow)) $SCRIPTS_moe
        [ -z "${SCRIPTS_megatron:-}" ] || script megatron-core-moe megatron_core_moe.py $((140 * slow)) $SCRIPTS_megatron
    fi
    if asked tools; then
        timeout 30 srun -n1 sh -c 'echo "visible: $CUDA_VISIBLE_DEVICES"; ep-overlap bench --ranks 1 --repeat 1 --tokens 8' >"$out/without.txt" 2>&1
        timeout -k 5 60 srun $step --ep-overlap=on ep-overlap bench --engine "$engine" ${BENCH_OPTIONS:-} --repeat 5 --json >"$out/bench.json" 2>"$out/bench.log"
        echo "status $?" >>"$out/bench.log"
    fi
}
STEPS
if ! cluster bash "$out/steps.sh" "$out" "$steps" "$engine" "$parts" "${step[@]}" >"$out/cluster.log" 2>&1; then
    tail -20 "$out/cluster.log" >&2
    result cluster FAIL "$(grep -v 'kept:' "$out/cluster.log" | tail -1)"
    [ -n "$(find "$out" -name '*-off.log' -o -name check.txt -o -name 'torch-*.log')" ] || exit 1
fi

# ---- what came out ----
losses() { sed -n 's/.*iteration *\([0-9]*\)\/.*lm loss: \([0-9.E+-]*\).*/\1 \2/p' "$out/$1.log"; }
compare() { # case against
    if [ "$(losses "$1" | wc -l)" != "$steps" ]; then
        result "$1" FAIL "$(losses "$1" | wc -l) of $steps losses: $(grep -v iteration "$out/$1.log" | tail -1)"
    elif ! grep -q "^ep-train: overlap $3.*$engine engine, $ranks ranks" "$out/$1.log"; then
        result "$1" FAIL "$(head -1 "$out/$1.log")"
    elif [ "$(losses "$1")" != "$(losses "$2")" ]; then
        result "$1" FAIL "losses differ from $2: $(losses "$1" | tail -1) against $(losses "$2" | tail -1)"
    elif ! cmp -s "$out/$1.weights" "$out/$2.weights"; then
        result "$1" FAIL "equal losses, but not the bits of $2's weights"
    else
        result "$1" ok "$steps losses to $(losses "$1" | tail -1 | cut -d' ' -f2) and all weights, $([ "$1" = "$2" ] && echo "the baseline" || echo "bit by bit those of $2")${ranks_note:-}"
    fi
}
for dispatcher in alltoall flex; do
    asked $dispatcher || continue
    compare "$dispatcher-off" "$dispatcher-off" off
    compare "$dispatcher-on" "$dispatcher-off" "on, dispatcher $dispatcher, weight gradients at once"
    compare "$dispatcher-wgrad" "$dispatcher-off" "on, dispatcher $dispatcher, weight gradients delayed"
done
! asked alltoall || [ -z "$BOUND" ] || compare alltoall-bound alltoall-off "on, dispatcher alltoall"
# What a job script printed, and that it came to its end.
ended() { # NAME
    grep -q '^status 0' "$out/$1.log" && return 0
    result "$1" FAIL "$(tail -1 "$out/$1.log"): $(grep -a . "$out/$1.out" | tail -1)"
    return 1
}
of_arm() { cat "$out/$1"-[0-9]*-"$2".log; }
arm_losses() { of_arm "$1" "$2" | sed -n 's/.*iteration *\([0-9]*\)\/.*lm loss: \([0-9.E+-]*\).*/\1 \2/p'; }
# That most of the bytes of an accelerated arm's all-to-alls were carried by copy engines, by its one line in FILE.
# What was left to NCCL for a late peer is the machine's and the job's matter, as long as a quarter was carried.
carried() { # NAME FILE...
    [ "$must_carry" = 1 ] || return 0
    local line many of late
    line=$(grep -ah 'MB carried by copy engines' "${@:2}" 2>/dev/null | tail -1)
    of=$(sed -n 's/.* all-to-all exchanges (\([0-9.]*\) MB).*/\1/p' <<<"$line")
    many=$(sed -n 's/.*; \([0-9.]*\) MB carried by copy engines.*/\1/p' <<<"$line")
    late=$(sed -n 's/.*late peer (\([0-9.]*\) MB).*/\1/p' <<<"$line")
    if awk -v many="${many:-0}" -v of="${of:-0}" -v late="${late:-0}" \
        'BEGIN { exit !(many > of / 4 && many > (of - late) / 2) }'; then
        result "$1 carried" ok "$many of $of MB${late:+, $late left for late peers}"
    else
        result "$1 carried" FAIL "${many:-none} of ${of:-0} MB: ${line:-no line says so}"
    fi
}
alltoall_judge() {
    ended torch-alltoall || return
    carried torch-alltoall "$out/torch-alltoall.out"
    local said
    said="$(sed -n '/^== off/,$s/^\([0-9].*\)/\1;/p' "$out/torch-alltoall.out" | tr -s ' \n' ' ')$(grep -ah '^ep-overlap' "$out/torch-alltoall.out" | tail -1)"
    if [ "$(grep -c 'every element as its sender sent it' "$out/torch-alltoall.out")" = 2 ]; then
        result torch-alltoall ok "ms off, ms on, times as fast: $said"
    else
        result torch-alltoall FAIL "$(tail -1 "$out/torch-alltoall.out")"
    fi
}
moe_judge() {
    ended torch-moe || return
    carried torch-moe "$out"/torch-moe-[0-9]*-on.log
    local arm many
    many=$(arm_losses torch-moe off | wc -l)
    for arm in on library library+wgrad; do
        [ "$(arm_losses torch-moe "$arm" | wc -l)" = "$many" ] && [ "$many" -gt 0 ] && continue
        result "torch-moe $arm" FAIL "$(arm_losses torch-moe "$arm" | wc -l) losses, off has $many"
        return
    done
    if [ "$(arm_losses torch-moe on)" = "$(arm_losses torch-moe off)" ]; then
        result torch-moe ok "$many losses, on as off: $(arm_losses torch-moe off | tail -1 | cut -d' ' -f2); library $(arm_losses torch-moe library | tail -1 | cut -d' ' -f2)"
    else
        result torch-moe FAIL "losses of on and off differ: $(arm_losses torch-moe on | tail -1) against $(arm_losses torch-moe off | tail -1)"
    fi
}
megatron_judge() {
    ended megatron-core-moe || return
    carried megatron-core-moe "$out"/megatron-core-moe-[0-9]*-alltoall.log
    local arm last
    for arm in off alltoall flex hybridep; do
        last="${last:+$last }$(arm_losses megatron-core-moe "$arm" | tail -1 | cut -d' ' -f2)"
    done
    # bf16: sums in another order
    if awk '{ bad = NF != 4; for (i = 2; i <= NF; i++) { d = $i / $1 - 1; if (d > 0.01 || d < -0.01) bad = 1 } exit bad }' <<<"$last"; then
        result megatron-core-moe ok "last losses of off, alltoall, flex, hybridep: $last"
    else
        result megatron-core-moe FAIL "last losses of off, alltoall, flex, hybridep: $last"
    fi
}
if asked scripts; then
    [ -z "${SCRIPTS_alltoall:-}" ] || alltoall_judge
    [ -z "${SCRIPTS_moe:-}" ] || moe_judge
    if [ -n "${SCRIPTS_megatron:-}" ]; then
        megatron_judge
    elif [[ ${EPO_SCRIPTS:-megatron} == *megatron* ]]; then
        printf 'case\tmegatron-core-moe\tskip\tno Megatron-Core here, or no GPU\n'
    fi
    grep -ah ' s  .*x$\|ms/step\|^arm' "$out/torch-moe.out" "$out/megatron-core-moe.out" 2>/dev/null | sed 's/^/# /'
fi
! asked bf16 || compare bf16-on bf16-off "on, dispatcher alltoall"
asked tools || exit "$failed"
if [ "$engine" = cuda ]; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
    name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
    if grep -q "$driver" "$out/check.txt" && grep -q "$name" "$out/check.txt"; then
        result check ok "$gpus x $name, driver $driver, as nvidia-smi says"
    else
        result check FAIL "check --node tells neither $driver nor $name: $(head -1 "$out/check.txt")"
    fi
    if grep -q 'engine_host.so\|^host engine' "$out/without.txt"; then
        result without-gpus ok "a step without GPUs takes the host engine ($(head -1 "$out/without.txt"))"
    else
        result without-gpus FAIL "$(head -3 "$out/without.txt" | tr '\n' ' ')"
    fi
    cat "$out/check.txt"
fi
if grep -q '"schema": "ep-overlap-bench/1"' "$out/bench.json" && grep -q '^status 0' "$out/bench.log"; then
    result bench ok "srun ep-overlap bench: $(grep -c '"identical": true' "$out/bench.json") arms with the same bits"
else
    result bench FAIL "$(head -1 "$out/bench.log")"
fi
exit "$failed"
