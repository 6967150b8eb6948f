#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# calls.sh [TREE]: forbids calls that overrun buffers, hide errors, go through a shell or have a limit
# that a step of the clock moves, asks for the licence line, and keeps files to a readable length.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

longest=700
mapfile -t files < <(sources '*.c' '*.h' '*.cu' '*.cuh' '*.sh' '*.bats' '*.py' '*.m4')
need_files "${files[@]}"
violations=$(cd "$root" && awk -v longest="$longest" '
    # Line without comments and the contents of strings.
    function code(line,    out, i, c, two) {
        out = ""
        for (i = 1; i <= length(line); i++) {
            c = substr(line, i, 1)
            two = substr(line, i, 2)
            if (in_comment) {
                if (two == "*/") { in_comment = 0; i++ }
            } else if (quote != "") {
                if (c == "\\") i++
                else if (c == quote) { quote = ""; out = out c }
            } else if (two == "/*") { in_comment = 1; i++ }
            else if (two == "//") break
            else { if (c == "\"" || c == "\047") quote = c; out = out c }
        }
        quote = ""
        return out
    }
    FNR == 1 {
        if (last != "" && lines > longest) print last ":" lines ": longer than " longest " lines"
        if (last != "" && !licensed) print last ":1: no SPDX-License-Identifier: Apache-2.0 in the first three lines"
        last = FILENAME
        in_comment = licensed = 0
        is_c = FILENAME ~ /\.(c|h|cu|cuh)$/
    }
    FNR <= 3 && /SPDX-License-Identifier: Apache-2\.0/ { licensed = 1 }
    { lines = FNR }
    is_c {
        text = in_comment || /[\/"\047]/ ? code($0) : $0
        if (match(text, /(^|[^A-Za-z0-9_.>])(strcpy|strcat|stpcpy|sprintf|vsprintf|atoi|atol|atoll|atof|gets|system|popen|tmpnam|mktemp|alloca|pthread_mutex_timedlock|sem_timedwait)[ \t]*\(/)) {
            name = substr(text, RSTART, RLENGTH)
            gsub(/[^a-z_]/, "", name)
            print FILENAME ":" FNR ": " name "() is not used here"
        }
    }
    END {
        if (lines > longest) print last ":" lines ": longer than " longest " lines"
        if (!licensed) print last ":1: no SPDX-License-Identifier: Apache-2.0 in the first three lines"
    }' "${files[@]}")
finish "$violations" "${#files[@]}"
