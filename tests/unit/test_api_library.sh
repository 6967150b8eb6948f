#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The built libep_overlap.so: what it exports and needs, how it finds engines, that
# the header compiles as C99, C11 and C++17, that a preload is silent.
set -u
top=${top_builddir:-.}
src=${srcdir:-.}
lib=$top/.libs/libep_overlap.so.0.0.0
header=$src/lib/include/ep_overlap.h
failed=0
check() { # NAME COMMAND...: passes when the command does
    name=$1
    shift
    if "$@"; then
        echo "ok: $name"
    else
        echo "FAILED: $name"
        failed=1
    fi
}
work=$(mktemp -d) || exit 99
trap 'rm -rf "$work"' EXIT

# exactly the functions of the header
sed -n 's/^EPO_API .*[ *]\(epo_[a-z_]*\)(.*/\1/p' "$header" | sort >"$work/declared"
nm -D --defined-only "$lib" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort >"$work/exported"
check "the header declares functions" test "$(wc -l <"$work/declared")" -gt 30
check "exports are the header's functions" diff "$work/declared" "$work/exported"

readelf -d "$lib" >"$work/dynamic"
# a sanitizer brings its own library and constructor, and cannot be preloaded
plain=0
if ! grep -q 'lib[a-z]*san\.so' "$work/dynamic" && ! nm -D "$lib" | grep -q '__[atu]san_'; then
    plain=1
    grep NEEDED "$work/dynamic" | grep -Ev '\[(libc\.so\.6|ld-linux[-a-z0-9_]*\.so\.[0-9])\]' >"$work/needed"
    # (thread-local storage names the loader, which is part of libc)
    check "needs libc alone" test ! -s "$work/needed"
    # at most one entry in .init_array: crtbegin's frame_dummy, where the compiler has it
    init=$(readelf -dW "$lib" | sed -n 's/.*INIT_ARRAYSZ) *\([0-9]*\) .*/\1/p')
    check "has no constructor" test "${init:-0}" -le 8
fi
check "SONAME" grep -q 'SONAME.*\[libep_overlap\.so\.0\]' "$work/dynamic"
newest=$(objdump -T "$lib" | sed -n 's/.*(\{0,1\}GLIBC_\([0-9.]*\).*/\1/p' | sort -V | tail -1)
check "no symbol newer than GLIBC_2.34 (newest $newest)" \
    test "$(printf '%s\n2.34\n' "$newest" | sort -V | tail -1)" = 2.34

# the header, by each language it promises
printf '#include "ep_overlap.h"\nint main(void) { epo_group_config g = EPO_GROUP_CONFIG_INIT; epo_buffer_config b = EPO_BUFFER_CONFIG_INIT;\n epo_routing r = EPO_ROUTING_INIT; epo_layer_config l = EPO_LAYER_CONFIG_INIT;\n return g.rank + 1 + b.hidden + r.tokens + l.ffn; }\n' >"$work/use.c"
cp "$work/use.c" "$work/use.cc"
flags="-Wall -Wextra -Wpedantic -Werror -fsyntax-only -I $src/lib/include"
# shellcheck disable=SC2086
check "header as C99" ${CC:-cc} -std=c99 $flags "$work/use.c"
# shellcheck disable=SC2086
check "header as C11" ${CC:-cc} -std=c11 $flags "$work/use.c"
if command -v "${CXX:-c++}" >/dev/null; then
    # shellcheck disable=SC2086
    check "header as C++17" ${CXX:-c++} -std=c++17 $flags "$work/use.cc"
else
    echo "left out: header as C++17 (no C++ compiler)"
fi

# a preload into a program that never calls it
if [ $plain = 1 ]; then
    said=$(LD_PRELOAD="$lib" /bin/true 2>&1)
    check "preload of /bin/true: status" test $? = 0
    check "preload of /bin/true: silent" test -z "$said"
else
    echo "left out in a sanitized build: NEEDED, constructors, preload of /bin/true"
fi

# engines: found beside the library, refused by name where they do not fit
mkdir -p "$work/lib/ep-overlap"
cp "$lib" "$work/lib/libep_overlap.so.0"
engine=$work/lib/ep-overlap/engine_host.so
# shellcheck disable=SC2317 # called by name
opens() { # WORDS: opening fails and says WORDS (none: it succeeds)
    text=$("$top/tests/unit/api_open" "$work/lib/libep_overlap.so.0" 2>&1)
    status=$?
    if [ -z "$1" ]; then
        [ "$status" = 0 ] && return 0
    elif [ "$status" = 1 ] && printf '%s' "$text" | grep -qF -- "$1"; then
        return 0
    fi
    echo "   status $status: $text"
    return 1
}
check "missing engine" opens "engine_host.so was found neither in $work/lib/ep-overlap nor in"
for wrong in good abi size version name null; do
    cp "$top/tests/unit/.libs/fake_$wrong.so" "$engine"
    case $wrong in
    good) words= ;;
    abi) words="$engine has engine ABI 77" ;;
    size) words="with a table of 8 bytes" ;;
    version) words="$engine is version 99.1 but libep_overlap is version" ;;
    name) words="holds the other engine, not the host engine" ;;
    null) words="does not serve engine ABI" ;;
    esac
    check "engine: $wrong" opens "$words"
done
cp "$lib" "$engine"
check "engine without entry" opens "has no epo_engine_entry"
echo junk >"$engine"
check "engine that is no library" opens "$engine does not load"
exit $failed
