#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The kernels of python/dropin/deep_ep/pack.py against its plain torch: on a GPU, or, without one, by Triton's
interpreter (TRITON_INTERPRET=1). PYTHONPATH=python:python/dropin."""
import os
import random
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

import importlib.util  # noqa: E402

spec = importlib.util.find_spec("deep_ep")
pack_spec = importlib.util.spec_from_file_location("pack", os.path.join(spec.submodule_search_locations[0], "pack.py"))
pack = importlib.util.module_from_spec(pack_spec)
pack_spec.loader.exec_module(pack)


def routing(t, k, e, g):
    index = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(t)]) if t else torch.empty(0, k, dtype=torch.int64)
    return torch.where(torch.rand(t, k, generator=g) < 0.2, -1, index).to(DEVICE)


def same(name, got, want):
    for i, (a, b) in enumerate(zip(got, want)):
        if (a is None) != (b is None) or a is not None and not (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)):
            sys.exit("%s, %d: the kernel gives\n%s\nplain torch\n%s" % (name, i, a, b))


def case(seed):
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    ranks, local, t = r.choice([1, 2, 3, 8]), r.choice([1, 2, 5]), r.choice([0, 1, 7, 40])
    e = ranks * local
    k, h = r.randint(1, min(e, 9)), r.choice([8, 24, 136, 256])
    index = routing(t, k, e, g)
    x = torch.randn(t, h, generator=g).to(torch.bfloat16).to(DEVICE)
    weights = torch.rand(t, k, generator=g).to(DEVICE)
    if t:  # bit patterns that arithmetic would change
        x.view(torch.int16)[0, :2] = torch.tensor([0x7F81, -1], dtype=torch.int16)
    if t and seed % 2:
        index[0, 0] = e + r.choice([0, 1, 1000])  # no expert: it counts nowhere
    counts = pack.layout_torch(index, e, ranks)
    same("layout", pack.layout(index, e, ranks), counts)
    assert int(counts[1].sum()) == int(((index >= 0) & (index < e)).sum())
    width = h + pack.wide_of(k)
    first = r.randrange(ranks) * local
    for weighted in (True, False):
        packed = pack.pack(x, index, weights if weighted else None, width)
        plain = pack.pack_torch(x, index, weights if weighted else None, width)
        used = h + (4 if weighted else 2) * k
        same("pack", [packed.view(torch.int16)[:, :used]], [plain.view(torch.int16)[:, :used]])
        got, want = (f(packed, h, k, first, local, weighted) for f in (pack.unpack, pack.unpack_torch))
        same("unpack", [got[0].view(torch.int16), *got[1:]], [want[0].view(torch.int16), *want[1:]])
        same("what was packed", [got[0].view(torch.int16)], [x.view(torch.int16)])
    mine = got[3]
    x = torch.randn(t, h, generator=g).to(torch.bfloat16).to(DEVICE)
    packed, plain = pack.widen(x, weights, mine, width), pack.widen_torch(x, weights, mine, width)
    for way in (packed, plain):  # (the interpreter rounds to bf16 in another way, but to the same sums)
        same("join", pack.join(way, h, k), pack.join_torch(way, h, k))
        same("what was widened", pack.join(way, h, k), (x, torch.where(mine, weights, 0.0)))
    dense = torch.rand(t, e, generator=g).to(DEVICE) < 0.4
    probs, most = torch.rand(t, e, generator=g).to(DEVICE), r.randint(1, e)
    for p in (probs, None):
        got, want = pack.columns(dense, p, most), pack.columns_torch(dense, p, most)
        same("columns", got, want)
    fits = dense.sum(1) <= most
    assert ((got[0] == e).any(1) == ~fits).all(), "a token with too many experts is told"
    experts, by_slot = pack.columns_torch(dense, probs, e)
    same("dense", [pack.dense(experts, by_slot, e)], [pack.dense_torch(experts, by_slot, e)])
    same("what was dense", [pack.dense(experts, by_slot, e)], [torch.where(dense, probs, 0.0)])


CASES = 4 if DEVICE == "cuda" else 30  # (each compiles its kernels there)
for seed in range(CASES):
    case(seed)
assert pack._usable, "Triton was not used"
print("ok: %d cases, kernels as plain torch on %s" % (CASES, DEVICE))
