#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A strong baseline beside the layer, in turns in one run: our dispatch and combine run serially
(rows arrive expert-major, so permute and unpermute are fused into them), torch._grouped_mm, and
SwiGLU with the router weight in one pass (Triton; plain torch without it, which is said).

  bench_strong.py RANKS TOKENS HIDDEN FFN EXPERTS TOP_K [REPEATS] [--arms flex:serial,flex:auto,...]

PYTHONPATH=python, EP_OVERLAP_LIBRARY and the engine beside it. One process a GPU; plans are made
before; calls in a row and medians of the slowest rank as tests/gpu/bench has them. Prints a table
and one JSON line: baseline over arm, forward and forward + backward.
"""
import argparse
import json
import os
import re
import statistics
import sys
from ctypes import byref, c_void_p

from launch import launch

HERE = os.path.abspath(__file__)
CALLS, WARM = 4, 3  # as tests/gpu/bench.h


def parse():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("ranks", "tokens", "hidden", "ffn", "experts", "top_k"):
        p.add_argument(name, type=int)
    p.add_argument("repeats", type=int, nargs="?", default=7)
    p.add_argument("--arms", default="flex:serial,flex:auto,alltoall:auto")
    p.add_argument("--fresh", action="store_true", help="the baseline's weight gradients are not added up")
    p.add_argument("--baseline", default="flex", help="the dispatcher of the baseline")
    return p.parse_args()


def trials():
    """Plans with a pass after which a GPU's engine has chosen: the number of measure/device."""
    with open(os.path.join(os.path.dirname(HERE), "../../lib/measure/device.c")) as f:
        return int(re.search(r"gpu \? (\d+)", f.read())[1])


def activation(torch, ffn):
    """forward(h, w) -> a, backward(h, w, da) -> dh, dw; and its name."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        silu = torch.nn.functional.silu

        def forward(h, w):
            gate, up = h.float().chunk(2, -1)
            return (silu(gate) * up * w[:, None]).to(h.dtype)

        def backward(h, w, da):
            gate, up = h.float().chunk(2, -1)
            s, d = torch.sigmoid(gate), da.float()
            dw = (d * gate * s * up).sum(-1)
            d = d * w[:, None]
            return torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s], -1).to(h.dtype), dw

        return forward, backward, "plain torch"
    block = triton.next_power_of_2(ffn)

    @triton.jit
    def up_kernel(h, w, a, F: tl.constexpr, B: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, B)
        gate = tl.load(h + row * 2 * F + at, at < F, 0.0).to(tl.float32)
        up = tl.load(h + row * 2 * F + F + at, at < F, 0.0).to(tl.float32)
        out = tl.load(w + row) * gate * tl.sigmoid(gate) * up
        tl.store(a + row * F + at, out.to(a.dtype.element_ty), at < F)

    @triton.jit
    def back_kernel(h, w, da, dh, dw, F: tl.constexpr, B: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, B)
        gate = tl.load(h + row * 2 * F + at, at < F, 0.0).to(tl.float32)
        up = tl.load(h + row * 2 * F + F + at, at < F, 0.0).to(tl.float32)
        d = tl.load(da + row * F + at, at < F, 0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        tl.store(dw + row, tl.sum(d * gate * s * up, 0))
        d = d * tl.load(w + row)
        tl.store(dh + row * 2 * F + at, (d * up * s * (1 + gate * (1 - s))).to(dh.dtype.element_ty), at < F)
        tl.store(dh + row * 2 * F + F + at, (d * gate * s).to(dh.dtype.element_ty), at < F)

    def forward(h, w):
        a = h.new_empty(h.shape[0], ffn)
        up_kernel[(h.shape[0],)](h, w, a, ffn, block)
        return a

    def backward(h, w, da):
        dh, dw = torch.empty_like(h), w.new_empty(h.shape[0])
        back_kernel[(h.shape[0],)](h, w, da, dh, dw, ffn, block)
        return dh, dw

    return forward, backward, "Triton"


def rank_main():
    import torch
    import torch.distributed as dist

    import ep_overlap
    from ep_overlap import _capi as c
    from ep_overlap import ops

    a, rank = parse(), int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo")
    torch.manual_seed(7 + rank)
    x = torch.randn(a.tokens, a.hidden, device="cuda").bfloat16()
    dy = torch.randn(a.tokens, a.hidden, device="cuda").bfloat16()
    experts = torch.rand(a.tokens, a.experts, device="cuda").topk(a.top_k, -1).indices
    weights = torch.full((a.tokens, a.top_k), 0.125, device="cuda")
    forward_act, backward_act, act_name = activation(torch, a.ffn)
    mm = torch._grouped_mm
    layers = []

    def layer_of(arm):
        dispatcher, chunks = arm.split(":")
        overlap = chunks != "serial"
        g = ep_overlap.Group(engine="cuda", overlap=overlap, dispatcher=dispatcher, timeout_s=20,
                             chunks=int(chunks) if chunks.isdigit() else 0 if overlap else 1)
        layer = ep_overlap.MoELayer(g, hidden=a.hidden, ffn=a.ffn, experts=a.experts, top_k=a.top_k,
                                    max_tokens=a.tokens)
        layer.w1.data.copy_(layers[0].w1 if layers else layer.w1)
        layer.w2.data.copy_(layers[0].w2 if layers else layer.w2)
        layers.append(layer)
        call = c.library().epo_forward
        y, dx, dweights = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weights)

        def run(backward):
            saved = c_void_p()
            c.check(call(layer.handle, plan.handle, x.data_ptr(), y.data_ptr(),
                         byref(saved) if backward else None, g.stream()))
            if backward:
                c.check(c.library().epo_backward(layer.handle, saved, dy.data_ptr(), dx.data_ptr(),
                                                 dweights.data_ptr(), g.stream()))
                layer.flush()
            return y, dx

        for _ in range(trials() if chunks == "auto" else 0):  # the first plans measure
            plan = layer.buffer.plan(experts, weights)
            run(True)
        plan = layer.buffer.plan(experts, weights)
        return run

    arms = {arm: layer_of(arm) for arm in a.arms.split(",")}
    group = ep_overlap.Group(engine="cuda", overlap=False, dispatcher=a.baseline, timeout_s=20, chunks=1)
    buffer = group.buffer(hidden=a.hidden, experts=a.experts, top_k=a.top_k, max_tokens=a.tokens, align_rows=1)
    plan = buffer.plan(experts, weights)
    ends = torch.tensor([f + n for f, n in zip(plan.first, plan.counts)], dtype=torch.int32, device="cuda")
    w1, w2 = layers[0].w1.detach(), layers[0].w2.detach()
    dw1, dw2 = torch.zeros_like(w1), torch.zeros_like(w2)

    def baseline(backward):
        row_weights = torch.empty(plan.rows, device="cuda")
        rows = ops._dispatch(plan, x, row_weights)
        h = mm(rows, w1.transpose(-2, -1), offs=ends)
        act = forward_act(h, row_weights)
        y, _ = ops.combine_weights(mm(act, w2.transpose(-2, -1), offs=ends), None, plan)
        if not backward:
            return y, None
        drows = ops._dispatch(plan, dy, None)
        dh, dw = backward_act(h, row_weights, mm(drows, w2, offs=ends))
        dx, _ = ops.combine_weights(mm(dh, w1, offs=ends), dw, plan)
        for grad, left, right in ((dw2, drows, act), (dw1, dh, rows)):
            new = mm(left.t(), right, offs=ends)
            if not a.fresh:  # as our layers do
                grad += new
        return y, dx

    arms = {"baseline": baseline, **arms}
    want = [t.clone() for t in baseline(True)]
    for name, run in arms.items():
        for got, right in zip(run(True), want):
            off = (got.float() - right.float()).norm() / right.float().norm()
            if not off < 0.02:
                raise SystemExit("rank %d: %s is %.3f off the baseline" % (rank, name, off))

    def measure(run, backward):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        for _ in range(CALLS):
            run(backward)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / CALLS

    times = {name: ([], []) for name in arms}
    order = list(arms)
    for rep in range(-WARM, a.repeats):
        order.append(order.pop(0))  # everyone comes behind everyone: clocks and heat hit all alike
        for name in order:
            for backward in (0, 1):
                ms = measure(arms[name], backward)
                if rep >= 0:
                    times[name][backward].append(ms)
    everyone = [None] * a.ranks
    dist.all_gather_object(everyone, times)
    if rank == 0:
        slow = {name: [[max(e[name][w][i] for e in everyone) for i in range(a.repeats)] for w in (0, 1)]
                for name in arms}
        print("# %s, torch %s: %d ranks, T=%d H=%d F=%d E=%d K=%d, medians of %d turns of the slowest rank, %d calls in a "
              "row each; plans are made before in every arm" % (
                  torch.cuda.get_device_name(), torch.__version__, a.ranks, a.tokens, a.hidden, a.ffn, a.experts, a.top_k,
                  a.repeats, CALLS))
        print("# baseline: %s dispatch and combine of this library in one piece (rows come by expert), torch._grouped_mm, "
              "SwiGLU with the router weight by %s in one pass each way, weight gradients %s" % (
                  a.baseline, act_name, "fresh" if a.fresh else "added up"))
        print("%-18s %9s %9s   baseline over it" % ("arm", "forward", "both, ms"))
        out = {}
        for name in arms:
            ms = [statistics.median(v) for v in slow[name]]
            ratio = [statistics.median(b / m for b, m in zip(slow["baseline"][w], slow[name][w])) for w in (0, 1)]
            out[name] = {"ms": [round(v, 4) for v in ms], "ratio": [round(v, 3) for v in ratio]}
            print("%-18s %9.3f %9.3f   %.2f  %.2f" % (name, *ms, *ratio))
        print("json\t" + json.dumps({"label": "strong", "tokens": a.tokens, "arms": out}), flush=True)
    dist.barrier()
    os._exit(0)  # what is still open goes with the process


def main():
    if "RANK" in os.environ:
        return rank_main()
    ranks = parse().ranks
    return launch(HERE, ranks, 55, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
