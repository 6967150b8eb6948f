# SPDX-License-Identifier: Apache-2.0
"""deep_ep.HybridEPBuffer: dispatch to expert-major rows, which is what ep_overlap does itself."""
from __future__ import annotations

from typing import Any, Optional

import torch

import ep_overlap

from .buffer import Windows


class HybridEPBuffer:
    """The two calls that Megatron-Core makes; everything runs on the current stream."""

    def __init__(self, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
                 use_fp8: bool = False, **_: Any) -> None:
        if use_fp8:
            raise NotImplementedError("deep_ep on ep_overlap: FP8 is not served")
        self.group, self.hidden_dim, self.num_local_experts = group, hidden_dim, num_local_experts
        self._windows = Windows(group, "flex")

    def _new_plan(self, hidden: torch.Tensor, routing_map: torch.Tensor, probs: Optional[torch.Tensor],
                  align: int) -> Any:
        """Routing [T, E] as columns, as many as the token with the most experts here has."""
        most = int(routing_map.sum(1).max().item()) if routing_map.numel() else 1
        chosen, index = torch.topk(routing_map.to(torch.int8), max(1, most), dim=1)
        experts = torch.where(chosen > 0, index, -1)
        weights = torch.gather(probs, 1, index).to(torch.float32) if probs is not None else None
        if weights is not None:
            weights = torch.where(chosen > 0, weights, 0.0).contiguous()
        plan = self._windows.plan(experts.contiguous(), weights, self.num_local_experts * self.group.size(),
                                  hidden.shape[1], hidden.dtype, max(1, align))
        return plan, experts, routing_map.shape[1]

    def dispatch_with_permute(self, hidden: torch.Tensor, routing_map: Optional[torch.Tensor] = None,
                              probs: Optional[torch.Tensor] = None, scaling_factor: Any = None,
                              num_of_experts_per_rank: Optional[int] = None, pad_multiple: Optional[int] = None,
                              num_permuted_tokens: Optional[int] = None, non_blocking: bool = False,
                              handle: Any = None, **_: Any) -> Any:
        """hidden [T, H], routing_map bool [T, E], probs float32 [T, E] -> rows by expert, their probs, None,
        rows of each local expert (aligned), handle. With `handle`: on the same way. [collective]"""
        if scaling_factor is not None:
            raise NotImplementedError("deep_ep on ep_overlap: FP8 scales are not served")
        with torch.no_grad():
            if handle is None:
                plan, experts, count = self._new_plan(hidden, routing_map, probs, pad_multiple or 1)
            else:
                plan, experts, count = handle[0], handle[1], handle[2]
            rows, row_probs = ep_overlap.dispatch(hidden.contiguous(), None, plan)
        ends = plan.first[1:] + [plan.rows]
        sizes = torch.tensor([end - at for at, end in zip(plan.first, ends)], dtype=torch.int64)
        overflow = torch.zeros(1, dtype=torch.bool, device=hidden.device)
        handle = handle or (plan, experts, count, None, None, None, None, None, None, None, overflow)
        return rows, row_probs if probs is not None or routing_map is None else None, None, sizes, handle

    def combine_with_unpermute(self, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None, handle: Any = None,
                               pad_multiple: Optional[int] = None, **_: Any) -> Any:
        """rows by expert -> [T, H], the unweighted sum; probs of rows -> [T, E] or None. [collective]"""
        plan, experts, count = handle[0], handle[1], handle[2]
        with torch.no_grad():
            y, by_slot = ep_overlap.ops.combine_weights(hidden.contiguous(), probs, plan)
            if by_slot is None:
                return y, None
            out = torch.zeros(plan.tokens, count + 1, dtype=torch.float32, device=hidden.device)
            out.scatter_(1, torch.where(experts >= 0, experts, count), by_slot)
        return y, out[:, :count].contiguous()
