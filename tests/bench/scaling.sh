#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What a plan and a pass cost the host engine against ranks, experts and tokens: builds
# scaling.c with nothing but a C compiler, runs it over three sweeps, and says where the
# cost grows faster than what it is plotted against.
#
#   tests/bench/scaling.sh [-q] [-o FOLDER]    -q: fewer points, for a small machine
#
# FOLDER [build-scaling] gets scaling.tsv (see scaling.c; first column: the sweep).  A
# picture: tests/bench/scaling_plot.py FOLDER/scaling.tsv FOLDER/scaling.svg
# Status 1: a cost grew by more than 1.3 times its argument, over the whole sweep and over
# its last step.  (Over the whole one alone it may: rows leave the caches.)
set -u
cd "$(dirname "$0")/../.." || exit 2
out=build-scaling
ranks='2 4 8 16 32'
experts='64 256 1024 4096'
tokens='128 512 2048 8192 32768'
rounds=9
while getopts qo: option; do
    case $option in
        q) ranks='2 4 8 16' experts='64 256 1024' tokens='512 8192 32768' rounds=3 ;;
        o) out=$OPTARG ;;
        *) sed -n '3,15s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done
mkdir -p "$out" || exit 2
cc=${CC:-cc}
flags=(-std=gnu11 -O2 -pthread -DEPO_ENGINE_NAME='"host"' -DHAVE_CONFIG_H -I"$out" -Ilib -Ilib/include)
libs=(-lm -lrt -ldl)
printf '#define PACKAGE_VERSION "scaling"\n#ifndef _GNU_SOURCE\n#define _GNU_SOURCE 1\n#endif\n' >"$out/config.h"
# A machine without CBLAS: nothing is multiplied here.
if echo '#include <cblas.h>' | $cc -E - >/dev/null 2>&1; then
    libs+=(-lopenblas)
else
    flags+=(-Itests/bench/no_blas)
fi
# shellcheck disable=SC2086 # $cc may be "ccache gcc"
if ! $cc "${flags[@]}" tests/bench/scaling.c lib/core/status.c lib/core/group_card.c lib/backend/*.c \
    lib/backend/host/*.c lib/moe/*.c -o "$out/scaling" "${libs[@]}" >"$out/build.log" 2>&1; then
    tail -20 "$out/build.log" >&2
    exit 1
fi
: >"$out/scaling.tsv"
run() { # SWEEP RANKS EXPERTS TOKENS
    local dispatcher
    for dispatcher in alltoall flex; do
        if ! timeout 120 "$out/scaling" "$2" "$3" "$4" "$dispatcher" "$rounds" >"$out/line"; then
            echo "scaling.sh: $2 ranks, $3 experts, $4 tokens, $dispatcher: failed" >&2
            exit 1
        fi
        printf '%s\t%s\n' "$1" "$(cat "$out/line")" | tee -a "$out/scaling.tsv"
    done
}
export OPENBLAS_NUM_THREADS=1
printf 'sweep\tdispatcher\tranks\texperts\ttokens\tplan us\tpass us\tbarrier us\tplan CPU\tpass CPU\tbarrier CPU\tmade us\n'
for n in $ranks; do run ranks "$n" 128 512; done
for n in $experts; do run experts 4 "$n" 512; done
for n in $tokens; do run tokens 4 64 "$n"; done

# Growth: cost's factor over the argument's.
awk -F'\t' -v cores="$(nproc)" '
    BEGIN { split("plan pass barrier plan_CPU pass_CPU barrier_CPU making", what, " ") }
    { x = $1 == "ranks" ? $3 : $1 == "experts" ? $4 : $5; key = $1 "\t" $2
      # Wall time beyond the cores says nothing: ranks take turns on them.
      for (c = 6; c <= 12; c++) {
          if ((c < 9 || c == 12) && $3 > cores) continue
          if (!((key, c) in x0)) { x0[key, c] = x; y0[key, c] = $c }
          xb[key, c] = x1[key, c]; yb[key, c] = y1[key, c] # the step before
          x1[key, c] = x; y1[key, c] = $c
      }
      if (!(key in seen)) { seen[key] = 1; order[++keys] = key } }
    END { for (i = 1; i <= keys; i++) for (c = 6; c <= 12; c++) {
              k = order[i] SUBSEP c
              if (!(k in x0) || x1[k] == x0[k]) continue
              grew = (y1[k] / yb[k]) / (x1[k] / xb[k])
              all = (y1[k] / y0[k]) / (x1[k] / x0[k])
              split(order[i], name, "\t")
              more = grew > 1.3 && all > 1.3
              verdict = more ? "MORE THAN LINEAR" : "no more than linear"
              bad += more
              printf "%-8s %-9s %-11s %5d to %5d: %9.1f to %9.1f us, %4.2f of linear, last step %4.2f: %s\n", name[1], name[2], what[c - 5], x0[k], x1[k], y0[k], y1[k], all, grew, verdict
          }
          exit bad > 0 }' "$out/scaling.tsv"
