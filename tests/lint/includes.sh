#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# includes.sh [TREE]: holds every #include below lib/, spank/ and tools/ to includes.tsv.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mapfile -t files < <(sources '*.c' '*.h' '*.cu' '*.cuh' '*.inl' | grep -E '^(lib|spank|tools)/')
need_files "${files[@]}"
violations=$(cd "$root" && awk -F '\t' -v table="$lint_dir/includes.tsv" '
    function row_of(path) {
        while (sub(/\/[^\/]*$/, "", path) && !(path in ours)) { }
        return path
    }
    BEGIN {
        while ((getline line < table) > 0) {
            if (line ~ /^#/ || split(line, column, "\t") != 3) continue
            ours[column[1]] = column[2]
            others[column[1]] = column[3]
        }
    }
    FNR == 1 {
        own = FILENAME
        sub(/\/[^\/]*$/, "", own)
        row = row_of(FILENAME)
        if (!(row in ours)) print FILENAME ":1: no row of includes.tsv covers its folder"
    }
    /^[ \t]*#[ \t]*include[ \t]*["<]/ && (row in ours) {
        name = $0
        sub(/^[ \t]*#[ \t]*include[ \t]*/, "", name)
        system_header = substr(name, 1, 1) == "<"
        name = substr(name, 2)
        sub(/[">].*/, "", name)
        if (system_header) {
            if (name !~ ("^(" others["libc"] ")$") && name !~ ("^(" others[row] ")$"))
                print FILENAME ":" FNR ": <" name "> is not for " row
            next
        }
        if (name == "config.h" && row != "lib/include") next
        if (name == "ep_overlap.h") name = "include/ep_overlap.h"
        if (name !~ /\//) {
            if ((getline unused < (own "/" name)) < 0) print FILENAME ":" FNR ": \"" name "\" is not in its folder; say which part it belongs to"
            close(own "/" name)
            next
        }
        if (row_of("lib/" name) == row) next
        if (name !~ ("^(" ours[row] ")$")) print FILENAME ":" FNR ": \"" name "\" is not for " row
    }' "${files[@]}")
finish "$violations" "${#files[@]}"
