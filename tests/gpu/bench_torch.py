#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rival of tests/gpu/bench: an eager PyTorch MoE layer with an all-to-all dispatcher.

  bench_torch.py RANKS TOKENS HIDDEN FFN EXPERTS TOP_K [REPEATS] [--label L]

The layer is eager_layer.py's. One process per GPU (where there are fewer, NCCL over sockets: a way through the
program, no measurement); as many calls in a row as bench makes; medians of the slowest rank. Prints one line and one
JSON line.
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

    from eager_layer import EagerLayer
    from launch import sharing

    there = torch.cuda.device_count()
    os.environ.update(sharing(rank, a.ranks, there))
    torch.cuda.set_device(rank % there)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=a.ranks, device_id=torch.device("cuda", rank % there))
    layer = EagerLayer(rank, a.ranks, "cuda", a.tokens, a.hidden, a.ffn, a.experts, a.top_k)

    def measure(backward):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        for _ in range(CALLS):
            if backward:
                layer.clear()
                layer.forward().backward(layer.dy)
            else:
                with torch.no_grad():
                    layer.forward()
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
