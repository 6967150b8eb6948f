#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# coverage.sh BUILD: the share of lines that the tests ran, by folder, after `make check` in a
# BUILD configured with CFLAGS="-O0 -g --coverage".  Status 1 if one of the folders that matter
# is below 85 %.
# shellcheck source=tests/lint/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" ''
build=$(cd "${1:?a build folder}" && pwd) || exit 2
need_files "$(find "$build" -name '*.gcda' -print -quit)"
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT

# A source may have been compiled more than once: a line ran if it ran in one of them.
find "$build" -name '*.gcda' -print0 | (cd "$build" && xargs -0 gcov --stdout 2>/dev/null) | awk -v root="$root/" '
    { split($0, part, ":"); count = part[1]; line = part[2] + 0 }
    line == 0 { if ($0 ~ /:Source:/) { file = $0; sub(/.*:Source:/, "", file); sub(/^(\.\.\/)+/, "", file)
                if (index(file, root) == 1) file = substr(file, length(root) + 1) }; next }
    count ~ /^ *-$/ || file ~ /^\// { next }
    { key = file ":" line; seen[key] = file; if (count !~ /#|=/) ran[key] = 1 }
    END { for (key in seen) print seen[key], (key in ran) }' |
    awk '{ folder = $1; sub(/\/[^\/]*$/, "", folder); all[folder]++; ran[folder] += $2 }
        END { for (folder in all) printf "%6.1f %% of %5d lines  %s\n", 100 * ran[folder] / all[folder], all[folder], folder }' |
    grep -E '  (lib|spank|tools)' | sort -k 6 >"$work/table"
cat "$work/table"
low=$(awk '$6 ~ /^(spank|lib\/core|lib\/rules|lib\/moe|lib\/trace|lib\/backend\/host)$/ { n++; if ($1 < 85) print "below 85 %: " $6 }
    END { if (n != 6) print "only " n + 0 " of 6 folders were measured" }' "$work/table")
finish "$low" 6
