#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""python/ep_overlap where a program is wrong, or unusual: one rank on the host engine, CPU tensors.
PYTHONPATH=python, EP_OVERLAP_LIBRARY and the engine beside it."""
import copy
import pickle
import types

import torch

import ep_overlap
from ep_overlap import layer as layer_module
from ep_overlap import ops

H, E, K, T = 8, 4, 2, 6
SHAPE = dict(hidden=H, experts=E, top_k=K, max_tokens=T, dtype=torch.float32)
G = torch.Generator().manual_seed(3)
X, INDEX, WEIGHTS = torch.randn(T, H, generator=G), torch.randint(0, E, (T, K), generator=G), torch.rand(T, K, generator=G)


def refused(name, kind, part, call):
    try:
        call()
    except kind as e:
        assert part in str(e), "%s: refused with %r, which lacks %r" % (name, str(e), part)
        return
    raise SystemExit("%s: accepted" % name)


def numbers(group):
    """Those that C would not take as they are; none is cut to its lowest bits."""
    for name, part, shape in (("hidden", "hidden: found 4294967304, allowed is", dict(hidden=2**32 + H)),
                              ("max_tokens", "max_tokens: found 4294967302", dict(max_tokens=2**32 + T)),
                              ("chunks", "chunks: found 8589934592", dict(chunks=2**33)),
                              ("max_rows", "max_rows: found -1, allowed is 0..", dict(max_rows=-1)),
                              ("half a column", "hidden: found 8.5, needed is a whole number", dict(hidden=8.5)),
                              ("dispatcher", "found 'deepep', allowed are None, 'alltoall', 'flex'", dict(dispatcher="deepep")),
                              ("wire", "wire", dict(wire="e5m2")), ("overflow", "overflow", dict(overflow="drop")),
                              ("dtype", "dtype: found torch.float64", dict(dtype=torch.float64)),
                              ("factor", "capacity_factor: found '1', needed is a number", dict(capacity_factor="1")),
                              ("padding", "pad_to_capacity: found 'off'", dict(pad_to_capacity="off")),
                              ("graphs", "graphs: found 2, allowed is 0..1", dict(graphs=2))):
        refused(name, ValueError, part, lambda: group.buffer(**{**SHAPE, **shape}))
    refused("chunks of a group", ValueError, "chunks: found 8589934592", lambda: ep_overlap.Group(engine="host", chunks=2**33))
    for name, part, given in (("overlap", "overlap: found 'on'", dict(overlap="on")),
                              ("timeout", "timeout_s: found None, needed is a number", dict(timeout_s=None)),
                              ("process group", "process_group: found 3, needed is a group", dict(process_group=3))):
        refused(name, ValueError, part, lambda: ep_overlap.Group(engine="host", **given))
    group.buffer(**{**SHAPE, "hidden": torch.tensor(H)}).close()  # (whatever is a whole number)


def tensors(group):
    buffer = group.buffer(**SHAPE)
    plan = buffer.plan(INDEX, WEIGHTS)
    for name, part, call in (
            ("a list", "experts: found list, needed is a tensor", lambda: buffer.plan(INDEX.tolist())),
            ("nothing", "experts: found NoneType", lambda: buffer.plan(None)),
            ("int32", "needed is [any, any] torch.int64", lambda: buffer.plan(INDEX.int())),
            ("sparse", "sparse", lambda: buffer.plan(INDEX.to_sparse())),
            ("too many tokens", "the buffer's max_tokens", lambda: buffer.plan(INDEX.repeat(2, 1))),
            ("no slots", "top_k: found 0", lambda: buffer.plan(INDEX[:, :0])),
            ("float16", "x: found [6, 8] torch.float16", lambda: ep_overlap.dispatch(X.half(), WEIGHTS, plan)),
            ("other weights", "weights: found [6, 1]", lambda: ep_overlap.dispatch(X, WEIGHTS[:, :1], plan)),
            ("weights that the plan lacks", "made without weights", lambda: ep_overlap.dispatch(X, WEIGHTS, buffer.plan(INDEX))),
            ("rows of another plan", "rows: found [6, 8]", lambda: ep_overlap.combine(X, plan))):
        refused(name, ValueError, part, call)
    # (another GPU's memory is none of the group's)
    far = types.SimpleNamespace(dim=lambda: 1, shape=(4,), dtype=torch.float32, device=torch.device("cuda", 1), layout=torch.strided)
    real, ops.torch = ops.torch, types.SimpleNamespace(Tensor=types.SimpleNamespace, strided=torch.strided)
    try:
        refused("another GPU", ValueError, "on cuda:1, needed is [4] torch.float32 on cuda:0",
                lambda: ops._need(far, "x", (4,), torch.float32, torch.device("cuda", 0)))
    finally:
        ops.torch = real
    negative = torch._neg_view(X)  # (as z.conj().imag is: its memory has the other sign)
    assert torch.equal(ep_overlap.dispatch(negative, None, plan)[0], -ep_overlap.dispatch(X, None, plan)[0])
    fake = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True).from_tensor(X)
    refused("a fake tensor", ValueError, "which has no memory of its own", lambda: ep_overlap.dispatch(fake, None, plan))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):  # (two would end one plan twice)
        for what in (plan, buffer, group):
            refused("a copy", TypeError, "%s cannot be copied nor pickled" % type(what).__name__, lambda: copied(what))
    for x, index, weights in ((X.t().contiguous().t(), INDEX.t().contiguous().t(), WEIGHTS.t().contiguous().t()),
                              (X[:0], INDEX[:0], WEIGHTS[:0])):
        rows, by_row = ep_overlap.dispatch(x, weights, buffer.plan(index, weights))
        y = ep_overlap.combine(rows * by_row[:, None], buffer.plan(index, weights))
        assert torch.allclose(y, x * weights.sum(1, keepdim=True)), "rows in another order, or none"
    del plan
    buffer.close()


def closing():
    """A refused close leaves everything as it was."""
    group = ep_overlap.Group(engine="host")
    buffer = group.buffer(**SHAPE)
    plan = buffer.plan(INDEX, WEIGHTS)
    for what in (group, buffer):
        refused("a close too early", ep_overlap.Error, "EPO_E_STATE", what.close)
        assert what.handle is not None
    assert ep_overlap.dispatch(X, None, plan)[0].shape == (plan.rows, H)
    del plan
    buffer.close()
    group.close()
    group.close()
    refused("a closed group", RuntimeError, "closed", lambda: group.handle)


def layer_of(group, **more):
    return ep_overlap.MoELayer(group, ffn=8, **{**SHAPE, **more})


def trained(layer, x=X, weights=WEIGHTS, wrap=lambda f, x: f(x)):
    """(dx, dweights, dw1, dw2) of a backward."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    layer.zero_grad()
    wrap(lambda a: (layer(a * 2, INDEX, weights) * 3).tanh(), x).sum().backward()
    layer.flush()
    return x.grad, weights.grad, layer.w1.grad, layer.w2.grad


def same(name, got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want)), "%s: other gradients" % name


def arguments(group):
    free = group.stats()["memory_bytes"]
    refused("no ffn", ValueError, "ffn", lambda: ep_overlap.MoELayer(group, **SHAPE))
    refused("float64 gradients", ValueError, "float64", lambda: layer_of(group, grad_dtype=torch.float64))
    for name, part, given in (("float16 gradients", "wgrad_type", dict(dtype=torch.bfloat16, grad_dtype=torch.float16)),
                              ("half a column", "ffn: found 2.5", dict(ffn=2.5)),
                              ("a word", "experts: found '4', needed is a whole number", dict(experts="4"))):
        refused(name, ValueError, part, lambda: ep_overlap.MoELayer(group, **{**SHAPE, "ffn": 8, **given}))
    layer_module.torch = types.SimpleNamespace(**{**vars(torch), "zeros_like": no_memory})
    try:
        refused("no memory", torch.OutOfMemoryError, "none left", lambda: layer_of(group))
    finally:
        layer_module.torch = torch
    assert group.stats()["memory_bytes"] == free, "what was refused keeps windows"
    layer = layer_of(group)
    for name, part, x in (("nothing", "x: found NoneType", None), ("an array", "x: found ndarray", X.numpy()),
                          ("a batch", "x: found [1, 6, 8]", X[None])):
        refused(name, ValueError, part, lambda: layer(x, INDEX, WEIGHTS))
    refused("no hook", ValueError, "hook: found None", lambda: layer.register_wgrad_hook(None))
    remove = layer.register_wgrad_hook(print)
    remove(), remove()
    layer.close()


def no_memory(*_, **__):
    raise torch.OutOfMemoryError("none left")


def own_module(group):
    """What a module returns is a row for each of its rows: nothing is spread over the others."""
    module = torch.nn.Module()
    layer = ep_overlap.MoELayer(group, module=module, **SHAPE)
    for name, part, call in (("nothing", "found NoneType", lambda r, _: None), ("two", "found tuple", lambda r, _: (r, r)),
                             ("one row", "module: found [1, 8] for rows [", lambda r, _: r[:1]),
                             ("a column", ", 1] for rows [", lambda r, _: r[:, :1])):
        module.forward = call
        refused(name, ValueError, part, lambda: layer(X, INDEX, WEIGHTS))
    module.forward = lambda r, counts: r.double()
    assert torch.allclose(layer(X, INDEX, WEIGHTS), X * WEIGHTS.sum(1, keepdim=True), atol=1e-6)
    layer.close()


def no_room(group):
    """A backward that lacks memory changes nothing: without what fills it, it runs."""
    layer = layer_of(group)
    want = [g.clone() for g in trained(layer)]
    x, weights = X.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
    layer.zero_grad()
    y = (layer(x * 2, INDEX, weights) * 3).tanh().sum()
    layer_module.torch = types.SimpleNamespace(**{**vars(torch), "empty": no_memory})
    try:
        refused("no memory", torch.OutOfMemoryError, "none left", lambda: y.backward(retain_graph=True))
    finally:
        layer_module.torch = torch
    y.backward()
    layer.flush()
    same("once more", (x.grad, weights.grad, layer.w1.grad, layer.w2.grad), want)
    del y
    layer.close()


def autograd(group):
    """Forwards for one backward; recomputed ones; copies."""
    layer = layer_of(group)
    refused("retain_graph", RuntimeError, "backward ran already", lambda: twice(layer))
    refused("a second derivative", RuntimeError, "once_differentiable", lambda: second(layer))
    want = [g.clone() for g in trained(layer)]
    from torch.utils.checkpoint import checkpoint

    for way in (True, False):
        same("checkpoint", trained(layer, wrap=lambda f, x: checkpoint(f, x, use_reentrant=way)), want)
    for copied in (copy.deepcopy, pickle.dumps):
        refused("a copy", TypeError, "state_dict()", lambda: copied(layer))
    layer.load_state_dict(layer.state_dict())
    with torch.inference_mode():
        layer(X, INDEX, WEIGHTS)
    same("as before", trained(layer), want)
    layer.close()


def twice(layer):
    y = layer(X.clone().requires_grad_(), INDEX, WEIGHTS)
    y.sum().backward(retain_graph=True)
    y.sum().backward()


def second(layer):
    x = X.clone().requires_grad_()
    g, = torch.autograd.grad(layer(x, INDEX, WEIGHTS).pow(2).sum(), x, create_graph=True)
    g.sum().backward()


def frozen(group):
    """A weight that needs no gradient gets none; the others' are what they were."""
    layer, came = layer_of(group), []
    layer.register_wgrad_hook(came.append)
    want = [g.clone() for g in trained(layer)]
    for names in (("w1",), ("w2",), ("w1", "w2")):
        before = len(came)
        for name in names:
            getattr(layer, name).requires_grad_(False)
        for _ in range(2):
            got = trained(layer)
        for g, w, name in zip(got[2:], want[2:], ("w1", "w2")):
            assert g is None if name in names else torch.equal(g, w), "%s frozen: gradient of %s" % (names, name)
        same("frozen", got[:2], want[:2])
        assert (len(came) > before) == (len(names) == 1), "hooks are for gradients"
        for name in names:
            getattr(layer, name).requires_grad_(True)
    kept = [g.clone() for g in trained(layer)]
    layer.w1.requires_grad_(False)  # its last gradient is the program's
    layer(X, INDEX, WEIGHTS).sum().backward()
    layer.flush()
    assert torch.equal(layer.w1.grad, kept[2]) and not torch.equal(layer.w2.grad, kept[3])
    layer.w1.requires_grad_(True)
    same("no longer frozen", trained(layer), want)
    layer.close()


def frozen_sums(group):
    """The same with main_grad: what was added before stays, and is added to later."""
    layer = layer_of(group, dtype=torch.bfloat16, grad_dtype=torch.float32)

    def step():
        layer(X.bfloat16(), INDEX, WEIGHTS).float().sum().backward()
        layer.flush()
        return layer.w1.main_grad.clone(), layer.w2.main_grad.clone()

    one = step()
    layer.w1.requires_grad_(False)
    kept, more = step()
    assert torch.equal(kept, one[0]) and torch.allclose(more, 2 * one[1]), "w1 gets none, w2 its second"
    layer.w1.main_grad.mul_(4)
    layer.w1.requires_grad_(True)
    step()
    assert torch.allclose(layer.w1.main_grad, 5 * one[0]) and torch.allclose(layer.w2.main_grad, 3 * one[1])
    layer.close()


def hooks():
    """group.flush() completes the gradients of all layers, so it tells of all, in the order they were made in."""
    group = ep_overlap.Group(engine="host", overlap=True, delay_wgrad=True)
    layers, came = [layer_of(group) for _ in range(3)], []
    for layer in layers:
        layer.register_wgrad_hook(came.append)
    for layer in (layers[2], layers[0]):
        layer(X, INDEX, WEIGHTS).sum().backward()
    assert not came
    group.flush()
    assert came == [layers[0], layers[2]], "group.flush calls the hooks that wait"
    group.flush()
    layers[0].flush()
    assert len(came) == 2, "once"
    for layer in layers:
        layer.close()
    group.close()


def compiled(group):
    """torch.compile breaks its graph at our calls."""
    try:
        torch.compile(lambda a: a + 1, backend="eager")(X)
    except RuntimeError as e:  # (this Python, or this torch, has no Dynamo)
        print("left out: torch.compile (%s)" % e)
        return
    layer = layer_of(group)
    want = [g.clone() for g in trained(layer)]
    same("compiled", trained(layer, wrap=lambda f, x: torch.compile(f, backend="aot_eager")(x)), want)

    def own(x):
        plan = layer.buffer.plan(INDEX, WEIGHTS)
        rows, by_row = ep_overlap.dispatch(x * 2, WEIGHTS, plan)
        return ep_overlap.combine(rows.tanh() * by_row[:, None], plan).sum()

    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    own(x).backward()
    torch.compile(own, backend="aot_eager")(y).backward()
    assert torch.allclose(x.grad, y.grad), "compiled dispatch and combine"
    layer.close()


torch.set_num_threads(1)
GROUP = ep_overlap.Group(engine="host", overlap=True)
for case in (numbers, tensors, arguments, own_module, autograd, no_room, frozen, frozen_sums, compiled):
    case(GROUP)
    print("ok: %s" % case.__name__, flush=True)
GROUP.close()
closing()
hooks()
print("ok: closing, hooks")
