#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# shell.sh [TREE]: shellcheck over every shell script. Status 77 (left out) without shellcheck.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command -v shellcheck >/dev/null || { echo "shellcheck is not installed (Debian and Ubuntu: shellcheck)" && exit 77; }
# Scripts by their first line, sourced parts by their directive.
mapfile -t files < <(sources '*' | grep -v '^tests/fuzz/seeds/' | while read -r name; do
    head -n 3 "$root/$name" | grep -qaE '^#!.*[/ ](sh|bash|dash|bats)$|shellcheck shell=' && echo "$name"
done)
need_files "${files[@]}"
# bats sets variables that shellcheck cannot see, and its tests split words at will.
violations=$(cd "$root" && for name in "${files[@]}"; do
    case $name in
    *.bats) shellcheck --format=gcc --exclude=SC2030,SC2031,SC2154,SC2086,SC2317 "$name" ;;
    *) shellcheck --format=gcc "$name" ;;
    esac
done)
finish "$violations" "${#files[@]}"
