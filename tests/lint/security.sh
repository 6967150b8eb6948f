#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Holds docs/security.md to the tests that it names: "FILE: NAME, NAME; FILE: NAME" in the last
# column of its claims. A NAME is a function of a unit test, or how a bats test's name begins (one
# for each FILE).
set -u
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
map=${1:-$top/docs/security.md}
[ -r "$map" ] || { echo "security.sh: $map cannot be read" >&2 && exit 2; }

has_test() { # file name
    local path
    path=$(find "$top/tests" -name "$1" | head -n 1)
    [ -n "$path" ] || return 1
    case $1 in
    *.bats) grep -qF "@test \"$2" "$path" ;;
    *) grep -qE "^static void $2\(void\)" "$path" ;;
    esac
}

count=0 missing=0 file=
while IFS= read -r part; do
    case $part in
    *.c:* | *.bats:*)
        file=${part%%:*}
        part=${part#*: }
        ;;
    esac
    [ -n "$part" ] || continue
    count=$((count + 1))
    has_test "$file" "$part" || { echo "docs/security.md names \"$file: $part\", which does not exist" && missing=$((missing + 1)); }
done < <(sed -n '/^## Claims/,/^Flags/s/^|.*| \([^|]*[^ |]\) *|$/\1/p' "$map" | grep -v '^held by$\|^-*$' | sed 's/; /\n/g' | sed '/^ *[a-z_]*\.c:/s/, /\n/g' | sed 's/^ *//')
[ "$count" -gt 0 ] || { echo "security.sh: $map names no test" >&2 && exit 2; }
echo "security.sh: $count tests named, $missing missing"
[ "$missing" = 0 ]
