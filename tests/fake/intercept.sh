#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Helpers for tests of the interposer on stand-ins: source it.
#   fakes_build FOLDER SRC       compiles them; CC as the build's
#   ranks MODE N WHAT COUNT [NAME=VALUE...]   N ranks; output in $fakes/out.RANK, 0 if all ended well
#   check NAME COMMAND...     passes when the command does; a failure is shown and sets `failed`
#   is_sanitized LIBRARY      built with a sanitizer, so not to be preloaded into other programs
# Set `library` to the interposer, `work` to a folder and `failed` to 0 before.
# shellcheck disable=SC2034,SC2154 # failed, work: of who sources this
fakes_build() {
    fakes=$1
    local flags=(-std=gnu11 -g -O1 -Wall -Wextra -Werror -I "$2/lib")
    ${CC:-cc} "${flags[@]}" -shared -fPIC -fvisibility=hidden -Wl,-soname,libcuda.so.1 -o "$fakes/libcuda.so.1" \
        "$2/tests/fake/cuda_streams.c" "$2/tests/fake/cuda_pieces.c" -lpthread &&
        ${CC:-cc} "${flags[@]}" -shared -fPIC -fvisibility=hidden -Wl,-soname,libnccl.so.2 -o "$fakes/libnccl.so.2" \
            "$2/tests/fake/nccl.c" -ldl &&
        ${CC:-cc} "${flags[@]}" -o "$fakes/rank" "$2/tests/fake/intercept_rank.c" -L"$fakes" -l:libnccl.so.2 -ldl -lpthread
}

rank_job() { # MODE RANK N UNIQUE WHAT COUNT [NAME=VALUE...]
    local mode=$1 words=(RANK="$2" WORLD_SIZE="$3" UNIQUE="$4" LD_LIBRARY_PATH="$fakes${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
    [ "$mode" = plain ] || words+=(LD_PRELOAD="${library:?}" EP_OVERLAP_INTERPOSE="$mode")
    timeout "${RANK_LIMIT:-60}" env "${words[@]}" "${@:7}" "$fakes/${PROGRAM:-rank}" "$5" "$6"
}

ranks() {
    local mode=$1 n=$2 what=$3 count=$4 unique status=0 r pids=()
    unique=t$BASHPID-$RANDOM
    shift 4
    rm -f "$fakes"/out.*
    for ((r = 0; r < n; r++)); do
        rank_job "$mode" "$r" "$n" "$unique" "$what" "$count" "$@" >"$fakes/out.$r" 2>&1 &
        pids+=($!)
    done
    for r in "${pids[@]}"; do
        wait "$r" || status=$?
    done
    rm -f /dev/shm/ep-fake-comm-"$unique"* /dev/shm/ep-fake-"$unique"*
    return "$status"
}

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" >"$work/said" 2>&1; then
        echo "ok: $name"
    else
        echo "FAILED: $name"
        sed 's/^/    /' "$work/said"
        failed=1
    fi
}

is_sanitized() { # LIBRARY
    readelf -d "$1" | grep -q 'lib[a-z]*san\.so' || nm -D "$1" | grep -q '__[atu]san_'
}
