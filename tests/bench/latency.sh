#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the plugin adds to srun's time: absent, --ep-overlap=off, and on with all checks (the
# probe with a stand-in for NVML, and what rules say of Megatron-LM's arguments), in turns in one
# cluster. Prints medians and the added milliseconds; a benchmark, not a test.
#
#   latency.sh [ROUNDS [20]]      EPO_BUILD_DIR: the build [build]
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
rounds=${1:-20}
build=${EPO_BUILD_DIR:-$here/../../build}
work=$(mktemp -d) && chmod 755 "$work" || exit 1
trap 'rm -rf "$work"' EXIT
umask 022
if ! cp -L "$build/tests/fake/.libs/fake_nvml.so" "$work/" 2>/dev/null; then
    echo "latency.sh: $build/tests/fake/.libs/fake_nvml.so was not built (make check builds it)" >&2
    exit 2
fi
echo '* h100 8' >"$work/nvml.table"
cat >"$work/site.conf" <<END
version = 1;
checks = { nvml_path = "$work/fake_nvml.so"; minimum = { driver = "550"; cuda = "12.4"; nccl = "2.0"; torch = "2.4"; te = "1.9"; }; };
END
# shellcheck disable=SC2016 # expanded in the cluster
"$here/../cluster/run.sh" -n 1 -g 8 -c "$work/site.conf" -t 550 bash -c '
    plugin=$(cat "$EPO_CLUSTER_DIR/etc/plugstack.conf")
    arguments="python3 pretrain_gpt.py --num-experts 8 --expert-model-parallel-size 8 --bf16 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm"
    once() { # arm command...
        local arm=$1 from
        shift
        from=$(date +%s%N)
        "$@" >/dev/null 2>"$0/error" || { echo "failed: $*" >&2 && cat "$0/error" >&2 && exit 1; }
        echo "$arm $((($(date +%s%N) - from) / 1000))" >>"$0/times"
    }
    printf "#!/bin/sh\nexit 0\n" >"$0/python3" && chmod 755 "$0/python3"
    export PATH=$0:$PATH
    for i in $(seq 0 "$1"); do
        [ "$i" != 1 ] || : >"$0/times" # the first round warms up
        : >"$EPO_CLUSTER_DIR/etc/plugstack.conf"
        once absent srun -n8 --gpus=8 $arguments
        echo "$plugin" >"$EPO_CLUSTER_DIR/etc/plugstack.conf"
        once off srun -n8 --gpus=8 $arguments
        once on srun -n8 --gpus=8 --ep-overlap=on $arguments
    done' "$work" "$rounds" || exit 1
sort -k1,1 -k2,2n "$work/times" | awk '
    { t[$1, ++n[$1]] = $2 / 1000 }
    function median(arm) { return (t[arm, int((n[arm] + 1) / 2)] + t[arm, int(n[arm] / 2) + 1]) / 2 }
    END {
        printf "srun of 8 tasks, %d rounds in turns, ms\n", n["absent"]
        printf "%-8s %8s %8s %8s %8s\n", "plugin", "median", "lowest", "highest", "added"
        split("absent off on", arms, " ")
        for (i = 1; i <= 3; i++) {
            a = arms[i]
            printf "%-8s %8.1f %8.1f %8.1f %8.1f\n", a, median(a), t[a, 1], t[a, n[a]], median(a) - median("absent")
        }
    }'
