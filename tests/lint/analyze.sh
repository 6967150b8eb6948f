#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# analyze.sh BUILD [-n] [-c [-b BASE]] TOOL...: what gcc's -fanalyzer (gcc), cppcheck and clang-tidy
# (tidy) say of the sources, without what tests/lint/findings.tsv explains.  BUILD is configured.
# -n prints every finding as a line for that list; -c looks at those sources alone that were changed
# since BASE [origin/main, else the last commit], or include a header of ours that was: seconds in
# place of minutes.  Status 1 if something is left; an explanation of nothing is named alone.
# shellcheck source=tests/lint/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" ''
build=$(realpath "${1:?a build folder}") && shift
as_list=0 changed=0 base=origin/main
while getopts ncb: option; do
    case $option in
    n) as_list=1 ;;
    c) changed=1 ;;
    b) base=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || set -- gcc cppcheck tidy
cd "$root" || exit 2

# CUDA's and the tests' sources are left out; status.c defines what EPO_ANALYZER wraps.
mapfile -t files < <(sources '*.c' | grep -E '^(lib|spank|tools)/' | grep -vE '/cuda/|^lib/core/status\.c$')
need_files "${files[@]}"

# Of `files`, what was changed since BASE, and what includes a changed header.
changed_files() {
    local since name
    since=$(git merge-base HEAD "$base" 2>/dev/null || echo HEAD)
    { git diff --name-only "$since" && git ls-files -o --exclude-standard; } | while read -r name; do
        case $name in
        *.c) [ ! -e "$name" ] || echo "$name" ;;
        *.h) grep -lE "^#include \"([a-z_/-]+/)?${name##*/}\"" "${files[@]}" ;;
        esac
    done | sort -u | comm -12 - <(printf '%s\n' "${files[@]}" | sort)
}
if [ "$changed" = 1 ]; then
    mapfile -t files < <(changed_files)
    [ ${#files[@]} -gt 0 ] || { echo "analyze.sh: no source was changed" && exit 0; }
fi
# Words that the Makefile fragments define as texts; which text does not matter here.
mapfile -t defines < <(grep -ohE -- "-D[A-Z_]+='\"" lib/*/Makefile.inc spank/Makefile.inc tools/*/Makefile.inc | sed "s/='.*/=\"p\"/" | sort -u)
flags=(-std=gnu11 -DEPO_ANALYZER -D_GNU_SOURCE -I"$build" -Ilib/include -Ilib -Ispank -Itools/ep-overlap -Itools/ep-train
    "${defines[@]}")
mapfile -t -O ${#flags[@]} flags < <(pkg-config --cflags-only-I openblas 2>/dev/null | tr -s ' ' '\n' | grep .)

# Each prints FILE:LINE:CHECK:message.
say_gcc() {
    printf '%s\0' "${files[@]}" | xargs -0 -P "$(nproc)" -I '{}' gcc "${flags[@]}" -O2 -fanalyzer \
        -fanalyzer-verbosity=0 -fdiagnostics-plain-output -c -o /dev/null '{}' 2>&1 |
        sed -nE 's/^([^ :]+):([0-9]+):[0-9]+: (warning|error): (.*) \[-W(analyzer[^]]*)\]$/\1:\2:\5:\4/p; /error: /p'
}
say_cppcheck() {
    printf '%s\n' "${files[@]}" | cppcheck --quiet -j "$(nproc)" --std=c11 --enable=warning,performance,portability \
        --library=posix --file-list=- -D__linux__ -D__x86_64__ "-DSPANK_PLUGIN(name,version)=" \
        -Ilib/include -Ilib -Ispank -Itools/ep-overlap -Itools/ep-train \
        --template='{file}:{line}:{id}:{message}' 2>&1 | grep -E '^[^ ]+:[0-9]+:'
}
say_tidy() {
    # shellcheck disable=SC2016 # the inner shell expands it
    printf '%s\0' "${files[@]}" | xargs -0 -P "$(nproc)" -I '{}' sh -c 'file=$1 && shift
        clang-tidy --quiet "$file" -- "$@" 2>/dev/null' tidy '{}' "${flags[@]}" |
        sed -nE "s|^$root/||; s/^([^ :]+):([0-9]+):[0-9]+: (warning|error): (.*) \[([^],]*)[^]]*\]\$/\1:\2:\5:\4/p"
}

# A finding is known by tool, file, check and the text of its line, wherever that line is now.
list=tests/lint/findings.tsv left=0
seen=$(mktemp) || exit 2
trap 'rm -f "$seen"' EXIT
for tool; do
    command=$tool
    [ "$tool" != tidy ] || command=clang-tidy
    command -v "$command" >/dev/null || { echo "analyze.sh: $command is not installed" >&2 && exit 2; }
    count=0 explained=0
    while IFS=: read -r file line check message; do
        [ -f "$file" ] || { echo "$tool: $file:$line:$check:$message" && left=$((left + 1)) && continue; }
        count=$((count + 1))
        text=$(sed -n "${line}s/^[ \t]*//p" "$file")
        if [ "$as_list" = 1 ]; then
            printf '%s\t%s\t%s\t%s\t%s\n' "$tool" "$file" "$check" "$text" "$message"
        elif grep -qF "$tool"$'\t'"$file"$'\t'"$check"$'\t'"$text"$'\t' "$list"; then
            explained=$((explained + 1))
            printf '%s\t%s\t%s\t%s\t\n' "$tool" "$file" "$check" "$text" >>"$seen"
        else
            echo "$tool: $file:$line: $message [$check]"
            left=$((left + 1))
        fi
    done < <("say_$tool" | sort -u)
    [ "$as_list" = 1 ] || echo "$tool: ${#files[@]} files, $count findings, $explained of them explained"
    [ "$as_list" = 0 ] || continue
    while IFS= read -r line; do # what this tool does not say any more: no fault, as another version of it may
        [ "$changed" = 0 ] || printf '%s\n' "${files[@]}" | grep -qxF "$(cut -f 2 <<<"$line")" || continue
        grep -qF "$(cut -f 1-4 <<<"$line")"$'\t' "$seen" && continue
        echo "$list: this $tool does not say that (any more?): $(cut -f 2-4 <<<"$line" | tr '\t' ' ')"
    done < <(grep "^$tool"$'\t' "$list")
done
[ "$as_list" = 1 ] || [ "$left" = 0 ]
