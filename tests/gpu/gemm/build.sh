#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2086 # flags and objects are lists of words
# Builds the grouped GEMM's test and benchmark library without the rest of the
# tree: build.sh [OUTDIR].  Needs nvcc (12.4 or newer) and a C compiler; no GPU.
#   NVCC, CC, HOST_CXX   compilers [nvcc, gcc, g++]
#   PORTABLE_ARCH        architectures beside sm_90a ["80 89 100" as nvcc has them]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
gemm=$root/lib/backend/cuda/gemm
out=${1:-$root/build-gemm}
nvcc=${NVCC:-nvcc}
cc=${CC:-gcc}
cxx=${HOST_CXX:-g++}
mkdir -p "$out"
cuda=$(dirname "$(dirname "$(command -v "$nvcc")")")
known=$("$nvcc" --list-gpu-code | tr '\n' ' ')
flags="-std=c++17 -O3 -ccbin $cxx -I$root/lib -I$root/lib/include -Xcompiler -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics"
sm90="-gencode=arch=compute_90a,code=sm_90a"
wide=$sm90
for arch in ${PORTABLE_ARCH-80 89 100}; do
    case " $known " in
        *" sm_$arch "*) wide="$wide -gencode=arch=compute_$arch,code=sm_$arch" ;;
    esac
done

compile() { # NAME SOURCE FLAGS
    if ! "$nvcc" $flags $3 -Xptxas -v -c "$2" -o "$out/$1.o" 2>"$out/$1.log"; then
        cat "$out/$1.log" >&2
        exit 1
    fi
    sh "$here/compiled.sh" log "$out/$1.log" || exit 1
}

compile prepare "$gemm/gg_prepare.cu" "$wide" &
compile bf16 "$gemm/gg_sm90_bf16.cu" "$sm90"
wait $!
compile portable "$gemm/gg_portable.cu" "$wide" &
compile f16 "$gemm/gg_sm90_f16.cu" "$sm90"
wait $!
compile chain_bf16 "$gemm/gg_sm90_chain_bf16.cu" "$sm90" &
compile chain_f16 "$gemm/gg_sm90_chain_f16.cu" "$sm90"
wait $!
compile copy "$here/bench_copy.cu" "$wide" &
compile test "$here/test_grouped_gemm.cu" "$wide"
wait $!
compile rows "$root/lib/backend/cuda/kernels.cu" "$wide" &
compile test_chain "$here/test_chain.cu" "$sm90"
wait $!
for source in "$gemm/gg_host.c" "$gemm/gg_chain.c" "$root/lib/core/status.c"; do
    "$cc" -std=gnu11 -O2 -fPIC -Wall -Wextra -Werror -I"$root/lib" -I"$root/lib/include" \
        -isystem "$cuda/include" -c "$source" -o "$out/$(basename "$source" .c).o"
done
objects="$out/prepare.o $out/bf16.o $out/f16.o $out/chain_bf16.o $out/chain_f16.o $out/portable.o $out/gg_host.o $out/gg_chain.o $out/status.o"
sh "$here/compiled.sh" objects $objects
"$nvcc" -ccbin "$cxx" -cudart static $objects "$out/test.o" -o "$out/test_grouped_gemm"
"$nvcc" -ccbin "$cxx" -cudart static $objects "$out/rows.o" "$out/test_chain.o" -o "$out/test_chain"
"$cc" -shared -o "$out/libepo_gemm.so" $objects "$out/copy.o" -L"$cuda/lib64" -lcudart_static \
    -ldl -lrt -lpthread
echo "$out/test_grouped_gemm $out/libepo_gemm.so"
