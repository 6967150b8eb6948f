# SPDX-License-Identifier: Apache-2.0
"""MoELayer: dispatch, experts and combine as one module."""
from __future__ import annotations

import contextlib
import gc
import weakref
from ctypes import byref, c_void_p
from typing import Any, Callable, List, Optional

import torch
from torch.autograd.function import once_differentiable

from . import _capi as c
from .ops import Buffer, Group, Plan, _fits, _need, _pointer, _tokens, _type_of, combine, dispatch, untraced


class _Saved:
    """What a forward keeps for its backward; released if none comes."""

    def __init__(self, handle: c_void_p) -> None:
        self.handle: Optional[c_void_p] = handle

    def take(self) -> c_void_p:
        handle, self.handle = self.held(), None
        return handle

    def held(self) -> c_void_p:
        if self.handle is None:
            raise RuntimeError("MoELayer: backward ran already; it saves nothing for a second one")
        return self.handle

    def __del__(self) -> None:
        if self.handle is not None and c._library is not None:
            c._library.epo_saved_release(self.handle)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, layer: "MoELayer", plan: Plan,
                trains: bool, anchor: Optional[torch.Tensor]) -> torch.Tensor:
        x, y, saved = _tokens(plan, x, "x"), plan.empty_tokens(), c_void_p()
        c.check(c.library().epo_forward(layer.handle, plan.handle, _pointer(x), _pointer(y),
                                        byref(saved) if trains else None, plan.group.stream()))
        ctx.layer, ctx.plan, ctx.saved = layer, plan, _Saved(saved) if trains else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        ctx.saved.held()
        layer, plan = ctx.layer, ctx.plan
        # (what may fail for want of memory comes before anything changes: who catches that goes on)
        dy, dx = _tokens(plan, dy, "gradient of y"), plan.empty_tokens()
        dweights = torch.empty(plan.tokens, plan.top_k, dtype=torch.float32, device=plan.group.device)
        layer._offer_gradients()
        ctx.layer = ctx.plan = None  # (an output that lives on does not keep the plan)
        c.check(c.library().epo_backward(layer.handle, ctx.saved.take(), _pointer(dy), _pointer(dx),
                                         dweights.data_ptr(), plan.group.stream()))
        layer._gradients_came()
        return dx, dweights, None, None, None, None


_through_experts: Callable[..., torch.Tensor] = _Experts.apply  # (torch gives it no types)


class MoELayer(torch.nn.Module):
    """y = MoE(x) over the ranks of `group`. [collective], forward and backward.

    hidden H, ffn F, experts E of the whole group (El = E / ranks here), top_k K, max_tokens T at most.
    Built-in experts: w1 [El, 2F, H] and w2 [El, H, F], y = w2 (weight * silu(g) * u) with g, u = w1 x.
    Their gradients are added by the library, not by autograd: into `w.grad`, or, with
    `grad_dtype=torch.float32` beside narrower weights, into `w.main_grad`. Call `flush()` before they
    are read (delayed weight gradients come no sooner), or register a hook with
    `register_wgrad_hook`.
    `module`: own experts instead: called as module(rows [R, H], counts: list of El) on expert-major
    rows, its result times the router weights is combined.

    Refuses to run inside DistributedDataParallel or FSDP, or with gradient hooks on its weights: those
    fire when autograd is done with a parameter, which is before, or without, our gradients.
    """

    def __init__(self, group: Group, *, hidden: int, ffn: int = 0, experts: int, top_k: int, max_tokens: int,
                 dtype: torch.dtype = torch.bfloat16, grad_dtype: Optional[torch.dtype] = None,
                 module: Optional[torch.nn.Module] = None, **buffer: Any) -> None:
        super().__init__()
        experts = c.whole("experts", experts, 1, 2**31 - 1)
        if experts % group.ranks != 0:
            raise ValueError("experts: found %d, allowed is a multiple of %d ranks" % (experts, group.ranks))
        ffn = c.whole("ffn", ffn, 0, 2**31 - 1)
        if module is None and ffn < 1:
            raise ValueError("ffn: found %d, allowed is a number from 1 (or give `module`)" % ffn)
        grad_dtype = grad_dtype or dtype
        _type_of(grad_dtype)
        self.group = group
        self.buffer = Buffer(group, hidden=hidden, experts=experts, top_k=top_k, max_tokens=max_tokens,
                             dtype=dtype, **buffer)
        self.module = module
        self._hooks: List[Callable[["MoELayer"], None]] = []
        self._pending = False
        self._handle: Optional[c_void_p] = None
        self._aside: List[Optional[torch.Tensor]] = [None, None]
        if module is not None:
            return
        try:
            self._make_experts(hidden, ffn, experts, dtype, grad_dtype)
        except BaseException:  # refused, or no memory: nobody has the buffer, to close it
            with contextlib.suppress(Exception):
                self.buffer.close()
            raise

    def _make_experts(self, hidden: int, ffn: int, experts: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        group = self.group
        local, device = experts // group.ranks, group.device
        self.w1 = torch.nn.Parameter(torch.empty(local, 2 * ffn, hidden, dtype=dtype, device=device))
        self.w2 = torch.nn.Parameter(torch.empty(local, hidden, ffn, dtype=dtype, device=device))
        with torch.no_grad():
            self.w1.normal_(0.0, hidden**-0.5)
            self.w2.normal_(0.0, ffn**-0.5)
        self._grads = [torch.zeros_like(w, dtype=grad_dtype) for w in (self.w1, self.w2)]
        if grad_dtype != dtype:
            for w, g in zip((self.w1, self.w2), self._grads):
                setattr(w, "main_grad", g)
        self._config = c.LayerConfig(
            experts=experts, hidden=hidden, ffn=ffn, type=_type_of(dtype), wgrad_type=_type_of(grad_dtype),
            w1=self.w1.data_ptr(), w2=self.w2.data_ptr(), dw1=self._grads[0].data_ptr(),
            dw2=self._grads[1].data_ptr())
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        # (held, so that no others come to lie at their addresses, as FSDP's gathered ones once did)
        self._made = ((self.w1, self.w1.data_ptr()), (self.w2, self.w2.data_ptr()))
        self._handle = c.create("epo_layer_create", group.handle, byref(self._config))
        group._layers[:] = [known for known in group._layers if known() is not None] + [weakref.ref(self)]

    @property
    def handle(self) -> c_void_p:
        if self._handle is None:
            raise RuntimeError("this layer was closed, or has its own module")
        return self._handle

    def __getstate__(self) -> Any:
        """No copies: the library knows the weights by their address."""
        raise TypeError("MoELayer cannot be copied nor pickled: save its state_dict(), and load it into a layer made anew")

    @untraced
    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], experts int64 [T, K] (-1: unused), weights float32 [T, K] -> y [T, H]."""
        plan = self.buffer.plan(experts, weights)
        _fits(x, "x", (plan.tokens, self.buffer.hidden), self.buffer.dtype, self.group.device)
        if self.module is not None:
            rows, row_weights = dispatch(x, weights, plan)
            out = self.module(rows, plan.counts)
            if not isinstance(out, torch.Tensor) or out.shape != rows.shape:
                raise ValueError("module: found %s for rows %s, needed is a row for each" % (
                    list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__, list(rows.shape)))
            return combine((out * row_weights[:, None]).to(self.buffer.dtype), plan)
        self._check_place()
        weights = _need(weights, "weights", (plan.tokens, plan.top_k), torch.float32, self.group.device)
        trains = torch.is_grad_enabled() and (
            x.requires_grad or weights.requires_grad or self.w1.requires_grad or self.w2.requires_grad)
        # Autograd does not see the weights: who hangs on the nodes that would add up their gradients (Megatron's
        # overlap_grad_reduce) would be called before these are there.
        return _through_experts(x, weights, self, plan, trains, self._anchor if trains else None)

    def _check_place(self) -> None:
        """Weights where the library knows them, and nobody who would take gradients too early."""
        for name, w, (made, at), grads, aside in zip(("w1", "w2"), (self.w1, self.w2), self._made, self._grads, self._aside):
            if type(w.data).__name__ == "DTensor" or getattr(w, "_is_flat_param", False) or w.numel() == 0:
                raise RuntimeError("MoELayer.%s is sharded (FSDP): leave the layer out of it" % name)
            if w is not made or w.data_ptr() != at:
                raise RuntimeError("MoELayer.%s has moved (to another device or type, or into a flat buffer, as FSDP "
                                   "does): make the layer where it is to stay, and leave it out of FSDP" % name)
            held = getattr(w, "main_grad", grads)
            if held is not aside and held.data_ptr() != grads.data_ptr():
                raise RuntimeError("MoELayer.%s got another main_grad (Megatron's DistributedDataParallel?), which the "
                                   "library does not know: leave the layer out of it, make it with grad_dtype, and "
                                   "reduce its own main_grad in register_wgrad_hook" % name)
            if getattr(w, "_post_accumulate_grad_hooks", None) or getattr(w, "_backward_hooks", None):
                raise RuntimeError("MoELayer.%s has a gradient hook (overlap_grad_reduce?), which would run before "
                                   "its gradient is there: use register_wgrad_hook" % name)
        ddp = torch.nn.parallel.DistributedDataParallel
        active = getattr(ddp, "_get_active_ddp_module", lambda: None)()
        if active is not None and any(p is self.w1 for p in active.parameters()):
            ignored = set(getattr(active, "parameters_to_ignore", ()))
            names = [n for n, p in active.module.named_parameters() if p is self.w1 or p is self.w2]
            if any(n not in ignored for n in names):
                raise RuntimeError("MoELayer inside DistributedDataParallel: its experts differ from rank to rank; "
                                   "name %s in _ddp_params_and_buffers_to_ignore" % " and ".join(names))

    def _offer_gradients(self) -> None:
        """w.grad is the array that the library adds to, or writes where somebody dropped them all. Of a weight that
        needs no gradient the array is the library's alone."""
        fresh = []
        for i, (w, g) in enumerate(zip((self.w1, self.w2), self._grads)):
            if hasattr(w, "main_grad"):
                if not w.requires_grad:
                    fresh.append(g)
                self._set_aside(i, w, g)
            elif not w.requires_grad:
                fresh.append(g)
                if w.grad is not None and w.grad.data_ptr() == g.data_ptr():
                    w.grad = w.grad.clone()
            elif w.grad is None:
                fresh.append(g)
                w.grad = g
            elif w.grad.data_ptr() != g.data_ptr():
                g.copy_(w.grad)
                w.grad = g
        if len(fresh) == 2:
            c.check(c.library().epo_layer_wgrad_begin(self.handle))
        elif fresh:
            fresh[0].zero_()

    def _set_aside(self, i: int, w: Any, g: torch.Tensor) -> None:
        """main_grad of a weight that needs no gradient is a copy, until it needs one again."""
        held: torch.Tensor = w.main_grad
        if not w.requires_grad and held is not self._aside[i]:
            self._aside[i] = w.main_grad = held.clone()
        elif w.requires_grad and held is self._aside[i]:
            g.copy_(held)
            self._aside[i], w.main_grad = None, g

    def _gradients_came(self) -> None:
        self._pending = self.w1.requires_grad or self.w2.requires_grad
        if self._pending and not self.group.delay_wgrad:
            self._call_hooks()

    def _call_hooks(self) -> None:
        self._pending = False
        for hook in list(self._hooks):
            hook(self)

    def gradients_flushed(self) -> None:
        """Calls the hooks that wait for what was flushed, if any do."""
        if self._pending:
            self._call_hooks()

    def register_wgrad_hook(self, hook: Callable[["MoELayer"], None]) -> Callable[[], None]:
        """Called with the layer when the weight gradients are complete in stream order: after each
        backward, with delayed weight gradients after `flush()`. Returns what removes it."""
        if not callable(hook):
            raise ValueError("hook: found %r, needed is a function of the layer" % (hook,))
        known = [hook]  # (the same function may be registered twice, and what it returned called twice)
        self._hooks.append(hook)
        return lambda: self._hooks.remove(known.pop()) if known else None

    @untraced
    def flush(self) -> None:
        """The weight gradients of all backwards so far are complete, in stream order."""
        if self._handle is None:
            return
        c.check(c.library().epo_layer_wgrad_flush(self._handle, self.group.stream()))
        self.gradients_flushed()

    def close(self) -> None:
        """[collective] Flushes; after the last forward's graph is gone."""
        gc.collect()  # graphs that only a cycle keeps
        self.flush()
        self.buffer.close()  # refuses while somebody holds a plan: then the layer still works
        if self._handle is not None:
            c.destroy("epo_layer_destroy", self)
