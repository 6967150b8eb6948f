#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh [-s SECONDS] [-b FOLDER] [TARGET]...: builds the fuzz targets with clang's libFuzzer and
# the address and undefined-behaviour sanitizers, and runs each for SECONDS (10) from its seeds.
# What it finds stays in FOLDER (build-fuzz) as TARGET-crash-*; status 1 if there is any.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../.." && pwd)
seconds=10 folder=$top/build-fuzz
while getopts s:b: option; do
    case $option in
    s) seconds=$OPTARG ;;
    b) folder=$OPTARG ;;
    *) echo "usage: run.sh [-s SECONDS] [-b FOLDER] [TARGET]..." >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
clang=${CLANG:-clang}
command -v "$clang" >/dev/null || {
    echo "run.sh: $clang is not installed; on Debian or Ubuntu: apt-get install clang libclang-rt-dev" >&2
    exit 2
}
[ $# -gt 0 ] || set -- log script yaml chrome nsight values

mkdir -p "$folder"
libraries=(-lyaml -lsqlite3 -lyajl -lm)
mapfile -t sources < <(printf '%s\n' "$top"/lib/core/{status,facts,fact_value,version,text,options}.c \
    "$top"/lib/rules/{rules,condition,condition_lex,settings,derive,words,command,launch,launcher,program,complete}.c \
    "$top"/lib/trace/*.c "$top"/tools/ep-overlap/input_yaml.c)
failed=0
for target; do
    echo "fuzz $target: build"
    "$clang" -g -O1 -std=gnu11 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
        -I"$top/lib/include" -I"$top/lib" -I"$top/tools/ep-overlap" -I"$here" \
        -o "$folder/fuzz_$target" "$here/fuzz_$target.c" "${sources[@]}" "${libraries[@]}"
    mkdir -p "$folder/corpus_$target"
    echo "fuzz $target: $seconds s"
    log=$folder/fuzz_$target.log
    if ! (cd "$folder" && timeout $((seconds + 120)) ./fuzz_"$target" -max_total_time="$seconds" \
        -timeout=20 -rss_limit_mb=4096 -max_len=65536 -print_final_stats=1 \
        -artifact_prefix="$target-" "corpus_$target" "$here/seeds/$target") >"$log" 2>&1; then
        failed=1
        echo "fuzz $target: FAILED, see $log"
        grep -E 'ERROR|SUMMARY|runtime error|Test unit written' "$log" | head -5
    else
        grep -E 'number_of_executed_units|new_units_added|peak_rss' "$log" | sed "s/^/fuzz $target: /"
    fi
done
exit $failed
