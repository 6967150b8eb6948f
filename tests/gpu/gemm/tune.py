#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures tile width, row-tile group and cluster for the shapes of known models and
writes lib/backend/cuda/gemm/gg_tuning.h.

  tune.py LIBRARY [--shape Q,gptoss,...] [--quick] [--write FILE]
"""
import argparse

import torch

import gg

# hidden, ffn, experts measured, rows per expert
SHAPES = {
    "Qwen3-30B-A3B": (2048, 768, 64, 512),
    "DeepSeek-V3": (7168, 2048, 16, 512),
    "Mixtral-8x7B": (4096, 14336, 2, 2048),
    "gpt-oss": (2880, 2880, 32, 512),
}
HEAD = """/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_tuning.h - tile width, row tiles that pass over the columns together and
 * cluster, as measured.  Written by tests/gpu/gemm/tune.py; shapes that are not listed take the
 * width that wastes the fewest columns.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_TUNING_H
#define EPO_BACKEND_CUDA_GEMM_GG_TUNING_H

typedef struct gg_tuned {
    int kind, fuse, n, k;
    int tile_n, group_m, cluster;
} gg_tuned;

/* kind, fuse, n, k, tile_n, group_m, cluster */
static const gg_tuned gg_tuning[] = {
"""


def calls(lib, name, per):
    """(label, Call) of every kind for one model, `per` rows per expert."""
    hidden, ffn, experts = SHAPES[name][:3]
    rows, two = experts * per, 2 * ffn
    make = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16) * 0.1
    x, h, act = make(rows, hidden), make(rows, two), make(rows, ffn)
    w1, w2 = make(experts, two, hidden), make(experts, hidden, ffn)
    o_h, o_x, o_f, o_dh = (torch.empty_like(t) for t in (h, x, act, h))
    weight, dweight = torch.rand(rows, device="cuda"), torch.empty(rows, device="cuda")
    count = torch.full((experts,), per, dtype=torch.int64, device="cuda")
    first = torch.cumsum(count, 0) - count

    def call(kind, a, b, c, n, k, **more):
        return gg.Call(lib, kind, a, b, c, n, k, first, count, rows=rows, **more).finish()

    g1, g2 = torch.empty_like(w1), torch.empty_like(w2)
    return [
        ("fc1", call(gg.FORWARD, x, w1, o_h, two, hidden)),
        ("fc1 SwiGLU", call(gg.FORWARD, x, w1, o_f, two, hidden, fuse=1, row_weight=weight, h=o_h)),
        ("fc2", call(gg.FORWARD, act, w2, o_x, hidden, ffn)),
        ("dgrad2", call(gg.DGRAD, x, w2, o_f, hidden, ffn)),
        ("dgrad2 SwiGLU", call(gg.DGRAD, x, w2, o_dh, hidden, ffn, fuse=1, row_weight=weight, h=h,
                               act=o_f, row_dweight=dweight)),
        ("dgrad1", call(gg.DGRAD, h, w1, o_x, two, hidden)),
        ("wgrad1", call(gg.WGRAD, h, x, g1, two, hidden)),
        ("wgrad2", call(gg.WGRAD, x, act, g2, hidden, ffn)),
    ]


def tune(call, label, quick):
    """Best (tile_n, group_m, cluster): width and cluster first, then the group."""
    g = call.g

    def variant(tile_n, group_m, cluster):
        def go():
            g.tile_n, g.group_m, g.cluster = tile_n, group_m, cluster
            call.launch()
        return go

    def best(options):
        t, spread = gg.measure({o: variant(*o) for o in options}, rounds=9, burst=2)
        order = sorted(t, key=t.get)
        flops = 2.0 * g.rows * g.n * g.k
        print(f"  {label:14s}", "  ".join(f"{o[0]}/{o[1]}/{o[2]}: {flops / t[o] * 1e-6:.0f}"
                                         for o in order[:6]),
              f"  worst {flops / t[order[-1]] * 1e-6:.0f} TFLOP/s,"
              f" spread {max(spread.values()):.1%}", flush=True)
        return order[0]

    widest = 192 if g.kind == gg.DGRAD and g.fuse else 256
    widths = best([(w, 8, c) for w in (256, 192, 128) for c in (1, 2) if w <= widest])
    if quick:
        return widths
    return best([(widths[0], m, widths[2]) for m in (2, 4, 8, 16)])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("library")
    ap.add_argument("--shape", default=",".join(SHAPES))
    ap.add_argument("--quick", action="store_true", help="only the width")
    ap.add_argument("--rows", type=int, help="rows per expert instead of each model's")
    ap.add_argument("--write")
    args = ap.parse_args()
    lib = gg.library(args.library)
    lines = []
    for name in args.shape.split(","):
        print(name)
        lines.append(f"    /* {name} */\n")
        for label, call in calls(lib, name, args.rows or SHAPES[name][3]):
            t, m, c = tune(call, label, args.quick)
            g = call.g
            lines.append(f"    {{{g.kind}, {g.fuse}, {g.n}, {g.k}, {t}, {m}, {c}}},\n")
        torch.cuda.empty_cache()
    if args.write:
        with open(args.write, "w", encoding="ascii") as f:
            f.write(HEAD + "".join(lines) + "};\n\n#endif\n")


if __name__ == "__main__":
    main()
