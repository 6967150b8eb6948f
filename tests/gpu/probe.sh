#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The probe against this machine's own NVML: builds it with gcc alone, prints what it
# finds, and holds it against nvidia-smi. One line per case, as tests/gpu/run.sh reads
# them. Where the toolkit is built (EPO_BUILD_DIR), prints ep-overlap check --node too.
#
#   probe.sh [FOLDER]     for what is built; status 1 when a case failed
set -u
cd "$(dirname "$0")/../.." || exit 2
out=${1:-build-gpu/probe}
command -v nvidia-smi >/dev/null || { echo "probe.sh: no nvidia-smi here to hold the probe against" >&2 && exit 2; }
mkdir -p "$out" || exit 2
flags='-std=gnu11 -O2 -g -Wall -Wextra -Ilib -Ilib/include'
core='lib/core/status.c lib/core/text.c lib/core/facts.c lib/core/fact_value.c lib/core/version.c
lib/core/options.c lib/core/probe_record.c'
failed=0

# shellcheck disable=SC2086 # lists of files and flags
build() {
    gcc $flags -o "$out/probe" tools/probe/main.c lib/probe/*.c $core lib/core/probe_run.c -ldl &&
        gcc $flags -o "$out/probe_show" tests/gpu/probe_show.c lib/core/probe_run.c $core lib/rules/*.c -lm
}
if ! build >"$out/build.log" 2>&1; then
    tail -20 "$out/build.log" >&2
    printf 'case\tbuild\tFAIL\t%s\n' "$(tail -1 "$out/build.log")"
    exit 1
fi

same() { # CASE FOUND WANTED
    if [ "$2" = "$3" ]; then
        printf 'case\t%s\tok\t%s\n' "$1" "$2"
    else
        printf 'case\t%s\tFAIL\tthe probe says "%s", nvidia-smi "%s"\n' "$1" "$2" "$3"
        failed=1
    fi
}
fact() { sed -n "s/^$1 = \(.*\) ([^(]*)$/\1/p" "$out/$2.txt" | head -1; }
smi() { nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null; }
show() { # NAME [VARIABLE=VALUE...]
    local name=$1
    shift
    timeout 60 env -u CUDA_VISIBLE_DEVICES -u SLURM_STEP_GPUS "$@" "$out/probe_show" "$out/probe" 30000 >"$out/$name.txt"
}

show all
cat "$out/all.txt"
count=$(smi index | grep -c .)
same count "$(fact node.gpu_count all)" "$count"
same name "$(fact gpu_name all)" "$(smi name | head -1)"
same driver "$(fact node.driver_version all)" "$(smi driver_version | head -1)"
same capability "$(fact node.compute_capability all)" "$(smi compute_cap | head -1)"
same memory "$(fact node.gpu_memory_mib all)" "$(smi memory.total | sort -n | head -1)"
same cuda "$(fact node.cuda_version all)" "$(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -1)"
if [ "$count" -gt 1 ]; then
    # a table of OK, CNS, NS, ... beside X on the diagonal
    table=$(nvidia-smi topo -p2p r | grep -E '^ *GPU[0-9]+[[:space:]]' | grep -w X)
    if [ -n "$table" ]; then
        wanted=True
        grep -qwE 'CNS|GNS|TNS|NS|U|DR' <<<"$table" && wanted=False
        same p2p "$(fact node.all_gpus_p2p all)" "$wanted"
    fi
fi
show first CUDA_VISIBLE_DEVICES=0
same visible-by-index "$(fact node.gpu_count first)" 1
uuid=$(smi uuid | tail -1)
show last CUDA_VISIBLE_DEVICES="$uuid"
same visible-by-uuid "$(fact node.gpus last)" "$((count - 1)): $(smi name | tail -1)"
show none CUDA_VISIBLE_DEVICES=
same visible-none "$(fact node.gpu_count none)" 0
for i in 1 2 3 4 5; do show "time$i" && tail -1 "$out/time$i.txt"; done | sort -k2 -n |
    awk '{t[NR] = $2} END {printf "case\ttime\tok\tmedian of %d: %s ms, largest %s ms\n", NR, t[int((NR + 1) / 2)], t[NR]}'
tool=${EPO_BUILD_DIR:-build}/stage/usr/local/bin/ep-overlap
[ ! -x "$tool" ] || timeout 60 "$tool" check --node
exit "$failed"
