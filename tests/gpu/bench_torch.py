#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rival of tests/gpu/bench: an eager PyTorch MoE layer with an all-to-all dispatcher.

  bench_torch.py RANKS TOKENS HIDDEN FFN EXPERTS TOP_K [REPEATS] [--label L]

As training frameworks have it: permute by a stable sort, counts to the host, NCCL
all_to_all_single, rows sorted by expert, torch._grouped_mm and SwiGLU with the router
weight, and the same way back; autograd's backward. One process per GPU; as many calls in
a row as bench makes; medians of the slowest rank. Prints one line and one JSON line.
"""
import argparse
import json
import os
import statistics
import sys

CALLS, WARM = 4, 3  # as tests/gpu/bench.h


def parse():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("ranks", "tokens", "hidden", "ffn", "experts", "top_k"):
        p.add_argument(name, type=int)
    p.add_argument("repeats", type=int, nargs="?", default=7)
    p.add_argument("--label", default="Q")
    return p.parse_args()


def rank_main(rank, a, port, results):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=a.ranks, device_id=torch.device("cuda", rank))
    local = a.experts // a.ranks
    torch.manual_seed(7 + rank)

    def weight(*shape):
        return (0.03 * torch.randn(*shape, device="cuda")).bfloat16().requires_grad_()

    w1, w2 = weight(local, 2 * a.ffn, a.hidden), weight(local, a.hidden, a.ffn)
    x = torch.randn(a.tokens, a.hidden, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(a.tokens, a.hidden, device="cuda").bfloat16()
    experts = torch.rand(a.tokens, a.experts, device="cuda").topk(a.top_k, -1).indices
    probs = torch.full((a.tokens, a.top_k), 0.125, device="cuda", requires_grad=True)

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, to, come):
            ctx.splits = to, come
            out = rows.new_empty((sum(come), *rows.shape[1:]))
            dist.all_to_all_single(out, rows.contiguous(), come, to)
            return out

        @staticmethod
        def backward(ctx, grad):
            to, come = ctx.splits
            out = grad.new_empty((sum(to), *grad.shape[1:]))
            dist.all_to_all_single(out, grad.contiguous(), to, come)
            return out, None, None

    def regroup(rows, splits, order):
        parts = rows.split(splits)
        return torch.cat([parts[i] for i in order])

    by_expert = [s * local + e for e in range(local) for s in range(a.ranks)]
    by_source = [e * a.ranks + s for s in range(a.ranks) for e in range(local)]

    def layer():
        flat = experts.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // a.top_k
        rows, prob = x.index_select(0, token), probs.reshape(-1).index_select(0, order)
        counts = torch.bincount(flat, minlength=a.experts)
        everyone = torch.empty(a.ranks * a.experts, dtype=counts.dtype, device="cuda")
        dist.all_gather_into_tensor(everyone, counts)
        everyone = everyone.view(a.ranks, a.ranks, local)
        mine = everyone[:, rank]
        offsets = mine.sum(0).cumsum(0).int()
        to = everyone[rank].sum(-1).tolist()
        come, pieces = mine.sum(-1).tolist(), mine.reshape(-1).tolist()
        rows = regroup(Exchange.apply(rows, to, come), pieces, by_expert)
        prob = regroup(Exchange.apply(prob, to, come), pieces, by_expert)
        gate, up = torch._grouped_mm(rows, w1.transpose(-2, -1), offs=offsets).chunk(2, -1)
        act = (F.silu(gate.float()) * up.float() * prob[:, None]).bfloat16()
        out = torch._grouped_mm(act, w2.transpose(-2, -1), offs=offsets)
        back = [pieces[i] for i in by_expert]
        out = Exchange.apply(regroup(out, back, by_source), come, to)
        return torch.zeros_like(x).index_add(0, token, out)

    def measure(backward):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        for _ in range(CALLS):
            if backward:
                x.grad = w1.grad = w2.grad = probs.grad = None
                layer().backward(dy)
            else:
                with torch.no_grad():
                    layer()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / CALLS

    times = [(measure(False), measure(True)) for _ in range(WARM + a.repeats)][WARM:]
    results[rank] = (times, torch.__version__, ".".join(map(str, torch.cuda.nccl.version())))
    dist.barrier()
    dist.destroy_process_group()


def main():
    a = parse()
    try:
        import torch.multiprocessing as mp
    except ImportError:
        print("bench_torch: no PyTorch here", file=sys.stderr)
        return 3
    context = mp.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        port = 20000 + os.getpid() % 20000
        mp.spawn(rank_main, args=(a, port, results), nprocs=a.ranks)
        ranks = [results[r] for r in range(a.ranks)]
    slowest = [[max(t[0][i][w] for t in ranks) for i in range(a.repeats)] for w in (0, 1)]
    forward, both = map(statistics.median, slowest)
    spread = [(max(s) - min(s)) / 2 for s in slowest]
    print(f"# torch {ranks[0][1]}, NCCL {ranks[0][2]}, {a.label}: eager all-to-all layer")
    print(f"{'torch eager':<20} {'':>2} {forward:8.3f} {spread[0]:6.3f} {both:8.3f} {spread[1]:6.3f}")
    print("json\t" + json.dumps({"label": a.label, "arm": "torch eager", "tokens": a.tokens,
                                 "forward_ms": round(forward, 4),
                                 "forward_backward_ms": round(both, 4)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
