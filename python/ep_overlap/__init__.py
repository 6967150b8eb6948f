# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers over expert-parallel ranks, for PyTorch (2.4 or newer).

    group = ep_overlap.Group()                       # ranks by the launcher's environment
    layer = ep_overlap.MoELayer(group, hidden=2048, ffn=768, experts=128, top_k=8, max_tokens=4096)
    y = layer(x, experts, weights)                   # x [T, H], experts [T, K], weights [T, K]
    y.sum().backward()
    layer.flush()                                    # before the optimizer reads the gradients

With experts of your own, between `dispatch` and `combine`:

    buffer = group.buffer(hidden=2048, experts=128, top_k=8, max_tokens=4096, dtype=torch.bfloat16)
    plan = buffer.plan(experts, weights)
    rows, row_weights = ep_overlap.dispatch(x, weights, plan)
    y = ep_overlap.combine(my_experts(rows, plan.counts) * row_weights[:, None].to(rows.dtype), plan)
"""
from ._capi import Error
from .layer import MoELayer
from .ops import Buffer, Group, Plan, combine, dispatch

__version__ = "0.1.0"
__all__ = ["Group", "Buffer", "Plan", "MoELayer", "dispatch", "combine", "Error"]
