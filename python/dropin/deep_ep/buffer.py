# SPDX-License-Identifier: Apache-2.0
"""deep_ep.Buffer.

DeepEP moves one copy of a token to each rank that has one of its experts, and sums over ranks on the
way back. That is a layer whose "experts" are the ranks: dispatch and combine of a routing to ranks
give its rows, in its order (source rank, token), without repetition.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

import ep_overlap
from ep_overlap import ops

from . import pack
from .low_latency import LowLatency
from .utils import EventHandle, EventOverlap, current_stream
from .windows import Windows


class Config:
    """Windows are made to measure at the first use, so sizes asked for in advance are 0, and what DeepEP is tuned by
    has no effect."""

    def __init__(self, num_sms: int = 20, *_: int, **__: int) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle:
    """What `dispatch` leaves for `combine` and for a dispatch of other rows on the same way.

    ranks_of [T, K]: where tokens go. top_k: slots of the tokens' routing, 0 without. mine bool [N, top_k]:
    the slots of received rows that are this rank's. rows: N.
    """

    def __init__(self, tokens: int, ranks_of: torch.Tensor, top_k: int) -> None:
        self.tokens, self.ranks_of, self.top_k, self.rows = tokens, ranks_of, top_k, 0
        self.mine: Optional[torch.Tensor] = None
        self.plans: Dict[Any, Any] = {}

    def width(self, hidden: int) -> int:
        """Columns of a row on its way."""
        return (hidden + pack.wide_of(self.top_k) + 7) // 8 * 8


Laid = Dict[torch.cuda.Stream, Optional[EventHandle]]


def on_stream(comm: Optional[torch.cuda.Stream], inputs: Tuple[Optional[torch.Tensor], ...],
              previous: Optional[EventOverlap], asynchronous: bool, work: Callable[[], Any],
              laid: Optional[Laid] = None) -> Tuple[Any, EventOverlap]:
    """Runs `work` on the communication stream, behind `previous` or the current stream, and behind what `laid` has of
    other streams: the event there, or all that was given to the stream; empties it. Without a communication
    stream (no GPU) it runs at once."""
    if comm is None:
        return work(), EventOverlap(EventHandle() if asynchronous else None)
    current = current_stream()
    waited = None if previous is None or previous.event is None or previous.event._event is None else previous.event
    if waited is not None and waited._event is not None:
        comm.wait_event(waited._event)
    else:
        comm.wait_stream(current)
    for stream, made in (laid or {}).items():
        if waited is None and stream == current or made is not None and made is waited:
            continue
        if made is not None and made._event is not None:
            comm.wait_event(made._event)
        else:
            comm.wait_stream(stream)
    if laid:
        laid.clear()
    for tensor in inputs:  # (before the work: it may have begun when it raises)
        if tensor is not None:
            tensor.record_stream(comm)
    torch.cuda.set_stream(comm)  # (torch.cuda.stream does the same and takes 15 us more)
    try:
        out = work()
        event = EventHandle()
    finally:
        torch.cuda.set_stream(current)
    for tensor in out:
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(current)
    if not asynchronous:
        event.current_stream_wait()
        return out, EventOverlap()
    return out, EventOverlap(event, inputs)


class Buffer(LowLatency):
    """See DeepEP's README; `group` is a torch.distributed group. [collective]

    T: this rank's tokens, H: elements of a token, K: slots of its routing, R: ranks, E: experts of all ranks, E / R on
    each, N: rows that this rank receives, one for each token of any rank that has an expert here.
    """

    num_sms: int = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
                 num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
                 use_fabric: bool = False, explicitly_destroy: bool = False, enable_shrink: bool = False,
                 comm: Any = None) -> None:
        """Sizes and modes are kept or ignored: windows are made at the first use. Ranks cannot be masked
        (enable_shrink) nor come from mpi4py (comm)."""
        if not hasattr(group, "rank"):
            raise ValueError("Buffer: found %r, needed is a group of torch.distributed" % (group or comm,))
        if enable_shrink:
            raise ValueError("Buffer: enable_shrink: ranks cannot be left out of a group; make another group")
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = low_latency_mode, explicitly_destroy, False
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.rank, self.group_size = group.rank(), group.size()
        self._windows = Windows(group, "flex")
        self._comm = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None
        self._laid: Laid = {}  # layouts that no dispatch has waited for
        self._numbers: Optional[torch.Tensor] = None
        self._blank: Dict[Any, torch.Tensor] = {}

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        if new_num_sms % 2 != 0:
            raise ValueError("set_num_sms: found %d, an even number is needed" % new_num_sms)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def is_sm90_compiled() -> bool:
        """FP8 rows are carried as bytes on every GPU."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_comm_stream(self) -> Optional[torch.cuda.Stream]:
        return self._comm

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refused: tensors are never aliases of a window."""
        raise NotImplementedError("Buffer.get_local_buffer_tensor: windows are the library's, no tensor is one")

    def destroy(self) -> None:
        """After the last handle is gone. [collective]"""
        self._windows.close()

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int,
                            previous_event: Optional[EventOverlap] = None, async_finish: bool = False,
                            allocate_on_comm_stream: bool = False) -> Any:
        """topk_idx int64 [T, K], -1: unused -> tokens per rank int32 [R], None, tokens per expert int32 [E],
        token in rank bool [T, R], event. All on the device; the CPU does not wait."""
        if topk_idx.dim() != 2 or topk_idx.dtype != torch.int64 or num_experts < 1 or num_experts % self.group_size != 0:
            raise ValueError("get_dispatch_layout: found topk_idx %s %s and %d experts, needed are int64 [T, K] and a "
                             "multiple of %d ranks" % (
                                 topk_idx.dtype, list(topk_idx.shape), num_experts, self.group_size))

        # On the current stream, which it does not hold up for longer than another would; it only has to wait
        # for an event of another stream.
        if previous_event is not None and previous_event.event is not None and previous_event.event.wait_elsewhere():
            topk_idx.record_stream(current_stream())  # (it may be of the stream that was waited for)
        with torch.no_grad():
            per_rank, per_expert, inside = pack.layout(topk_idx.contiguous(), num_experts, self.group_size)
        event = EventHandle() if async_finish else None
        if self._comm is not None:
            self._laid[current_stream()] = event
        return per_rank, None, per_expert, inside, EventOverlap(event)

    # ---- dispatch ----

    def _plan(self, handle: Handle, hidden: int, dtype: torch.dtype) -> ep_overlap.Plan:
        key = (hidden, dtype)
        if key not in handle.plans:
            handle.plans[key] = self._windows.plan(handle.ranks_of, None, self.group_size, hidden, dtype, 1)
        return handle.plans[key]

    def _rows(self, handle: Handle, x: torch.Tensor) -> torch.Tensor:
        """Rows alone, on the way of `handle`."""
        h, width = x.shape[1], handle.width(x.shape[1])
        packed = self._wide(x, width)
        rows = ops.dispatch_rows(packed, self._plan(handle, width, x.dtype))
        handle.rows = rows.shape[0]
        return rows if width == h else rows[:, :h].contiguous()

    def _wide(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """x with columns behind its own that nobody reads."""
        n, more = x.shape[0], width - x.shape[1]
        if more == 0:
            return x.contiguous()
        key = more, x.dtype
        if key not in self._blank or self._blank[key].shape[0] < n:
            self._blank[key] = torch.zeros(n * 5 // 4, more, dtype=x.dtype, device=x.device)
            if self._comm is not None:  # (combines of any stream read it)
                torch.cuda.current_stream().synchronize()
        return torch.cat((x, self._blank[key][:n]), 1)

    def _routed_rows(self, handle: Handle, x: torch.Tensor, index: torch.Tensor, weights: Optional[torch.Tensor],
                     local: int) -> Any:
        """Rows with their indices and weights, and how many there are of each local expert (on the device)."""
        k, h = index.shape[1], x.shape[1]
        width = handle.width(h)
        if weights is not None:
            weights = weights.to(torch.float32).contiguous()
        packed = pack.pack(x.contiguous(), index.contiguous(), weights, width)
        came = ops.dispatch_rows(packed, self._plan(handle, width, x.dtype))
        handle.rows = came.shape[0]
        out, own, kept, handle.mine, counts = pack.unpack(came, h, k, self.rank * local, local, weights is not None)
        return out, own, kept, counts

    def _ranks_of(self, inside: torch.Tensor) -> torch.Tensor:
        """[T, R] int64: the ranks that a token goes to, then -1."""
        if self._numbers is None:
            self._numbers = torch.arange(self.group_size, device=inside.device)
        return torch.where(inside, self._numbers, -1)

    def _check_dispatch(self, rows: torch.Tensor, handle: Optional[Handle], inside: Optional[torch.Tensor],
                        per_expert: Optional[torch.Tensor], index: Optional[torch.Tensor],
                        weights: Optional[torch.Tensor], alignment: int) -> None:
        """What is wrong is said before anything is sent."""
        if handle is not None and not isinstance(handle, Handle):
            raise ValueError("dispatch: found %s for a handle, needed is that of a dispatch" % type(handle).__name__)
        pack.need("dispatch", "x", rows, (-1, -1))
        tokens, slots = rows.shape[0], 0 if index is None else index.shape[-1]
        if index is not None and handle is None and (
                rows.dtype != torch.bfloat16 or per_expert is None or index.dtype != torch.int64):
            raise ValueError("dispatch: found x of %s, topk_idx of %s and num_tokens_per_expert %s; needed are bfloat16 "
                             "or FP8 rows, int64, and num_tokens_per_expert beside topk_idx" % (
                                 rows.dtype, index.dtype, None if per_expert is None else "given"))
        if handle is not None and (index is not None or weights is not None):
            raise ValueError("dispatch: found a handle beside topk_idx or topk_weights; a handle has its own")
        if handle is None and inside is None:
            raise ValueError("dispatch: is_token_in_rank (from get_dispatch_layout) or a handle is needed")
        if handle is not None and tokens != handle.tokens:
            raise ValueError("dispatch: found %d tokens, the handle is of %d" % (tokens, handle.tokens))
        if weights is not None and index is None:
            raise ValueError("dispatch: found topk_weights without topk_idx; each is of a slot")
        pack.need("dispatch", "topk_idx", index, (tokens, -1))
        pack.need("dispatch", "topk_weights", weights, (tokens, slots))
        if handle is None:
            pack.need("dispatch", "is_token_in_rank", inside, (tokens, self.group_size), torch.bool)
        if index is not None and per_expert is not None and per_expert.numel() % self.group_size != 0:
            raise ValueError("dispatch: found num_tokens_per_expert of %d experts, needed is a multiple of %d ranks" % (
                per_expert.numel(), self.group_size))
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError("dispatch: found expert_alignment %s, allowed is a number from 1" % alignment)

    def dispatch(self, x: Any, handle: Optional[Handle] = None, num_tokens_per_rank: Any = None,
                 num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Optional[torch.Tensor] = None,
                 num_tokens_per_expert: Optional[torch.Tensor] = None, topk_idx: Optional[torch.Tensor] = None,
                 topk_weights: Optional[torch.Tensor] = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
                 config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None,
                 async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:
        """x bf16 [T, H], or FP8 rows (data [T, H] of 1 byte, scales [T, S] of 4 bytes) -> rows [N, H] in the order (rank,
        token), or (data, scales) of them; recv_topk_idx int64 [N, K] (of this rank's experts, from 0, else -1),
        recv_topk_weights float32 [N, K] (0 there) or None; rows of each local expert, each up to a multiple of
        expert_alignment (a list of E / R); handle; event.
        With `handle`: rows alone, on the same way; Nones for the rest. Without topk_idx: rows alone, by
        is_token_in_rank bool [T, R] (or the handle).
        num_worst_tokens: so many rows come out, those behind N undefined with recv_topk_idx -1, and the list is empty.
        Raises ValueError, and ep_overlap.Error where ranks disagree or one has ended. [collective]"""
        rows, restore = pack.as_rows(x)
        self._check_dispatch(rows, handle, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
                             expert_alignment)

        def work() -> Any:
            way = handle
            if way is None:
                assert is_token_in_rank is not None
                slots = 0 if topk_idx is None else topk_idx.shape[1]
                way = Handle(rows.shape[0], self._ranks_of(is_token_in_rank), slots)
            if handle is not None or topk_idx is None or num_tokens_per_expert is None:
                out, index, kept, counts = self._rows(way, rows), None, None, None
            else:
                local = num_tokens_per_expert.numel() // self.group_size
                out, index, kept, counts = self._routed_rows(way, rows, topk_idx, topk_weights, local)
                counts = [] if num_worst_tokens > 0 else counts.tolist()  # (waits for the rows)
                counts = [(n + expert_alignment - 1) // expert_alignment * expert_alignment for n in counts]
            if num_worst_tokens > 0:
                out, index, kept = (_lengthen(v, num_worst_tokens, fill)
                                    for v, fill in ((out, None), (index, -1), (kept, 0.0)))
            return (*restore(out, as_tuple=True), index, kept, counts, way if handle is None else None)

        with torch.no_grad():
            inputs = (*(x if isinstance(x, (tuple, list)) else (x,)), topk_idx, topk_weights, is_token_in_rank)
            out, event = on_stream(self._comm, inputs, previous_event, async_finish, work,
                                   self._laid if is_token_in_rank is not None else None)
        return (out[0] if isinstance(x, torch.Tensor) else out[:2], *out[-4:], event)

    def combine(self, x: torch.Tensor, handle: Handle, topk_weights: Optional[torch.Tensor] = None, bias: Any = None,
                config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None,
                async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Any:
        """rows bf16 [N, H] of a dispatch -> the sum over ranks bf16 [T, H], in float32 and rounded once (a token without
        ranks gives 0); topk_weights float32 [N, K] -> float32 [T, K], each slot's value from the rank whose slot it
        is (for a handle of a dispatch with topk_idx), or None; event.
        bias: one or two tensors [T, H], added to the rounded sum in float32. Rows behind N are ignored.
        Raises ValueError, and ep_overlap.Error where ranks disagree or one has ended. [collective]"""
        if not isinstance(handle, Handle):
            raise ValueError("combine: found %s for a handle, needed is that of a dispatch" % type(handle).__name__)
        if topk_weights is not None and handle.mine is None:
            raise ValueError("combine: topk_weights needs a handle of a dispatch with topk_idx")
        pack.need("combine", "x", x, (-1, -1), None if topk_weights is None else torch.bfloat16)
        pack.need("combine", "topk_weights", topk_weights, (-1, handle.top_k))
        if x.shape[0] < handle.rows or topk_weights is not None and topk_weights.shape[0] < handle.rows:
            raise ValueError("combine: found %d rows, the handle is of %d" % (x.shape[0], handle.rows))
        biases = () if bias is None else tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        for b in biases:
            if not isinstance(b, torch.Tensor):
                raise ValueError("combine: found a bias %r, needed are one or two tensors" % (b,))
            if b.shape != (handle.tokens, x.shape[1]):
                raise ValueError("combine: found a bias %s, needed is [%d, %d]" % (
                    list(b.shape), handle.tokens, x.shape[1]))

        def work() -> Any:
            h, width, rows, back = x.shape[1], handle.width(x.shape[1]), x[: handle.rows].contiguous(), None
            if topk_weights is not None and handle.mine is not None:
                weights = topk_weights[: handle.rows].contiguous()
                packed = pack.widen(rows, weights, handle.mine, width)
                y, _ = ops.combine_weights(packed, None, self._plan(handle, width, x.dtype))
                y, back = pack.join(y, h, weights.shape[1])
            else:
                packed = self._wide(rows, width)
                y, _ = ops.combine_weights(packed, None, self._plan(handle, width, x.dtype))
                y = y if width == h else y[:, :h].contiguous()
            if biases:
                y = sum((b.float() for b in biases), y.float()).to(y.dtype)
            return y, back

        with torch.no_grad():
            out, event = on_stream(self._comm, (x, topk_weights, *biases), previous_event, async_finish, work)
        return (*out, event)

    # (across nodes, too, it is one call here)
    internode_dispatch, internode_combine = dispatch, combine


def _lengthen(x: Optional[torch.Tensor], rows: int, fill: Any) -> Any:
    """x with rows behind its own up to `rows`."""
    if x is None:
        return None
    if x.shape[0] > rows:
        raise ValueError("dispatch: num_worst_tokens is %d, and %d rows came" % (rows, x.shape[0]))
    out = x.new_empty(rows, x.shape[1]) if fill is None else x.new_full((rows, x.shape[1]), fill)
    out[: x.shape[0]] = x
    return out


__all__: List[str] = ["Buffer", "Config"]
