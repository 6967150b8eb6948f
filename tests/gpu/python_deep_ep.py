#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The deep_ep drop-in (python/dropin) on GPUs, against what each rank knows of the others' tokens.

    python_deep_ep.py          PYTHONPATH=python:python/dropin, EP_OVERLAP_LIBRARY and the engine beside it
"""
import os
import sys

from launch import launch

HERE = os.path.abspath(__file__)
H, E, K, R = 256, 8, 3, 2
LOCAL = E // R


def tokens_of(rank, turn):
    return 160 - 23 * rank + 40 * turn


def inputs(torch, rank, turn, device):
    g = torch.Generator().manual_seed(900 + 10 * turn + rank)
    t = tokens_of(rank, turn)
    x = torch.randn(t, H, generator=g).to(torch.bfloat16)
    index = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(t)])
    index[2, 0] = -1
    index[5, :] = -1
    weights = torch.rand(t, K, generator=g)
    return x.to(device), index.to(device), weights.to(device)


def same(torch, name, got, want):
    if got.shape != want.shape or not torch.equal(got, want):
        raise SystemExit("rank %s: %s differs: %s for %s" % (os.environ["RANK"], name, got.shape, want.shape))


def check_deepep(torch, buffer, rank, turn, device):
    """One step of a flex dispatcher: layout, dispatch, combine, both backward forms."""
    from deep_ep import Buffer
    from deep_ep.utils import EventHandle, EventOverlap

    x, index, weights = inputs(torch, rank, turn, device)
    per_rank, rdma, per_expert, inside, event = buffer.get_dispatch_layout(
        index, E, previous_event=EventOverlap(EventHandle()), async_finish=True, allocate_on_comm_stream=True)
    event.current_stream_wait()
    want_inside = torch.stack([((index >= r * LOCAL) & (index < (r + 1) * LOCAL)).any(1) for r in range(R)], 1)
    same(torch, "is_token_in_rank", inside, want_inside)
    same(torch, "tokens per rank", per_rank, want_inside.sum(0).to(torch.int32))
    same(torch, "tokens per expert", per_expert,
         torch.stack([(index == e).sum() for e in range(E)]).to(torch.int32))
    rows, got_index, got_weights, counts, handle, event = buffer.dispatch(
        x, topk_idx=index, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=rdma,
        is_token_in_rank=inside, num_tokens_per_expert=per_expert, previous_event=Buffer.capture(),
        async_finish=True, allocate_on_comm_stream=True)
    event.current_stream_wait()
    parts = []
    for s in range(R):
        xs, ixs, ws = inputs(torch, s, turn, device)
        here = (ixs >= rank * LOCAL) & (ixs < (rank + 1) * LOCAL)
        to = here.any(1)
        parts.append((xs[to], torch.where(here, ixs - rank * LOCAL, -1)[to], torch.where(here, ws, 0.0)[to]))
    same(torch, "rows", rows, torch.cat([p[0] for p in parts]))
    want_index = torch.cat([p[1] for p in parts])
    same(torch, "recv_topk_idx", got_index, want_index)
    same(torch, "recv_topk_weights", got_weights, torch.cat([p[2] for p in parts]))
    assert counts == [int((want_index == e).sum()) for e in range(LOCAL)], counts
    # each rank gives its rows back as they are: x times the number of ranks that had it
    y, back, event = buffer.combine(rows, handle, topk_weights=got_weights)
    times = want_inside.sum(1, keepdim=True)
    same(torch, "combined rows", y, (x.float() * times).to(torch.bfloat16))
    same(torch, "combined weights", back, torch.where(index >= 0, weights, 0.0))
    again = buffer.dispatch(y, handle=handle)
    same(torch, "rows of a cached dispatch", again[0],
         torch.cat([(inputs(torch, s, turn, device)[0].float() * n[:, None]).to(torch.bfloat16)[m]
                    for s in range(R) for n, m in [ranks_of(torch, s, turn, rank, device)]]))
    assert again[1] is None and again[4] is None


def ranks_of(torch, s, turn, rank, device):
    index = inputs(torch, s, turn, device)[1]
    inside = torch.stack([((index >= r * LOCAL) & (index < (r + 1) * LOCAL)).any(1) for r in range(R)], 1)
    return inside.sum(1), inside[:, rank]


def check_hybrid(torch, buffer, rank, turn, device):
    x, index, weights = inputs(torch, rank, turn, device)

    def dense(index, weights):
        routing = torch.zeros(index.shape[0], E + 1, dtype=torch.bool, device=device)
        probs = torch.zeros(index.shape[0], E + 1, device=device)
        at = torch.where(index >= 0, index, E)
        return routing.scatter(1, at, True)[:, :E], probs.scatter(1, at, weights)[:, :E].contiguous()

    routing, probs = dense(index, weights)
    rows, row_probs, _, sizes, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=routing, probs=probs, num_of_experts_per_rank=LOCAL, pad_multiple=1)
    want, want_probs, want_sizes = [], [], []
    for e in range(rank * LOCAL, (rank + 1) * LOCAL):
        count = 0
        for s in range(R):
            xs, ixs, ws = inputs(torch, s, turn, device)
            rs, ps = dense(ixs, ws)
            want.append(xs[rs[:, e]])
            want_probs.append(ps[rs[:, e], e])
            count += int(rs[:, e].sum())
        want_sizes.append(count)
    assert sizes.tolist() == want_sizes and len(handle) == 11, (sizes, want_sizes)
    same(torch, "HybridEP rows", rows, torch.cat(want))
    same(torch, "HybridEP probs", row_probs, torch.cat(want_probs))
    y, back = buffer.combine_with_unpermute(hidden=rows, probs=row_probs, handle=handle)
    same(torch, "HybridEP combined", y, (x.float() * routing.sum(1, keepdim=True)).to(torch.bfloat16))
    same(torch, "HybridEP combined probs", back, probs)


def rank_main():
    import torch
    import torch.distributed as dist

    from deep_ep import Buffer, HybridEPBuffer

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo")
    hint = Buffer.get_dispatch_config(R).get_nvl_buffer_size_hint(2 * H, R)
    buffer = Buffer(dist.group.WORLD, hint, 0)
    Buffer.set_num_sms(24)
    for turn in (0, 1, 1, 0):  # more tokens the second time than the windows were made for
        check_deepep(torch, buffer, rank, turn, device)
    hybrid = HybridEPBuffer(group=dist.group.WORLD, hidden_dim=H, max_num_of_tokens_per_rank=512,
                            num_local_experts=LOCAL, use_fp8=False)
    for turn in (0, 1):
        check_hybrid(torch, hybrid, rank, turn, device)
    print("rank %d: ok" % rank, flush=True)
    dist.barrier()
    os._exit(0)


def main():
    if "RANK" in os.environ:
        return rank_main()
    status = launch(HERE, R, 50, show_all=True)
    print("deep_ep drop-in: %s" % ("ok" if status == 0 else "FAILED"))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
