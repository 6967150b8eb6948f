#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh [-s SECONDS] [-r RUNS] [-j JOBS] [-b FOLDER] [TARGET]...: builds the fuzz targets with
# clang's libFuzzer and the address and undefined-behaviour sanitizers, and runs each for
# SECONDS (10), or until RUNS inputs were tried, from its seeds, JOBS (all cores) at a time.
# What it finds stays in FOLDER (build-fuzz) as TARGET-crash-*; status 1 if there is any.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../.." && pwd)
usage="usage: run.sh [-s SECONDS] [-r RUNS] [-j JOBS] [-b FOLDER] [TARGET]..."
seconds=10 runs=-1 jobs=$(nproc) folder=$top/build-fuzz
while getopts s:r:j:b: option; do
    case $option in
    s) seconds=$OPTARG ;;
    r) runs=$OPTARG seconds=0 ;;
    j) jobs=$OPTARG ;;
    b) folder=$OPTARG ;;
    *) echo "$usage" >&2 && exit 2 ;;
    esac
done
shift $((OPTIND - 1))
for number in "$seconds" "${runs#-}" "$jobs"; do
    [[ $number =~ ^[0-9]{1,9}$ ]] || { echo "$usage" >&2 && exit 2; }
done
export CLANG=${CLANG:-clang}
command -v "$CLANG" >/dev/null || {
    echo "run.sh: $CLANG is not installed; on Debian or Ubuntu: apt-get install clang libclang-rt-dev" >&2
    exit 2
}
mapfile -t known < <(cd "$here" && printf '%s\n' fuzz_*.c | sed 's/^fuzz_//; s/\.c$//')
[ $# -gt 0 ] || set -- "${known[@]}"
for target; do
    [ -f "$here/fuzz_$target.c" ] || { echo "run.sh: no target $target; there are: ${known[*]}" >&2 && exit 2; }
done

# Everything that the targets test, compiled once, and a library of it.
mkdir -p "$folder/objects"
printf '#define PACKAGE_VERSION "fuzz"\n#ifndef _GNU_SOURCE\n#define _GNU_SOURCE 1\n#endif\n' >"$folder/config.h"
mapfile -t sources < <(printf '%s\n' "$top"/lib/{core,rules,trace,backend}/*.c "$top"/lib/backend/host/{socket,hello,nodes,place}.c \
    "$top"/tools/ep-overlap/input_{yaml,recipe}.c \
    "$here"/fuzz_*.c)
export FLAGS="-g -O1 -std=gnu11 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined
    -I$top/lib/include -I$top/lib -I$top/tools/ep-overlap -I$here -I$folder"
echo "build: ${#sources[@]} files"
# shellcheck disable=SC2016 # the inner shell expands it
printf '%s\0' "${sources[@]}" | (cd "$folder/objects" && xargs -0 -P "$jobs" -I '{}' \
    sh -c '$CLANG $FLAGS -c -o "$(basename "$1" .c).o" "$1"' compile '{}')
rm -f "$folder/library.a"
find "$folder/objects" -name '*.o' ! -name 'fuzz_*' -exec ar rcs "$folder/library.a" {} +
for target; do
    "$CLANG" -fsanitize=fuzzer,address,undefined -o "$folder/fuzz_$target" "$folder/objects/fuzz_$target.o" \
        "$folder/library.a" -lconfig -lyaml -lsqlite3 -lyajl -lm
    mkdir -p "$folder/corpus_$target"
done

run_one() { # target
    cd "$folder"
    local log=fuzz_$1.log limit=$((seconds > 0 ? seconds + 120 : 7200)) status=0
    timeout "$limit" ./"fuzz_$1" -max_total_time="$seconds" -runs="$runs" -timeout=20 -rss_limit_mb=4096 \
        -max_len=65536 -print_final_stats=1 -artifact_prefix="$1-" "corpus_$1" "$here/seeds/$1" >"$log" 2>&1 || status=$?
    if [ "$status" = 0 ]; then
        sed -n 's/^stat::\(number_of_executed_units\|new_units_added\|peak_rss_mb\): */ \1 /p' "$log" |
            tr '\n' ' ' | sed "s/^/fuzz $1:/; s/_/ /g; s/ *\$/\n/"
    else
        echo "fuzz $1: FAILED (status $status), see $folder/$log"
        grep -E 'ERROR|SUMMARY|runtime error|Test unit written' "$log" | head -5
    fi
    return "$status"
}
export -f run_one
export folder here seconds runs
printf '%s\0' "$@" | xargs -0 -P "$jobs" -I '{}' bash -c 'run_one "$1"' run '{}' || exit 1
