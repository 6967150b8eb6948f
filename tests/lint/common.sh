# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the checks of tests/lint share. Sourced; a check gets the tree as its argument, else from
# EPO_SRC_DIR, else its own. Violations go to standard output, one a line, as FILE:LINE: TEXT.
set -u
lint_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "${1:-${EPO_SRC_DIR:-$lint_dir/../..}}" && pwd) || exit 2

sources() { # name pattern...: files of that name, relative to the tree, without build folders
    local pattern names=()
    for pattern in "$@"; do
        names+=(${names[@]+-o} -name "$pattern")
    done
    (cd "$root" && find lib spank tools tests jobscripts python m4 etc packaging .ci ./*.sh \( "${names[@]}" \) -type f 2>/dev/null) |
        grep -vE '^m4/(libtool|lt.*)\.m4$' | sed 's|^\./||' | sort
}

need_files() { # a check that looks at nothing must not pass
    [ $# -gt 0 ] || { echo "$(basename "$0"): nothing to check under $root" >&2 && exit 2; }
}

finish() { # violations checked: says how it went, exits
    echo "$(basename "$0"): $(grep -c . <<<"$1") violations in $2 files"
    [ -z "$1" ] || { echo "$1" && exit 1; }
    exit 0
}
