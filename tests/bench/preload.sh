#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What LD_PRELOAD=libep_overlap.so adds to a program that never calls it.
# A benchmark: interleaved starts of /bin/true with and without, medians.
# Usage: tests/bench/preload.sh [LIBRARY [STARTS]]
set -u
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
library=${1:-$top/build/.libs/libep_overlap.so.0.0.0}
starts=${2:-301}
[ -r "$library" ] || { echo "$library: not there; build it, or name the library" >&2 && exit 69; }
times=$(mktemp) || exit 70
trap 'rm -f "$times"' EXIT
for ((i = 0; i < starts; i++)); do
    begin=${EPOCHREALTIME/[.,]/}
    /bin/true
    middle=${EPOCHREALTIME/[.,]/}
    LD_PRELOAD=$library /bin/true || exit 1
    end=${EPOCHREALTIME/[.,]/}
    echo "$((middle - begin)) $((end - middle))"
done >"$times"
median() { cut -d ' ' -f "$1" "$times" | sort -n | sed -n "$((starts / 2 + 1))p"; }
plain=$(median 1) loaded=$(median 2)
echo "/bin/true: $plain us, with the preload $loaded us: $((loaded - plain)) us added (medians of $starts interleaved starts)"
