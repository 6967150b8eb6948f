#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An unmodified torch program with and without the interposer.

    intercept.py LIBRARY [part[:n] ...]    parts: random churn graph mismatch abort time gemm layer speed (default: all);
                                           :n takes the n-th of its cases alone
        --together    all cases are started at once and take their turns when they are ready to
                      exchange: what starts processes and communicators is not waited for each time

Starts two ranks per case, plain and with LIBRARY preloaded, compares results to the bit with
what each rank knows the other sent, and prints times side by side. Needs two GPUs: NCCL refuses
two ranks on one.
"""
import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time

from launch import at_gate, in_turn

HERE = os.path.abspath(__file__)
MB = 1 << 20


# ---- ranks ---------------------------------------------------------------------------------


class Rank:
    def __init__(self, high_priority=False):
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = high_priority
        import datetime

        dist.init_process_group(
            "nccl", pg_options=options, timeout=datetime.timedelta(seconds=40)
        )
        dist.all_reduce(torch.ones(1, device=self.device))  # makes the communicator
        torch.cuda.synchronize()
        at_gate(self.rank)

    def base(self, rank, nbytes):
        g = self.torch.Generator(device=self.device)
        g.manual_seed(1234 + rank)
        return self.torch.randint(
            -(2**62), 2**62, (nbytes // 8,), dtype=self.torch.int64, device=self.device, generator=g
        )


def say(**fields):
    print("RESULT " + json.dumps(fields), flush=True)


def part_random(r, calls, most, seed=99, limit_s=60):
    """Random exchanges, mostly small, each compared on the device with the sender's data. Ends early,
    on all ranks after the same call, where the time is over."""
    import math
    import random

    torch, dist = r.torch, r.dist
    rng = random.Random(seed)  # the same on all ranks
    bases = [r.base(p, most + most // 2).view(torch.int8) for p in range(r.ranks)]
    groups = [None, dist.new_group(list(range(r.ranks))), dist.new_group(list(range(r.ranks)))]
    wrong = torch.zeros((), dtype=torch.int64, device=r.device)
    types = [(torch.bfloat16, 2), (torch.float32, 4), (torch.int64, 8)]
    done, pending, start, last = 0, [], time.time(), calls
    large, moved = 0, 0
    sums = torch.ones(1024, device=r.device)
    over = torch.zeros(1, dtype=torch.int64, device=r.device)

    def finish():
        for work, out, pieces in pending:
            if work is not None:
                work.wait()
            at = 0
            for source, first, count in pieces:
                if count:
                    wrong.add_(torch.ne(out[at : at + count], bases[source][first : first + count]).any())
                at += count
        pending.clear()

    while done < last:
        kind = rng.random()
        dtype, size = rng.choice(types)
        top = math.log2(most) if rng.random() < 0.2 else 20
        total = int(2 ** rng.uniform(10, top)) // 64 * 64
        even = kind < 0.4
        # split[s][d]: elements from s to d
        if even:
            split = [[total // size // r.ranks] * r.ranks for _ in range(r.ranks)]
        else:
            split = [[int(total // size * rng.random() / r.ranks) for _ in range(r.ranks)]
                     for _ in range(r.ranks)]
            if kind > 0.85:
                split[rng.randrange(r.ranks)][rng.randrange(r.ranks)] = 0
        first = [rng.randrange(0, most // 128) * 64 for _ in range(r.ranks)]
        counts = split[r.rank]
        incoming = [split[s][r.rank] for s in range(r.ranks)]
        send = bases[r.rank][first[r.rank] : first[r.rank] + sum(counts) * size].view(dtype)
        recv = torch.empty(sum(incoming), dtype=dtype, device=r.device)
        large += total >= MB
        moved += sum(counts) * size
        asynchronous = rng.random() < 0.5
        work = dist.all_to_all_single(
            recv,
            send,
            None if even else incoming,
            None if even else counts,
            group=groups[rng.randrange(3)],
            async_op=asynchronous,
        )
        pieces = []
        for s in range(r.ranks):
            offset = first[s] + sum(split[s][: r.rank]) * size
            pieces.append((s, offset, split[s][r.rank] * size))
        pending.append((work if asynchronous else None, recv.view(torch.int8), pieces))
        if rng.random() < 0.3:
            dist.all_reduce(sums, op=dist.ReduceOp.MAX)
        if len(pending) > 4 or not asynchronous:
            finish()
        done += 1
        if done % 500 == 0:
            over.fill_(time.time() - start > limit_s)
            dist.all_reduce(over)
            last = done if over.item() else last
    finish()
    torch.cuda.synchronize()
    if r.rank == 0:
        say(calls=done, wrong=int(wrong.item()), large=large, gb=round(moved / 1e9, 1),
            seconds=round(time.time() - start, 1))
    return wrong.item() == 0


def part_churn(r, calls):
    """Buffers that are allocated, freed and given back to the driver all the time: what arrives is
    right, and what peers have opened does not keep memory for good."""
    import random

    torch, dist = r.torch, r.dist
    rng = random.Random(5)
    base = [r.base(p, 512 * MB) for p in range(r.ranks)]
    wrong = torch.zeros((), dtype=torch.int64, device=r.device)
    dist.all_reduce(torch.ones(1, device=r.device))
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    least = free
    for call in range(calls):
        n = rng.randrange(2 * MB, 24 * MB)  # elements of 8 bytes to each rank
        send = torch.cat([base[r.rank][:n]] * r.ranks)
        recv = torch.empty(r.ranks * n, dtype=torch.int64, device=r.device)
        dist.all_to_all_single(recv, send)
        for s in range(r.ranks):
            wrong.add_(torch.ne(recv[s * n : (s + 1) * n], base[s][:n]).any())
        del send, recv
        if call % 5 == 4:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            least = min(least, torch.cuda.mem_get_info()[0])
        if call % 20 == 19:
            time.sleep(0.3)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    time.sleep(0.5)
    lost = free - torch.cuda.mem_get_info()[0]
    if r.rank == 0:
        say(calls=calls, wrong=int(wrong.item()), gone_mb=lost // MB, most_gone_mb=(free - least) // MB)
    return wrong.item() == 0 and lost < 300 * MB


def part_graph(r, iterations):
    """Rank 0 captures the exchange at iteration 3, rank 1 at iteration 6. From then on all of the
    communicator is NCCL's: the last part of a process."""
    torch, dist = r.torch, r.dist
    n = 8 * MB
    send = torch.empty(r.ranks * n // 4, dtype=torch.float32, device=r.device)
    recv = torch.empty_like(send)
    graph, wrong = None, 0
    stream = torch.cuda.Stream()
    dist.all_to_all_single(recv, send)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i in range(iterations):
            send.fill_(1000.0 * r.rank + i)
            recv.fill_(-1.0)
            if i == 3 + 3 * r.rank:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    dist.all_to_all_single(recv, send)
            if graph is not None:
                graph.replay()
            else:
                dist.all_to_all_single(recv, send)
            got = recv.view(r.ranks, -1)
            for s in range(r.ranks):
                wrong += int((got[s] != 1000.0 * s + i).any().item())
    torch.cuda.synchronize()
    if r.rank == 0:
        say(iterations=iterations, wrong=wrong)
    del graph
    return wrong == 0


def part_mismatch(r):
    """The sender has more than the receiver takes: what fits arrives in what one packet holds, and where
    we carry it; with more, NCCL mixes up the pieces, and all that counts is that it ends."""
    good = True
    carries = os.environ.get("EP_OVERLAP_INTERPOSE") == "accelerate"
    torch, dist = r.torch, r.dist
    other = 1 - r.rank
    for sent, taken in ((1000, 500), (3 * MB // 4 + 64, 3 * MB // 4), (2 * MB + 64, 2 * MB), (4 * MB, 3 * MB)):
        x = torch.full((sent,), 7.0 + r.rank, device=r.device)
        y = torch.full((taken,), -1.0, device=r.device)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        )
        for w in works:
            w.wait()
        torch.cuda.synchronize()
        right = bool((y == 7.0 + other).all().item())
        good = good and (right or (taken > 1000 and not (carries and 4 * taken >= 4 * MB)))
        if r.rank == 0:
            say(sent=sent, taken=taken, right=right)
    return good


def part_abort(r):
    """Rank 1 never comes; rank 0 aborts a group's communicator, then all, which PyTorch does between
    the start and the end of a group, and its streams are free again. The last part of a process."""
    torch, dist = r.torch, r.dist
    groups = [dist.new_group(list(range(r.ranks))), None]
    x = torch.zeros(32 * MB // 4, device=r.device)
    y = torch.empty_like(x)
    for group in groups:
        dist.all_to_all_single(y, x, group=group)
    torch.cuda.synchronize()
    if r.rank == 0:
        faulthandler.dump_traceback_later(6)
        for group in groups:
            dist.all_to_all_single(y, x, group=group, async_op=True)
            time.sleep(0.3)
            start = time.time()
            dist.distributed_c10d._abort_process_group(group)
            torch.cuda.synchronize()
            say(aborted="all" if group is None else "a group", after_s=round(time.time() - start, 2))
    else:
        time.sleep(3)
    os._exit(0)


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def part_time(r, sizes):
    """all_to_all_single, total MB per rank, even: median of single calls and of ten in a row."""
    times(r, sizes)
    return True


def times(r, sizes, uneven=False):
    """uneven: a rank keeps 3/8 of its bytes and sends 5/8; torch
    makes sends and receives of it, of an even one ncclAlltoAll."""
    torch, dist = r.torch, r.dist
    for mb in sizes:
        n = int(mb * MB) // 4 // 8 * 8
        share = [3 * n // 8, 5 * n // 8] if uneven else [n // 2, n // 2]
        to = share if r.rank == 0 else share[::-1]  # of two ranks: what comes has the same sizes
        x, y = torch.ones(n, device=r.device), torch.empty(n, device=r.device)

        def exchange():
            if uneven:
                dist.all_to_all_single(y, x, to, to)
            else:
                dist.all_to_all_single(y, x)

        for _ in range(5):
            exchange()
        one, ten = [], []
        for _ in range(20):
            dist.barrier()
            torch.cuda.synchronize()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400000)  # the host issues while the device waits
            a.record()
            exchange()
            b.record()
            torch.cuda.synchronize()
            one.append(a.elapsed_time(b) * 1000)
        for _ in range(5):
            dist.barrier()
            torch.cuda.synchronize()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1000000)
            a.record()
            for _ in range(10):
                exchange()
            b.record()
            torch.cuda.synchronize()
            ten.append(a.elapsed_time(b) * 100)
        if r.rank == 0:
            say(exchange="uneven" if uneven else "even", mb=mb, us=round(median(one), 1), us_least=round(min(one), 1),
                us_of_ten=round(median(ten), 1), gbs=round(to[1] * 4 / median(ten) / 1e3, 1))


def part_gemm(r, mb):
    """20 exchanges beside 20 GEMMs of 8192 x 4096 x 4096."""
    beside_gemms(r, mb)
    return True


def beside_gemms(r, mb):
    torch, dist = r.torch, r.dist
    n = int(mb * MB) // 4
    x, y = torch.ones(n, device=r.device), torch.empty(n, device=r.device)
    a = torch.randn(8192, 4096, device=r.device, dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device=r.device, dtype=torch.bfloat16)
    c = torch.empty(8192, 4096, device=r.device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(priority=-1)

    def run(exchanges, gemms):
        dist.barrier()
        torch.cuda.synchronize()
        e = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda._sleep(1000000)
        start = torch.cuda.Event()
        start.record()
        side.wait_event(start)
        e[2].record()
        with torch.cuda.stream(side):
            e[0].record()
        for i in range(20):
            if exchanges:
                with torch.cuda.stream(side):
                    dist.all_to_all_single(y, x)
            if gemms:
                torch.mm(a, b, out=c)
        with torch.cuda.stream(side):
            e[1].record()
        e[3].record()
        torch.cuda.synchronize()
        return e[0].elapsed_time(e[1]), e[2].elapsed_time(e[3])

    for _ in range(2):
        run(True, True)
    both = [run(True, True) for _ in range(9)]
    alone = [run(True, False)[0] for _ in range(5)]
    plain = [run(False, True)[1] for _ in range(5)]
    if r.rank == 0:
        remote = 20 * mb * MB * (r.ranks - 1) / r.ranks / 1e6
        say(mb=mb, gbs_beside=round(remote / median([t[0] for t in both]), 1),
            gbs_alone=round(remote / median(alone), 1),
            gemm_ms_beside=round(median([t[1] for t in both]), 2),
            gemm_ms_alone=round(median(plain), 2))


def part_layer(r, steps):
    """The eager MoE layer that bench_torch.py times with a training step around it, as a program has it that
    knows nothing of us: time of a step; of its all-to-alls, each behind a barrier; the same where the
    CPU is ahead of the GPU; and the losses to the bit."""
    layer = Trained(r)
    layer.train(steps, None)
    layer.train(steps, "barrier")
    layer.train(steps // 2, "ahead")
    return True


def part_speed(r, sizes, mb, steps):
    """All that is timed, in one pair of processes."""
    times(r, sizes)
    times(r, sizes, uneven=True)
    beside_gemms(r, mb)
    part_layer(r, steps)
    return True


class Trained:
    """Workload Q's layer, trained in the same bits in every run."""

    def __init__(self, r):
        from eager_layer import EagerLayer

        self.r, self.how, self.spans, self.losses = r, None, [], []
        self.token = r.torch.zeros(1, device=r.device)
        self.layer = EagerLayer(r.rank, r.ranks, r.device, tokens=4096, hidden=2048, ffn=768, experts=128, top_k=8,
                                move=self.move)

    def move(self, out, rows, come, to):
        """`how`: None, as programs do it; "barrier": both ranks are here when the time begins; "ahead":
        the GPU has other work until all is issued."""
        torch, dist = self.r.torch, self.r.dist
        timed = self.how is not None and rows.dim() > 1
        if timed:
            if self.how == "ahead":
                torch.cuda._sleep(1000000)
            dist.all_reduce(self.token)
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
        start = time.perf_counter()
        dist.all_to_all_single(out, rows, come, to)
        call = time.perf_counter() - start
        if timed:
            b.record()
            other = to[1 - self.r.rank] * rows.shape[1] * rows.element_size()
            self.spans.append((a, b, call * 1e6, other / 1e6))

    def step(self):
        layer, torch = self.layer, self.r.torch
        layer.clear()
        loss = layer.forward_in_order().float().square().sum(1).mean()
        loss.backward()
        with torch.no_grad():
            layer.w1.sub_(layer.w1.grad, alpha=1.0)
            layer.w2.sub_(layer.w2.grad, alpha=1.0)
        self.losses.append(loss.detach())

    def train(self, steps, how):
        """Four steps in a row at a time."""
        r, torch, times = self.r, self.r.torch, []
        self.how = None
        for _ in range(3):
            self.step()
        self.how = how
        self.spans.clear()
        for _ in range(steps // 4 + 1):
            r.dist.barrier()
            torch.cuda.synchronize()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            for _ in range(4):
                self.step()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) / 4)
        if r.rank == 0:
            fields = {"layer": how or "as it is", "step_ms": round(median(times), 3),
                      "least_ms": round(min(times), 3)}
            moved = [1e3 * s[0].elapsed_time(s[1]) for s in self.spans]
            if moved:
                one = [median(moved[k::4]) for k in range(4)]
                fields.update(alltoalls_us=round(sum(one)), each_us=[round(t) for t in one],
                              call_us=round(median([s[2] for s in self.spans])),
                              mb=[round(s[3], 1) for s in self.spans[:4]])
            bits = [struct.pack("f", v.item()).hex() for v in self.losses]
            say(**fields, losses=" ".join(bits[:: max(1, len(bits) // 3)]))


# ---- the driver ------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_main(parts):
    r = Rank(any(name in ("gemm", "layer", "speed") for name, _ in parts))
    good = all([PARTS[name](r, *args) for name, args in parts])
    r.dist.destroy_process_group()
    return 0 if good else 1


def start(library, mode, parts, extra, gate=None):
    """Both ranks of one case. `gate`: a path; they stand before their first exchange until it is there."""
    port, ranks, folder = free_port(), [], os.environ.get("EPO_RESULTS", "")
    for rank in range(2):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        env.setdefault("NCCL_NVLS_ENABLE", "0")
        if gate:
            env["EP_TEST_GATE"] = gate
        env.update(extra)
        if mode != "plain":
            env["LD_PRELOAD"] = library
            env["EP_OVERLAP_INTERPOSE"] = mode
            env.setdefault("EP_OVERLAP_INTERPOSE_ALLTOALL", "1")  # what torch makes of an even exchange
            if folder:
                env["EP_OVERLAP_RECORD"] = folder
        ranks.append(subprocess.Popen(
            [sys.executable, HERE, "--rank", json.dumps(parts)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return ranks


def end(ranks, timeout):
    """(status, results of rank 0, what they said)"""
    said, status, until = [], 0, time.time() + timeout
    for p in ranks:
        try:
            said.append(p.communicate(timeout=max(0.1, until - time.time()))[0])
        except subprocess.TimeoutExpired:
            for q in ranks:
                q.kill()
            said.append(p.communicate()[0] + "\n(no end after %d s)" % timeout)
        status = status or p.returncode
    results = [json.loads(line[7:]) for text in said for line in text.splitlines()
               if line.startswith("RESULT ")]
    other = [line for text in said for line in text.splitlines()
             if not line.startswith("RESULT ") and line.strip()]
    return status, results, other


def in_turns(library, cases):
    """All cases, started at once; each has the GPUs alone from its first exchange on."""
    failed, folder = 0, tempfile.mkdtemp(prefix="ep-intercept-")
    running = []
    try:
        for i, (name, mode, parts, limit, extra) in enumerate(cases):
            gate = os.path.join(folder, "gate%d" % i)
            running.append((name, start(library, mode, parts, extra, gate), limit, gate))
        for name, ranks, limit, gate in running:
            with in_turn(contextlib.nullcontext(), gate, ranks):
                failed += not show(name, end(ranks, limit))
    finally:
        for _, ranks, _, _ in running:
            for p in ranks:
                if p.poll() is None:
                    p.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return failed


def show(name, outcome):
    status, results, other = outcome
    for fields in results:
        print("%-34s %s" % (name, "  ".join("%s %s" % kv for kv in fields.items())))
    ours = [line for line in other if "ep-overlap" in line]
    for line in ours[:4]:
        print("%-34s | %s" % ("", line[:300]))
    if status != 0:
        print("%-34s FAILED, status %s" % (name, status))
        for line in other[-25:]:
            print("    " + line[:240])
    sys.stdout.flush()
    return status == 0


THIRTY_TWO = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
SIZES = [0.25, 1, 2, 4, 8, 16, 64, 256]
CASES = {
    # name: [(mode, [[part, arguments]], limit, environment)]
    "random": [("accelerate", [["random", [100000, 64 * MB, 2, 40]]], 60, {"EP_OVERLAP_INTERPOSE_LEAST": "1"}),
               ("accelerate", [["random", [50000, 256 * MB, 1, 15]]], 40, {}),
               ("plain", [["random", [400, 64 * MB]]], 40, {}), ("observe", [["random", [200, 64 * MB]]], 40, {})],
    "churn": [("accelerate", [["churn", [100]]], 60, {}),
              ("accelerate", [["churn", [40]]], 60, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})],
    "graph": [("accelerate", [["graph", [20]]], 30, {}), ("plain", [["graph", [20]]], 30, {})],
    "mismatch": [("accelerate", [["mismatch", []]], 20, {}), ("plain", [["mismatch", []]], 20, {})],
    "abort": [("accelerate", [["abort", []]], 30, {}), ("plain", [["abort", []]], 30, {})],
    "time": [("plain", [["time", [SIZES]]], 90, {}),
             ("accelerate", [["time", [SIZES]]], 90, {"EP_OVERLAP_INTERPOSE_LEAST": "1"})],
    "layer": [("plain", [["layer", [20]]], 60, {}), ("accelerate", [["layer", [20]]], 60, {})],
    "speed": [(mode, [["speed", [[4, 8, 16, 32, 64, 256], 64, 20]]], 60, THIRTY_TWO)
              for mode in ("accelerate", "plain")],
    "gemm": [("plain", [["gemm", [64]]], 60, THIRTY_TWO),
             ("plain", [["gemm", [64]]], 60, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
             ("accelerate", [["gemm", [64]]], 60, THIRTY_TWO)],
}
PARTS = {"random": part_random, "churn": part_churn, "graph": part_graph, "mismatch": part_mismatch,
         "abort": part_abort, "time": part_time, "gemm": part_gemm, "layer": part_layer, "speed": part_speed}


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "--rank":
        return rank_main(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("part", nargs="*")
    parser.add_argument("--calls", type=int, help="random calls of the long case")
    parser.add_argument("--together", action="store_true")
    options = parser.parse_intermixed_args()
    import torch

    if torch.cuda.device_count() < 2:
        print("left out: %d GPU here, and NCCL refuses two ranks on one" % torch.cuda.device_count())
        return 77
    cases = []
    for word in options.part or list(CASES):
        group, _, only = word.partition(":")
        for mode, parts, limit, extra in [CASES[group][int(only)]] if only else CASES[group]:
            if group == "random" and options.calls and mode == "accelerate" and not extra:
                parts, limit = [["random", [options.calls] + parts[0][1][1:3] + [550]]], 600
            name = " ".join([group, mode] + ["%s=%s" % kv for kv in extra.items()])
            cases.append((name[:80], mode, parts, limit, extra))
    library = os.path.abspath(options.library)
    if options.together:
        failed = in_turns(library, cases)
    else:
        failed = sum(not show(name, end(start(library, mode, parts, extra), limit))
                     for name, mode, parts, limit, extra in cases)
    print("intercept: %s" % ("all cases passed" if not failed else "%d cases FAILED" % failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
