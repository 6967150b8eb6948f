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
    arm() { # what round
        case $1 in
        absent) : >"$EPO_CLUSTER_DIR/etc/plugstack.conf" && once "$1 $2" srun -n8 --gpus=8 $arguments ;;
        off) echo "$plugin" >"$EPO_CLUSTER_DIR/etc/plugstack.conf" && once "$1 $2" srun -n8 --gpus=8 $arguments ;;
        on) echo "$plugin" >"$EPO_CLUSTER_DIR/etc/plugstack.conf" && once "$1 $2" srun -n8 --gpus=8 --ep-overlap=on $arguments ;;
        esac
    }
    for i in $(seq 0 "$1"); do
        [ "$i" != 1 ] || : >"$0/times" # the first round warms up
        case $((i % 3)) in # each stands first, second and last as often
        0) arms="absent off on" ;; 1) arms="off on absent" ;; 2) arms="on absent off" ;;
        esac
        for name in $arms; do arm $name $i; done
    done' "$work" "$rounds" || exit 1
sort -k1,1 -k3,3n "$work/times" | awk '
    { t[$1, ++n[$1]] = $3 / 1000; round[$1, $2] = $3 / 1000; if ($1 == "absent") rounds[++r] = $2 }
    function median(arm) { return (t[arm, int((n[arm] + 1) / 2)] + t[arm, int(n[arm] / 2) + 1]) / 2 }
    function added(arm,    i, j, d, m, x) { # the median of the rounds own differences
        for (i = 1; i <= r; i++) {
            x = round[arm, rounds[i]] - round["absent", rounds[i]]
            for (j = m++; j > 0 && d[j] > x; j--) d[j + 1] = d[j]
            d[j + 1] = x
        }
        return (d[int((m + 1) / 2)] + d[int(m / 2) + 1]) / 2
    }
    END {
        printf "srun of 8 tasks, %d rounds in turns, ms; added: the median of the rounds\047 own differences\n", n["absent"]
        printf "%-8s %8s %8s %8s %8s\n", "plugin", "median", "lowest", "highest", "added"
        split("absent off on", arms, " ")
        for (i = 1; i <= 3; i++) {
            a = arms[i]
            printf "%-8s %8.1f %8.1f %8.1f %8.1f\n", a, median(a), t[a, 1], t[a, n[a]], added(a)
        }
    }'
