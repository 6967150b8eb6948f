#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""python/ep_overlap on GPUs against plain torch: outputs and gradients.

    python_layer.py            PYTHONPATH=python, EP_OVERLAP_LIBRARY and the engine beside it

Two ranks, on two GPUs, both on one, or, without any, on the host engine; each knows all ranks' tokens and computes the whole layer.
"""
import os
import sys

from launch import launch

HERE = os.path.abspath(__file__)
T, H, F, E, K, R = 192, 256, 128, 8, 2, 2


def inputs(torch, rank, device):
    g = torch.Generator().manual_seed(50 + rank)
    t = T - 17 * rank  # uneven
    x = torch.randn(t, H, generator=g).to(torch.bfloat16)
    experts = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(t)])
    experts[3, 1] = -1
    weights = torch.rand(t, K, generator=g)
    dy = torch.randn(t, H, generator=g).to(torch.bfloat16)
    return tuple(v.to(device) for v in (x, experts, weights, dy))


def all_weights(torch, device):
    g = torch.Generator().manual_seed(7)
    w1 = (torch.randn(E, 2 * F, H, generator=g) * H**-0.5).to(torch.bfloat16)
    w2 = (torch.randn(E, H, F, generator=g) * F**-0.5).to(torch.bfloat16)
    return w1.to(device), w2.to(device)


def reference(torch, x, experts, weights, w1, w2):
    """One token after the other's slot, in fp32."""
    y = torch.zeros(x.shape[0], H, device=x.device)
    for k in range(K):
        for e in range(E):
            rows = (experts[:, k] == e).nonzero()[:, 0]
            if rows.numel() == 0:
                continue
            z = x[rows] @ w1[e].t()
            a = torch.nn.functional.silu(z[:, :F]) * z[:, F:] * weights[rows, k][:, None]
            y = y.index_add(0, rows, a @ w2[e].t())
    return y


def close(torch, name, got, want):
    scale = want.float().abs().max().item() + 1e-6
    error = (got.float() - want.float()).abs().max().item() / scale
    print("%-34s largest difference %.4f of the largest value" % (name, error), flush=True)
    if not error < 0.03:
        raise SystemExit("rank %s: %s differs" % (os.environ["RANK"], name))


def refused(call, part):
    try:
        call()
    except RuntimeError as e:
        assert part in str(e), e
        return
    raise SystemExit("accepted, where %r should have been said" % part)


def check_refused(layer, x, experts, weights):
    """Whoever would take gradients before they are there, or from elsewhere."""
    for register in (layer.w1.register_hook, layer.w2.register_post_accumulate_grad_hook):
        handle = register(lambda g: g)
        refused(lambda: layer(x, experts, weights), "register_wgrad_hook")
        handle.remove()
    made = layer.w1
    layer.w1 = type(made)(made.data)  # where FSDP's gathered weights came to lie by chance
    refused(lambda: layer(x, experts, weights), "has moved")
    layer.w1 = made
    layer.w1.main_grad = layer.w1.detach().float()
    refused(lambda: layer(x, experts, weights), "main_grad")
    del layer.w1.main_grad
    early = []  # as Megatron's overlap_grad_reduce: it cannot be seen, and is not called
    node = layer.w1.expand_as(layer.w1).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: early.append(1))
    layer(x, experts, weights).sum().backward()
    layer.flush()
    assert not early, "a hook on the weights' node was called by backward"


def check_wrapped(torch, group, x, experts, weights):
    import ep_overlap
    from torch.distributed.fsdp import fully_shard

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device=x.device))
            self.moe = ep_overlap.MoELayer(group, hidden=H, ffn=F, experts=E, top_k=K, max_tokens=T)

        def forward(self, x):
            return self.moe(x * self.scale, experts, weights.detach())

    wrap = torch.nn.parallel.DistributedDataParallel
    x = x.detach()
    model = Model()
    refused(lambda: wrap(model)(x), "_ddp_params_and_buffers_to_ignore")
    model.moe.close()
    model = Model()
    fully_shard(model)
    refused(lambda: model(x), "FSDP")
    model.moe.close()
    model = Model()
    wrap._set_params_and_buffers_to_ignore_for_model(model, ["moe.w1", "moe.w2"])
    wrap(model)(x).sum().backward()
    model.moe.flush()
    assert model.scale.grad is not None and model.moe.w1.grad.abs().sum() > 0
    model.moe.close()


def check_capacity(torch, group, x, experts, weights):
    """What is dropped and padded is told, by the plan and by the group's sums."""
    import ep_overlap

    ranks_capacity = 3
    buffer = group.buffer(hidden=H, experts=E, top_k=K, max_tokens=T, capacity=ranks_capacity,
                          overflow="drop_by_position", pad_to_capacity=True)
    group.stats(reset=True)
    plan = buffer.plan(experts, weights)
    sent = torch.bincount(experts[experts >= 0], minlength=E)
    assert plan.dropped == int((sent - ranks_capacity).clamp(min=0).sum()) > 0, plan.dropped
    assert plan.counts == [ranks_capacity * R] * (E // R) and plan.pad_rows >= 0
    rows, _ = ep_overlap.dispatch(x.detach(), weights.detach(), plan)
    stats = group.stats()
    assert stats["dropped_slots"] == plan.dropped and stats["memory_bytes"] > 0, stats
    del rows, plan
    buffer.close()


def check_wire(torch, group, x, experts, weights):
    """8-bit rows: each element within what the header says, and what comes back is the sum of those."""
    import ep_overlap

    try:
        group.buffer(hidden=H, experts=E, top_k=K, max_tokens=T, wire="e5m2")
        raise SystemExit("wire e5m2 was accepted")
    except ValueError as e:
        assert "e4m3" in str(e), e
    exact = group.buffer(hidden=H, experts=E, top_k=K, max_tokens=T)
    small = group.buffer(hidden=H, experts=E, top_k=K, max_tokens=T, wire="e4m3")
    plans = [b.plan(experts, weights) for b in (exact, small)]
    want, got = (ep_overlap.dispatch(x.detach(), None, p)[0].float() for p in plans)
    largest = want.view(want.shape[0], -1, 128).abs().amax(-1, keepdim=True).expand(-1, -1, 128).reshape(want.shape)
    off = (got - want).abs() - torch.maximum(want.abs() / 16, largest * 2.0**-10) * 1.01  # (bf16 once more)
    assert off.max().item() <= 0, off.max()
    assert not torch.equal(got, want), "nothing was rounded: were the rows sent as they are?"
    del plans
    exact.close()
    small.close()


def rank_main():
    import torch

    import ep_overlap

    rank = int(os.environ["RANK"])
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    process_group = None
    if os.environ["WAY"] == "torch":
        import torch.distributed as dist

        dist.init_process_group("nccl" if gpu else "gloo")
        process_group = dist.group.WORLD
    w1, w2 = all_weights(torch, device)
    mine = slice(rank * E // R, (rank + 1) * E // R)
    # what every rank has to come to
    want = []
    full1, full2 = w1.float().requires_grad_(), w2.float().requires_grad_()
    for r in range(R):
        x, experts, weights, dy = inputs(torch, r, device)
        x, weights = x.float().requires_grad_(), weights.requires_grad_()
        y = reference(torch, x, experts, weights, full1, full2)
        y.backward(dy.float())
        want.append((y.detach(), x.grad, weights.grad))
    y_want, dx_want, dw_want = want[rank]
    for dispatcher, overlap, delay in (("alltoall", False, False), ("alltoall", True, True), ("flex", True, True)):
        name = "%s overlap=%d delay=%d " % (dispatcher, overlap, delay)
        group = ep_overlap.Group(process_group, engine="cuda" if gpu else "host", overlap=overlap, dispatcher=dispatcher,
                                 delay_wgrad=delay, timeout_s=20)
        layer = ep_overlap.MoELayer(group, hidden=H, ffn=F, experts=E, top_k=K, max_tokens=T)
        with torch.no_grad():
            layer.w1.copy_(w1[mine])
            layer.w2.copy_(w2[mine])
        x, experts, weights, dy = inputs(torch, rank, device)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        hooked = []
        layer.register_wgrad_hook(hooked.append)
        for step in range(2):
            x.grad = weights.grad = None
            layer.zero_grad(set_to_none=True)
            y = layer(x, experts, weights)
            y.backward(dy)
            layer.flush()
            assert len(hooked) == step + 1, hooked
            if rank == 0 or step:
                close(torch, name + "y", y, y_want)
                close(torch, name + "dx", x.grad, dx_want)
                close(torch, name + "dweights", weights.grad, dw_want)
                close(torch, name + "dw1", layer.w1.grad, full1.grad[mine])
                close(torch, name + "dw2", layer.w2.grad, full2.grad[mine])
        # own experts between dispatch and combine, on the same routing
        a, b = w1[mine], w2[mine]

        class Own(torch.nn.Module):
            def forward(self, rows, counts):
                out = torch.zeros_like(rows)
                for e, n in enumerate(counts):
                    at = plan.first[e]
                    z = rows[at : at + n] @ a[e].t()
                    out[at : at + n] = (torch.nn.functional.silu(z[:, :F]) * z[:, F:]) @ b[e].t()
                return out

        plan = layer.buffer.plan(experts, weights)
        x2, weights2 = x.detach().requires_grad_(), weights.detach().requires_grad_()
        rows, row_weights = ep_overlap.dispatch(x2, weights2, plan)
        y2 = ep_overlap.combine((Own()(rows, plan.counts) * row_weights[:, None]).to(rows.dtype), plan)
        y2.backward(dy)
        close(torch, name + "own experts: y", y2, y_want)
        close(torch, name + "own experts: dx", x2.grad, dx_want)
        close(torch, name + "own experts: dweights", weights2.grad, dw_want)
        check_refused(layer, x, experts, weights)
        check_capacity(torch, group, x, experts, weights)
        if dispatcher == "flex":
            check_wire(torch, group, x, experts, weights)
        if os.environ["WAY"] == "torch":
            check_wrapped(torch, group, x, experts, weights)
        y3 = layer(x, experts, weights)
        try:
            layer.close()
            raise SystemExit("a layer was closed under an output that waits for its backward")
        except ep_overlap.Error as e:
            assert e.status == "EPO_E_STATE" and "del them" in str(e), e
        close(torch, name + "y, after a refused close", y3, y_want)
        del y3
        if rank == 0:
            try:
                ep_overlap.dispatch(x.float(), None, plan)
                raise SystemExit("a wrong dtype was accepted")
            except ValueError as e:
                assert "x: found" in str(e), e
        del y2, rows, row_weights, plan  # (y's backward has run: it holds nothing)
        group.check()
        layer.close()
        group.close()
    print("rank %d: ok" % rank, flush=True)
    if process_group is not None:
        dist.destroy_process_group()


def main():
    if "RANK" in os.environ:
        return rank_main()
    status = 0
    for way in ("launcher", "torch"):
        status = launch(HERE, R, 90, environment={"WAY": way, "OMP_NUM_THREADS": "1"}, name="%s: rank" % way) or status
    print("python layer: %s" % ("ok" if status == 0 else "FAILED"))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
