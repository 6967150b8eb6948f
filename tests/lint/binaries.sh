#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# binaries.sh [FOLDER]: holds the shared objects below FOLDER (default: the build's staged
# install) to binaries.tsv, to symbols no newer than GLIBC_2.34, and to the usual hardening.
# Status 77 (left out) in a build with sanitizers, whose run-time libraries are of another kind.
set -u
lint_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
newest=2.34
if [ $# -gt 0 ]; then
    folder=$1
else
    here=$lint_dir/../cluster
    # shellcheck disable=SC2034 # common.sh reads it
    plugin=0
    # shellcheck source=tests/cluster/common.sh
    . "$here/common.sh"
    stage_find || exit $?
    folder=${EPO_STAGE_DIR:-}
fi
[ -d "$folder" ] || { echo "binaries.sh: no such folder: '$folder'" >&2 && exit 2; }

complain() { violations+="$file: $*"$'\n'; }

check_exports() { # allowed
    local bad
    bad=$(nm -D --defined-only "$file" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | grep -vxE "$1" | tr '\n' ' ')
    [ -z "$bad" ] || complain "exports more than $1: $bad"
    [ "$(nm -D --defined-only "$file" | awk '$2 != "A"' | wc -l)" -gt 0 ] || complain "exports nothing"
}

check_glibc() {
    local version newer=
    for version in $(readelf -W --dyn-syms "$file" | grep -o '@GLIBC_[0-9.]*' | sed 's/@GLIBC_//' | sort -uV); do
        [ "$(printf '%s\n' "$version" "$newest" | sort -V | tail -n 1)" = "$newest" ] ||
            newer="$newer $(readelf -W --dyn-syms "$file" | grep -oE "[A-Za-z0-9_]+@GLIBC_$version( |$)" | tr -d ' ')"
    done
    [ -z "$newer" ] || complain "needs symbols newer than GLIBC_$newest:$newer"
}

check_needed() { # allowed
    local bad
    bad=$(readelf -W -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vxE "lib(c|m|dl|rt|pthread)\.so\.[0-9]+|ld-linux[-a-z0-9_]*\.so\.[0-9]+|$1" | tr '\n' ' ')
    [ -z "$bad" ] || complain "needs more than libc${1:+ and $1}: $bad"
}

check_hardening() {
    local headers dynamic
    headers=$(readelf -W -l "$file")
    dynamic=$(readelf -W -d "$file")
    grep -qE '^ *GNU_STACK.* RW +0x' <<<"$headers" || complain "its stack is executable"
    grep -q '^ *GNU_RELRO' <<<"$headers" || complain "not linked with -z relro"
    grep -qE '\(BIND_NOW\)|Flags:.*NOW' <<<"$dynamic" || complain "not linked with -z now"
    ! grep -qE '\(TEXTREL\)|TEXTREL' <<<"$dynamic" || complain "has text relocations"
    ! grep -qE '\((RPATH|RUNPATH)\)' <<<"$dynamic" || complain "has a RPATH"
    # Marks of the whole file (IBT, SHSTK) need a C library built with them; our own code has them
    # everywhere.
    if readelf -h "$file" | grep -q 'X86-64'; then
        local entry
        entry=$(nm -D --defined-only "$file" | awk '$2 == "T" { sub(/@.*/, "", $3); print $3; exit }')
        [ -z "$entry" ] || objdump -d --disassemble="$entry" "$file" | grep -q 'endbr64' || complain "not built with -fcf-protection=full"
    fi
}

violations='' count=0
while read -r file; do
    name=$(basename "$file")
    name=${name%%.so*}.so
    if readelf -W --dyn-syms "$file" | grep -qE ' __(asan|tsan|ubsan)_'; then
        echo "binaries.sh: $name is built with sanitizers" && exit 77
    fi
    row=$(awk -F '\t' -v name="$name" '!/^#/ && $1 == name' "$lint_dir/binaries.tsv")
    [ -n "$row" ] || { complain "is not in binaries.tsv" && continue; }
    IFS=$'\t' read -r _ exports needed <<<"$row"
    count=$((count + 1))
    check_exports "$exports"
    check_glibc
    check_needed "${needed#-}"
    check_hardening
done < <(find "$folder" -type f -name '*.so*' ! -name '*.so.conf' | sort)
[ "$count" -gt 0 ] || [ -n "$violations" ] || { echo "binaries.sh: no shared object below $folder" >&2 && exit 2; }
echo "binaries.sh: $(grep -c . <<<"$violations") violations in $count shared objects"
[ -z "$violations" ] || { printf '%s' "$violations" && exit 1; }
