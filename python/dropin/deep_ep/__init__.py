# SPDX-License-Identifier: Apache-2.0
"""The surface of DeepEP that Megatron-Core's flex dispatcher uses, on ep_overlap.

Used where this folder's parent is put first into PYTHONPATH, and nowhere else: nothing installs it
beside or over DeepEP itself. Tensors that come out are torch's own.
"""
import torch

from .buffer import Buffer, Config
from .hybrid import HybridEPBuffer
from .utils import EventHandle, EventOverlap

topk_idx_t = torch.int64
__version__ = "1.2.1+ep.overlap"
__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "HybridEPBuffer", "topk_idx_t"]
