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
    """What `dispatch` leaves for `combine` and for a dispatch of other rows on the same way."""

    def __init__(self, tokens: int, ranks_of: torch.Tensor, plans: Dict[Any, Any]) -> None:
        self.tokens, self.ranks_of, self.plans = tokens, ranks_of, plans


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


def agree_on_most(group: Any, value: int) -> int:
    """The largest of all ranks' values."""
    gpu = "nccl" in str(dist.get_backend(group))
    most = torch.tensor([value], dtype=torch.int64, device="cuda" if gpu else "cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most.item())


class Windows:
    """ep_overlap buffers of one group, by shape; larger ones where a rank has more tokens. The
    library tells all ranks when one of them does not fit."""

    def __init__(self, group: Any) -> None:
        self.process_group = group
        self.group = ep_overlap.Group(group, engine="cuda")
        self._made: Dict[Any, Tuple[ep_overlap.Buffer, int]] = {}

    def plan(self, experts: torch.Tensor, weights: Optional[torch.Tensor], count: int, hidden: int,
             dtype: torch.dtype, align: int) -> ep_overlap.Plan:
        key = (count, experts.shape[1], hidden, dtype, align)
        try:
            if key in self._made:
                return self._made[key][0].plan(experts, weights)
        except (ValueError, ep_overlap.Error):
            if agree_on_most(self.process_group, experts.shape[0]) <= self._made[key][1]:
                raise
        most = agree_on_most(self.process_group, max(1, experts.shape[0]))
        # (the old one stays: plans made from it may still be in use)
        buffer = self.group.buffer(hidden=hidden, experts=count, top_k=experts.shape[1], max_tokens=most,
                                   dtype=dtype, align_rows=align)
        self._made[key] = (buffer, most)
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

        def cached() -> Any:
            rows, _ = ep_overlap.dispatch(x, None, self._plan(handle, x.shape[1], x.dtype))
            return rows, None, None, None, None

        def fresh() -> Any:
            made = Handle(x.shape[0], self._ranks_of(is_token_in_rank), {})
            rows, _ = ep_overlap.dispatch(x, None, self._plan(made, x.shape[1], x.dtype))
            if topk_idx is None:
                return rows, None, None, None, made
            k, experts = topk_idx.shape[1], num_tokens_per_expert.numel()
            local = experts // self.group_size
            weights = topk_weights if topk_weights is not None else torch.zeros(topk_idx.shape, device=x.device)
            words = torch.cat([topk_idx.to(torch.float32), weights.to(torch.float32)], 1)
            words, _ = ep_overlap.dispatch(words, None, self._plan(made, 2 * k, torch.float32))
            index = words[:, :k].to(torch.int64) - self.rank * local
            mine = (index >= 0) & (index < local)
            index = torch.where(mine, index, -1)
            counts = torch.bincount(index[mine], minlength=local).tolist()
            counts = [(n + expert_alignment - 1) // expert_alignment * expert_alignment for n in counts]
            kept = torch.where(mine, words[:, k:], 0.0) if topk_weights is not None else None
            return rows, index, kept, counts, made

        if handle is None and is_token_in_rank is None:
            raise ValueError("dispatch: is_token_in_rank (from get_dispatch_layout) or a handle is needed")
        with torch.no_grad():
            out, event = on_stream(self._comm, (x, topk_idx, topk_weights), previous_event, async_finish,
                                   fresh if handle is None else cached)
        return (*out, event)

    def combine(self, x: torch.Tensor, handle: Handle, topk_weights: Optional[torch.Tensor] = None, bias: Any = None,
                config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None,
                async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:
        """rows [N, H] -> [T, H], the sum over ranks; topk_weights [N, K] likewise -> [T, K] or None. [collective]"""
        if bias is not None:
            raise NotImplementedError("deep_ep on ep_overlap: bias is not served")

        def work() -> Any:
            y = ep_overlap.combine(x, self._plan(handle, x.shape[1], x.dtype))
            if topk_weights is None:
                return y, None
            k = topk_weights.shape[1]
            wide = torch.nn.functional.pad(topk_weights.to(torch.float32), (0, k))
            return y, ep_overlap.combine(wide, self._plan(handle, 2 * k, torch.float32))[:, :k].contiguous()

        with torch.no_grad():
            out, event = on_stream(self._comm, (x, topk_weights), previous_event, async_finish, work)
        return (*out, event)


__all__: List[str] = ["Buffer", "Config"]
