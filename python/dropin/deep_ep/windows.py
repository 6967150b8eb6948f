# SPDX-License-Identifier: Apache-2.0
"""The library's windows behind the drop-in's buffers, made at the first use of a shape."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

import ep_overlap


def agree_on_most(group: Any, values: List[int]) -> List[int]:
    """The largest of all ranks' values, each by itself. [collective]"""
    gpu = "nccl" in str(dist.get_backend(group))
    most = torch.tensor(values, dtype=torch.int64, device="cuda" if gpu else "cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.tolist()


class Windows:
    """ep_overlap buffers of one group, by shape; larger ones where a rank has more tokens or slots. The
    library tells all ranks when one of them does not fit, so nobody has to be asked before."""

    def __init__(self, group: Any, dispatcher: Optional[str] = None) -> None:
        self.process_group = group
        self.group = ep_overlap.Group(group, engine="cuda" if torch.cuda.is_available() else "host",
                                      dispatcher=dispatcher)
        self._made: Dict[Any, Tuple[ep_overlap.Buffer, List[int]]] = {}
        self._outgrown: List[ep_overlap.Buffer] = []

    def plan(self, experts: torch.Tensor, weights: Optional[torch.Tensor], count: int, hidden: int,
             dtype: torch.dtype, align: int, least: int = 1) -> ep_overlap.Plan:
        """experts int64 [T, K] of `count`, weights float32 [T, K] or None; windows for `least` tokens at
        least. [collective]"""
        key, size = (count, hidden, dtype, align), [max(least, experts.shape[0]), experts.shape[1]]
        if key in self._made:
            buffer, had = self._made[key]
            try:
                return buffer.plan(experts, weights)
            except ValueError:  # too small, which all ranks hear; where a rank has ended nobody would answer
                most = agree_on_most(self.process_group, size)
                if most[0] <= had[0] and most[1] <= had[1]:
                    raise
            # By half at least, so that a slowly growing T does not make many. The old one stays: plans made
            # from it may still be in use.
            self._outgrown.append(buffer)
            size = [max(most[0], had[0] * 3 // 2 if most[0] > had[0] else had[0]), max(most[1], had[1])]
        else:
            size = agree_on_most(self.process_group, size)
        buffer = self.group.buffer(hidden=hidden, experts=count, top_k=size[1], max_tokens=size[0], dtype=dtype,
                                   align_rows=align)
        self._made[key] = (buffer, size)
        return buffer.plan(experts, weights)

    def close(self) -> None:
        """After the last handle is gone. [collective]"""
        for buffer in [*self._outgrown, *(buffer for buffer, _ in self._made.values())]:
            buffer.close()
        self._outgrown, self._made = [], {}
        self.group.close()
