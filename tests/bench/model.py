#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A cost model of the layer, fitted to what `ep-overlap bench --json` measured.

  model.py fit [--hold FILE]... [--save FILE] FILE...   fits, and states its errors
  model.py paper [--net GB/S] [--tokens N] [--workload q|d] PARAMETERS
                                                        EP = 2 to 2048 from a saved fit

Forward pass, one rank; every coefficient is at least 0:
  FFN        = FLOPs / rate + weight bytes / bandwidth + fixed
  serial     = FFN + fixed + wire bytes / link + expert-row bytes x local
  overlapped = max(FFN + first + last, wire + FFN / n) + fixed + n x a chunk's
               + expert-row bytes x local + contention x what of communication lies beside the FFN
wire is dispatch and combine; first, last: the part of them that nothing hides, which is the
first chunk's rows and the last one's.  FFN, serial and overlapped are fitted apart, for each
dispatcher, by least squares of relative errors.  Held-out files are predicted, not fitted.
Left out: one that was measured where ranks share a GPU (its times mean nothing).
"""
import argparse
import json
import math
import sys
from itertools import combinations

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
WORKLOADS = {"q": (2048, 768, 128, 8), "d": (7168, 2048, 256, 8)}


class Wrong(Exception):
    """What is wrong with an input, for the user."""


# ---- bytes by theory ----------------------------------------------------------------------

def touched(experts, of, top_k):
    """Chance that a token of top_k distinct experts uses one of `of` experts."""
    return 1 - math.comb(experts - of, top_k) / math.comb(experts, top_k)


def copies(dispatcher, experts, top_k, ranks):
    """Rows that a token sends to other ranks, routing even."""
    if dispatcher == "alltoall":
        return top_k * (ranks - 1) / ranks
    return (ranks - 1) * touched(experts, experts // ranks, top_k)


def first_share(dispatcher, experts, top_k, ranks, chunks):
    """Share of the rows in the first of n chunks; the last one's on the way back."""
    local = experts // ranks
    if chunks <= 1:
        return 1.0
    # Half chunks at the ends where there are experts enough (alltoall alone).
    part = local / chunks
    if dispatcher == "alltoall":
        if chunks > 2 and local >= 2 * (chunks - 1):
            part = local / (2 * (chunks - 1))
        return part / local
    return touched(experts, max(1, round(part)), top_k) / touched(experts, local, top_k)


class Point:
    """One arm of one measurement: what was run, and what it took (ms)."""

    def __init__(self, run, arm, name):
        try:
            self.tokens, self.hidden, self.ffn = run["tokens"], run["hidden"], run["ffn"]
            self.experts, self.top_k, self.ranks = run["experts"], run["top_k"], run["ranks"]
            self.size = BYTES[run["type"]]
            self.dispatcher, self.overlap = arm["dispatcher"], arm["overlap"]
            self.chunks = arm["chunks"]
            self.ms = arm["forward"]["ms"]["median"]
            self.ffn_ms = arm["ffn_alone_forward_ms"]
            self.delayed = arm["delay_wgrad"]
        except (KeyError, TypeError) as e:
            raise Wrong(f"{name}: no field {e} of ep-overlap-bench/1") from e
        self.name = name

    @property
    def rows(self):
        return self.tokens * self.top_k

    @property
    def flops(self):
        return 6 * self.rows * self.hidden * self.ffn

    @property
    def weights(self):
        return 3 * self.experts // self.ranks * self.hidden * self.ffn * self.size

    @property
    def row_bytes(self):
        return self.rows * self.hidden * self.size

    @property
    def wire(self):
        """Bytes that leave the rank, one way."""
        return (self.tokens * copies(self.dispatcher, self.experts, self.top_k, self.ranks)
                * self.hidden * self.size)

    @property
    def first(self):
        return self.wire * first_share(self.dispatcher, self.experts, self.top_k, self.ranks,
                                       self.chunks)

    def label(self):
        kind = f"overlapped in {self.chunks}" if self.overlap else "serial"
        return f"EP {self.ranks}, T {self.tokens}, H {self.hidden}, {self.dispatcher} {kind}"


def load(paths):
    points = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as f:
                run = json.load(f)
        except (OSError, ValueError) as e:
            raise Wrong(f"{path}: {e}") from e
        for one in run if isinstance(run, list) else [run]:
            if not isinstance(one, dict) or one.get("schema") != "ep-overlap-bench/1":
                raise Wrong(f"{path}: not a report of ep-overlap bench --json")
            if one.get("ranks_share"):
                print(f"{path}: ranks share a GPU or a core: left out", file=sys.stderr)
                continue
            points += [Point(one, arm, path) for arm in one["arms"]]
    return [p for p in points if not p.delayed]


# ---- least squares, no coefficient below 0 --------------------------------------------------

def solve(a, b):
    """Gauss with pivots; None where the matrix is singular."""
    n = len(b)
    m = [row[:] + [y] for row, y in zip(a, b)]
    for i in range(n):
        p = max(range(i, n), key=lambda r: abs(m[r][i]))
        if abs(m[p][i]) < 1e-12:
            return None
        m[i], m[p] = m[p], m[i]
        for r in range(n):
            if r != i:
                f = m[r][i] / m[i][i]
                m[r] = [x - f * y for x, y in zip(m[r], m[i])]
    return [m[i][n] / m[i][i] for i in range(n)]


def nonnegative(rows, targets, weights):
    """The best coefficients, found among all subsets of the columns."""
    n = len(rows[0])
    scale = [max(abs(r[i]) for r in rows) or 1.0 for i in range(n)]
    x = [[v / s * w for v, s in zip(r, scale)] for r, w in zip(rows, weights)]
    y = [t * w for t, w in zip(targets, weights)]
    best, least = [0.0] * n, sum(v * v for v in y)
    for size in range(1, n + 1):
        for used in combinations(range(n), size):
            a = [[sum(r[i] * r[j] for r in x) for j in used] for i in used]
            got = solve(a, [sum(r[i] * v for r, v in zip(x, y)) for i in used])
            if got is None or min(got) < 0:
                continue
            full = [0.0] * n
            for i, v in zip(used, got):
                full[i] = v
            rest = sum((sum(c * v for c, v in zip(full, r)) - t) ** 2 for r, t in zip(x, y))
            if rest < least * (1 - 1e-9):
                best, least = full, rest
    return [c / s for c, s in zip(best, scale)]


# ---- the model ------------------------------------------------------------------------------

def ffn_columns(p):
    """Where all runs had the same weights, what does not grow with rows is theirs."""
    return p.flops, p.weights, 1


class Model:
    """Milliseconds of bytes and FLOPs."""

    def __init__(self, ffn, serial, overlapped):
        self.ffn, self.serial, self.overlapped = ffn, serial, overlapped

    def ffn_ms(self, p):
        return sum(c * v for c, v in zip(self.ffn[p.dispatcher], ffn_columns(p)))

    def wire_ms(self, p, nbytes):
        return self.serial[p.dispatcher][1] * nbytes

    def bound(self, p, ffn):
        """What a schedule of n chunks cannot be under."""
        first, wire = self.wire_ms(p, p.first), self.wire_ms(p, p.wire)
        return max(ffn + 2 * first, 2 * wire + ffn / max(1, p.chunks))

    def beside(self, p, ffn):
        return min(ffn, 2 * self.wire_ms(p, p.wire - p.first))

    def beyond(self, p, ffn):
        """What an overlapped pass takes longer by."""
        return 1, p.chunks, self.beside(p, ffn), p.row_bytes

    def predict(self, p, ffn=None):
        ffn = self.ffn_ms(p) if ffn is None else ffn
        if not p.overlap:
            c = self.serial[p.dispatcher]
            return ffn + c[0] + 2 * c[1] * p.wire + c[2] * p.row_bytes
        return self.bound(p, ffn) + sum(c * v for c, v in zip(
            self.overlapped[p.dispatcher], self.beyond(p, ffn)))


def fit_part(points, columns, target):
    if not points:
        raise Wrong("nothing to fit: a part of the model has no measurement")
    return nonnegative([columns(p) for p in points], [target(p) for p in points],
                       [1 / p.ms for p in points])


def fit(points):
    """FFN from what it took alone, the rest from the pass minus that FFN."""
    if not any(p.ranks == 1 for p in points) or not any(p.ranks > 1 for p in points):
        raise Wrong("a fit needs measurements of one rank and of several: bytes inside a GPU and "
                    "on the link are told apart by them")
    model = Model({}, {}, {})
    for name in sorted({p.dispatcher for p in points}):
        mine = [p for p in points if p.dispatcher == name]
        model.ffn[name] = nonnegative([ffn_columns(p) for p in mine],
                                      [p.ffn_ms for p in mine], [1 / p.ffn_ms for p in mine])
        model.serial[name] = fit_part([p for p in mine if not p.overlap],
                                      lambda p: (1, 2 * p.wire, p.row_bytes),
                                      lambda p: p.ms - p.ffn_ms)
        model.overlapped[name] = fit_part(
            [p for p in mine if p.overlap],
            lambda p: model.beyond(p, p.ffn_ms),
            lambda p: p.ms - model.bound(p, p.ffn_ms))
    return model


def errors(model, points):
    return [(model.predict(p) / p.ms - 1, p) for p in points]


def state(name, found):
    if not found:
        return
    size = sorted(abs(e) for e, _ in found)
    worst, p = max(found, key=lambda f: abs(f[0]))
    print(f"{name}: {len(found)} times, error {size[len(size) // 2]:.1%} (median), "
          f"{worst:+.1%} at worst ({p.label()})")


def leave_one_out(points):
    """Each run's times predicted by a fit to all the others."""
    found = []
    for key in sorted({(p.name, p.ranks, p.tokens, p.hidden) for p in points}):
        mine = [p for p in points if (p.name, p.ranks, p.tokens, p.hidden) == key]
        rest = [p for p in points if (p.name, p.ranks, p.tokens, p.hidden) != key]
        try:
            found += errors(fit(rest), mine)
        except Wrong:
            continue
    return found


def per(value, unit):
    return f"{1 / value * unit:.0f}" if value > 0 else "-"


def show(model):
    for name, c in model.serial.items():
        f = model.ffn[name]
        print(f"{name} FFN: FLOPs at {per(f[0], 1e-9)} TFLOP/s + weights at {per(f[1], 1e-6)} GB/s "
              f"+ {f[2] * 1e3:.0f} us")
        print(f"{name} serial: {c[0] * 1e3:.0f} us + wire at {per(c[1], 1e-6)} GB/s + expert rows "
              f"at {per(c[2], 1e-6)} GB/s")
        c = model.overlapped[name]
        print(f"{name} overlapped: {c[0] * 1e3:.0f} us + {c[1] * 1e3:.0f} us a chunk + {c[2]:.2f} "
              f"of hidden communication + expert rows at {per(c[3], 1e-6)} GB/s")


# ---- on paper -------------------------------------------------------------------------------

NODE = 8           # GPUs
NET_LATENCY = 0.01  # ms, a message between nodes and what says that it came; assumed
PIECE = 1.3e-3      # ms of CPU for a copy to a peer, measured (docs/performance-log.md, 2.10)
E4M3 = (1 + 4 / 128) / 2  # of bf16's bytes
NODES_OF_TOKEN = 4  # where routing is limited to so many, as DeepSeek-V3's


class Far:
    """One pass of EP ranks over nodes of eight: times in ms, memory in GB."""

    def __init__(self, model, workload, tokens, ranks, net, way):
        hidden, ffn, experts, top_k = WORKLOADS[workload]
        experts = max(experts, ranks)
        nodes = max(1, ranks // NODE)
        local, on_node = experts // ranks, experts // nodes
        row = tokens * hidden * 2
        near = min(ranks, NODE) - 1
        one = touched(experts, local, top_k)
        self.ranks, self.experts = ranks, experts
        out = (nodes - 1) * touched(experts, on_node, top_k)
        if way == "alltoall":
            inside, across = top_k * near / ranks, top_k * (ranks - near - 1) / ranks
        elif way == "flex":
            inside, across = near * one, (ranks - near - 1) * one
        else:  # one row a token and node, handed on over NVLink there
            across = out if way != "limited" else min(out, NODES_OF_TOKEN * (1 - 1 / nodes))
            inside = min(top_k, (ranks - nodes) * one) if nodes > 1 else near * one
        shrink = E4M3 if way in ("e4m3", "limited") else 1.0  # dispatch alone
        link = model.serial["flex"][1]
        self.across = across
        trip = [max(inside * row * s * link, across * row * s / net * 1e-6) +
                (NET_LATENCY if nodes > 1 else 0) for s in (shrink, 1.0)]
        self.wire = sum(trip)
        shape = {"tokens": tokens, "hidden": hidden, "ffn": ffn, "experts": experts,
                 "top_k": top_k, "ranks": ranks, "type": "bf16"}
        arm = {"dispatcher": "alltoall" if way == "alltoall" else "flex", "overlap": True,
               "chunks": 1, "forward": {"ms": {"median": 1.0}}, "ffn_alone_forward_ms": 1.0,
               "delay_wgrad": False}
        p = Point(shape, arm, "paper")
        self.ffn = model.ffn_ms(p)
        c = model.overlapped[p.dispatcher]
        # As the engine does: as many chunks as are fastest, of those there are experts for.
        self.overlapped, self.chunks = math.inf, 1
        for chunks in (n for n in (1, 2, 4, 8) if n <= local):
            share = first_share(p.dispatcher, experts, top_k, ranks, chunks)
            floor = max(self.ffn + share * self.wire, self.wire + self.ffn / chunks)
            # A network card takes no SM and no copy engine: only NVLink's part contends.
            beside = min(self.ffn, (1 - share) * inside * row * link * (1 + shrink))
            took = floor + c[0] + c[1] * chunks + c[2] * beside + c[3] * p.row_bytes
            if took < self.overlapped:
                self.overlapped, self.chunks = took, chunks
        pieces = local * (ranks - 1) if way == "alltoall" else self.chunks * (ranks - 1)
        self.cpu = 2 * pieces * PIECE
        self.record = ranks * (experts + ranks * (1 + 2 * self.chunks)) * 4 / 1e6  # MB a plan
        # Rows from every rank, and what comes back.
        self.window = tokens * (ranks + min(ranks, top_k)) * hidden * 2 / 1e9


def paper(args):
    with open(args.parameters, encoding="utf-8") as f:
        saved = json.load(f)
    model = Model(saved["ffn"], saved["serial"], saved["overlapped"])
    ways = ("alltoall", "flex", "node", "e4m3", "limited")
    print(f"workload {args.workload}, {args.tokens} tokens a rank, {args.net:g} GB/s a GPU between "
          f"nodes of {NODE}; forward, ms; experts: the larger of the workload's and EP")
    print("| EP | experts | FFN | " + " | ".join(f"{w}: wire, layer (chunks)" for w in ways) +
          " | CPU of copies (flex) | counts of a plan, MB | window (flex), GB |")
    print("|" + "---|" * (6 + len(ways)))
    for ranks in (2, 8, 64, 128, 256, 512, 1024, 2048):
        all_ways = [Far(model, args.workload, args.tokens, ranks, args.net, w) for w in ways]
        flex = all_ways[1]
        print(f"| {ranks} | {flex.experts} | {flex.ffn:.2f} | " +
              " | ".join(f"{w.wire:.2f}, {w.overlapped:.2f}" for w in all_ways) +
              f" | {flex.cpu:.2f} | {flex.record:.2f} | {flex.window:.1f} |")


def main():
    ap = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="what", required=True)
    f = sub.add_parser("fit")
    f.add_argument("--hold", action="append", default=[])
    f.add_argument("--save")
    f.add_argument("files", nargs="+")
    p = sub.add_parser("paper")
    p.add_argument("--net", type=float, default=45.0)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--workload", choices=sorted(WORKLOADS), default="q")
    p.add_argument("parameters")
    args = ap.parse_args()
    try:
        if args.what == "paper":
            paper(args)
            return 0
        points, held = load(args.files), load(args.hold)
        model = fit(points)
    except (Wrong, OSError, ValueError, KeyError) as e:
        print(f"model.py: {e}", file=sys.stderr)
        return 1
    show(model)
    state("fitted", errors(model, points))
    state("each run by a fit to the others", leave_one_out(points))
    state("held out", errors(model, held))
    if args.save:
        with open(args.save, "w", encoding="ascii") as out:
            json.dump({"ffn": model.ffn, "serial": model.serial, "overlapped": model.overlapped},
                      out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
