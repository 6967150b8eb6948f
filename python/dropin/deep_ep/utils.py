# SPDX-License-Identifier: Apache-2.0
"""Events as DeepEP names them."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch


_streams: Dict[Tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream() -> torch.cuda.Stream:
    """torch.cuda.current_stream(), which makes an object each time: that takes longer than what it is used for."""
    key = torch._C._cuda_getCurrentStream(torch.cuda.current_device())
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream()
    return _streams[key]


class EventHandle:
    """What the current stream has reached when this was made. Without a GPU all is complete at once."""

    def __init__(self) -> None:
        self._event: Optional[torch.cuda.Event] = None
        self._stream: Optional[torch.cuda.Stream] = None
        if torch.cuda.is_initialized():
            self._event, self._stream = torch.cuda.Event(), current_stream()
            self._event.record(self._stream)

    def current_stream_wait(self) -> None:
        if self._event is not None:
            current_stream().wait_event(self._event)

    def wait_elsewhere(self) -> bool:
        """current_stream_wait, unless it is the current stream's own. Whether it waited."""
        waits = self._event is not None and self._stream != current_stream()
        if waits:
            self.current_stream_wait()
        return waits


class EventOverlap:
    """An EventHandle, or None, and tensors that must live until it is reached."""

    def __init__(self, event: Optional[EventHandle] = None,
                 extra_tensors: Optional[Tuple[Optional[torch.Tensor], ...]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        if self.event is None:
            raise RuntimeError("EventOverlap.current_stream_wait: there is no event (async_finish was not asked for)")
        self.event.current_stream_wait()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


__all__ = ["EventHandle", "EventOverlap"]
