# SPDX-License-Identifier: Apache-2.0
"""deep_ep.Buffer.

DeepEP moves one copy of a token to each rank that has one of its experts, and sums over ranks on the
way back. That is a layer whose "experts" are the ranks: dispatch and combine of a routing to ranks
give its rows, in its order (source rank, token), without repetition.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

import ep_overlap

from .utils import EventHandle, EventOverlap


class Config:
    """Windows are made to measure at the first use, so sizes asked for in advance are 0."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle:
    """What `dispatch` leaves for `combine` and for a dispatch of other rows on the same way.

    ranks_of [T, R]: where tokens go. wide: columns behind a row's own, which carry its indices and
    weights. mine bool [N, K]: the slots of received rows that are this rank's.
    """

    def __init__(self, tokens: int, ranks_of: torch.Tensor, wide: int) -> None:
        self.tokens, self.ranks_of, self.wide = tokens, ranks_of, wide
        self.mine: Optional[torch.Tensor] = None
        self.plans: Dict[Any, Any] = {}


# Indices and weights travel in the rows themselves, as bf16 columns, so that a layer needs one plan and
# an exchange less each way. An index (plus one) is two numbers below 256; a float32 is the sum of three
# bf16, each what the ones before it leave: exact, and so is a sum of such parts and zeros.
PARTS = 5


def wide_of(top_k: int) -> int:
    """Columns for K slots: whole 16 bytes."""
    return (PARTS * top_k + 7) // 8 * 8


def split_weights(w: torch.Tensor) -> List[torch.Tensor]:
    """float32 -> three bf16 whose sum it is."""
    high = w.to(torch.bfloat16)
    rest = w - high.float()
    middle = rest.to(torch.bfloat16)
    return [high, middle, (rest - middle.float()).to(torch.bfloat16)]


def join_weights(parts: torch.Tensor, k: int) -> torch.Tensor:
    f = parts.float()
    return f[:, :k] + f[:, k : 2 * k] + f[:, 2 * k : 3 * k]


def widen(x: torch.Tensor, parts: List[torch.Tensor], wide: int) -> torch.Tensor:
    """[N, H] with the parts behind it and zeros up to H + wide."""
    out = torch.empty(x.shape[0], x.shape[1] + wide, dtype=x.dtype, device=x.device)
    out[:, : x.shape[1]] = x
    at = x.shape[1]
    for part in parts:
        out[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    out[:, at:] = 0
    return out


def on_stream(comm: torch.cuda.Stream, inputs: Tuple[Optional[torch.Tensor], ...], previous: Optional[EventOverlap],
              asynchronous: bool, work: Callable[[], Any]) -> Tuple[Any, EventOverlap]:
    """Runs `work` on the communication stream, behind `previous` or the current stream."""
    current = torch.cuda.current_stream()
    if previous is not None and previous.event is not None:
        comm.wait_event(previous.event._event)
    else:
        comm.wait_stream(current)
    with torch.cuda.stream(comm):
        out = work()
        event = EventHandle()
    for tensor in inputs:
        if tensor is not None:
            tensor.record_stream(comm)
    for tensor in out:
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(current)
    if not asynchronous:
        event.current_stream_wait()
        return out, EventOverlap()
    return out, EventOverlap(event, inputs)


def agree_on_most(group: Any, values: List[int]) -> List[int]:
    """The largest of all ranks' values, each by itself."""
    gpu = "nccl" in str(dist.get_backend(group))
    most = torch.tensor(values, dtype=torch.int64, device="cuda" if gpu else "cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.tolist()


class Windows:
    """ep_overlap buffers of one group, by shape; larger ones where a rank has more tokens or slots. The
    library tells all ranks when one of them does not fit, so nobody has to be asked before."""

    def __init__(self, group: Any, dispatcher: Optional[str] = None) -> None:
        self.process_group = group
        self.group = ep_overlap.Group(group, engine="cuda", dispatcher=dispatcher)
        self._made: Dict[Any, Tuple[ep_overlap.Buffer, List[int]]] = {}

    def plan(self, experts: torch.Tensor, weights: Optional[torch.Tensor], count: int, hidden: int,
             dtype: torch.dtype, align: int) -> ep_overlap.Plan:
        key, size = (count, hidden, dtype, align), [max(1, experts.shape[0]), experts.shape[1]]
        try:
            if key in self._made:
                return self._made[key][0].plan(experts, weights)
        except (ValueError, ep_overlap.Error):
            had = self._made[key][1]
            most = agree_on_most(self.process_group, size)
            if most[0] <= had[0] and most[1] <= had[1]:
                raise
            size = [max(pair) for pair in zip(most, had)]
        else:
            size = agree_on_most(self.process_group, size)
        # (the old one stays: plans made from it may still be in use)
        buffer = self.group.buffer(hidden=hidden, experts=count, top_k=size[1], max_tokens=size[0], dtype=dtype,
                                   align_rows=align)
        self._made[key] = (buffer, size)
        return buffer.plan(experts, weights)


class Buffer:
    """See DeepEP's README; `group` is a torch.distributed group. [collective: the first dispatch]"""

    num_sms: int = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
                 num_qps_per_rank: int = 1, **_: Any) -> None:
        if low_latency_mode:
            raise NotImplementedError("deep_ep on ep_overlap: low_latency_mode is not served")
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.rank, self.group_size = group.rank(), group.size()
        self._windows = Windows(group)
        self._comm = torch.cuda.Stream(priority=-1)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        if new_num_sms % 2 != 0:
            raise ValueError("set_num_sms: found %d, an even number is needed" % new_num_sms)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_comm_stream(self) -> torch.cuda.Stream:
        return self._comm

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, previous_event: Optional[EventOverlap] = None,
                            async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:
        """topk_idx int64 [T, K], -1: unused -> tokens per rank int32 [R], None, tokens per expert int32 [E],
        token in rank bool [T, R], event."""

        def work() -> Any:
            ranks = self.group_size
            valid = topk_idx >= 0
            owner = torch.where(valid, topk_idx // (num_experts // ranks), ranks)
            inside = torch.zeros(topk_idx.shape[0], ranks + 1, dtype=torch.bool, device=topk_idx.device)
            inside.scatter_(1, owner, True)
            inside = inside[:, :ranks].contiguous()
            per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
            flat = torch.where(valid, topk_idx, num_experts).flatten()
            per_expert.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
            return inside.sum(0).to(torch.int32), None, per_expert[:num_experts].contiguous(), inside

        out, event = on_stream(self._comm, (topk_idx,), previous_event, async_finish, work)
        return (*out, event)

    # ---- dispatch ----

    def _plan(self, handle: Handle, hidden: int, dtype: torch.dtype) -> ep_overlap.Plan:
        key = (hidden, dtype)
        if key not in handle.plans:
            handle.plans[key] = self._windows.plan(handle.ranks_of, None, self.group_size, hidden, dtype, 1)
        return handle.plans[key]

    def _rows(self, handle: Handle, x: torch.Tensor) -> torch.Tensor:
        """Rows alone, on the way of `handle`."""
        h = x.shape[1]
        rows, _ = ep_overlap.dispatch(widen(x, [], handle.wide) if handle.wide else x.contiguous(), None,
                                      self._plan(handle, h + handle.wide, x.dtype))
        return rows[:, :h].contiguous() if handle.wide else rows

    def _ranks_of(self, inside: torch.Tensor) -> torch.Tensor:
        """[T, R] int64: the ranks that a token goes to, then -1."""
        numbers = torch.arange(self.group_size, device=inside.device)
        return torch.where(inside, numbers, -1).contiguous()

    def dispatch(self, x: torch.Tensor, handle: Optional[Handle] = None, num_tokens_per_rank: Any = None,
                 num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Optional[torch.Tensor] = None,
                 num_tokens_per_expert: Optional[torch.Tensor] = None, topk_idx: Optional[torch.Tensor] = None,
                 topk_weights: Optional[torch.Tensor] = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
                 config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None,
                 async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:
        """x [T, H] -> rows [N, H], their topk_idx (of this rank's experts, else -1) and weights [N, K], rows of
        each local expert, handle, event. With `handle`: rows alone, on the same way. [collective]"""
        if isinstance(x, tuple):
            raise NotImplementedError("deep_ep on ep_overlap: FP8 rows with scales are not served")
        if topk_idx is not None and (x.dtype != torch.bfloat16 or num_tokens_per_expert is None):
            raise ValueError("dispatch: found x of %s, needed are bfloat16 and num_tokens_per_expert beside "
                             "topk_idx" % x.dtype)

        def cached() -> Any:
            return self._rows(handle, x), None, None, None, None

        def plain() -> Any:
            made = Handle(x.shape[0], self._ranks_of(is_token_in_rank), 0)
            return self._rows(made, x), None, None, None, made

        def fresh() -> Any:
            k, experts = topk_idx.shape[1], num_tokens_per_expert.numel()
            made = Handle(x.shape[0], self._ranks_of(is_token_in_rank), wide_of(k))
            local, h = experts // self.group_size, x.shape[1]
            number = topk_idx + 1
            parts = [(number // 128).to(x.dtype), (number % 128).to(x.dtype)]
            if topk_weights is not None:
                parts += split_weights(topk_weights.to(torch.float32))
            came, _ = ep_overlap.dispatch(widen(x, parts, made.wide), None, self._plan(made, h + made.wide, x.dtype))
            index = came[:, h : h + k].to(torch.int64) * 128 + came[:, h + k : h + 2 * k].to(torch.int64)
            index -= 1 + self.rank * local
            made.mine = (index >= 0) & (index < local)
            index = torch.where(made.mine, index, -1)
            counts = torch.bincount(index.flatten() + 1, minlength=local + 1)[1:].tolist()
            counts = [(n + expert_alignment - 1) // expert_alignment * expert_alignment for n in counts]
            kept = None
            if topk_weights is not None:
                kept = torch.where(made.mine, join_weights(came[:, h + 2 * k :], k), 0.0)
            return came[:, :h].contiguous(), index, kept, counts, made

        if handle is None and is_token_in_rank is None:
            raise ValueError("dispatch: is_token_in_rank (from get_dispatch_layout) or a handle is needed")
        with torch.no_grad():
            work = cached if handle is not None else fresh if topk_idx is not None else plain
            out, event = on_stream(self._comm, (x, topk_idx, topk_weights), previous_event, async_finish, work)
        return (*out, event)

    def combine(self, x: torch.Tensor, handle: Handle, topk_weights: Optional[torch.Tensor] = None, bias: Any = None,
                config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None,
                async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:
        """rows [N, H] -> [T, H], the sum over ranks; topk_weights [N, K] -> [T, K] or None: each slot's value
        from the rank whose slot it is. [collective]"""
        if bias is not None:
            raise NotImplementedError("deep_ep on ep_overlap: bias is not served")
        if topk_weights is not None and handle.mine is None:
            raise ValueError("combine: topk_weights needs a handle of a dispatch with topk_idx")

        def work() -> Any:
            h = x.shape[1]
            parts = []
            if topk_weights is not None:
                parts = split_weights(torch.where(handle.mine, topk_weights.to(torch.float32), 0.0))
            rows = widen(x, parts, handle.wide) if handle.wide else x.contiguous()
            y = ep_overlap.combine(rows, self._plan(handle, h + handle.wide, x.dtype))
            if not handle.wide:
                return y, None
            back = join_weights(y[:, h:], topk_weights.shape[1]) if topk_weights is not None else None
            return y[:, :h].contiguous(), back

        with torch.no_grad():
            out, event = on_stream(self._comm, (x, topk_weights), previous_event, async_finish, work)
        return (*out, event)


__all__: List[str] = ["Buffer", "Config"]
