#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# format.sh [TREE]: clang-format's opinion of every C source. Status 77 (left out) without it.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command -v clang-format >/dev/null || { echo "clang-format is not installed (Debian and Ubuntu: clang-format)" && exit 77; }
mapfile -t files < <(sources '*.c' '*.h' '*.cu' '*.cuh')
need_files "${files[@]}"
violations=$(cd "$root" && clang-format --dry-run "${files[@]}" 2>&1 | grep -E 'warning:|error:')
finish "$violations" "${#files[@]}"
