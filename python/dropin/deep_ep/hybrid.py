# SPDX-License-Identifier: Apache-2.0
"""deep_ep.HybridEPBuffer: dispatch to expert-major rows, which is what ep_overlap does itself."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch

import ep_overlap
from ep_overlap import ops

from . import pack
from .windows import Windows, agree_on_most


class Way:
    """A routing as columns, experts int64 [T, K] and weights float32 [T, K] or None, and its plans by the rows' shape."""

    def __init__(self, experts: torch.Tensor, weights: Optional[torch.Tensor], align: int) -> None:
        self.experts, self.weights, self.align = experts, weights, align
        self.plans: Dict[Any, ep_overlap.Plan] = {}


class HybridEPBuffer:
    """The two calls that Megatron-Core makes; everything runs on the current stream.

    T: this rank's tokens, H: elements of a token, E: experts of all ranks, E / R on each, N: rows of this rank's
    experts, each expert's up to a multiple of pad_multiple (zeros there).
    """

    def __init__(self, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
                 use_fp8: bool = False, **_: Any) -> None:
        """Sizes and what else DeepEP's takes are not needed: windows are made at the first use. [collective]"""
        self.group, self.hidden_dim, self.num_local_experts = group, hidden_dim, num_local_experts
        self._windows = Windows(group, "flex")
        self._most = 0
        self._overflow: Optional[torch.Tensor] = None

    def destroy(self) -> None:
        """After the last handle is gone. [collective]"""
        self._windows.close()

    def _plan(self, way: Way, hidden: int, dtype: torch.dtype) -> ep_overlap.Plan:
        key = hidden, dtype
        if key not in way.plans:
            way.plans[key] = self._windows.plan(way.experts, way.weights, self.num_local_experts * self.group.size(),
                                                hidden, dtype, way.align)
        return way.plans[key]

    def _new_way(self, rows: torch.Tensor, routing_map: torch.Tensor, probs: Optional[torch.Tensor], align: int) -> Way:
        """As many columns as the token with the most experts has had on any rank. A token with more gets a number
        that is no expert, which all ranks hear of when they make the plan."""
        routing_map = routing_map.contiguous()
        probs = probs.contiguous() if probs is not None else None
        for again in (False, True):
            if self._most == 0 or again:
                most = int(routing_map.sum(1).max().item()) if routing_map.numel() else 1
                self._most = max(self._most, agree_on_most(self.group, [max(1, most)])[0])
            way = Way(*pack.columns(routing_map, probs, self._most), align)
            try:
                self._plan(way, rows.shape[1], rows.dtype)
                return way
            except ep_overlap.Error as e:
                if again or e.status != "EPO_E_INDEX":
                    raise
        raise AssertionError("not reached")

    def dispatch_with_permute(self, hidden: torch.Tensor, routing_map: Optional[torch.Tensor] = None,
                              probs: Optional[torch.Tensor] = None, scaling_factor: Optional[torch.Tensor] = None,
                              num_of_experts_per_rank: Optional[int] = None, pad_multiple: Optional[int] = None,
                              num_permuted_tokens: Optional[int] = None, non_blocking: bool = False,
                              handle: Any = None, **_: Any) -> Any:
        """hidden [T, H] (bf16; or 1 byte an element with scaling_factor [T, S] of 4), routing_map bool [T, E], probs
        float32 [T, E] or None -> rows by expert [N, H], their probs float32 [N] or None, their scales [N, S] or None,
        rows of each local expert int64 [E / R] on the CPU, handle (11 items, the last an overflow flag, never set). With
        `handle`: on the same way, without probs. num_permuted_tokens and non_blocking have no effect: the
        exact number is always known. Raises ValueError, and ep_overlap.Error where ranks disagree. [collective]"""
        experts = self.num_local_experts * self.group.size()
        if handle is None and (routing_map is None or routing_map.dtype != torch.bool
                               or routing_map.shape != (hidden.shape[0], experts)):
            raise ValueError("dispatch_with_permute: found routing_map %s, needed is bool [%d, %d] (or a handle)" % (
                None if routing_map is None else (routing_map.dtype, list(routing_map.shape)), hidden.shape[0], experts))
        rows, restore = pack.as_rows(hidden if scaling_factor is None else (hidden, scaling_factor))
        with torch.no_grad():
            if handle is not None:
                way = handle[0]
            else:
                assert routing_map is not None
                way = self._new_way(rows, routing_map, probs, pad_multiple or 1)
            plan, row_probs = self._plan(way, rows.shape[1], rows.dtype), None
            if handle is None and probs is not None:
                row_probs = torch.empty(plan.rows, dtype=torch.float32, device=hidden.device)
            out = restore(ops.dispatch_rows(rows.contiguous(), plan, row_probs), as_tuple=True)
            if handle is None:
                ends = plan.first[1:] + [plan.rows]
                sizes = torch.tensor([end - at for at, end in zip(plan.first, ends)], dtype=torch.int64)
                if self._overflow is None:
                    self._overflow = torch.zeros(1, dtype=torch.bool, device=hidden.device)
                handle = (way, sizes, experts, None, None, None, None, None, None, None, self._overflow)
        return out[0], row_probs, out[1] if scaling_factor is not None else None, handle[1].clone(), handle

    def combine_with_unpermute(self, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None, handle: Any = None,
                               pad_multiple: Optional[int] = None, **_: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """rows by expert bf16 [N, H] -> [T, H], the unweighted sum in float32, rounded once; probs float32 [N] ->
        float32 [T, E] (0 where a token has no such expert) or None. Raises as the dispatch. [collective]"""
        way = handle[0]
        with torch.no_grad():
            y, by_slot = ops.combine_weights(hidden.contiguous(), probs, self._plan(way, hidden.shape[1], hidden.dtype))
            return y, None if by_slot is None else pack.dense(way.experts, by_slot, handle[2])


__all__: List[str] = ["HybridEPBuffer"]
