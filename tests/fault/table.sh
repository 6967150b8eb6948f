#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# table.sh TSV: run.sh's lines as tables for a document. Process ids and hosts go, milliseconds stay.
set -u
[ -r "${1:-}" ] || { echo "usage: table.sh TSV" >&2 && exit 2; }
grep -v '^#' "$1" | awk -F'\t' '
    function said(line) {
        sub(/^rank [0-9]+: [a-z_]+: /, "", line)
        gsub(/ \(pid [0-9]+[^)]*\)/, "", line)
        gsub(/ \(epoch [^)]*\)/, "", line)
        gsub(/0x[0-9a-f]+/, "0x...", line)
        gsub(/\/tmp\/tmp\.[A-Za-z0-9]*/, "DISK", line)
        gsub(/\|/, "; ", line)
        return line
    }
    function cell(kind, phase) {
        if (!((kind, phase) in ms)) return "-"
        return verdict[kind, phase] == "ok" ? ms[kind, phase] : "**" ms[kind, phase] "**"
    }
    {
        if ($4 == "ok") good++
        else bad[++nbad] = $2 ", " $3
        if ($6 == "nothing") clean++
        ms[$2, $3] = $5; verdict[$2, $3] = $4; line[$2, $3] = said($8); n++
        if ($2 ~ /killed|stopped|slow|late/ && !($3 in known)) { known[$3] = 1; phase[++phases] = $3 }
        if ($2 == "twisted") other[++others] = $2 SUBSEP $3
        if ($2 == "scarce" || $2 == "place") {
            around[++arounds] = $2 SUBSEP $3
            if ($2 == "scarce") line[$2, $3] = $7
            if ($2 == "place" && line[$2, $3] == "") line[$2, $3] = "runs"
        }
    }
    END {
        printf "%d of %d cases as they have to be; nothing left behind in %d.\n", good, n, clean
        for (i = 1; i <= nbad; i++) print "Not as it has to be: " bad[i] "."
        if (phases > 0) {
            print "\n| where rank 1 is | killed, ms | stopped | late | slow (the rest of the job) | what a survivor says when it was killed |\n|---|---|---|---|---|---|"
            for (i = 1; i <= phases; i++) {
                p = phase[i]
                printf "| %s | %s | %s | %s | %s | %s |\n", p, cell("killed", p), cell("stopped", p), cell("late", p), cell("slow", p),
                    line["killed", p] == "" ? "(nobody waits for it any more)" : line["killed", p]
            }
        }
        if (others > 0) {
            print "\n| what rank 1 does | ms | what a survivor says |\n|---|---|---|"
            for (i = 1; i <= others; i++)
                printf "| %s | %s | %s |\n", substr(other[i], 9), verdict[other[i]] == "ok" ? ms[other[i]] : "**" ms[other[i]] "**",
                    line[other[i]] == "" ? "(runs)" : line[other[i]]
        }
        if (arounds > 0) {
            print "\n| what is missing | slowest, ms | how it ends |\n|---|---|---|"
            for (i = 1; i <= arounds; i++) {
                split(around[i], name, SUBSEP)
                printf "| %s | %s | %s |\n", name[2], verdict[around[i]] == "ok" ? ms[around[i]] : "**" ms[around[i]] "**", line[around[i]]
            }
        }
    }'
