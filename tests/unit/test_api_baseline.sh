#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What programs that were built before rely on: the SONAME, every function, the place of every
# field, the value of every constant; against api_baseline.txt.
#   A line that is gone or another breaks such programs: undo it, or raise the SONAME (the first
#   number of -version-info in lib/preload/Makefile.inc) and begin the baseline anew.
#   What is new (functions, constants, structs) is told, and promised from the release on that
#   puts its lines into the baseline; a struct that grew by fields at its end is changed there.
set -u
top=${top_builddir:-.}
src=${srcdir:-.}
lib=$top/.libs/libep_overlap.so.0.0.0
baseline=$src/tests/unit/api_baseline.txt
[ "$(getconf LONG_BIT)" = 64 ] || { echo "left out: the baseline is of 64-bit machines" && exit 77; }
work=$(mktemp -d) || exit 99
trap 'rm -rf "$work"' EXIT
{
    readelf -d "$lib" | sed -n 's/.*SONAME.*\[\(.*\)\]/soname \1/p'
    nm -D --defined-only "$lib" | awk '$2 != "A" { sub(/@.*/, "", $3); print "function " $3 }'
    "$top/tests/unit/api_layout"
} | sort >"$work/now"
sed -n 's/^typedef struct \(epo_[a-z_]*\) {.*/\1/p' "$src/lib/include/ep_overlap.h" | while read -r name; do
    grep -q "^struct $name " "$work/now" || echo "tests/unit/api_layout.c does not know struct $name yet"
done >"$work/unknown"
[ "${1:-}" != --print ] || { cat "$work/now" && exit 0; }
grep -v '^#' "$baseline" | sort >"$work/then"
[ "$(wc -l <"$work/then")" -gt 200 ] || { echo "the baseline is cut off" && exit 1; }
comm -23 "$work/then" "$work/now" >"$work/gone"
comm -13 "$work/then" "$work/now" >"$work/new"
[ ! -s "$work/gone" ] || { echo "gone or changed, which breaks programs that exist:" && sed 's/^/    /' "$work/gone"; }
[ ! -s "$work/new" ] || { echo "new, not promised yet:" && sed 's/^/    /' "$work/new"; }
cat "$work/unknown"
[ ! -s "$work/gone" ] || { sed -n "5,9s/^# *//p" "$0" && exit 1; }
echo "$(wc -l <"$work/then") lines of the baseline hold"
