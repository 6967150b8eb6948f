# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM's C interface for the benchmark and the tuning script."""
import ctypes as c
import os
import statistics

import torch

FORWARD, DGRAD, WGRAD = 0, 1, 2
F32, BF16, F16 = 0, 1, 2


class Ready(c.Structure):
    _fields_ = [("flag", c.c_void_p), ("epoch", c.c_uint64), ("words", c.c_int),
                ("block_rows", c.c_int), ("timeout_ns", c.c_uint64)]


class Gg(c.Structure):
    _fields_ = [("size", c.c_size_t), ("kind", c.c_int), ("fuse", c.c_int), ("type", c.c_int),
                ("c_type", c.c_int), ("accumulate", c.c_int), ("n", c.c_int), ("k", c.c_int),
                ("experts", c.c_int), ("first", c.c_int), ("count", c.c_int),
                ("rows", c.c_uint64), ("row_first", c.c_void_p), ("row_count", c.c_void_p),
                ("a", c.c_void_p), ("b", c.c_void_p), ("c", c.c_void_p),
                ("a_index", c.c_void_p), ("a_rows", c.c_uint64), ("b_index", c.c_void_p),
                ("b_rows", c.c_uint64), ("keep", c.c_void_p), ("row_weight", c.c_void_p),
                ("h", c.c_void_p), ("act", c.c_void_p), ("row_dweight", c.c_void_p),
                ("ready", Ready),
                ("sms", c.c_int), ("sm_limit", c.c_void_p), ("spin_ns", c.c_void_p),
                ("error", c.c_void_p), ("path", c.c_int), ("tile_n", c.c_int),
                ("group_m", c.c_int), ("cluster", c.c_int), ("workspace", c.c_void_p),
                ("workspace_bytes", c.c_uint64)]


def library(path):
    lib = c.CDLL(os.path.abspath(path))
    for name in ("epo_gg_launch", "epo_gg_prepare", "epo_gg_run"):
        getattr(lib, name).argtypes = [c.POINTER(Gg), c.c_void_p]
    lib.epo_gg_workspace.argtypes = [c.POINTER(Gg)]
    lib.epo_gg_workspace.restype = c.c_uint64
    lib.epo_fail_text.restype = c.c_char_p
    lib.bench_copy.argtypes = [c.c_void_p, c.c_void_p, c.c_uint64, c.c_int, c.c_uint64,
                               c.c_void_p, c.c_void_p]
    return lib


def ptr(t):
    return None if t is None else t.data_ptr()


class Call:
    """One grouped GEMM with its tensors; tensors may be replaced between launches."""

    def __init__(self, lib, kind, a, b, out, n, k, first, count, **more):
        self.lib = lib
        self.keep = [a, b, out, first, count] + list(more.values())
        g = Gg(size=c.sizeof(Gg), kind=kind, type=BF16, c_type=BF16, n=n, k=k,
               experts=count.numel(), first=0, count=count.numel(), row_first=ptr(first),
               row_count=ptr(count), a=ptr(a), b=ptr(b), c=ptr(out))
        for name, value in more.items():
            setattr(g, name, ptr(value) if isinstance(value, torch.Tensor) else value)
        if kind == WGRAD and out.dtype == torch.float32:
            g.c_type = F32
        self.g = g

    def finish(self):
        size = self.lib.epo_gg_workspace(c.byref(self.g))
        self.ws = torch.empty(size + 256, dtype=torch.uint8, device="cuda")
        self.g.workspace = (self.ws.data_ptr() + 255) // 256 * 256
        self.g.workspace_bytes = size
        return self

    def _do(self, fn, stream):
        stream = torch.cuda.current_stream() if stream is None else stream
        if fn(c.byref(self.g), stream.cuda_stream) != 0:
            raise RuntimeError(self.lib.epo_fail_text().decode())

    def launch(self, stream=None):
        self._do(self.lib.epo_gg_launch, stream)

    def prepare(self, stream=None):
        self._do(self.lib.epo_gg_prepare, stream)

    def run(self, stream=None):
        self._do(self.lib.epo_gg_run, stream)

    def __call__(self):
        self.launch()


def measure(functions, rounds=11, burst=3):
    """Median time in us of each function, interleaved; a short sleep ahead lets the
    host run in front.  Returns (medians, spreads as share of the median)."""
    times = {name: [] for name in functions}
    for fn in functions.values():
        fn()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, fn in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(150000)
            start.record()
            for _ in range(burst):
                fn()
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    out, spread = {}, {}
    for name, pairs in times.items():
        us = sorted(s.elapsed_time(e) * 1000.0 / burst for s, e in pairs)
        out[name] = statistics.median(us)
        spread[name] = (us[-2] - us[1]) / out[name]
    return out, spread


def counts_of(style, experts, rows, seed=1):
    """Rows per expert: all the same, multinomial, or Zipf 1.0 in random order."""
    gen = torch.Generator().manual_seed(seed)
    if style == "even":
        return [rows] * experts
    if style == "random":
        pick = torch.randint(experts, (rows * experts,), generator=gen)
        return torch.bincount(pick, minlength=experts).tolist()
    share = 1.0 / torch.arange(1, experts + 1, dtype=torch.float64)
    share = share[torch.randperm(experts, generator=gen)]
    return (share / share.sum() * rows * experts).floor().long().tolist()
