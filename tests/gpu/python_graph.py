#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A MoELayer in torch.cuda.graph, forward and backward, replayed with other inputs, against the
same layer without a graph, with both dispatchers.

    python_graph.py            PYTHONPATH=python, EP_OVERLAP_LIBRARY and the engine beside it

Two ranks, on two GPUs or both on one.
"""
import os
import sys

from launch import launch

HERE = os.path.abspath(__file__)
T, H, F, E, K, R, REPLAYS = 192, 256, 128, 8, 2, 2, 20


def inputs(torch, rank, i, device):
    g = torch.Generator().manual_seed(1000 * i + rank)
    x = torch.randn(T, H, generator=g).to(torch.bfloat16)
    experts = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
    return tuple(v.to(device) for v in (x, experts, torch.rand(T, K, generator=g),
                                        torch.randn(T, H, generator=g).to(torch.bfloat16)))


def rank_main():
    import torch

    import ep_overlap

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    group = ep_overlap.Group(engine="cuda", overlap=True, dispatcher=os.environ["DISPATCHER"], delay_wgrad=False,
                             timeout_s=20)
    shape = dict(hidden=H, ffn=F, experts=E, top_k=K, max_tokens=T, capacity_factor=1.25,
                 overflow="drop_by_weight", pad_to_capacity=True)
    plain = ep_overlap.MoELayer(group, **shape)
    layer = ep_overlap.MoELayer(group, graphs=True, **shape)
    with torch.no_grad():
        layer.w1.copy_(plain.w1)
        layer.w2.copy_(plain.w2)
    x, experts, weights, dy = (v.clone() for v in inputs(torch, rank, 0, device))
    x.requires_grad_()
    weights.requires_grad_()

    def step():
        y = layer(x, experts, weights)
        dx, dweights = torch.autograd.grad(y, (x, weights), dy)
        return y, dx, dweights

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def compare():  # what autograd keeps of plain's calls ends here
        for i in range(REPLAYS):
            given = inputs(torch, rank, i, device)
            with torch.no_grad():
                for to, value in zip((x, experts, weights, dy), given):
                    to.copy_(value)
            for w in (layer.w1, layer.w2, plain.w1, plain.w2):
                if w.grad is not None:
                    w.grad.zero_()
            graph.replay()
            x2, weights2 = given[0].requires_grad_(), given[2].requires_grad_()
            y = plain(x2, given[1], weights2)
            y.backward(given[3])
            torch.cuda.synchronize()
            want = (y, x2.grad, weights2.grad, plain.w1.grad, plain.w2.grad)
            for name, a, b in zip(("y", "dx", "dweights", "dw1", "dw2"),
                                  (*outputs, layer.w1.grad, layer.w2.grad), want):
                if not torch.equal(a, b):
                    raise SystemExit("rank %d, replay %d: %s has other bits" % (rank, i, name))

    compare()
    group.check()
    del graph, outputs
    layer.close()
    plain.close()
    group.close()
    print("rank %d: %d replays, the same bits" % (rank, REPLAYS), flush=True)


def main():
    if "RANK" in os.environ:
        return rank_main()
    status = 0
    for dispatcher in ("alltoall", "flex"):
        status = launch(HERE, R, 60, environment={"DISPATCHER": dispatcher}, name=dispatcher + ": rank") or status
    print("python graph: %s" % ("ok" if status == 0 else "FAILED"))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
