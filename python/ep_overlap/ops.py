# SPDX-License-Identifier: Apache-2.0
"""Groups, buffers, plans, and dispatch and combine with their gradients."""
from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import byref, c_uint64, c_void_p
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable

from . import _capi as c

_TYPES = {torch.float32: c.F32, torch.bfloat16: c.BF16, torch.float16: c.F16}


def _check_torch() -> None:
    found = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    if found < (2, 4):
        raise ImportError("torch %s: ep_overlap needs 2.4 or newer" % torch.__version__)


_check_torch()


def _type_of(dtype: torch.dtype) -> int:
    if dtype not in _TYPES:
        raise ValueError("dtype: found %s, allowed are %s" % (dtype, ", ".join(map(str, _TYPES))))
    return _TYPES[dtype]


def _fits(tensor: torch.Tensor, name: str, shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError where the tensor is not what is needed; -1 in `shape` allows any size."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("%s: found %s, needed is a tensor" % (name, type(tensor).__name__))
    fits = tensor.dim() == len(shape) and all(n in (-1, m) for n, m in zip(shape, tensor.shape))
    there = tensor.device
    if not fits or tensor.dtype != dtype or there.type != device.type or (
            there.index != device.index and there.type == "cuda") or tensor.layout is not torch.strided:
        raise ValueError("%s: found %s %s on %s%s, needed is [%s] %s on %s" % (
            name, list(tensor.shape), tensor.dtype, there, "" if tensor.layout is torch.strided else ", sparse",
            ", ".join("any" if n < 0 else str(n) for n in shape), dtype, device))


def _need(tensor: torch.Tensor, name: str, shape: Tuple[int, ...], dtype: torch.dtype,
          device: torch.device) -> torch.Tensor:
    """The tensor as it lies in memory, contiguous, if it is what is needed."""
    _fits(tensor, name, shape, dtype, device)
    if tensor.is_neg():  # (a view such as z.conj().imag, whose memory has the other sign)
        tensor = tensor.resolve_neg()
    tensor = tensor.contiguous()
    try:
        there = tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # (as those of torch.func say)
        there = False
    if not there:
        raise ValueError("%s: found a %s, which has no memory of its own; needed is a plain tensor (of a DTensor: "
                         "to_local(); not inside torch.func's transforms)" % (name, type(tensor).__name__))
    return tensor


def _switch(name: str, value: Any) -> int:
    """0 or 1 of a bool; a word ("off") is none."""
    return c.whole(name, value, 0, 1)


def _pointer(tensor: Optional[torch.Tensor]) -> Optional[int]:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """What torch.compile leaves to Python, as the library's calls cannot be traced: the graph breaks there, and what
    is around them is compiled."""
    plain = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        # (it imports Dynamo, which takes seconds: only where that is there anyway)
        return (plain if torch.compiler.is_compiling() else function)(*arguments, **named)

    return cast(Function, call)


class Group(c.Single):
    """The ranks that share the experts. [collective]

    ranks of the job by default (torchrun's, mpirun's or Slurm's variables); `process_group`: a
    torch.distributed group, whose ranks, in its order, form this one.
    engine: "cuda", "host" or None (CUDA if there is a GPU).
    overlap, delay_wgrad: None leaves them to the job's options (srun --ep-overlap, --delay-wgrad).
    dispatcher: "alltoall", "flex" or None.
    torch_memory: what calls take beside their tensors (activations, maps; not the windows, which peers
    write) comes from torch's allocator and stands in its figures; False: from the driver.
    tensor_parallel: ranks i*tp .. i*tp+tp-1 hold the same tokens and share the work on them.
    chunks: expert groups of a pass; 0 leaves them to the engine. timeout_s: seconds that a peer is waited
    for; 0: EP_OVERLAP_TIMEOUT, else 600.
    Raises ValueError for a wrong argument and ep_overlap.Error for a failure.

    To read: rank, ranks; engine, "host" or "cuda"; device, where tensors have to be; overlap and delay_wgrad
    as decided, reason why, versions of all that takes part.
    """

    def __init__(self, process_group: Any = None, *, engine: Optional[str] = None,
                 overlap: Optional[bool] = None, dispatcher: Optional[str] = None,
                 delay_wgrad: Optional[bool] = None, chunks: int = 0, timeout_s: float = 0.0,
                 torch_memory: bool = True, tensor_parallel: int = 0) -> None:
        for name, table, word in (("engine", c.ENGINES, engine), ("dispatcher", c.DISPATCHERS, dispatcher)):
            if word not in table:
                raise ValueError("%s: found %r, allowed are %s" % (name, word, ", ".join(map(repr, table))))
        config = c.GroupConfig(
            engine=c.ENGINES[engine], rank=-1, ranks=-1, dispatcher=c.DISPATCHERS[dispatcher],
            overlap=c.DEFAULT if overlap is None else _switch("overlap", overlap),
            delay_wgrad=c.DEFAULT if delay_wgrad is None else _switch("delay_wgrad", delay_wgrad),
            chunks=chunks, timeout_s=timeout_s, tensor_parallel=tensor_parallel)
        self._layers: List["weakref.ref[Any]"] = []  # in the order in which all ranks made them
        self._memory = _Memory() if torch_memory else None
        if self._memory is not None:
            config.alloc, config.free = self._memory.alloc, self._memory.free
        self._bootstrap = None
        if process_group is not None:
            if not hasattr(process_group, "rank"):
                raise ValueError("process_group: found %r, needed is a group of torch.distributed that this rank is of (of a "
                                 "DeviceMesh: get_group())" % (process_group,))
            self._bootstrap = _bootstrap_of(process_group)
            config.rank, config.ranks = process_group.rank(), process_group.size()
            config.bootstrap = ctypes.pointer(self._bootstrap)
        self._handle: Optional[c_void_p] = c.create("epo_group_create", byref(config))
        info = c.GroupInfo()
        c.check(c.library().epo_group_query(self._handle, byref(info)))
        self.rank, self.ranks = info.rank, info.ranks
        self.engine = info.engine.decode()
        if self._memory is not None:
            self._memory.on_gpu = self.engine == "cuda"
        self.overlap, self.delay_wgrad = bool(info.overlap), bool(info.delay_wgrad)
        self.reason, self.versions = info.reason.decode(), info.versions.decode()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.engine == "cuda" else torch.device("cpu")

    @property
    def handle(self) -> c_void_p:
        if self._handle is None:
            raise RuntimeError("this group was closed")
        return self._handle

    def stream(self) -> Optional[int]:
        """torch's current stream, as the library takes it."""
        # (torch.cuda.current_stream makes an object each time, 8 us of the CPU)
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.engine == "cuda" else None

    def buffer(self, **shape: Any) -> "Buffer":
        """See Buffer. [collective]"""
        return Buffer(self, **shape)

    @untraced
    def flush(self) -> None:
        """All delayed weight gradients of the group are in their arrays, in stream order; the hooks of its layers that
        wait for them are called."""
        c.check(c.library().epo_group_wgrad_flush(self.handle, self.stream()))
        for layer in [known() for known in self._layers]:
            if layer is not None:
                layer.gradients_flushed()

    def check(self) -> None:
        """Raises an error that a device reported late or that broke the group."""
        c.check(c.library().epo_group_async_error(self.handle))

    def stats(self, reset: bool = False) -> Dict[str, Any]:
        """The sums that epo_stats of ep_overlap.h describes, by its names, since the group was made or last reset:
        calls, bytes sent, delayed weight gradients, memory held now and at most, dropped slots."""
        stats = c.Stats()
        c.check(c.library().epo_group_stats(self.handle, byref(stats), int(reset)))
        return {field[0]: getattr(stats, field[0]) for field in stats._fields_[1:]}

    def close(self) -> None:
        """[collective] After the last buffer and layer. Groups are not closed by the garbage
        collector: it runs at another time on every rank."""
        if self._handle is not None:
            c.destroy("epo_group_destroy", self)


# (torch gives these no types)
_gpu_alloc: Callable[[int], int] = torch.cuda.caching_allocator_alloc
_gpu_free: Callable[[int], None] = torch.cuda.caching_allocator_delete


class _Memory:
    """torch's allocator as the library calls it; NULL: there is no more."""

    def __init__(self) -> None:
        self.on_gpu = False  # (nothing is asked for before the group is made)
        self._held: Dict[int, torch.Tensor] = {}
        self.alloc, self.free = c.ALLOC(self._alloc), c.FREE(self._free)

    def _alloc(self, _: Any, count: int) -> Optional[int]:
        try:
            if self.on_gpu:
                return _gpu_alloc(count)
            tensor = torch.empty(count + 255, dtype=torch.uint8)
            at = (tensor.data_ptr() + 255) // 256 * 256
            self._held[at] = tensor
            return at
        except Exception:  # none may cross into C; the library says what it wanted to have
            return None

    def _free(self, _: Any, at: int, count: int) -> None:
        try:
            if self.on_gpu:
                _gpu_free(at)
            else:
                self._held.pop(at, None)
        except Exception as e:
            print("ep_overlap: freeing %d bytes: %s" % (count, e), flush=True)


def _bootstrap_of(group: Any) -> c.Bootstrap:
    """Bytes from every rank over a torch.distributed group, while ours is made."""
    import torch.distributed as dist

    gpu = "nccl" in str(dist.get_backend(group))
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")

    def allgather(_: Any, mine: int, count: int, everything: int) -> int:
        try:
            if count == 0:
                dist.barrier(group)
                return 0
            source = (ctypes.c_ubyte * count).from_address(mine)
            one = torch.frombuffer(source, dtype=torch.uint8).to(device)
            parts = [torch.empty_like(one) for _ in range(group.size())]
            dist.all_gather(parts, one, group=group)
            for i, part in enumerate(parts):
                host = part.cpu().contiguous()
                ctypes.memmove(everything + i * count, host.data_ptr(), count)
            return 0
        except Exception as e:  # no exception may cross into C
            print("ep_overlap: gathering over torch.distributed: %s" % e, flush=True)
            return 1

    def barrier(_: Any) -> int:
        try:
            dist.barrier(group)
            return 0
        except Exception as e:
            print("ep_overlap: barrier over torch.distributed: %s" % e, flush=True)
            return 1

    return c.Bootstrap(allgather=c.ALLGATHER(allgather), barrier=c.BARRIER(barrier))


class Buffer(c.Single):
    """The windows through which rows of one shape travel. [collective]

    experts: E of the whole group. top_k: K at most. max_tokens: T of any rank at most.
    capacity_factor, overflow ("error", "drop_by_weight", "drop_by_position"), pad_to_capacity: as
    ep_overlap.h has them; without them every plan has its exact size. graphs: calls may be captured in
    a CUDA graph (torch.cuda.graph); needs pad_to_capacity. wire: "e4m3" sends what dispatch sends, gradients too,
    as 8-bit floats with a scale of each 128 (half the bytes, about 2.6 % off); None or "rows": as it is.
    Raises ValueError for a wrong argument and ep_overlap.Error for a failure (memory, a peer).
    To read: bytes, what its windows take on this rank.
    """

    def __init__(self, group: Group, *, hidden: int, experts: int, top_k: int, max_tokens: int,
                 dtype: torch.dtype = torch.bfloat16, dispatcher: Optional[str] = None, chunks: int = 0,
                 align_rows: int = 0, max_rows: int = 0, capacity_factor: float = 0.0,
                 capacity: int = -1, overflow: str = "error", pad_to_capacity: bool = False,
                 graphs: bool = False, wire: Optional[str] = None) -> None:
        if wire not in c.WIRES:
            raise ValueError("wire: found %r, allowed are None, 'rows', 'e4m3'" % (wire,))
        if overflow not in c.OVERFLOWS:
            raise ValueError("overflow: found %r, allowed are %s" % (overflow, ", ".join(c.OVERFLOWS)))
        if dispatcher not in c.DISPATCHERS:
            raise ValueError("dispatcher: found %r, allowed are %s" % (dispatcher, ", ".join(map(repr, c.DISPATCHERS))))
        self.group, self.hidden, self.experts, self.top_k, self.dtype = group, hidden, experts, top_k, dtype
        self._config = c.BufferConfig(
            experts=experts, hidden=hidden, top_k=top_k, max_tokens=max_tokens, type=_type_of(dtype),
            dispatcher=c.DISPATCHERS[dispatcher], chunks=chunks, align_rows=align_rows, max_rows=max_rows,
            capacity_factor=capacity_factor, capacity=capacity, overflow=c.OVERFLOWS[overflow],
            pad_to_capacity=_switch("pad_to_capacity", pad_to_capacity), wire=c.WIRES[wire],
            graphs=_switch("graphs", graphs))
        self._captured: List["Plan"] = []  # graphs use their memory until this buffer is closed
        count = c_uint64()
        c.check(c.library().epo_buffer_bytes(group.handle, byref(self._config), byref(count)))
        self.bytes = count.value
        self._handle: Optional[c_void_p] = c.create("epo_buffer_create", group.handle, byref(self._config))

    @property
    def handle(self) -> c_void_p:
        if self._handle is None:
            raise RuntimeError("this buffer was closed")
        return self._handle

    @untraced
    def plan(self, experts: torch.Tensor, weights: Optional[torch.Tensor] = None) -> "Plan":
        """experts int64 [T, K], -1 for a slot that is not used; weights float32 [T, K] or None: 1.
        [collective] Waits until the counts are known, unless the buffer is for graphs."""
        plan = Plan(self, experts, weights)
        if self._config.graphs and torch.cuda.is_current_stream_capturing():
            self._captured.append(plan)
        return plan

    def close(self) -> None:
        """[collective] After the last plan made from it, and the last replay of a graph."""
        self._captured.clear()
        if self._handle is None:
            return
        try:
            c.destroy("epo_buffer_destroy", self)
        except c.Error as e:
            if e.status != "EPO_E_STATE":
                raise
            raise c.Error(e.status, str(e).split(": ", 1)[1] + " (outputs whose backward has not run keep theirs: "
                                                             "del them)") from None


class Plan(c.Single):
    """Which row goes where: made once from a routing, used by forward and backward.

    Made by `Buffer.plan`. tokens T, top_k K: of the routing. rows R: expert-major rows on this rank.
    first, counts: each local expert's first row and rows. It ends with the last reference to it.
    """

    def __init__(self, buffer: Buffer, experts: torch.Tensor, weights: Optional[torch.Tensor]) -> None:
        group = buffer.group
        experts = _need(experts, "experts", (-1, -1), torch.int64, group.device)
        self.tokens, self.top_k = int(experts.shape[0]), int(experts.shape[1])
        if weights is not None:
            weights = _need(weights.detach(), "weights", (self.tokens, self.top_k), torch.float32, group.device)
        self.buffer, self.group, self.weighted = buffer, group, weights is not None
        routing = c.Routing(tokens=self.tokens, top_k=self.top_k, experts=_pointer(experts), weights=_pointer(weights))
        self.handle: Optional[c_void_p] = c.create("epo_plan_create", buffer.handle, byref(routing), group.stream())
        rows = c_uint64()
        c.check(c.library().epo_plan_rows(self.handle, byref(rows)))
        self.rows = rows.value
        self.first, self.counts = c.plan_experts(self.handle, buffer.experts // group.ranks)

    @property
    def dropped(self) -> int:
        """Slots of this rank that its capacity dropped; they add nothing to y. 0 where the buffer is for graphs: there
        `Group.stats` counts them."""
        return int(self._info().dropped)

    @property
    def pad_rows(self) -> int:
        """Of `rows`, those that only fill up to the capacity."""
        return int(self._info().pad_rows)

    def _info(self) -> c.PlanInfo:
        info = c.PlanInfo()
        c.check(c.library().epo_plan_query(self.handle, byref(info)))
        return info

    def empty_rows(self) -> torch.Tensor:
        """[R, H], not set."""
        return torch.empty(self.rows, self.buffer.hidden, dtype=self.buffer.dtype, device=self.group.device)

    def empty_tokens(self) -> torch.Tensor:
        """[T, H], not set."""
        return torch.empty(self.tokens, self.buffer.hidden, dtype=self.buffer.dtype, device=self.group.device)

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), None
        if handle is not None and c._library is not None:
            c._library.epo_plan_release(handle)


def _tokens(plan: Plan, x: torch.Tensor, name: str) -> torch.Tensor:
    return _need(x, name, (plan.tokens, plan.buffer.hidden), plan.buffer.dtype, plan.group.device)


def _rows(plan: Plan, x: torch.Tensor, name: str) -> torch.Tensor:
    return _need(x, name, (plan.rows, plan.buffer.hidden), plan.buffer.dtype, plan.group.device)


def _dispatch(plan: Plan, x: torch.Tensor, row_weights: Optional[torch.Tensor]) -> torch.Tensor:
    out = plan.empty_rows()
    c.check(c.library().epo_dispatch(plan.handle, _pointer(x), _pointer(out), _pointer(row_weights), plan.group.stream()))
    return out


def dispatch_rows(x: torch.Tensor, plan: Plan, row_weights: Optional[torch.Tensor] = None) -> torch.Tensor:
    """dispatch without a gradient: x [T, H] to rows [plan.rows, H]; row_weights float32 [plan.rows] receives the
    router weights of the rows. [collective]"""
    return _dispatch(plan, _tokens(plan, x, "x"), row_weights)


def combine_weights(rows: torch.Tensor, row_dweights: Optional[torch.Tensor],
                    plan: Plan) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """combine without a gradient of its own; row_dweights float32 [plan.rows] go back to [T, K]. [collective]"""
    y, dweights, keep = plan.empty_tokens(), None, None
    rows = _rows(plan, rows, "rows")
    if row_dweights is not None:
        dweights = torch.empty(max(1, plan.tokens), plan.top_k, dtype=torch.float32, device=plan.group.device)
        keep = _need(row_dweights, "row_dweights", (plan.rows,), torch.float32, plan.group.device)
        if keep.numel() == 0:  # nothing to give, but the others count on the call
            keep = torch.zeros(1, device=plan.group.device)
    c.check(c.library().epo_combine(plan.handle, _pointer(rows), _pointer(y), _pointer(keep), _pointer(dweights),
                                    plan.group.stream()))
    return y, None if dweights is None else dweights[: plan.tokens]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: Optional[torch.Tensor], plan: Plan) -> Any:
        ctx.plan, ctx.weighted = plan, weights is not None
        row_weights = torch.empty(plan.rows, dtype=torch.float32, device=plan.group.device)
        rows = _dispatch(plan, _tokens(plan, x, "x"), row_weights)
        return rows, row_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: torch.Tensor, drow_weights: torch.Tensor) -> Any:
        given = drow_weights if ctx.weighted else None
        dx, dweights = combine_weights(drows, given, ctx.plan)
        return dx, dweights, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, plan: Plan) -> torch.Tensor:
        ctx.plan = plan
        y = plan.empty_tokens()
        c.check(c.library().epo_combine(plan.handle, _pointer(_rows(plan, rows, "rows")), _pointer(y), None, None,
                                        plan.group.stream()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _dispatch(ctx.plan, _tokens(ctx.plan, dy, "gradient of y"), None), None


# (torch gives Function.apply no types)
_dispatched: Callable[..., Tuple[torch.Tensor, torch.Tensor]] = _Dispatch.apply
_combined: Callable[..., torch.Tensor] = _Combine.apply


@untraced
def dispatch(x: torch.Tensor, weights: Optional[torch.Tensor], plan: Plan) -> Tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] to (rows [plan.rows, H], row_weights float32 [plan.rows]), differentiable in both.

    weights: the tensor that `plan` was made with (its gradient comes back through it), or None.
    [collective], and so is its backward: every rank runs both, in the same order.
    """
    if weights is not None and (not plan.weighted or weights.shape != (plan.tokens, plan.top_k)):
        raise ValueError("weights: found %s for a plan of [%d, %d] made %s weights; needed are those it was made with" % (
            list(weights.shape), plan.tokens, plan.top_k, "with" if plan.weighted else "without"))
    return _dispatched(x, weights, plan)


@untraced
def combine(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
    """rows [plan.rows, H] to y [T, H]: the unweighted sum of each token's rows. [collective]"""
    return _combined(rows, plan)


__all__: List[str] = ["Group", "Buffer", "Plan", "dispatch", "combine"]
