#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes gg_wgmma.cuh: one wrapper per tile width and input type."""

HEAD = """/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_wgmma.cuh - wgmma.mma_async m64nNk16 with fp32 accumulators, both operands in
 * shared memory.  Written by gen_wgmma.py.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_WGMMA_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_WGMMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace gg {

/* d[64][N] += A[64][16] B[16][N]; kTransA/B: 0 the operand is K-major, 1 M/N-major. */
template <class T, int kN, int kTransA, int kTransB> struct wgmma;
"""


def wrapper(ctype, ptx, n):
    regs = n // 2
    lines = []
    for i in range(0, regs, 16):
        names = ", ".join(f"%{j}" for j in range(i, i + 16))
        lines.append(f'            "{names}{"," if i + 16 < regs else ""} "')
    outs = []
    for i in range(0, regs, 4):
        outs.append(", ".join(f'"+f"(d[{j}])' for j in range(i, i + 4)))
    body = "\n".join(lines)
    out = ",\n              ".join(outs)
    return f"""
template <int kTransA, int kTransB> struct wgmma<{ctype}, {n}, kTransA, kTransB> {{
    static __device__ __forceinline__ void mma(float (&d)[{regs}], uint64_t a, uint64_t b) {{
        asm volatile(
            "{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} {{"
{body}
            "}}, %{regs}, %{regs + 1}, p, 1, 1, %{regs + 2}, %{regs + 3};\\n}}"
            : {out}
            : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB));
    }}
}};
"""


def main():
    text = HEAD
    for ctype, ptx in (("__nv_bfloat16", "bf16"), ("__half", "f16")):
        for n in (128, 192, 256):
            text += wrapper(ctype, ptx, n)
    text += "\n} /* namespace gg */\n#endif\n"
    with open("gg_wgmma.cuh", "w", encoding="ascii") as f:
        f.write(text)


main()
