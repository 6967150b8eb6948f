#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the grouped GEMM beside torch._grouped_mm and dense cuBLAS, interleaved in
one run, and prints ratios.

  bench_grouped_gemm.py LIBRARY [--shape Q|D|mixtral|gptoss] [--only rival,extra,...]
"""
import argparse
import json
import sys

import torch
import torch.nn.functional as F

import gg

# experts on one rank, hidden, ffn, rows per expert of one rank of two
SHAPES = {
    "Q": (64, 2048, 768, (512, 256, 128)),
    "D": (32, 7168, 2048, (256,)),
    "mixtral": (4, 4096, 14336, (2048,)),
    "gptoss": (64, 2880, 2880, (256,)),
}
ROWS = []


def row(label, ours, other, spread, flops, note=""):
    """One line: times in us, ours over the rival's speed (>1: ours is faster)."""
    ROWS.append((label, ours, other, other / ours if other else None, flops / ours * 1e-6, note))
    ratio = f"{other / ours:5.2f}x" if other else "     -"
    print(f"{label:34s} ours {ours:8.1f}  rival {other or 0:8.1f}  {ratio}  "
          f"{flops / ours * 1e-6:6.0f} TFLOP/s  spread {spread:4.1%}  {note}", flush=True)


class Work:
    """Tensors of one layer: weights, rows, gradients; normal values."""

    def __init__(self, lib, shape, counts):
        self.lib = lib
        self.E, self.H, self.F = SHAPES[shape][:3]
        self.counts = counts
        rows = sum(counts)
        self.rows = rows
        make = lambda *s: (torch.randn(*s, device="cuda", dtype=torch.bfloat16) * 0.5)
        self.x, self.dy = make(rows, self.H), make(rows, self.H)
        self.h, self.act = make(rows, 2 * self.F), make(rows, self.F)
        self.count = torch.tensor(counts, dtype=torch.int64, device="cuda")
        ends = torch.cumsum(self.count, 0)
        self.first = ends - self.count
        self.offs = ends.to(torch.int32)
        self.w = torch.rand(rows, device="cuda")

    def weights(self):
        make = lambda *s: (torch.randn(*s, device="cuda", dtype=torch.bfloat16) * 0.05)
        self.w1 = make(self.E, 2 * self.F, self.H)
        self.w2 = make(self.E, self.H, self.F)

    def call(self, kind, a, b, out, n, k, **more):
        return gg.Call(self.lib, kind, a, b, out, n, k, self.first, self.count, rows=self.rows,
                       **more).finish()

    def empty(self, *shape, dtype=torch.bfloat16):
        return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


def operations(w):
    """name -> (n, k, ours, rival, dense, output, reference of the rival)."""
    f2, h, f = 2 * w.F, w.H, w.F
    y1, y2 = w.empty(w.rows, f2), w.empty(w.rows, h)
    da, dx = w.empty(w.rows, f), w.empty(w.rows, h)
    g1, g2 = w.empty(w.E, f2, h), w.empty(w.E, h, f)
    mm = torch._grouped_mm
    o = w.offs
    table = {
        "fc1": (f2, h, w.call(gg.FORWARD, w.x, w.w1, y1, f2, h), y1,
                lambda: mm(w.x, w.w1.transpose(1, 2), offs=o),
                lambda: torch.mm(w.x, w.w1[0].t())),
        "fc2": (h, f, w.call(gg.FORWARD, w.act, w.w2, y2, h, f), y2,
                lambda: mm(w.act, w.w2.transpose(1, 2), offs=o),
                lambda: torch.mm(w.act, w.w2[0].t())),
        "dgrad2": (h, f, w.call(gg.DGRAD, w.dy, w.w2, da, h, f), da,
                   lambda: mm(w.dy, w.w2, offs=o), lambda: torch.mm(w.dy, w.w2[0])),
        "dgrad1": (f2, h, w.call(gg.DGRAD, w.h, w.w1, dx, f2, h), dx,
                   lambda: mm(w.h, w.w1, offs=o), lambda: torch.mm(w.h, w.w1[0])),
        "wgrad1": (f2, h, w.call(gg.WGRAD, w.h, w.x, g1, f2, h), g1,
                   lambda: mm(w.h.t(), w.x, offs=o), lambda: torch.mm(w.h.t(), w.x)),
        "wgrad2": (h, f, w.call(gg.WGRAD, w.dy, w.act, g2, h, f), g2,
                   lambda: mm(w.dy.t(), w.act, offs=o), lambda: torch.mm(w.dy.t(), w.act)),
    }
    return table


def agree(name, out, other):
    err = ((out.float() - other.float()).norm() / other.float().norm()).item()
    if not err < 6e-3:
        print(f"WRONG {name}: relative difference {err}")
        sys.exit(1)


def bench_rivals(lib, shape, style, rows, w1w2):
    experts = SHAPES[shape][0]
    w = Work(lib, shape, gg.counts_of(style, experts, rows))
    w.w1, w.w2 = w1w2
    for name, (n, k, ours, out, rival, dense) in operations(w).items():
        ours()
        agree(name, out, rival())
        fns = {"ours": ours, "torch": rival}
        if style == "even" and rows >= 512:
            fns["cublas"] = dense
        t, s = gg.measure(fns)
        flops = 2.0 * w.rows * n * k
        label = f"{shape} {name} {style} {rows}"
        row(label, t["ours"], t["torch"], max(s["ours"], s["torch"]), flops, "vs torch grouped")
        if "cublas" in fns:
            row(label, t["ours"], t["cublas"], s["cublas"], flops, "vs cuBLAS dense")


def bench_dense(lib, shape, rows, w1w2, repeats=7):
    """All products against dense cuBLAS, again and again: medians and what they lie between."""
    w = Work(lib, shape, gg.counts_of("even", SHAPES[shape][0], rows))
    w.w1, w.w2 = w1w2
    ratios, table = {}, operations(w)
    for _ in range(repeats):
        for name, (_, _, ours, _, _, dense) in table.items():
            t, _ = gg.measure({"ours": ours, "cublas": dense}, rounds=7)
            ratios.setdefault(name, []).append(t["cublas"] / t["ours"])
    for name, r in ratios.items():
        r.sort()
        print(f"{shape} {name} even {rows} of dense cuBLAS, {repeats} repeats: median "
              f"{r[len(r) // 2]:.3f}, {r[0]:.3f} to {r[-1]:.3f}", flush=True)


def bench_fused(lib, shape, rows, w1w2):
    """SwiGLU in the epilogue against the plain call and a pass of torch; gather."""
    w = Work(lib, shape, gg.counts_of("even", SHAPES[shape][0], rows))
    w.w1, w.w2 = w1w2
    f2, h, f = 2 * w.F, w.H, w.F
    hh, act, da = w.empty(w.rows, f2), w.empty(w.rows, f), w.empty(w.rows, f)
    dh, dw = w.empty(w.rows, f2), w.empty(w.rows, dtype=torch.float32)
    plain1 = w.call(gg.FORWARD, w.x, w.w1, hh, f2, h)
    plain2 = w.call(gg.DGRAD, w.dy, w.w2, da, h, f)
    infer = w.call(gg.FORWARD, w.x, w.w1, act, f2, h, fuse=1, row_weight=w.w)
    train = w.call(gg.FORWARD, w.x, w.w1, act, f2, h, fuse=1, row_weight=w.w, h=hh)
    back = w.call(gg.DGRAD, w.dy, w.w2, dh, h, f, fuse=1, row_weight=w.w, h=w.h, act=act,
                  row_dweight=dw)
    index = torch.randperm(w.rows, device="cuda").to(torch.int32)
    pick = (torch.randint(w.rows // 4, (w.rows,), device="cuda")).to(torch.int32)
    gather = w.call(gg.FORWARD, w.x, w.w1, hh, f2, h, a_index=index, a_rows=w.rows)
    shared = w.call(gg.FORWARD, w.x, w.w1, hh, f2, h, a_index=pick, a_rows=w.rows // 4)

    def torch_pass():
        g, u = hh.chunk(2, dim=1)
        return F.silu(g) * u * w.w[:, None]

    t, s = gg.measure({"plain1": plain1, "infer": infer, "train": train, "pass": torch_pass,
                       "plain2": plain2, "back": back, "gather": gather, "shared": shared})
    fl = 2.0 * w.rows * f2 * h
    m = max(s.values())
    row(f"{shape} fc1+SwiGLU {rows}", t["infer"], t["plain1"], m, fl, "vs plain fc1")
    row(f"{shape} fc1+SwiGLU+h {rows}", t["train"], t["plain1"] + t["pass"], m, fl,
        "vs plain fc1 + torch pass")
    row(f"{shape} dgrad2+SwiGLU {rows}", t["back"], t["plain2"] + t["pass"], m, fl / 2,
        "vs plain dgrad2 + torch forward pass")
    row(f"{shape} fc1 gathered {rows}", t["gather"], t["plain1"], m, fl, "vs not gathered")
    row(f"{shape} fc1 gathered 4x {rows}", t["shared"], t["plain1"], m, fl, "vs not gathered")


def bench_wgrad(lib, shape, rows):
    w = Work(lib, shape, gg.counts_of("even", SHAPES[shape][0], rows))
    f2, h = 2 * w.F, w.H
    fresh = w.empty(w.E, f2, h)
    main = torch.zeros(w.E, f2, h, device="cuda")
    half = torch.zeros(w.E, f2, h, device="cuda", dtype=torch.bfloat16)
    fns = {"fresh": w.call(gg.WGRAD, w.h, w.x, fresh, f2, h),
           "fp32 +=": w.call(gg.WGRAD, w.h, w.x, main, f2, h, accumulate=1),
           "bf16 +=": w.call(gg.WGRAD, w.h, w.x, half, f2, h, accumulate=1),
           "fp32 copy": lambda: main.mul_(1.0)}
    t, s = gg.measure(fns)
    fl = 2.0 * w.rows * f2 * h
    for name in ("fp32 +=", "bf16 +="):
        row(f"{shape} wgrad1 {name} {rows}", t[name], t["fresh"], s[name], fl,
            f"vs bf16 fresh; read+write of fp32 alone {t['fp32 copy']:.0f} us")


def bench_lend(lib, shape, rows, w1w2):
    """16 and 24 SMs lent to a copy kernel for a third of the time."""
    w = Work(lib, shape, gg.counts_of("even", SHAPES[shape][0], rows))
    w.w1 = w1w2[0]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    out = w.empty(w.rows, 2 * w.F)
    make = lambda **m: w.call(gg.FORWARD, w.x, w.w1, out, 2 * w.F, w.H, **m)
    main = torch.cuda.current_stream()
    comm = torch.cuda.Stream(priority=-5)
    src = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    copied = torch.zeros(1, dtype=torch.int64, device="cuda")
    alone = make()
    third = int(gg.measure({"x": alone})[0]["x"] * 1000 / 3)

    def copy(blocks):
        lib.bench_copy(dst.data_ptr(), src.data_ptr(), src.numel(), blocks, third,
                       copied.data_ptr(), comm.cuda_stream)

    def queued(blocks, call):
        def go():
            comm.wait_stream(main)
            copy(blocks)
            torch.cuda._sleep(20000)  # the copy comes first
            call.launch()
            main.wait_stream(comm)
        return go

    def joined(blocks, call, rest):
        def go():
            call.prepare()
            comm.wait_stream(main)
            copy(blocks)
            call.run()
            rest.run(comm)
            main.wait_stream(comm)
        return go

    def after_sleep():
        torch.cuda._sleep(20000)
        alone.launch()

    fns = {"alone": alone, "after sleep": after_sleep}
    for n in (16, 24):
        fns[f"queued {n}"] = queued(n, make())
        call = make(sms=sms - n)
        rest = make(sms=n)
        rest.g.workspace = call.g.workspace
        fns[f"joined {n}"] = joined(n, call, rest)
        fns[f"static {n}"] = make(sms=sms - n)
    t, s = gg.measure(fns, burst=1, rounds=21)
    for n in (16, 24):
        for how, base in (("queued", "after sleep"), ("joined", "alone")):
            expect = t[base] + third / 1000.0 * n / sms
            row(f"{shape} fc1, {n} SMs lent, {how}", t[f"{how} {n}"], expect, s[f"{how} {n}"],
                2.0 * w.rows * 2 * w.F * w.H, f"vs what the SM time predicts; {n} SMs gone for "
                f"good: {t[f'static {n}']:.0f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("library")
    ap.add_argument("--shape", default="Q")
    ap.add_argument("--only", default="rivals,dense,fused,wgrad,lend")
    ap.add_argument("--styles", default="even,random,zipf")
    ap.add_argument("--json")
    args = ap.parse_args()
    lib = gg.library(args.library)
    torch.manual_seed(1)
    for shape in args.shape.split(","):
        w = Work(lib, shape, [8] * SHAPES[shape][0])
        w.weights()
        both = (w.w1, w.w2)
        sizes = SHAPES[shape][3]
        for part in args.only.split(","):
            if part == "rivals":
                for style in args.styles.split(","):
                    for rows in sizes if style == "even" else sizes[:1]:
                        bench_rivals(lib, shape, style, rows, both)
            elif part == "dense":
                bench_dense(lib, shape, sizes[0], both)
            elif part == "fused":
                bench_fused(lib, shape, sizes[0], both)
            elif part == "wgrad":
                bench_wgrad(lib, shape, sizes[0])
            elif part == "lend":
                bench_lend(lib, shape, sizes[0], both)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    if args.json:
        with open(args.json, "w", encoding="ascii") as f:
            json.dump(ROWS, f, indent=1)


if __name__ == "__main__":
    main()
