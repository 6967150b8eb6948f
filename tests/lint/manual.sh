#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# manual.sh [TREE]: the man pages are well formed, and they and the code name the same options,
# commands, configuration keys, variables and exit statuses. The commands' own --help is compared
# where they are built (EPO_BUILD_DIR); the rest is read from the sources.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

man=docs/man
build=${EPO_BUILD_DIR:-$root/build}
cd "$root" || exit 2
for page in ep-overlap.1 ep-train.1 ep_overlap.8 ep_overlap.conf.5; do
    [ -r "$man/$page" ] || { echo "manual.sh: $root/$man/$page is missing" >&2 && exit 2; }
done

only_in() { # message file-of-places: lines of stdin, one name each
    local name
    while read -r name; do echo "$2:1: $1: $name"; done
}

compare() { # page what wanted found: both lists, one name a line
    comm -23 <(grep . <<<"$3" | sort -u) <(grep . <<<"$4" | sort -u) | only_in "$2, not described here" "$1"
    comm -13 <(grep . <<<"$3" | sort -u) <(grep . <<<"$4" | sort -u) | only_in "described here, but no $2" "$1"
}

# Names after a tag line ".It Fl -NAME ..." of the part of a page between two headings.
tags() { # macro; page on stdin
    sed -nE "s/^\.It $1 //p" | tr ' ' '\n' | sed -nE "$2"
}
flags_of() { tags Fl 's/^-([a-z][a-z-]*)$/\1/p'; }
keys_of() { tags Ic 's/^([a-z_]+)$/\1/p'; }
section() { # page heading-pattern: from .Ss or .Sh HEADING to the next
    awk -v heading="$2" '/^\.S[hs] / { on = $0 ~ heading } on' "$1"
}

# Options at the start of a line of help, before its examples.
help_flags() { sed '/^examples:/,$d' | grep -oE '^ {1,6}--[a-z-]+( [A-Z]+)?(, --[a-z-]+)?' | grep -oE -- '--[a-z][a-z-]*' | sed 's/^--//' | grep -vxE 'help|version'; }

well_formed() {
    local page
    for page in "$man"/*.[1-8]; do
        if command -v mandoc >/dev/null; then
            mandoc -Tlint -Wwarning "$page" 2>&1 | sed -nE "s|^mandoc: ([^:]+:[0-9]+):[0-9]+: |\1: |p"
        elif command -v groff >/dev/null; then
            groff -ww -mdoc -Tascii "$page" 2>&1 >/dev/null | sed -E "s|^.*(mdoc\|$page):|$page:|"
        fi
    done
}

options_and_variables() {
    local named words
    # srun's options: the table, and the twin
    named=$({
        sed -nE 's/^ *\[EPO_OPT_[A-Z_]+\] = \{"([a-z-]+)".*/\1/p' lib/core/options.c
        sed -nE 's/.*EPO_OPT_DELAY_WGRAD, "([a-z-]+)",.*/\1/p' spank/options.c
    })
    compare "$man/ep_overlap.8" "option of srun" "$named" "$(section "$man/ep_overlap.8" '^.Ss Options' | flags_of)"
    words=$(sed -nE '/^static const char \*const [a-z]+_values\[\]/,/;/p' lib/core/options.c | grep -oE '"[a-z:]+"' | tr -d '"')
    for word in $words; do
        grep -qwF -- "$word" "$man/ep_overlap.8" || echo "$man/ep_overlap.8:1: value, not described here: $word"
    done
    compare "$man/ep_overlap.8" "variable of lib/core/names.h" \
        "$(grep -oE '"(EP_OVERLAP|SLURM_EP)_[A-Z_]+"' lib/core/names.h | tr -d '"')" \
        "$(tags Ev 's/^((EP_OVERLAP|SLURM_EP)_[A-Z_]+)$/\1/p' <"$man/ep_overlap.8")"
}

configuration() {
    local keys
    keys=$(sed -nE 's/^ *\{"([a-z_]+)", (config_)?read_.*/\1/p' lib/core/config.c)
    compare "$man/ep_overlap.conf.5" "key of lib/core/config.c" "$keys" "$(keys_of <"$man/ep_overlap.conf.5")"
    for key in $keys; do
        grep -qE "(^|[^a-z_])$key( =|,|   )" etc/ep_overlap.conf || echo "etc/ep_overlap.conf:1: key, not in the sample: $key"
    done
}

exit_statuses() {
    compare "$man/ep-overlap.1" "exit status of tools/ep-overlap/tool.h" \
        "$(sed -nE 's/^ *EPO_EXIT_[A-Z]+ = ([0-9]+).*/\1/p' tools/ep-overlap/tool.h)" \
        "$(section "$man/ep-overlap.1" '^.Sh EXIT STATUS' | sed -nE 's/^\.It ([0-9]+)$/\1/p')"
}

usage_flags() { # command: options that its usage line names
    "$build/ep-overlap" "$1" --help | sed -nE '/^usage/,/^$/p' | grep -oE -- '\[--[a-z-]+' | sed 's/^\[--//'
}

toolkit() {
    local commands command described
    [ -x "$build/ep-overlap" ] || return 0
    commands=$("$build/ep-overlap" --help | sed -nE '/^usage:/,/^examples:/s/^  ([a-z]+) +[^ ].*/\1/p')
    described=$(sed -nE 's/^\.Ss ep-overlap ([a-z]+).*/\1/p' "$man/ep-overlap.1")
    compare "$man/ep-overlap.1" "command of ep-overlap" "$commands" "$described"
    for command in $commands; do
        compare "$man/ep-overlap.1" "option of ep-overlap $command" \
            "$({ "$build/ep-overlap" "$command" --help | help_flags; usage_flags "$command"; })" \
            "$(section "$man/ep-overlap.1" "^.Ss ep-overlap $command( |\$)" | flags_of)"
    done
}

trainer() {
    [ -x "$build/tools/ep-train/ep-train" ] || return 0
    compare "$man/ep-train.1" "option of ep-train" "$("$build/tools/ep-train/ep-train" --help | help_flags)" "$(flags_of <"$man/ep-train.1")"
}

violations=$(
    well_formed
    options_and_variables
    configuration
    exit_statuses
    toolkit
    trainer
)
finish "$violations" "$(find "$man" -name '*.[1-8]' | wc -l)"
