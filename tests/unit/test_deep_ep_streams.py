#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""On which streams python/dropin/deep_ep waits for what, by streams that only keep count: each knows how far every
stream has come before what it is given next. PYTHONPATH=python:python/dropin; needs no GPU and no library."""
import random

import torch

from deep_ep import buffer as module
from deep_ep import utils

NOW = {}  # the current stream, by "stream"


class Stream:
    def __init__(self, name):
        self.name, self.seen = name, {}

    def step(self):
        """Something is given to the stream: how far all streams are behind it."""
        self.seen[self.name] = self.seen.get(self.name, 0) + 1
        return dict(self.seen)

    def wait_event(self, event):
        for name, count in event.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def wait_stream(self, other):
        self.wait_event(dict(other.seen))


class Handle:
    def __init__(self):
        self._stream, self._event = NOW["stream"], NOW["stream"].step()

    def current_stream_wait(self):
        NOW["stream"].wait_event(self._event)

    def wait_elsewhere(self):
        if self._stream is NOW["stream"]:
            return False
        self.current_stream_wait()
        return True


def behind(later, earlier):
    return all(later.get(name, 0) >= count for name, count in earlier.items())


def set_stream(stream):
    NOW["stream"] = stream


RECORDED = []
module.current_stream = utils.current_stream = lambda: NOW["stream"]
module.EventHandle = utils.EventHandle = Handle
torch.cuda.set_stream = set_stream
torch.Tensor.record_stream = lambda tensor, stream: RECORDED.append((tensor.data_ptr(), stream))


def made():
    """A Buffer of one rank of two whose streams are these; (buffer, the moments of its layouts and of its dispatches)."""
    buffer, laid, sent = module.Buffer.__new__(module.Buffer), [], []
    buffer.rank, buffer.group_size, buffer._comm, buffer._laid, buffer._numbers = 0, 2, Stream("comm"), {}, None

    def layout(index, experts, ranks):
        laid.append(NOW["stream"].step())
        return module.pack.layout_torch(index, experts, ranks)

    def routed(handle, x, index, weights, local):
        sent.append(NOW["stream"].step())
        if buffer.broken:
            raise RuntimeError("a rank has ended")
        return x, index, weights, torch.zeros(local, dtype=torch.int32)

    buffer.broken, buffer._routed_rows = False, routed
    module.pack = type("Pack", (), {"layout": staticmethod(layout), "as_rows": staticmethod(PACK.as_rows), "need": staticmethod(PACK.need),
                                    "layout_torch": staticmethod(PACK.layout_torch)})
    return buffer, laid, sent


PACK = module.pack
X, INDEX, WEIGHTS = torch.zeros(4, 8, dtype=torch.bfloat16), torch.tensor([[0], [1], [2], [3]]), torch.ones(4, 1)


def dispatch(buffer, layout, previous, asynchronous):
    return buffer.dispatch(X, topk_idx=INDEX, topk_weights=WEIGHTS, is_token_in_rank=layout[3],
                           num_tokens_per_expert=layout[2], previous_event=previous, async_finish=asynchronous)


def case(seed):
    """Layouts and dispatches on any streams, with events that are older than the layout, are its own, or none."""
    r = random.Random(seed)
    buffer, laid, sent = made()
    streams = [Stream("a"), Stream("b")]
    for _ in range(r.randint(1, 3)):
        set_stream(r.choice(streams))
        older = module.EventOverlap(Handle())
        layouts = []
        for _ in range(r.randint(1, 2)):
            set_stream(r.choice(streams))
            layouts.append(buffer.get_dispatch_layout(INDEX, 4, r.choice([None, older]), r.random() < 0.5))
        for layout in r.sample(layouts, len(layouts)):
            set_stream(r.choice(streams))
            NOW["stream"].step()
            given = r.choice([None, older, layout[4]])
            mine, reached = NOW["stream"], dict(NOW["stream"].seen)
            asynchronous = r.random() < 0.5
            event = dispatch(buffer, layout, given, asynchronous)[5]
            assert NOW["stream"] is mine, "the current stream is the caller's again"
            for moment in laid:
                assert behind(sent[-1], moment), "a dispatch is not behind a layout"
            if given is None or given.event is None:
                assert behind(sent[-1], reached), "a dispatch without an event is not behind the current stream"
            else:
                assert behind(sent[-1], given.event._event), "a dispatch is not behind its event"
            if asynchronous:
                event.current_stream_wait()
            assert behind(mine.seen, sent[-1]), "the caller does not wait for a dispatch"


def overlaps():
    """What is given to the caller's stream behind the layout is not waited for where the event says so."""
    buffer, laid, sent = made()
    set_stream(Stream("a"))
    layout = buffer.get_dispatch_layout(INDEX, 4, None, True)
    later = NOW["stream"].step()
    dispatch(buffer, layout, layout[4], True)
    assert behind(sent[-1], laid[-1]) and not behind(sent[-1], later)


def elsewhere():
    """A layout behind an event of another stream reads what may be that one's: it is recorded on the stream that reads."""
    buffer, _, _ = made()
    set_stream(Stream("a"))
    older = module.EventOverlap(Handle())
    RECORDED.clear()
    buffer.get_dispatch_layout(INDEX, 4, older)
    assert not RECORDED, "recorded on its own stream"
    set_stream(Stream("b"))
    buffer.get_dispatch_layout(INDEX, 4, older)
    assert RECORDED == [(INDEX.data_ptr(), NOW["stream"])], RECORDED


def raises():
    """A call that raises has its inputs recorded: what it began may still read them."""
    buffer, _, _ = made()
    set_stream(Stream("a"))
    mine = NOW["stream"]
    layout = buffer.get_dispatch_layout(INDEX, 4)
    buffer.broken = True
    RECORDED.clear()
    try:
        dispatch(buffer, layout, None, True)
        raise SystemExit("the error was lost")
    except RuntimeError as e:
        assert "ended" in str(e)
    assert NOW["stream"] is mine, "the current stream is the caller's again"
    for tensor in (X, INDEX, WEIGHTS, layout[3]):
        assert (tensor.data_ptr(), buffer._comm) in RECORDED, "an input is not recorded on the communication stream"


CASES = 2000
for seed in range(CASES):
    case(seed)
overlaps()
elsewhere()
raises()
print("ok: %d random orders of layouts and dispatches on streams" % CASES)
