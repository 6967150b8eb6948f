#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # output: bats
# "make install" and "make uninstall": where files go, and that nothing stays.

bats_require_minimum_version 1.5.0

setup() {
    top=$(cd "$BATS_TEST_DIRNAME/../.." && pwd)
    build=${EPO_BUILD_DIR:-$top/build}
    cd "$BATS_TEST_TMPDIR" || return 1
}

files() { (cd "$1" && find . ! -type d | sort); }

@test "DESTDIR with blanks gets what one without gets; uninstall leaves nothing" {
    make -s -C "$build" install DESTDIR="$PWD/plain" >plain.log 2>&1
    make -s -C "$build" install DESTDIR="$PWD/with blanks/and more" >blanks.log 2>&1
    diff <(files plain) <(files "with blanks/and more")
    [ ! -e "$build/.destdir" ]
    [ "$(files plain | grep -c 'ep_overlap\.so$\|/probe$')" -ge 1 ]
    make -s -C "$build" uninstall DESTDIR="$PWD/with blanks/and more" >>blanks.log 2>&1
    make -s -C "$build" uninstall DESTDIR="$PWD/plain" >>plain.log 2>&1
    run find plain "with blanks" ! -type d -o -name ep-overlap
    echo "$output"
    [ -z "$output" ]
}

@test "README's links to pages, and theirs to each other, lead somewhere where they are installed" {
    make -s -C "$build" install DESTDIR="$PWD/plain" >plain.log 2>&1
    readme=$(find plain -path '*/doc/*' -name README.md)
    [ -n "$readme" ]
    doc=${readme%/README.md}
    { grep -oE '\]\(docs/[^)#]+' "$readme" | sed 's|](|./|' &&
        grep -hoE '\]\([^)#:]+' "$doc"/docs/*.md | sed 's|](|docs/|'; } | sort -u >links
    [ "$(wc -l <links)" -ge 12 ]
    while read -r link; do
        [ -e "$doc/$link" ] || { echo "leads nowhere: $link" && false; }
    done <links
}

@test "modules have no libtool archive beside them, programs no absolute path in them" {
    make -s -C "$build" install DESTDIR="$PWD/plain" >plain.log 2>&1
    run find plain -name '*.la' ! -name libep_overlap.la
    echo "$output"
    [ -z "$output" ]
    find plain -type f -perm -100 >list
    [ -s list ]
    while read -r file; do
        run readelf -d "$file"
        [[ ! $output =~ R(UN)?PATH.*\[/ ]]
    done <list
}

@test "the plugin preloads the library by its SONAME: the name without is the link of those who compile" {
    make -s -C "$build" install DESTDIR="$PWD/plain" >plain.log 2>&1
    plugin=$(find plain -name ep_overlap.so)
    [ -n "$plugin" ] || skip "no plugin in this build"
    library=$(LC_ALL=C grep -aoE '/[^[:cntrl:][:space:]]*/libep_overlap\.so[.0-9]*' "$plugin" | sort -u)
    echo "$library"
    [[ $library == */libep_overlap.so.0 ]]
    [ -e "plain$library" ]
}

@test "packages with the engine for GPUs: a Toolkit that is not there is named, before anything is built" {
    for script in build-deb.sh build-rpm.sh; do
        run "$top/packaging/$script" -g "$PWD/cuda" "$PWD/out"
        [ "$status" -eq 1 ]
        [[ $output == "$script: no CUDA Toolkit in $PWD/cuda (bin/nvcc); without -g the packages serve machines without GPUs" ]]
        [ ! -e out ]
        run "$top/packaging/$script" -g
        [ "$status" -eq 2 ]
    done
}
