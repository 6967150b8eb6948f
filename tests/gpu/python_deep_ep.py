#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The deep_ep drop-in (python/dropin) on GPUs, against what each rank knows of the others' tokens.

    python_deep_ep.py [RANKS]  PYTHONPATH=python:python/dropin, EP_OVERLAP_LIBRARY and the engine beside it

Without a GPU the host engine carries torch's CPU tensors.
"""
import os
import sys

from launch import gpus, launch

HERE = os.path.abspath(__file__)
H, E, K, R = 512, 8, 3, int(os.environ.get("WORLD_SIZE") or (sys.argv[1:] or [2])[0])
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
    bias = torch.linspace(-3, 3, x.numel(), device=device).view(x.shape).to(torch.bfloat16)
    for given, total in ((bias, bias.float()), ((bias, bias), 2 * bias.float())):
        biased, none, _ = buffer.combine(rows, handle, bias=given)
        same(torch, "combine with bias", biased, (y.float() + total).to(torch.bfloat16))
        assert none is None
    longer = buffer.dispatch(x, topk_idx=index, topk_weights=weights, is_token_in_rank=inside,
                             num_tokens_per_expert=per_expert, num_worst_tokens=1000)
    assert longer[3] == [] and longer[0].shape == (1000, H) and longer[1].shape == (1000, K)
    same(torch, "rows of num_worst_tokens", longer[0][: rows.shape[0]], rows)
    assert (longer[1][rows.shape[0] :] == -1).all() and (longer[2][rows.shape[0] :] == 0).all()
    y2, back2, _ = buffer.combine(longer[0], longer[4], topk_weights=longer[2])
    same(torch, "combined, num_worst_tokens", y2, y)
    same(torch, "combined weights, num_worst_tokens", back2, back)
    same(torch, "combined rows", y, (x.float() * times).to(torch.bfloat16))
    same(torch, "combined weights", back, torch.where(index >= 0, weights, 0.0))
    again = buffer.dispatch(y, handle=handle)
    same(torch, "rows of a cached dispatch", again[0],
         torch.cat([(inputs(torch, s, turn, device)[0].float() * n[:, None]).to(torch.bfloat16)[m]
                    for s in range(R) for n, m in [ranks_of(torch, s, turn, rank, device)]]))
    assert again[1] is None and again[4] is None


def check_fp8(torch, buffer, rank, turn, device):
    """Bytes arrive as they left, scales with them; the way back is bf16."""

    def quantized(s):
        x, index, _ = inputs(torch, s, turn, device)
        return x.to(torch.float8_e4m3fn), (x.float().view(x.shape[0], -1, 128).abs().amax(-1) / 448 + s), index

    data, scales, index = quantized(rank)
    layout = buffer.get_dispatch_layout(index, E)
    weights = inputs(torch, rank, turn, device)[2]
    (got, got_scales), got_index, got_weights, counts, handle, _ = buffer.dispatch(
        (data, scales), topk_idx=index, topk_weights=weights, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])
    here = [(q, sc, (i >= rank * LOCAL) & (i < (rank + 1) * LOCAL)) for q, sc, i in map(quantized, range(R))]
    same(torch, "FP8 rows", got.view(torch.uint8), torch.cat([q.view(torch.uint8)[m.any(1)] for q, _, m in here]))
    same(torch, "FP8 scales", got_scales, torch.cat([sc[m.any(1)] for _, sc, m in here]))
    assert got.dtype == torch.float8_e4m3fn and counts == [int((got_index == e).sum()) for e in range(LOCAL)]
    again = buffer.dispatch((data, scales), handle=handle)
    same(torch, "FP8 rows, cached", again[0][0].view(torch.uint8), got.view(torch.uint8))
    same(torch, "FP8 scales, cached", again[0][1], got_scales)
    y, back, _ = buffer.combine(got.to(torch.bfloat16), handle, topk_weights=got_weights)
    times = layout[3].sum(1, keepdim=True)
    same(torch, "combined behind FP8", y, (data.float() * times).to(torch.bfloat16))
    same(torch, "weights behind FP8", back, torch.where(index >= 0, weights, 0.0))


def check_low_latency(torch, buffer, rank, turn, device):
    """Every local expert's rows in places of a fixed size, in any order of tokens; the weighted sum back."""
    most = 256
    x, index, weights = inputs(torch, rank, turn, device)
    stats = torch.zeros(LOCAL, dtype=torch.int32, device=device)
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(x, index, most, E, use_fp8=False, return_recv_hook=True,
                                                                    cumulative_local_expert_recv_stats=stats)
    hook()
    assert rows.shape == (LOCAL, most * R, H)
    everyone = [inputs(torch, s, turn, device) for s in range(R)]
    for e in range(LOCAL):
        want = torch.cat([xs[(ixs == rank * LOCAL + e).any(1)] for xs, ixs, _ in everyone])
        assert int(counts[e]) == want.shape[0] == int(stats[e]), (counts, want.shape)
        same(torch, "low-latency rows", rows[e, : want.shape[0]], want)
    y, _, hook = buffer.low_latency_combine(rows * 2, index, weights, handle, return_recv_hook=True)
    hook()
    factor = torch.where(index >= 0, weights, 0.0).sum(1, keepdim=True)
    off = (y.float() - 2 * x.float() * factor).abs().max().item()
    if not off <= 2 * x.abs().max().item() * K * 2.0**-8:
        raise SystemExit("rank %d: low_latency_combine is %g off" % (rank, off))
    out = torch.empty_like(x)
    again, event, _ = buffer.low_latency_combine(rows * 2, index, weights, handle, out=out, async_finish=True)
    event.current_stream_wait()
    same(torch, "low_latency_combine, out", out, y)
    for round_scale, packed in ((False, False), (True, False), (True, True)):
        (data, scales), again, _, _, _ = buffer.low_latency_dispatch(x, index, most, E, round_scale=round_scale, use_ue8m0=packed)
        same(torch, "low-latency counts", again, counts)
        assert data.dtype == torch.float8_e4m3fn and data.shape == rows.shape
        assert scales.shape == (LOCAL, most * R, H // (512 if packed else 128)) and scales.stride(1) == 1
        for e in range(LOCAL):
            n, scale = int(counts[e]), scales[e, : int(counts[e])]
            if packed:
                scale = (scale.contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
            if round_scale and not (scale.view(torch.int32) & 0x7FFFFF == 0).all():
                raise SystemExit("round_scale: scales that are no powers of two")
            full = (data[e, :n].float().view(n, -1, 128) * scale[:, :, None]).view(n, H)
            off = (full - rows[e, :n].float()).abs() - rows[e, :n].float().abs() / 16
            if n and not off.max().item() <= rows[e, :n].float().abs().max().item() * 2.0**-8:
                raise SystemExit("rank %d: FP8 of low_latency_dispatch is %g off" % (rank, off.max().item()))


def check_streams(torch, buffer, rank, device):
    """Inputs of another stream behind previous_event; memory given back while the dispatch is under way; what comes out is
    used on a stream of the caller's."""
    from deep_ep import Buffer

    x, index, weights = inputs(torch, rank, 0, device)
    layout = buffer.get_dispatch_layout(index, E)
    routed = dict(topk_idx=index, topk_weights=weights, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])
    want = buffer.dispatch(x, **routed)
    sum_want = buffer.combine(want[0], want[4])[0]
    gpu = device.type == "cuda"
    side = torch.cuda.Stream() if gpu else None
    for _ in range(5):
        late = torch.zeros_like(x)
        if gpu:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)  # a millisecond
                late.copy_(x)
                ready = Buffer.capture()
        else:
            late.copy_(x)
            ready = Buffer.capture()
        got = buffer.dispatch(late, **routed, previous_event=ready, async_finish=True, allocate_on_comm_stream=True)
        del late
        over = [torch.full_like(x, 7.0) for _ in range(4)]  # in its memory, were that free already
        got[5].current_stream_wait()
        same(torch, "rows behind previous_event", got[0], want[0])
        y, _, event = buffer.combine(got[0], got[4], previous_event=Buffer.capture(), async_finish=True)
        del got
        over += [torch.full_like(want[0], 7.0) for _ in range(4)]
        event.current_stream_wait()
        same(torch, "sums, asynchronous", y, sum_want)
        del over, y, event


def check_no_tokens(torch, buffer, hybrid, rank, device):
    """The last rank has no tokens, then nobody has any."""
    for there in (inputs(torch, rank, 0, device) if rank < R - 1 else None, None):
        x, index, weights = there or (torch.empty(0, H, dtype=torch.bfloat16, device=device),
                                      torch.empty(0, K, dtype=torch.int64, device=device),
                                      torch.empty(0, K, device=device))
        layout = buffer.get_dispatch_layout(index, E)
        times = layout[3].sum(1, keepdim=True)
        want = (x.float() * times).to(torch.bfloat16)
        rows, _, got, counts, handle, _ = buffer.dispatch(x, topk_idx=index, topk_weights=weights, is_token_in_rank=layout[3],
                                                          num_tokens_per_expert=layout[2])
        y, back, _ = buffer.combine(rows, handle, topk_weights=got)
        same(torch, "without tokens: sums", y, want)
        same(torch, "without tokens: weights", back, torch.where(index >= 0, weights, 0.0))
        assert sum(counts) >= rows.shape[0]
        rows, probs, _, sizes, handle = hybrid.dispatch_with_permute(hidden=x, topk_idx=index, topk_weights=weights)
        assert rows.shape[0] == probs.shape[0] == int(sizes.sum())
        y, _ = hybrid.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        same(torch, "without tokens: HybridEP", y, (x.float() * (index >= 0).sum(1, keepdim=True)).to(torch.bfloat16))
        (data, scales), counts, _, _, _ = buffer.low_latency_dispatch(x, index, 256, E)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, index, 256, E, use_fp8=False)
        assert data.shape == rows.shape and int(counts.sum()) <= 256 * E
        y, _, _ = buffer.low_latency_combine(rows, index, torch.ones_like(weights), handle)
        assert y.shape == x.shape


def check_refused(torch, buffer, rank, device):
    """What is wrong is said before anything is sent, so the group goes on."""
    x, index, weights = inputs(torch, rank, 0, device)
    layout = buffer.get_dispatch_layout(index, E)
    routed = dict(topk_idx=index, topk_weights=weights, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])
    handle = buffer.dispatch(x, **routed)[4]
    plain = buffer.dispatch(x, is_token_in_rank=layout[3])[4]
    low = buffer.low_latency_dispatch(x, index, 256, E, use_fp8=False)
    rows, low = low[0], low[2]
    fp8 = [x.to(torch.float8_e4m3fn), weights.new_ones(x.shape[0], 2)]  # (a list as well as a tuple)
    for got, want in zip(buffer.dispatch(fp8, handle=handle)[0], buffer.dispatch(tuple(fp8), handle=handle)[0]):
        same(torch, "FP8 as a list", got.view(torch.uint8), want.view(torch.uint8))
    for name, part, call in (
            ("odd SMs", "an even number", lambda: buffer.set_num_sms(7)),
            ("experts", "a multiple of", lambda: buffer.get_dispatch_layout(index, E + 1)),
            ("int32 indices", "int64", lambda: buffer.get_dispatch_layout(index.int(), E)),
            ("float32 rows", "bfloat16 or FP8", lambda: buffer.dispatch(x.float(), **routed)),
            ("no ranks", "is_token_in_rank", lambda: buffer.dispatch(x)),
            ("a handle and indices", "has its own", lambda: buffer.dispatch(x, handle=handle, topk_idx=index)),
            ("other tokens", "the handle is of", lambda: buffer.dispatch(x[1:], handle=handle)),
            ("no experts", "a multiple of", lambda: buffer.get_dispatch_layout(index, 0)),
            ("a vector", "x torch.bfloat16 [512], needed is [any, any]", lambda: buffer.dispatch(x[0], **routed)),
            ("other indices", "topk_idx torch.int64", lambda: buffer.dispatch(x, **{**routed, "topk_idx": index[1:]})),
            ("other weights", "topk_weights", lambda: buffer.dispatch(x, **{**routed, "topk_weights": weights[:, 1:]})),
            ("weights alone", "without topk_idx", lambda: buffer.dispatch(x, **{**routed, "topk_idx": None})),
            ("other ranks", "is_token_in_rank", lambda: buffer.dispatch(x, **{**routed, "is_token_in_rank": layout[3][1:]})),
            ("ranks as numbers", "torch.bool", lambda: buffer.dispatch(x, **{**routed, "is_token_in_rank": layout[3].int()})),
            ("other experts", "a multiple of", lambda: buffer.dispatch(x, **{**routed, "num_tokens_per_expert": layout[2][1:]})),
            ("alignment", "expert_alignment 0", lambda: buffer.dispatch(x, **routed, expert_alignment=0)),
            ("half a row", "expert_alignment 1.5", lambda: buffer.dispatch(x, **routed, expert_alignment=1.5)),
            ("nothing", "rows: found NoneType", lambda: buffer.dispatch(None, **routed)),
            ("another handle", "found tuple for a handle", lambda: buffer.dispatch(x, handle=(1, 2))),
            ("half a bias", "a bias None", lambda: buffer.combine(x.new_empty(999, H), handle, bias=(x, None))),
            ("no room for low latency", "allowed are 0", lambda: buffer.low_latency_dispatch(x[:0], index[:0], 0, E)),
            ("other sums", "recv_stats", lambda: buffer.low_latency_dispatch(
                x, index, 256, E, cumulative_local_expert_recv_stats=layout[2].new_zeros(E))),
            ("no low-latency handle", "found tuple", lambda: buffer.low_latency_combine(rows, index, weights, (1,))),
            ("other low-latency slots", "topk_idx", lambda: buffer.low_latency_combine(rows, index[1:], weights, low)),
            ("a short out", "out", lambda: buffer.low_latency_combine(rows, index, weights, low, out=x[1:])),
            ("a float32 out", "out", lambda: buffer.low_latency_combine(rows, index, weights, low, out=x.float())),
            ("no handle", "needed is that of a dispatch", lambda: buffer.combine(x, None)),
            ("float32 beside weights", "torch.bfloat16 [any, any]",
             lambda: buffer.combine(x.new_empty(999, H, dtype=torch.float32), handle, topk_weights=x.new_empty(999, K))),
            ("other slots", "topk_weights", lambda: buffer.combine(x.new_empty(999, H), handle, topk_weights=x.new_empty(999, K + 1))),
            ("low-latency indices", "topk_idx", lambda: buffer.low_latency_dispatch(x, index[1:], 256, E)),
            ("low-latency experts", "a multiple of", lambda: buffer.low_latency_dispatch(x, index, 256, E + 1)),
            ("FP8 scales", "[T, S] of 4 bytes", lambda: buffer.dispatch((x.to(torch.float8_e4m3fn), weights.double()), **routed)),
            ("few rows", "the handle is of", lambda: buffer.combine(x[:1], handle)),
            ("weights without slots", "with topk_idx", lambda: buffer.combine(x, plain, topk_weights=weights)),
            ("a short bias", "needed is", lambda: buffer.combine(x.new_empty(999, H), handle, bias=x[1:])),
            ("too many tokens", "allowed are 8", lambda: buffer.low_latency_dispatch(x, index, 8, E)),
            ("a masked rank", "cannot be left out", lambda: buffer.low_latency_update_mask_buffer(0, True)),
            ("shrinking", "enable_shrink", lambda: type(buffer)(buffer.group, enable_shrink=True)),
            ("no group", "torch.distributed", lambda: type(buffer)(None, comm=3)),
            ("a window", "no tensor is one", lambda: buffer.get_local_buffer_tensor(torch.int8)),
            ("both ways to wait", "exclude", lambda: buffer.low_latency_dispatch(x, index, 256, E, async_finish=True, return_recv_hook=True))):
        try:
            call()
        except (ValueError, NotImplementedError) as e:
            if part in str(e):
                continue
            raise SystemExit("%s: refused with %r, which lacks %r" % (name, str(e), part))
        raise SystemExit("%s: accepted" % name)


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
    again = buffer.dispatch_with_permute(hidden=y, handle=handle)
    assert again[1] is None and again[2] is None and again[3].tolist() == want_sizes
    same(torch, "HybridEP rows, cached", buffer.combine_with_unpermute(hidden=again[0], handle=handle)[0],
         (y.float() * routing.sum(1, keepdim=True)).to(torch.bfloat16))
    data, scales = x.to(torch.float8_e4m3fn), torch.rand(x.shape[0], H // 128, device=device)
    rows8, probs8, scales8, sizes8, handle8 = buffer.dispatch_with_permute(
        hidden=data, routing_map=routing, probs=probs, scaling_factor=scales, pad_multiple=16)
    at = 0
    assert all(n % 16 == 0 for n in sizes8.tolist()) and rows8.shape[0] == sizes8.sum() == scales8.shape[0]
    for e, (n, padded) in enumerate(zip(want_sizes, sizes8.tolist())):
        start = sum(want_sizes[:e])
        same(torch, "HybridEP FP8 rows", rows8[at : at + n].view(torch.uint8),
             rows[start : start + n].to(torch.float8_e4m3fn).view(torch.uint8))
        same(torch, "HybridEP FP8 probs", probs8[at : at + n], row_probs[start : start + n])
        assert (rows8[at + n : at + padded].view(torch.uint8) == 0).all() and (probs8[at + n : at + padded] == 0).all()
        at += padded
    y8, back8 = buffer.combine_with_unpermute(hidden=rows8.to(torch.bfloat16), probs=probs8, handle=handle8)
    same(torch, "HybridEP combined behind FP8", y8, (data.float() * routing.sum(1, keepdim=True)).to(torch.bfloat16))
    same(torch, "HybridEP combined probs behind FP8", back8, probs)


def check_hybrid_topk(torch, buffer, rank, turn, device):
    """The same routing by index: the same rows, and what comes back is dense; other probs for a handle."""
    x, index, weights = inputs(torch, rank, turn, device)
    rows, probs, _, sizes, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=index, topk_weights=weights,
                                                                 num_of_experts=E, num_of_experts_per_rank=LOCAL)
    at = torch.where(index >= 0, index, E)
    routing = torch.zeros(x.shape[0], E + 1, dtype=torch.bool, device=device).scatter(1, at, True)[:, :E]
    dense = torch.zeros(x.shape[0], E + 1, device=device).scatter(1, at, weights)[:, :E].contiguous()
    want = buffer.dispatch_with_permute(hidden=x, routing_map=routing, probs=dense, fuse_permute_dispatch=True)
    same(torch, "HybridEP rows by index", rows, want[0])
    same(torch, "HybridEP probs by index", probs, want[1])
    assert sizes.tolist() == want[3].tolist()
    y, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle, fuse_unpermute_combine=True)
    same(torch, "HybridEP combined by index", y, buffer.combine_with_unpermute(hidden=want[0], handle=want[4])[0])
    same(torch, "HybridEP combined probs by index", back, dense)
    for way in (handle, want[4]):
        again, doubled, _, _, other = buffer.dispatch_with_permute(hidden=x, probs=2 * dense, handle=way)
        same(torch, "HybridEP rows, other probs", again, rows)
        same(torch, "HybridEP other probs", doubled, 2 * probs)
        _, back = buffer.combine_with_unpermute(hidden=again, probs=doubled, handle=other)
        same(torch, "HybridEP other probs, back", back, 2 * dense)
    plain = buffer.dispatch_with_permute(hidden=x, topk_idx=index.int())
    assert plain[1] is None
    same(torch, "HybridEP rows by index alone", plain[0], rows)


def check_hybrid_budget(torch, buffer, rank, turn, device):
    """num_permuted_tokens: so many rows whatever comes, and what does not fit is left out and told."""
    x, index, weights = inputs(torch, rank, turn, device)
    routed = dict(topk_idx=index, topk_weights=weights, pad_multiple=8)
    full, full_probs, _, sizes, handle = buffer.dispatch_with_permute(hidden=x, **routed)
    n, sums = full.shape[0], buffer.combine_with_unpermute(hidden=full, handle=handle)[0]
    assert not handle[10].item()
    rows, probs, _, on_device, longer = buffer.dispatch_with_permute(hidden=x, **routed, num_permuted_tokens=n + 24,
                                                                     non_blocking=True)
    assert rows.shape == (n + 24, H) and probs.shape == (n + 24,) and not longer[10].item() and on_device.device == device
    same(torch, "HybridEP rows within a budget", rows[:n], full)
    assert on_device.tolist() == sizes.tolist() and (rows[n:] == 0).all() and (probs[n:] == 0).all()
    y, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=longer)
    same(torch, "HybridEP combined within a budget", y, sums)
    same(torch, "HybridEP gradient within a budget",
         buffer.dispatch_with_permute(hidden=x, handle=longer, num_permuted_tokens=n + 24)[0], rows)
    less = n - int(sizes[-1]) // 2  # half of the last expert's do not fit
    rows, probs, _, fewer, short = buffer.dispatch_with_permute(hidden=x, **routed, num_permuted_tokens=torch.tensor(less))
    assert rows.shape == (less, H) and short[10].item() and fewer.tolist() == sizes.tolist()[:-1] + [less - int(sizes[:-1].sum())]
    same(torch, "HybridEP rows over a budget", rows, full[:less])
    left = full.clone()
    left[less:] = 0
    kept = torch.where(torch.arange(n, device=device) < less, full_probs, 0.0)
    want = buffer.combine_with_unpermute(hidden=left, probs=kept, handle=handle)
    got = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=short)
    for name, a, b in zip(("rows", "probs"), got, want):
        same(torch, "HybridEP combined over a budget, " + name, a, b)
    # A handle keeps its number of rows where another dispatch on the same way has another.
    again, _, _, counts, other = buffer.dispatch_with_permute(hidden=x, handle=short)
    same(torch, "HybridEP rows without the handle's budget", again, full)
    assert counts.tolist() == sizes.tolist() and not other[10].item() and short[10].item()
    same(torch, "HybridEP combined with the first handle", buffer.combine_with_unpermute(hidden=rows, handle=short)[0], got[0])
    same(torch, "HybridEP combined with the other handle", buffer.combine_with_unpermute(hidden=again, handle=other)[0], sums)


def check_hybrid_refused(torch, buffer, rank, device):
    """What is not served says so before anything is sent."""
    x, index, weights = inputs(torch, rank, 0, device)
    handle = buffer.dispatch_with_permute(hidden=x, topk_idx=index)[4]
    for part, kind, call in (
            ("a handle", ValueError, lambda: buffer.dispatch_with_permute(hidden=x)),
            ("of %d ranks" % R, ValueError,
             lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=index, num_of_experts=E + 1)),
            ("topk_weights", ValueError,
             lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=index, topk_weights=weights[1:])),
            ("needed is bool", ValueError,
             lambda: buffer.dispatch_with_permute(hidden=x, routing_map=x.new_zeros(x.shape[0], E))),
            ("probs", ValueError, lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=index, probs=weights)),
            ("the handle is of", ValueError, lambda: buffer.dispatch_with_permute(hidden=x[1:], handle=handle)),
            ("the handle is of", ValueError, lambda: buffer.combine_with_unpermute(hidden=x[:3], handle=handle)),
            ("a handle is needed", ValueError, lambda: buffer.combine_with_unpermute(hidden=x)),
            ("a handle is needed", ValueError, lambda: buffer.combine_with_unpermute(hidden=x, handle=())),
            ("a handle is needed", ValueError, lambda: buffer.dispatch_with_permute(hidden=x, handle=(1,))),
            ("int64 or int32", ValueError, lambda: buffer.dispatch_with_permute(hidden=x, topk_idx=index + 0.5)),
            ("a number from 0", ValueError, lambda: buffer.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=-1)),
            ("probs", ValueError, lambda: buffer.dispatch_with_permute(hidden=x, handle=handle, probs=weights)),
            ("hidden", ValueError, lambda: buffer.dispatch_with_permute(hidden=x[0], topk_idx=index)),
            ("dispatch_with_permute", NotImplementedError, lambda: buffer.dispatch(hidden=x)),
            ("combine_with_unpermute", NotImplementedError, lambda: buffer.combine(hidden=x)),
            ("unexpected keyword", TypeError, lambda: buffer.dispatch_with_permute(hidden=x, topk_index=index))):
        try:
            call()
        except kind as e:
            if part in str(e):
                continue
            raise SystemExit("refused with %r, which lacks %r" % (str(e), part))
        raise SystemExit("accepted, where %r should have been said" % part)
    # One rank's number that is no expert, beside probs of all: every rank hears of it, none waits for another.
    wrong = index.clone()
    if rank == 0:
        wrong[1, 0] = E + 5
    try:
        buffer.dispatch_with_permute(hidden=x, topk_idx=wrong, probs=weights.new_ones(x.shape[0], E))
    except RuntimeError as e:
        if "EPO_E_INDEX" not in str(e) or "= %d" % (E + 5) not in str(e):
            raise SystemExit("a number that is no expert: %r" % str(e))
    else:
        raise SystemExit("a number that is no expert: accepted")


def check_more_experts(torch, buffer, rank, device):
    """A token of one rank has more experts than any token before."""
    x = inputs(torch, rank, 0, device)[0]
    routing = torch.zeros(x.shape[0], E, dtype=torch.bool, device=device)
    routing[:, rank] = True
    routing[3] = rank == R - 1
    rows, _, _, sizes, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing, pad_multiple=1)
    y, none = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    same(torch, "many experts for a token", y, (x.float() * routing.sum(1, keepdim=True)).to(torch.bfloat16))
    assert none is None and sizes.sum() == rows.shape[0]


def rank_main():
    import torch
    import torch.distributed as dist

    from deep_ep import Buffer, Config, HybridEPBuffer

    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo")
    hint = Buffer.get_dispatch_config(R).get_nvl_buffer_size_hint(2 * H, R)
    assert Config(24, 8, 256).get_rdma_buffer_size_hint(2 * H, R) == hint
    buffer = Buffer(dist.group.WORLD, hint, 0)
    Buffer.set_num_sms(24)
    masked = torch.ones(R, dtype=torch.int32, device=device)
    buffer.low_latency_query_mask_buffer(masked)
    assert not masked.any() and not buffer.low_latency_mode
    for turn in (0, 1, 1, 0):  # more tokens the second time than the windows were made for
        check_deepep(torch, buffer, rank, turn, device)
        check_fp8(torch, buffer, rank, turn, device)
        check_low_latency(torch, buffer, rank, turn, device)
    check_streams(torch, buffer, rank, device)
    check_refused(torch, buffer, rank, device)
    hybrid = HybridEPBuffer(group=dist.group.WORLD, hidden_dim=H, max_num_of_tokens_per_rank=512,
                            num_local_experts=LOCAL, use_fp8=False)
    for turn in (0, 1, 0):
        check_hybrid(torch, hybrid, rank, turn, device)
        check_hybrid_topk(torch, hybrid, rank, turn, device)
        check_hybrid_budget(torch, hybrid, rank, turn, device)
    check_hybrid_refused(torch, hybrid, rank, device)
    check_no_tokens(torch, buffer, hybrid, rank, device)
    check_more_experts(torch, hybrid, rank, device)
    check_hybrid(torch, hybrid, rank, 1, device)
    print("rank %d: ok" % rank, flush=True)
    dist.barrier()
    print("rank %d: ending" % rank, flush=True)
    buffer.destroy()
    hybrid.destroy()
    print("rank %d: ended" % rank, flush=True)
    os._exit(0)


def main():
    if "RANK" in os.environ:
        return rank_main()
    status = launch(HERE, R, 50 if gpus() else 150, show_all=True, environment={"OMP_NUM_THREADS": "1"})  # (ranks share the CPU's cores)
    print("deep_ep drop-in: %s" % ("ok" if status == 0 else "FAILED"))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
