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
# of "alltoall flex bf16 tools" (the node's facts, a step without GPUs, bench), those that are to run;
# EPO_SECONDS: the limit of all of it (100).
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
cat >"$out/steps.sh" <<'STEPS'
out=$1 steps=$2 engine=$3 parts=$4
shift 4
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
    [ -n "$(find "$out" -name '*-off.log' -o -name check.txt)" ] || exit 1
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
