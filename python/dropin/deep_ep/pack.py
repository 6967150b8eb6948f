# SPDX-License-Identifier: Apache-2.0
"""What travels in a row of the drop-in beside the token itself.

On the way out a row is the token's bytes and, behind them, K indices (int32) and K weights (float32):
bytes, which dispatch only copies. On the way back rows are summed as bf16, so a weight is three bf16
columns whose sum it is, each what the ones before it leave; zeros from the other ranks change nothing.

Each function is one kernel of Triton where there are Triton and a GPU, else plain torch, which is
also what the kernels are tested against.
"""
from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

Three = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Columns = Tuple[torch.Tensor, Optional[torch.Tensor]]


def wide_of(top_k: int) -> int:
    """bf16 columns for K slots: two of each for an index and a weight; whole 16 bytes."""
    return (4 * top_k + 7) // 8 * 8


# ---- plain torch ----


def halves(x: torch.Tensor) -> torch.Tensor:
    """[T, K] of 4 bytes -> int16 [T, 2 K]."""
    return x.contiguous().view(-1).view(torch.int16).view(x.shape[0], 2 * x.shape[1])


def whole(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The way back: int16 [T, 2 K] -> [T, K] of 4 bytes."""
    return x.contiguous().view(-1).view(dtype).view(x.shape[0], x.shape[1] // 2)


def as_rows(x: Any) -> Tuple[torch.Tensor, Callable[..., Any]]:
    """Tokens as rows that dispatch can carry, and what makes of such rows the same again. x: a tensor, or FP8's
    (data [T, H] of 1 byte, scales [T, S] of 4), whose bytes travel as bf16 columns, whole 16 bytes a row."""
    if isinstance(x, torch.Tensor):
        return x, lambda rows, as_tuple=False: (rows,) if as_tuple else rows
    if not isinstance(x, (tuple, list)) or len(x) != 2 or not all(isinstance(part, torch.Tensor) for part in x):
        raise ValueError("rows: found %s, needed is a tensor, or FP8's (data, scales)" % type(x).__name__)
    data, scales = x
    if data.dim() != 2 or scales.dim() != 2 or data.element_size() != 1 or scales.element_size() != 4 or (
            data.shape[0] != scales.shape[0]):
        raise ValueError("FP8 rows: found %s %s and %s %s, needed are [T, H] of 1 byte and [T, S] of 4 bytes an "
                         "element" % (data.dtype, list(data.shape), scales.dtype, list(scales.shape)))
    t, h, s = data.shape[0], data.shape[1], scales.shape[1]
    out = torch.empty(t, (h + 4 * s + 15) // 16 * 16, dtype=torch.uint8, device=data.device)
    out[:, :h] = data.view(torch.uint8)
    out[:, h : h + 4 * s] = scales.contiguous().view(-1).view(torch.uint8).view(t, 4 * s)

    def restore(rows: torch.Tensor, as_tuple: bool = True) -> Tuple[torch.Tensor, torch.Tensor]:
        n, came = rows.shape[0], rows.contiguous().view(torch.uint8)
        come = came[:, h : h + 4 * s].contiguous().view(-1).view(scales.dtype).view(n, s)
        return came[:, :h].contiguous().view(data.dtype), come

    return out.view(torch.bfloat16), restore


def need(call: str, name: str, tensor: Optional[torch.Tensor], shape: Tuple[int, ...],
         dtype: Optional[torch.dtype] = None) -> None:
    """Raises ValueError where a tensor that is given is another; -1 allows any size. Kernels read by what they are
    told, not by what there is."""
    if tensor is None or tensor.dim() == len(shape) and (dtype is None or tensor.dtype == dtype) and all(
            n in (-1, m) for n, m in zip(shape, tensor.shape)):
        return
    raise ValueError("%s: found %s %s %s, needed is %s[%s]" % (
        call, name, tensor.dtype, list(tensor.shape), "" if dtype is None else "%s " % dtype,
        ", ".join("any" if n < 0 else str(n) for n in shape)))


def layout_torch(index: torch.Tensor, experts: int, ranks: int) -> Three:
    """index int64 [T, K], -1: unused -> rows per rank int32 [R], per expert int32 [E], token in rank bool [T, R]."""
    owner = torch.div(index, experts // ranks, rounding_mode="floor")  # (-1 stays below 0)
    inside = (owner[:, :, None] == torch.arange(ranks, device=index.device)).any(1)
    count = torch.zeros(experts + 1, dtype=torch.int32, device=index.device)
    flat = torch.where((index >= 0) & (index < experts), index, experts).flatten()  # (a bad one counts nowhere)
    count.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return inside.sum(0, dtype=torch.int32), count[:experts], inside


def pack_torch(x: torch.Tensor, index: torch.Tensor, weights: Optional[torch.Tensor], width: int) -> torch.Tensor:
    """x [T, H] bf16, index [T, K], weights [T, K] -> bf16 [T, width]; columns that nobody reads are left as they are."""
    out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    h, k = x.shape[1], index.shape[1]
    out[:, :h] = x
    words = out.view(torch.int16)
    words[:, h : h + 2 * k] = halves(index.to(torch.int32))
    if weights is not None:
        words[:, h + 2 * k : h + 4 * k] = halves(weights)
    return out


def unpack_torch(came: torch.Tensor, h: int, k: int, first: int, local: int, weighted: bool) -> Tuple[Any, ...]:
    """Rows [N, width] -> x [N, h], index int64 [N, k] of experts first .. first+local-1 (counted from there; -1:
    another rank's), weights float32 [N, k] (0 there) or None, mine bool [N, k], rows per expert int32 [local]."""
    words = came.view(torch.int16)
    index = whole(words[:, h : h + 2 * k], torch.int32).to(torch.int64) - first
    mine = (index >= 0) & (index < local)
    index = torch.where(mine, index, -1)
    count = torch.zeros(local + 1, dtype=torch.int32, device=came.device)
    flat = torch.where(mine, index, local).flatten()
    count.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    weights = None
    if weighted:
        weights = torch.where(mine, whole(words[:, h + 2 * k : h + 4 * k], torch.float32), 0.0)
    return came[:, :h].contiguous(), index, weights, mine, count[:local]


def split_weights(w: torch.Tensor) -> List[torch.Tensor]:
    """float32 -> three bf16 whose sum it is."""
    high = w.to(torch.bfloat16)
    rest = w - high.float()
    middle = rest.to(torch.bfloat16)
    return [high, middle, (rest - middle.float()).to(torch.bfloat16)]


def widen_torch(x: torch.Tensor, weights: torch.Tensor, mine: torch.Tensor, width: int) -> torch.Tensor:
    """Rows [N, H] and the weights [N, K] of this rank's slots -> bf16 [N, width] for the way back."""
    out = torch.zeros(x.shape[0], width, dtype=x.dtype, device=x.device)
    h, k = x.shape[1], weights.shape[1]
    out[:, :h] = x
    for i, part in enumerate(split_weights(torch.where(mine, weights.to(torch.float32), 0.0))):
        out[:, h + i * k : h + (i + 1) * k] = part
    return out


def join_torch(y: torch.Tensor, h: int, k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Sums [T, width] -> y [T, h], weights float32 [T, k]."""
    f = y[:, h:].float()
    return y[:, :h].contiguous(), f[:, :k] + f[:, k : 2 * k] + f[:, 2 * k : 3 * k]


def columns_torch(routing: torch.Tensor, probs: Optional[torch.Tensor], k: int) -> Columns:
    """routing bool [T, E], probs [T, E] -> experts int64 [T, k] in ascending order, then -1; their probs float32
    [T, k], then 0. A token with more than k has E, which is no expert, in its last place."""
    t, e = routing.shape
    place = routing.cumsum(1) - 1
    at = torch.where(routing & (place < k), place, k)
    numbers = torch.arange(e, device=routing.device).expand(t, e)
    experts = torch.full((t, k + 1), -1, dtype=torch.int64, device=routing.device).scatter_(1, at, numbers)[:, :k]
    experts = experts.contiguous()
    experts[:, k - 1] = torch.where(routing.sum(1) > k, e, experts[:, k - 1])
    if probs is None:
        return experts, None
    weights = torch.zeros(t, k + 1, dtype=torch.float32, device=routing.device).scatter_(1, at, probs.to(torch.float32))
    return experts, weights[:, :k].contiguous()


def dense_torch(experts: torch.Tensor, by_slot: torch.Tensor, count: int) -> torch.Tensor:
    """by_slot float32 [T, k] of experts [T, k] -> [T, count], 0 elsewhere."""
    out = torch.zeros(experts.shape[0], count + 1, dtype=torch.float32, device=experts.device)
    return out.scatter_(1, torch.where(experts >= 0, experts, count), by_slot)[:, :count].contiguous()


# ---- Triton ----


def _kernels() -> Any:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]

    @triton.jit
    def layout(index, count, inside, E, R, LOCAL, K: tl.constexpr, KB: tl.constexpr, RB: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        k, r = tl.arange(0, KB), tl.arange(0, RB)
        e = tl.load(index + row * K + k, k < K, -1)
        used = (e >= 0) & (e < E)  # a bad index is the library's to tell of
        tl.atomic_add(count + e, 1, used)
        owner = tl.where(used, e // LOCAL, -1)
        here = tl.max((owner[:, None] == r[None, :]).to(tl.int32), 0)
        tl.store(inside + row * R + r, here.to(tl.int8), r < R)
        tl.atomic_add(count + E + r, 1, (here > 0) & (r < R))

    @triton.jit
    def pack(x, index, weights, out, H, W, K: tl.constexpr, WEIGHTED: tl.constexpr, B: tl.constexpr, KB: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at, k = tl.arange(0, B), tl.arange(0, KB)
        tl.store(out + row * W + at, tl.load(x + row * H + at, at < H), at < H)
        tl.store(out + row * W + H + k, tl.load(index + row * K + k, k < K).to(tl.int32), k < K)
        if WEIGHTED:
            w = tl.load(weights + row * K + k, k < K)
            tl.store(out + row * W + H + K + k, w.to(tl.int32, bitcast=True), k < K)

    @triton.jit
    def unpack(came, x, index, weights, mine, count, H, W, FIRST, LOCAL, K: tl.constexpr, WEIGHTED: tl.constexpr,
               B: tl.constexpr, KB: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at, k = tl.arange(0, B), tl.arange(0, KB)
        tl.store(x + row * H + at, tl.load(came + row * W + at, at < H), at < H)
        i = tl.load(came + row * W + H + k, k < K, -1) - FIRST
        ok = (k < K) & (i >= 0) & (i < LOCAL)
        tl.store(index + row * K + k, tl.where(ok, i, -1).to(tl.int64), k < K)
        tl.store(mine + row * K + k, ok.to(tl.int8), k < K)
        tl.atomic_add(count + i, 1, ok)
        if WEIGHTED:
            w = tl.load(came + row * W + H + K + k, k < K, 0).to(tl.float32, bitcast=True)
            tl.store(weights + row * K + k, tl.where(ok, w, 0.0), k < K)

    @triton.jit
    def widen(x, weights, mine, words, out, H, W, K: tl.constexpr, B: tl.constexpr, KB: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at, k = tl.arange(0, B), tl.arange(0, KB)
        tl.store(words + row * W + at, tl.load(x + row * H + at, at < H), at < H)
        ok = (k < K) & (tl.load(mine + row * K + k, k < K, 0) != 0)
        w = tl.load(weights + row * K + k, ok, 0.0).to(tl.float32)
        high = w.to(tl.bfloat16)
        w -= high.to(tl.float32)
        middle = w.to(tl.bfloat16)
        w -= middle.to(tl.float32)
        to = out + row * 2 * W + 2 * H + k
        tl.store(to, high, k < K)
        tl.store(to + K, middle, k < K)
        tl.store(to + 2 * K, w.to(tl.bfloat16), k < K)

    @triton.jit
    def join(words, y, out, weights, H, W, K: tl.constexpr, B: tl.constexpr, KB: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at, k = tl.arange(0, B), tl.arange(0, KB)
        tl.store(out + row * H + at, tl.load(words + row * W + at, at < H), at < H)
        come = y + row * 2 * W + 2 * H + k
        w = tl.load(come, k < K, 0.0).to(tl.float32) + tl.load(come + K, k < K, 0.0).to(tl.float32)
        tl.store(weights + row * K + k, w + tl.load(come + 2 * K, k < K, 0.0).to(tl.float32), k < K)

    @triton.jit
    def columns(routing, probs, experts, weights, E, K, WEIGHTED: tl.constexpr, EB: tl.constexpr, KB: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        e, k = tl.arange(0, EB), tl.arange(0, KB)
        there = (tl.load(routing + row * E + e, e < E, 0) != 0).to(tl.int32)
        place = tl.cumsum(there, 0) - 1
        most = tl.sum(there, 0)
        kept = (there != 0) & (place < K)
        empty = (k >= most) & (k < K)
        tl.store(experts + row * K + k, tl.full([KB], -1, tl.int64), empty)
        number = tl.where((most > K) & (place == K - 1), E, e)
        tl.store(experts + row * K + place, number.to(tl.int64), kept)
        if WEIGHTED:
            tl.store(weights + row * K + k, tl.zeros([KB], tl.float32), empty)
            tl.store(weights + row * K + place, tl.load(probs + row * E + e, kept, 0.0).to(tl.float32), kept)

    @triton.jit
    def dense(experts, by_slot, out, E, K: tl.constexpr, EB: tl.constexpr, KB: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        e, k = tl.arange(0, EB), tl.arange(0, KB)
        at = tl.load(experts + row * K + k, k < K, -1)
        value = tl.load(by_slot + row * K + k, k < K, 0.0)
        total = tl.sum(tl.where(at[:, None] == e[None, :], value[:, None], 0.0), 0)
        tl.store(out + row * E + e, total, e < E)

    def power(n: int) -> int:
        return 1 << (n - 1).bit_length()

    return SimpleNamespace(layout=layout, pack=pack, unpack=unpack, widen=widen, join=join, columns=columns, dense=dense,
                           power=power)


_made: Any = None
_usable: Optional[bool] = None
_compiled: Dict[Any, Any] = {}


def _launch(name: str, rows: int, tensors: Tuple[torch.Tensor, ...], numbers: Tuple[Any, ...], warps: int = 4) -> None:
    """One program a row. Triton looks at every argument of every launch anew, which costs the CPU four times
    what the launch does; so a kernel that it made for the same numbers and types is launched as it is."""
    if rows == 0:
        return
    key = (name, numbers, tensors[0].device, *[t.dtype for t in tensors])
    aligned = not any(t.data_ptr() % 16 for t in tensors)  # (it is compiled for that, too)
    made = _compiled.get(key) if aligned else None
    if made is not None:
        try:
            made[(rows, 1, 1)](*tensors, *numbers)
            return
        except TypeError:  # another Triton wants other arguments there
            _compiled[key] = None
    made = getattr(_made, name)[(rows,)](*tensors, *numbers, num_warps=warps)
    if aligned:
        _compiled.setdefault(key, made)  # (None where it is interpreted)


def _triton(x: torch.Tensor, h: int = 8) -> Any:
    """The kernels, or None: no GPU, no Triton, or rows that are not whole words."""
    global _made, _usable
    if h % 2 != 0 or _usable is False or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    if _made is None:
        try:
            _made = _kernels()
        except ImportError:
            _usable = False
    return _made


def _run(fast: Callable[[Any], Any], plain: Callable[[], Any], x: torch.Tensor, h: int = 8) -> Any:
    """`fast` where Triton works (it needs a C compiler at the first launch), else `plain`."""
    global _usable
    kernels = _triton(x, h)
    if kernels is None:
        return plain()
    if _usable:
        return fast(kernels)
    try:
        out = fast(kernels)
        _usable = True
        return out
    except Exception as e:  # of many kinds: compiler, driver, version
        _usable = False
        warnings.warn("deep_ep on ep_overlap: Triton does not work here (%s): plain torch, which is slower" % e)
        return plain()


def layout(index: torch.Tensor, experts: int, ranks: int) -> Three:
    def fast(kernels: Any) -> Any:
        t, k = index.shape
        count = torch.zeros(experts + ranks, dtype=torch.int32, device=index.device)
        inside = torch.empty(t, ranks, dtype=torch.bool, device=index.device)
        _launch("layout", t, (index, count, inside.view(torch.int8)),
                (experts, ranks, experts // ranks, k, kernels.power(k), kernels.power(ranks)), 1)
        return count[experts:], count[:experts], inside

    return _run(fast, lambda: layout_torch(index, experts, ranks), index)


def pack(x: torch.Tensor, index: torch.Tensor, weights: Optional[torch.Tensor], width: int) -> torch.Tensor:
    def fast(kernels: Any) -> Any:
        t, h, k = x.shape[0], x.shape[1], index.shape[1]
        out = torch.empty(t, width, dtype=x.dtype, device=x.device)
        _launch("pack", t, (x.view(torch.int32), index, index if weights is None else weights, out.view(torch.int32)),
                (h // 2, width // 2, k, weights is not None, kernels.power(h // 2), kernels.power(k)))
        return out

    return _run(fast, lambda: pack_torch(x, index, weights, width), x, x.shape[1])


def unpack(came: torch.Tensor, h: int, k: int, first: int, local: int, weighted: bool) -> Tuple[Any, ...]:
    def fast(kernels: Any) -> Any:
        n, device = came.shape[0], came.device
        x = torch.empty(n, h, dtype=came.dtype, device=device)
        index = torch.empty(n, k, dtype=torch.int64, device=device)
        weights = torch.empty(n, k, dtype=torch.float32, device=device) if weighted else None
        mine = torch.empty(n, k, dtype=torch.bool, device=device)
        count = torch.zeros(local, dtype=torch.int32, device=device)
        _launch("unpack", n, (came.view(torch.int32), x.view(torch.int32), index, index if weights is None else weights,
                              mine.view(torch.int8), count),
                (h // 2, came.shape[1] // 2, first, local, k, weighted, kernels.power(h // 2), kernels.power(k)))
        return x, index, weights, mine, count

    return _run(fast, lambda: unpack_torch(came, h, k, first, local, weighted), came, h)


def widen(x: torch.Tensor, weights: torch.Tensor, mine: torch.Tensor, width: int) -> torch.Tensor:
    def fast(kernels: Any) -> Any:
        n, h, k = x.shape[0], x.shape[1], weights.shape[1]
        out = torch.empty(n, width, dtype=x.dtype, device=x.device)
        _launch("widen", n, (x.view(torch.int32), weights, mine.view(torch.int8), out.view(torch.int32), out),
                (h // 2, width // 2, k, kernels.power(h // 2), kernels.power(k)))
        return out

    return _run(fast, lambda: widen_torch(x, weights, mine, width), x, x.shape[1])


def join(y: torch.Tensor, h: int, k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    def fast(kernels: Any) -> Any:
        t = y.shape[0]
        out = torch.empty(t, h, dtype=y.dtype, device=y.device)
        weights = torch.empty(t, k, dtype=torch.float32, device=y.device)
        _launch("join", t, (y.view(torch.int32), y, out.view(torch.int32), weights),
                (h // 2, y.shape[1] // 2, k, kernels.power(h // 2), kernels.power(k)))
        return out, weights

    return _run(fast, lambda: join_torch(y, h, k), y, h)


def columns(routing: torch.Tensor, probs: Optional[torch.Tensor], k: int) -> Columns:
    def fast(kernels: Any) -> Any:
        t, e = routing.shape
        experts = torch.empty(t, k, dtype=torch.int64, device=routing.device)
        weights = torch.empty(t, k, dtype=torch.float32, device=routing.device) if probs is not None else None
        routes = routing.view(torch.int8)
        _launch("columns", t, (routes, routes if probs is None else probs, experts,
                               experts if weights is None else weights),
                (e, k, weights is not None, kernels.power(e), kernels.power(k)), 1)
        return experts, weights

    return _run(fast, lambda: columns_torch(routing, probs, k), routing)


def dense(experts: torch.Tensor, by_slot: torch.Tensor, count: int) -> torch.Tensor:
    def fast(kernels: Any) -> Any:
        t, k = experts.shape
        out = torch.empty(t, count, dtype=torch.float32, device=experts.device)
        _launch("dense", t, (experts, by_slot, out), (count, k, kernels.power(count), kernels.power(k)), 1)
        return out

    return _run(fast, lambda: dense_torch(experts, by_slot, count), experts)
