# SPDX-License-Identifier: Apache-2.0
"""low_latency_dispatch and low_latency_combine: rows by expert in places of a fixed size.

Correct, and not DeepEP's way: counts come to the CPU, so they cannot be captured in a CUDA graph, and
both are complete in stream order when they return (the hook has nothing left to do).
"""
from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import torch

from ep_overlap import ops

from . import pack
from .utils import EventHandle, EventOverlap

MAX_E4M3 = 448.0


def quantize(x: torch.Tensor, round_scale: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """[T, H] -> e4m3 [T, H] and a float32 scale of each 128, [T, H / 128]; round_scale: powers of two."""
    groups = x.float().view(x.shape[0], x.shape[1] // 128, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-4) / MAX_E4M3
    if round_scale:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    data = (groups / scale[:, :, None]).to(torch.float8_e4m3fn)
    return data.view(x.shape), scale


class LowLatencyHandle:
    """The plan of a dispatch, and where its expert-major rows lie in the places of fixed size."""

    def __init__(self, topk_idx: torch.Tensor, most: int, experts: int, hidden: int) -> None:
        self.topk_idx, self.most, self.experts, self.hidden = topk_idx, most, experts, hidden
        self.places = torch.empty(0, dtype=torch.int64)


class LowLatency:
    """The low-latency half of Buffer."""

    group_size: int
    _windows: Any

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int,
                                       num_experts: int) -> int:
        return 0

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing is left over from one call to the next."""

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Refused where a rank would be masked: a group goes on with all its ranks or ends."""
        if mask:
            raise NotImplementedError("low_latency_update_mask_buffer: rank %d cannot be left out; make another group "
                                      "of the ranks that remain" % rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """mask_status int32 [R]: 0, none is masked."""
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """None is masked."""

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """A tensor [E / R, M * R, H] of torch's for the rows of `low_latency_combine`; any other does as well."""
        return torch.empty(handle.experts // self.group_size, handle.most * self.group_size, handle.hidden,
                           dtype=torch.bfloat16, device=handle.topk_idx.device)

    def _finish(self, kept: Tuple[Any, ...], async_finish: bool) -> Tuple[EventOverlap, Callable[[], None]]:
        return EventOverlap(EventHandle() if async_finish else None, kept if async_finish else None), lambda: None

    def low_latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int,
                             num_experts: int, cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
                             dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None, use_fp8: bool = True,
                             round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
                             return_recv_hook: bool = False) -> Any:
        """x bf16 [T, H], topk_idx int64 [T, K] (-1: unused), T <= M = num_max_dispatch_tokens_per_rank, the same M
        on all ranks -> rows of each local expert bf16 [E / R, M * R, H], or with use_fp8 (e4m3 of that shape,
        scales float32 [E / R, M * R, H / 128]; use_ue8m0: int32 [.., H / 512], four exponents each), rows per
        local expert int32 [E / R] (what lies behind them is undefined), handle, event, hook. Scales are column-major
        in their last two dimensions, as DeepEP's are. [collective]"""
        pack.need("low_latency_dispatch", "x", x, (-1, -1))
        t, h, most, ranks = x.shape[0], x.shape[1], num_max_dispatch_tokens_per_rank, self.group_size
        pack.need("low_latency_dispatch", "topk_idx", topk_idx, (t, -1), torch.int64)
        if num_experts < 1 or num_experts % ranks != 0:
            raise ValueError("low_latency_dispatch: found %d experts, needed is a multiple of %d ranks" % (num_experts, ranks))
        if async_finish and return_recv_hook:
            raise ValueError("low_latency_dispatch: async_finish and return_recv_hook exclude each other")
        if most < 1 or t > most or x.dtype != torch.bfloat16:
            raise ValueError("low_latency_dispatch: found %d tokens of %s, allowed are %d (num_max_dispatch_tokens_"
                             "per_rank) of bfloat16" % (t, x.dtype, most))
        if use_fp8 and h % 128 != 0 or use_ue8m0 and (h % 512 != 0 or not round_scale):
            raise ValueError("low_latency_dispatch: found hidden %d, round_scale %s; use_fp8 needs a multiple of 128, "
                             "use_ue8m0 one of 512 and round_scale" % (h, round_scale))
        local = num_experts // ranks
        pack.need("low_latency_dispatch", "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, (local,))
        handle = LowLatencyHandle(topk_idx.contiguous(), most, num_experts, h)
        with torch.no_grad():
            rows, restore = pack.as_rows(quantize(x, round_scale) if use_fp8 else x)
            plan = self._windows.plan(handle.topk_idx, None, num_experts, rows.shape[1], rows.dtype, 1, most)
            rows = ops.dispatch_rows(rows, plan)
            counts = torch.tensor(plan.counts, dtype=torch.int64)
            starts = torch.arange(local) * (most * ranks) - torch.tensor(plan.first, dtype=torch.int64)
            places = torch.arange(plan.rows) + torch.repeat_interleave(starts, counts, output_size=plan.rows)
            handle.places = places.to(x.device, non_blocking=True)
            out = rows.new_empty(local * most * ranks, rows.shape[1])
            out.index_copy_(0, handle.places, rows)
            parts = [v.view(local, most * ranks, -1) for v in restore(out, as_tuple=True)]
            received = counts.to(torch.int32).to(x.device, non_blocking=True)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats += received
            if use_ue8m0:
                parts[1] = (parts[1].contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
            if use_fp8:
                parts[1] = parts[1].transpose(1, 2).contiguous().transpose(1, 2)
            event, hook = self._finish((x, topk_idx, *parts), async_finish)
        return tuple(parts) if use_fp8 else parts[0], received, handle, event, hook

    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
                            handle: LowLatencyHandle, use_logfmt: bool = False, zero_copy: bool = False,
                            async_finish: bool = False, return_recv_hook: bool = False,
                            out: Optional[torch.Tensor] = None,
                            combine_wait_recv_cost_stats: Optional[torch.Tensor] = None) -> Any:
        """x bf16 [E / R, M * R, H], topk_idx of the dispatch, topk_weights float32 [T, K] -> the sum of each token's
        rows times their weights, in float32, bf16 [T, H]; event, hook. use_logfmt and zero_copy change how DeepEP
        moves bytes and nothing here; combine_wait_recv_cost_stats is left as it is. [collective]"""
        if not isinstance(handle, LowLatencyHandle):
            raise ValueError("low_latency_combine: found %s for a handle, needed is that of a low_latency_dispatch" %
                             type(handle).__name__)
        h, slots = handle.hidden, tuple(handle.topk_idx.shape)
        pack.need("low_latency_combine", "topk_idx", topk_idx, slots)
        pack.need("low_latency_combine", "topk_weights", topk_weights, slots)
        pack.need("low_latency_combine", "out", out, (slots[0], h), torch.bfloat16)
        if async_finish and return_recv_hook:
            raise ValueError("low_latency_combine: async_finish and return_recv_hook exclude each other")
        pack.need("low_latency_combine", "x", x,
                  (handle.experts // self.group_size, handle.most * self.group_size, h), torch.bfloat16)
        with torch.no_grad():
            weights = topk_weights.to(torch.float32).contiguous()
            narrow = self._windows.plan(handle.topk_idx, weights, handle.experts, 8, torch.bfloat16, 1, handle.most)
            by_row = torch.empty(narrow.rows, dtype=torch.float32, device=x.device)
            ops.dispatch_rows(torch.zeros(narrow.tokens, 8, dtype=torch.bfloat16, device=x.device), narrow, by_row)
            rows = x.reshape(-1, h).index_select(0, handle.places).float() * by_row[:, None]
            plan = self._windows.plan(handle.topk_idx, None, handle.experts, h, torch.float32, 1, handle.most)
            y = ops.combine_weights(rows, None, plan)[0].to(torch.bfloat16)
            if out is not None:
                y = out.copy_(y)
            event, hook = self._finish((x, topk_idx, topk_weights, y), async_finish)
        return y, event, hook


__all__: List[str] = ["LowLatency", "LowLatencyHandle"]
