#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What a build of the grouped GEMM must have come to; status 1 and why where it has not.
#   compiled.sh log FILE...        what nvcc -Xptxas -v said: no registers and no asynchronous
#                                  products given up
#   compiled.sh objects OBJECT...  plain C at run time: nothing of ours may need the C++ library
set -u
what=${1:?log or objects} && shift
for file; do
    [ -r "$file" ] || { echo "compiled.sh: $file cannot be read" >&2 && exit 2; }
done
case $what in
    log) found=$(grep -HE 'C7508|C7510|serialized' "$@") why="ptxas gave up registers or asynchronous products" ;;
    objects) found=$(nm -uA "$@" | grep -E '_ZNSt|_ZSt|__cxa_|__gxx_personality') why="objects need the C++ library" ;;
    *) echo "compiled.sh: log or objects, not $what" >&2 && exit 2 ;;
esac
[ -z "$found" ] || { printf '%s:\n%s\n' "compiled.sh: $why" "$found" >&2 && exit 1; }
