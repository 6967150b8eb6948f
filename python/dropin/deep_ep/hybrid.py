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
    """A routing as columns, experts int64 [T, K] and weights float32 [T, K] or None, and its plans by the rows' shape.
    local: experts of a rank. budget: rows that come out, None: as many as there are."""

    def __init__(self, experts: torch.Tensor, weights: Optional[torch.Tensor], align: int, local: int) -> None:
        self.experts, self.weights, self.align, self.local = experts, weights, align, local
        self.budget: Optional[int] = None
        self.plans: Dict[Any, ep_overlap.Plan] = {}

    def with_budget(self, budget: Optional[int]) -> "Way":
        """The same plans, for a handle of another number of rows."""
        way = Way(self.experts, self.weights, self.align, self.local)
        way.budget, way.plans = budget, self.plans
        return way

    def with_probs(self, probs: torch.Tensor) -> "Way":
        """The same routing with other weights, probs [T, E]."""
        used = self.experts >= 0
        # (a number that is no expert is told to all ranks by the plan; here it would end this one, or its GPU's context)
        weights = probs.gather(1, self.experts.clamp(0, max(0, probs.shape[1] - 1))).to(torch.float32)
        return Way(self.experts, torch.where(used, weights, 0.0), self.align, self.local)


def to_rows(x: Optional[torch.Tensor], rows: int) -> Optional[torch.Tensor]:
    """x cut behind `rows` or lengthened with zeros to as many."""
    if x is None or x.shape[0] == rows:
        return x
    if x.shape[0] > rows:
        return x[:rows]
    return torch.cat((x, x.new_zeros(rows - x.shape[0], *x.shape[1:])))


def _way_of(call: str, handle: Any) -> Way:
    if not handle or not isinstance(handle[0], Way):
        raise ValueError("%s: found %r, a handle is needed, of a dispatch_with_permute" % (call, handle))
    way: Way = handle[0]
    return way


class HybridEPBuffer:
    """The two calls with permutation, which Megatron-Core makes; everything runs on the current stream.

    T: this rank's tokens, H: elements of a token, K: slots of its routing, R: ranks, E: experts of all ranks, E / R on
    each, N: rows of this rank's experts, each expert's up to a multiple of pad_multiple (zeros there).
    """

    def __init__(self, group: Any, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int,
                 use_fp8: bool = False, num_sms_dispatch_api: Optional[int] = None,
                 num_sms_combine_api: Optional[int] = None, num_sms_preprocessing_api: Optional[int] = None,
                 num_blocks_permute: Optional[int] = None, num_blocks_unpermute: Optional[int] = None,
                 load_cached_kernels: bool = False, use_shared_buffer: bool = True,
                 enable_custom_allgather: bool = False, num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
                 use_mnnvl: Optional[bool] = None) -> None:
        """Sizes and what DeepEP's is tuned by are taken and not needed: windows are made at the first use. [collective]"""
        if not hasattr(group, "rank"):
            raise ValueError("HybridEPBuffer: found %r, needed is a group of torch.distributed" % (group,))
        self.group, self.hidden_dim, self.num_local_experts = group, hidden_dim, num_local_experts
        self.rank, self.group_size = group.rank(), group.size()
        self.max_num_of_tokens_per_rank = max_num_of_tokens_per_rank
        self._windows = Windows(group, "flex")
        self._most = 0
        self._fits: Optional[torch.Tensor] = None

    def destroy(self) -> None:
        """After the last handle is gone. [collective]"""
        self._windows.close()

    def empty_jit_cache(self) -> None:
        """Nothing is compiled when it runs, but for Triton's small kernels, whose cache is Triton's."""

    def update_template_config(self, **_: Any) -> None:
        """What DeepEP's is tuned by has no effect."""

    def dispatch(self, *_: Any, **__: Any) -> Any:
        """Refused: rows without permutation are not made."""
        raise NotImplementedError("HybridEPBuffer.dispatch without permutation: use dispatch_with_permute, whose rows "
                                  "come by expert, or Buffer.dispatch, whose rows come by token")

    def combine(self, *_: Any, **__: Any) -> Any:
        """Refused, as dispatch."""
        raise NotImplementedError("HybridEPBuffer.combine without permutation: use combine_with_unpermute")

    def _plan(self, way: Way, hidden: int, dtype: torch.dtype) -> ep_overlap.Plan:
        key = hidden, dtype
        if key not in way.plans:
            way.plans[key] = self._windows.plan(way.experts, way.weights, way.local * self.group_size, hidden, dtype,
                                                way.align)
        return way.plans[key]

    def _way_of_map(self, rows: torch.Tensor, routing_map: torch.Tensor, probs: Optional[torch.Tensor], align: int,
                    local: int) -> Way:
        """As many columns as the token with the most experts has had on any rank. A token with more gets a number
        that is no expert, which all ranks hear of when they make the plan."""
        routing_map = routing_map.contiguous()
        probs = probs.contiguous() if probs is not None else None
        for again in (False, True):
            if self._most == 0 or again:
                most = int(routing_map.sum(1).max().item()) if routing_map.numel() else 1
                self._most = max(self._most, agree_on_most(self.group, [max(1, most)])[0])
            way = Way(*pack.columns(routing_map, probs, self._most), align, local)
            try:
                self._plan(way, rows.shape[1], rows.dtype)
                return way
            except ep_overlap.Error as e:
                if again or e.status != "EPO_E_INDEX":
                    raise
        raise AssertionError("not reached")

    def _new_way(self, rows: torch.Tensor, routing_map: Optional[torch.Tensor], topk_idx: Optional[torch.Tensor],
                 topk_weights: Optional[torch.Tensor], probs: Optional[torch.Tensor], align: int, local: int) -> Way:
        """A routing map goes before indices, probs before weights by index."""
        tokens, experts = rows.shape[0], local * self.group_size
        for name, given, shape in (("routing_map", routing_map, (tokens, experts)), ("probs", probs, (tokens, experts)),
                                   ("topk_weights", topk_weights, topk_idx.shape if topk_idx is not None else (tokens, 0))):
            if given is not None and given.shape != shape:
                raise ValueError("dispatch_with_permute: found %s %s, needed is %s" % (name, list(given.shape), list(shape)))
        if routing_map is not None:
            if routing_map.dtype != torch.bool:
                raise ValueError("dispatch_with_permute: found routing_map of %s, needed is bool" % routing_map.dtype)
            return self._way_of_map(rows, routing_map, probs, align, local)
        if topk_idx is None or topk_idx.dim() != 2 or topk_idx.shape[0] != tokens:
            raise ValueError("dispatch_with_permute: found topk_idx %s, needed is routing_map bool [%d, %d], topk_idx "
                             "[%d, K] (-1: unused), or a handle" % (
                                 None if topk_idx is None else list(topk_idx.shape), tokens, experts, tokens))
        if topk_idx.dtype not in (torch.int32, torch.int64):
            raise ValueError("dispatch_with_permute: found topk_idx of %s, needed is int64 or int32" % topk_idx.dtype)
        index = topk_idx.to(torch.int64).contiguous()
        way = Way(index, None if topk_weights is None else topk_weights.to(torch.float32).contiguous(), align, local)
        return way if probs is None else way.with_probs(probs)

    def _local(self, per_rank: Optional[int], experts: Optional[int]) -> int:
        """Experts of a rank, of this call: layers with other numbers may share a buffer."""
        local = self.num_local_experts if per_rank is None else int(per_rank)
        if experts is not None and experts != local * self.group_size:
            raise ValueError("dispatch_with_permute: found num_of_experts %d, needed are %d on each of %d ranks" % (
                experts, local, self.group_size))
        return local

    def dispatch_with_permute(self, *, hidden: torch.Tensor, topk_idx: Optional[torch.Tensor] = None,
                              topk_weights: Optional[torch.Tensor] = None,
                              num_of_experts_per_rank: Optional[int] = None, num_of_experts: Optional[int] = None,
                              use_fp8: Optional[bool] = None, routing_map: Optional[torch.Tensor] = None,
                              probs: Optional[torch.Tensor] = None, scaling_factor: Optional[torch.Tensor] = None,
                              num_permuted_tokens: Optional[int] = None, pad_multiple: Optional[int] = None,
                              handle: Any = None, non_blocking: bool = False, fuse_permute_dispatch: bool = False,
                              num_dispatched_tokens: Optional[int] = None, use_host_meta: Optional[bool] = None) -> Any:
        """hidden [T, H] (bf16; or 1 byte an element with scaling_factor [T, S] of 4); routing_map bool [T, E] with probs
        float32 [T, E] or None, or topk_idx [T, K] (-1: unused) with topk_weights float32 [T, K] or None -> rows by
        expert [N, H], their probs float32 [N] or None, their scales [N, S] or None, rows of each local expert int64
        [E / R] (on the CPU; with non_blocking where hidden is), handle (11 items, the last bool [1]: rows did not fit).
        With `handle`: on the same way; with probs for those in place of its own.
        num_permuted_tokens: so many rows come out, zeros behind N; of more, the last ones are left out, which the
        handle's last item tells. What is said of fp8, fusion and waiting has no effect.
        Raises ValueError, and ep_overlap.Error where ranks disagree. [collective]"""
        rows, restore = pack.as_rows(hidden if scaling_factor is None else (hidden, scaling_factor))
        pack.need("dispatch_with_permute", "hidden", rows, (-1, -1))
        if num_permuted_tokens is not None and int(num_permuted_tokens) < 0:
            raise ValueError("dispatch_with_permute: found num_permuted_tokens %d, allowed is a number from 0" % num_permuted_tokens)
        if handle is not None:
            _way_of("dispatch_with_permute", handle)
            pack.need("dispatch_with_permute", "probs", probs, (handle[0].experts.shape[0], handle[2]))
        with torch.no_grad():
            if handle is None:
                way = self._new_way(rows, routing_map, topk_idx, topk_weights, probs, pad_multiple or 1,
                                    self._local(num_of_experts_per_rank, num_of_experts))
            else:
                way = handle[0] if probs is None else handle[0].with_probs(probs)
                if rows.shape[0] != way.experts.shape[0]:
                    raise ValueError("dispatch_with_permute: found %d tokens, the handle is of %d" % (
                        rows.shape[0], way.experts.shape[0]))
            plan, row_probs = self._plan(way, rows.shape[1], rows.dtype), None
            weighted = probs is not None or handle is None and topk_weights is not None and routing_map is None
            if weighted:
                row_probs = torch.empty(plan.rows, dtype=torch.float32, device=hidden.device)
            given = plan.rows if num_permuted_tokens is None else int(num_permuted_tokens)
            came = ops.dispatch_rows(rows.contiguous(), plan, row_probs)
            out = restore(to_rows(came, given), as_tuple=True)
            if handle is None or way is not handle[0] or given != (plan.rows if way.budget is None else way.budget):
                handle = self._handle(way, plan, given, hidden.device)
        sizes = handle[1].to(hidden.device, non_blocking=True) if non_blocking else handle[1].clone()
        return out[0], to_rows(row_probs, given), out[1] if scaling_factor is not None else None, sizes, handle

    def _handle(self, way: Way, plan: ep_overlap.Plan, given: int, device: torch.device) -> Tuple[Any, ...]:
        way = way.with_budget(given if given != plan.rows else None)
        ends = [min(end, given) for end in plan.first[1:] + [plan.rows]]
        sizes = torch.tensor([max(0, end - at) for at, end in zip(plan.first, ends)], dtype=torch.int64)
        if self._fits is None:
            self._fits = torch.zeros(1, dtype=torch.bool, device=device)
        overflow = torch.ones(1, dtype=torch.bool, device=device) if given < plan.rows else self._fits
        return (way, sizes, way.local * self.group_size, None, None, None, None, None, None, None, overflow)

    def combine_with_unpermute(self, *, hidden: torch.Tensor, probs: Optional[torch.Tensor] = None, handle: Any = None,
                               pad_multiple: Optional[int] = None, fuse_unpermute_combine: bool = False,
                               num_dispatched_tokens: Optional[int] = None) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """rows by expert bf16 [N, H] (or as many as came out) -> [T, H], the unweighted sum in float32, rounded once;
        probs float32 [N] -> float32 [T, E] (0 where a token has no such expert) or None. Raises as the dispatch.
        [collective]"""
        way = _way_of("combine_with_unpermute", handle)
        with torch.no_grad():
            plan = self._plan(way, hidden.shape[1], hidden.dtype)
            for name, given in (("hidden", hidden), ("probs", probs)):
                if given is not None and given.shape[0] not in (plan.rows, way.budget):
                    raise ValueError("combine_with_unpermute: found %d rows of %s, the handle is of %d" % (
                        given.shape[0], name, plan.rows if way.budget is None else way.budget))
            rows = to_rows(hidden.contiguous(), plan.rows)
            assert rows is not None
            y, by_slot = ops.combine_weights(rows, to_rows(probs, plan.rows), plan)
            return y, None if by_slot is None else pack.dense(way.experts, by_slot, handle[2])


__all__: List[str] = ["HybridEPBuffer"]
