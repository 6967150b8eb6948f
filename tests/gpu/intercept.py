#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An unmodified torch program with and without the interposer.

    intercept.py LIBRARY [part[:n] ...]    parts: carries random churn groups graph mismatch abort time small gemm
                                           layer speed
                                           (default: all); :n takes the n-th of its cases alone,
                                           one+another what both have first, in the same processes
        --ranks N     two where nothing is said; `speed`, `time` and `mismatch` are of two
        --calls N     random calls of each long case, --seconds S their limit, --seed A what they follow from:
                      other seeds are other calls, so that runs of one library add up
        --within S    no case begins after S seconds, none goes on for more than 4 s after them
        --together    cases are started some ahead, by fork from one that has imported torch, and take their
                      turns when they are ready to exchange: what starts is not waited for each time

gather.py adds up what runs printed.

Starts the ranks of each case, plain and with LIBRARY preloaded, compares results to the bit with
what each rank knows the others sent, and prints times side by side, and a line `result` of each case. A case
that does not end is ended, told, and the next one begins. With fewer GPUs than ranks,
ranks share a GPU (launch.py: sharing) and NCCL's part goes over a socket: then NCCL's own figures say
nothing, and cases that need its P2P are left out, by name.
"""
import argparse
import contextlib
import datetime
import faulthandler
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time

import intercept_carries as carries
import intercept_speed as speed
from intercept_room import Watch
from intercept_speed import MB, say
from launch import AFTER, at_gate, gpus, in_turn, sharing, told
from nursery import Nursery, Process, ended, serve

HERE = os.path.abspath(__file__)
# ---- ranks ---------------------------------------------------------------------------------


def stage(what):
    """For whoever asks afterwards where it stood."""
    print("STAGE %.1f s: %s" % (time.time() - float(os.environ.get("EP_TEST_BEGAN", time.time())), what), flush=True)


class Rank:
    def __init__(self, high_priority=False, bound=False):
        """`bound`: to its device from the start, so that communicators can be split."""
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        there = torch.cuda.device_count()
        self.shared = "EP_TEST_SHARED" in os.environ
        self.device = torch.device("cuda", self.rank % there)
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)
        stage("a context")
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = high_priority
        self.bound = bound and hasattr(dist, "split_group")
        dist.init_process_group(
            "nccl", pg_options=options, timeout=datetime.timedelta(seconds=40),
            device_id=self.device if self.bound else None
        )
        dist.all_reduce(torch.ones(1, device=self.device))  # makes the communicator
        torch.cuda.synchronize()
        stage("a communicator")
        faulthandler.cancel_dump_traceback_later()
        at_gate(self.rank)
        stage("its turn")

    def base(self, rank, nbytes):
        g = self.torch.Generator(device=self.device)
        g.manual_seed(1234 + rank)
        return self.torch.randint(
            -(2**62), 2**62, (nbytes // 8,), dtype=self.torch.int64, device=self.device, generator=g
        )


class Random:
    """Random exchanges: what a call has is the same on all ranks, what arrived is compared on the device
    with the senders' data, several calls at once."""

    TYPES = ("bfloat16", 2), ("float32", 4), ("int64", 8)

    def __init__(self, r, most, seed):
        import random

        torch = r.torch
        self.r, self.most, self.rng = r, most, random.Random(seed)
        self.bases = [r.base(p, most + most // 2).view(torch.int8) for p in range(r.ranks)]
        self.groups = [None] + [r.dist.new_group(list(range(r.ranks))) for _ in range(2)]
        self.sums = torch.ones(1024, device=r.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=r.device)
        self.pending, self.held = [], 0
        self.large = self.zeros = self.reduced = self.moved = 0

    def finish(self):
        """Waits for what was asynchronous; what came and what was sent, behind one another."""
        got, sent = [], []
        for work, out, pieces in self.pending:
            if work is not None:
                work.wait()
            got.append(out)
            sent += [self.bases[s][first : first + count] for s, first, count in pieces if count]
        if sent:
            cat = self.r.torch.cat
            self.wrong.add_(self.r.torch.ne(cat(got), cat(sent)).any())
        self.pending.clear()
        self.held = 0

    def split(self, elements, zeros):
        """[sender][receiver]: elements"""
        rng, n = self.rng, self.r.ranks
        kind = rng.random()
        if kind < 0.4:
            return True, [[elements // n] * n for _ in range(n)]
        split = [[int(elements * rng.random() / n) for _ in range(n)] for _ in range(n)]
        if kind > 1 - zeros:
            split[rng.randrange(n)][rng.randrange(n)] = 0
            self.zeros += 1
        return False, split

    def call(self, share):
        import math

        r, rng = self.r, self.rng
        name, size = rng.choice(self.TYPES)
        dtype = getattr(r.torch, name)
        top = math.log2(self.most) if rng.random() < share["large"] else 20
        total = int(2 ** rng.uniform(10, top)) // 64 * 64
        even, split = self.split(total // size, share["zeros"])
        first = [rng.randrange(0, self.most // 128) * 64 for _ in range(r.ranks)]
        counts, incoming = split[r.rank], [row[r.rank] for row in split]
        send = self.bases[r.rank][first[r.rank] : first[r.rank] + sum(counts) * size].view(dtype)
        recv = r.torch.empty(sum(incoming), dtype=dtype, device=r.device)
        asynchronous = rng.random() < 0.5
        work = r.dist.all_to_all_single(
            recv, send, None if even else incoming, None if even else counts,
            group=self.groups[rng.randrange(3)], async_op=asynchronous)
        pieces = [(s, first[s] + sum(split[s][: r.rank]) * size, split[s][r.rank] * size)
                  for s in range(r.ranks)]
        self.pending.append((work if asynchronous else None, recv.view(r.torch.int8), pieces))
        self.held += recv.numel() * size
        self.large += total >= MB
        self.moved += sum(counts) * size
        if rng.random() < share["reduce"]:
            r.dist.all_reduce(self.sums, op=r.dist.ReduceOp.MAX)
            self.reduced += 1
        if len(self.pending) >= share["checked"] or self.held > 256 * MB:
            self.finish()


# What is a message of NCCL's costs a thousand times as much where ranks share a GPU.
OFTEN = {"large": 0.2, "zeros": 0.15, "reduce": 0.1, "checked": 16}
SELDOM = {"large": 0.1, "zeros": 0.01, "reduce": 0.01, "checked": 16}


def part_random(r, calls, most, seed=99, limit_s=60):
    """Random exchanges, mostly small.  Ends early, on all ranks after the same call, where the time is
    over; a rank that does not go on for a while tells where it is and ends."""
    torch, stands = r.torch, 150 if r.shared else 15
    job = Random(r, most, seed)
    faulthandler.dump_traceback_later(stands, exit=True)
    over = torch.zeros(1, dtype=torch.int64, device=r.device)
    done, last, start = 0, calls, time.time()
    watch = Watch(4, "random")
    while done < last:
        watch.tick()
        job.call(SELDOM if r.shared else OFTEN)
        done += 1
        if done % 500 == 0 or done in (20, 100):
            faulthandler.dump_traceback_later(stands, exit=True)
            over.fill_(time.time() - start > limit_s)
            r.dist.all_reduce(over)
            last = done if over.item() else last
            if r.rank == 0 and (done in (20, 100, 500) or done % 5000 == 0):
                stage("%d calls in %.2f s" % (done, time.time() - start))
    job.finish()
    torch.cuda.synchronize()
    watch.stop()
    faulthandler.dump_traceback_later(stands)
    seconds = time.time() - start
    if r.rank == 0:
        say(calls=done, of=calls, seed=seed, wrong=int(job.wrong.item()), large=job.large, with_zero=job.zeros,
            all_reduces=job.reduced, gb=round(job.moved / 1e9, 1), seconds=round(seconds, 1),
            calls_per_s=round(done / seconds))
    return job.wrong.item() == 0


def part_churn(r, calls):
    """Buffers that are allocated, freed and given back to the driver all the time: what arrives is
    right, and what peers have opened does not keep memory for good."""
    import random

    torch, dist = r.torch, r.dist
    rng = random.Random(5)
    base = [r.base(p, 512 * MB) for p in range(r.ranks)]
    wrong = torch.zeros((), dtype=torch.int64, device=r.device)
    small = torch.ones(r.ranks * 256, device=r.device)
    dist.all_reduce(small)
    dist.all_to_all_single(torch.empty_like(small), small)  # what NCCL itself takes for such, once
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
    for _ in range(3):  # what was freed is told, and given back, at an exchange half a second after the last
        time.sleep(0.6)
        torch.cuda.empty_cache()  # (torch's own watchdog may have held the last ones before)
        dist.all_to_all_single(torch.empty_like(small), small, [256] * r.ranks, [256] * r.ranks)
        torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    lost = free - torch.cuda.mem_get_info()[0]
    if r.rank == 0:
        say(calls=calls, wrong=int(wrong.item()), gone_mb=lost // MB, most_gone_mb=(free - least) // MB)
    return wrong.item() == 0 and lost < 300 * MB


def part_graph(r, iterations):
    """Rank 0 captures the exchange at iteration 3, rank 1 at iteration 6, and so on. From then on all of
    the communicator is NCCL's: the last part of a process."""
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
    we carry it; with more, NCCL mixes up the pieces, and all that counts is that it ends.  A message that
    one of the ranks is late for is NCCL's, so none may be (its memory is opened at the first): see WAITS.
    The first message between two ranks is NCCL's, too: both sides have the same count there, as NCCL's
    socket refuses another."""
    good = True
    carries = os.environ.get("EP_OVERLAP_INTERPOSE") == "accelerate"
    least = 1 if os.environ.get("EP_OVERLAP_INTERPOSE_LEAST") == "1" else 4 * MB
    torch, dist = r.torch, r.dist
    other = r.rank ^ 1  # an even number of ranks
    for sent, taken in ((1000, 1000), (1000, 500), (3 * MB // 4 + 64, 3 * MB // 4), (2 * MB + 64, 2 * MB), (4 * MB, 3 * MB)):
        x = torch.full((sent,), 7.0 + r.rank, device=r.device)
        y = torch.full((taken,), -1.0, device=r.device)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        )
        for w in works:
            w.wait()
        torch.cuda.synchronize()
        right = bool((y == 7.0 + other).all().item())
        ours = carries and 4 * taken >= least
        good = good and (right or (taken > 1000 and not ours))
        if r.rank == 0:
            say(sent=sent, taken=taken, right=right)
    return good


def part_abort(r, held=False):
    """Rank 0 aborts a group's communicator, then all, which PyTorch does between the start and the end of
    a group, and its streams are free again.  The others never come or, `held`, are there with their
    CPU but not with their stream: then there is a wait of ours to end.  The last part of a process."""
    torch, dist = r.torch, r.dist
    groups = [dist.new_group(list(range(r.ranks))), None]
    x = torch.zeros(32 * MB // 4, device=r.device)
    y = torch.empty_like(x)
    for group in groups:
        dist.all_to_all_single(y, x, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    store = dist.distributed_c10d._get_default_store()
    if r.rank == 0:
        faulthandler.dump_traceback_later(12)  # (the other one counts no more)
        for group in groups:
            dist.all_to_all_single(y, x, group=group, async_op=True)
            time.sleep(0.3)
            start = time.time()
            dist.distributed_c10d._abort_process_group(group)
            torch.cuda.synchronize()
            say(aborted="all" if group is None else "a group", held=held, after_s=round(time.time() - start, 2))
    else:
        if held:
            torch.cuda._sleep(6 * 10**9)
            for group in groups:
                dist.all_to_all_single(y, x, group=group, async_op=True)
        with contextlib.suppress(RuntimeError):  # (rank 0 takes the store with it)
            store.wait(["aborted"], datetime.timedelta(seconds=15))
        os._exit(0)
    store.set("aborted", "1")
    os._exit(0)


def part_groups(r, turns):
    """Process groups made, used, destroyed and aborted beside an exchange of another; with splits where
    torch has them.  What arrives is right, and of what has gone nothing is left in this process but the last two,
    which the other rank may not have left yet."""
    torch, dist = r.torch, r.dist
    n = 1 << 18
    wrong, maps, start = 0, 0, time.time()

    def exchange(group, turn):
        send = torch.full((r.ranks * n,), 100.0 * turn + r.rank, device=r.device)
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send, group=group)
        want = 100.0 * turn + torch.arange(r.ranks, device=r.device, dtype=torch.float32)
        return int((recv.view(r.ranks, n) != want[:, None]).any().item())

    def shared_memory():
        with open("/proc/self/maps") as lines:
            return sum("ep-overlap" in line for line in lines)

    everybody = list(range(r.ranks))
    for turn in range(turns):
        group = dist.new_group(everybody)
        split = dist.split_group(split_ranks=[everybody]) if r.bound else None
        for g in (group, split, None):
            if g is not None or turn % 2 == 0:
                wrong += exchange(g, turn)
        dist.barrier()
        torch.cuda.synchronize()
        if turn % 3 == 2:
            dist.distributed_c10d._abort_process_group(group)
        else:
            dist.destroy_process_group(group)
        if split is not None:
            dist.destroy_process_group(split)
        wrong += exchange(None, turn)
        dist.barrier()
        torch.cuda.synchronize()
        maps = shared_memory() if turn == 1 else maps
    late = shared_memory()
    if r.rank == 0:
        say(groups=turns, splits=turns if r.bound else 0, wrong=wrong, maps_early=maps, maps_late=late,
            seconds=round(time.time() - start, 1))
    return wrong == 0 and late <= 3


# ---- the driver ------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_main(parts):
    names = [name for name, _ in parts]
    trace = int(os.environ.get("EP_TEST_TRACE", "50"))  # where a rank hangs
    faulthandler.dump_traceback_later(trace)
    r = Rank(high_priority=any(name in ("gemm", "layer", "speed") for name in names), bound="groups" in names)
    faulthandler.dump_traceback_later(trace)
    watch = Watch(trace - 1, "+".join(names))
    good = True
    for name, args in parts:
        stage("begins " + name)
        good = PARTS[name](r, *args) and good
    watch.stop()
    stage("has done all")
    r.dist.destroy_process_group()
    return 0 if good else 1


def start(options, mode, parts, extra, gate=None):
    """The ranks of one case. `gate`: a path; they stand before their first exchange until it is there.
    From the mode's nursery, where there is one."""
    port, ranks, folder = free_port(), [], os.environ.get("EPO_RESULTS", "")
    count = int(extra.get("RANKS", options.ranks))
    for rank in range(count):
        env = dict(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(port), OMP_NUM_THREADS="1", EP_TEST_BEGAN=str(options.began), **sharing(rank, count, options.gpus))
        env["NCCL_NVLS_ENABLE"] = os.environ.get("NCCL_NVLS_ENABLE", "0")
        if count > options.gpus:  # (a rank waits for the other's turn on the GPU now and then)
            env["EP_OVERLAP_INTERPOSE_WAIT"] = "200000"
        if gate:
            env["EP_TEST_GATE"] = gate
        env.update(carries.environment(extra, rank))
        if mode != "plain":
            env["EP_OVERLAP_INTERPOSE"] = mode
            env.setdefault("EP_OVERLAP_INTERPOSE_ALLTOALL", "1")  # what torch makes of an even exchange
            if folder:
                env["EP_OVERLAP_RECORD"] = folder
        nursery = options.nurseries.get("plain" if mode == "plain" else "preloaded")
        if nursery and not carries.needs_own_process(extra):
            ranks.append(nursery.start(env, parts))
            continue
        options.started += 1
        ranks.append(Process([sys.executable, HERE, "--rank", json.dumps(parts)],
                             dict(os.environ, **env, **preload(options, mode)),
                             os.path.join(options.folder, str(options.started))))
    return ranks


def preload(options, mode):
    return {} if mode == "plain" else {"LD_PRELOAD": options.library}


def open_nurseries(options, cases):
    for mode in sorted({case[1] for case in cases}):
        name = "plain" if mode == "plain" else "preloaded"
        if name not in options.nurseries:
            options.nurseries[name] = Nursery([sys.executable, HERE, "--nursery"],
                                              dict(os.environ, OMP_NUM_THREADS="1", **preload(options, mode)))


def end(ranks, timeout):
    """(status, results of rank 0, what they said); where one has failed, the others have AFTER seconds."""
    late = ended(ranks, timeout)
    note = "\n(ended: %d s, or another rank failed %d s before)" % (timeout, AFTER)
    said = [p.said() + (note if p in late else "") for p in ranks]
    status = next((p.returncode for p in ranks if p.returncode), -9 if late else 0)
    results = [json.loads(line[7:]) for text in said for line in text.splitlines()
               if line.startswith("RESULT ")]
    other = ["%d: %s" % (rank, line) for rank, text in enumerate(said) for line in text.splitlines()
             if not line.startswith("RESULT ") and line.strip()]
    if status == 0:
        other = [line for line in other if "STAGE" not in line]
    return status, results, other


def stand_at(gate, ranks, limit=35):
    """Whether all ranks have come to their gate, or one has ended."""
    until = time.time() + limit
    while time.time() < until:
        if (all(os.path.exists("%s-%d" % (gate, r)) for r in range(len(ranks)))
                or any(p.poll() is not None for p in ranks)):
            return True
        time.sleep(0.01)
    return False


def in_turns(options, cases):
    """The cases, of which AHEAD are started before their turn; each has the GPUs alone from its first
    exchange on, and what is to be ALONE has no others that start beside it."""
    failed, folder = 0, tempfile.mkdtemp(prefix="ep-intercept-")
    running, waiting = [], list(enumerate(cases))
    open_nurseries(options, cases)

    def begin(most):
        while waiting and len(running) < most:
            i, (name, mode, parts, limit, extra) = waiting.pop(0)
            gate = os.path.join(folder, "gate%d" % i)
            running.append((name, start(options, mode, parts, extra, gate), limit, gate,
                            any(part in ALONE for part, _ in parts)))

    try:
        while waiting or running:
            if options.late():
                for case in [c[0] for c in running] + [case[0] for _, case in waiting]:
                    left_out(case, options)
                break
            begin(AHEAD)
            name, ranks, limit, gate, alone = running[0]
            came = stand_at(gate, ranks)
            for _, others, _, other, _ in running[1:] if alone else []:
                stand_at(other, others)
            if options.late():
                continue
            if not came:
                for p in ranks:
                    p.kill()
            print("%.1f s: %s" % (time.time() - options.began, name), flush=True)
            turn = time.time()
            with in_turn(contextlib.nullcontext(), gate, ranks):
                failed += not show(options, name, end(ranks, options.most(limit)), time.time() - turn)
            running.pop(0)
    finally:
        for name, ranks, _, _, _ in running:
            for p in ranks:
                if p.poll() is None:
                    if not options.late():
                        print("%s: not ended after %.0f s, last: %s" % (
                            name, time.time() - options.began, p.said()[-1500:]), flush=True)
                    p.kill()
        for nursery in options.nurseries.values():
            nursery.end()
        shutil.rmtree(folder, ignore_errors=True)
    return failed


def left_out(name, options):
    print("result phase=%s library=%s left_out=no-time-left" % (name.replace(" ", ","), options.state))
    print("case\tintercept %s\tskip\tno time was left for it" % name, flush=True)


def show(options, name, outcome, seconds):
    status, results, other = outcome
    wrong = carries.wrongly_carried(name, other) if name.startswith("carries") and status == 0 else None
    if wrong is not None:
        status, other = 1, other + [wrong]
    for fields in results:
        print("%-34s %s" % (name, "  ".join("%s %s" % kv for kv in fields.items())))
        if "calls" in fields:
            print("result phase=%s library=%s calls=%d wrong=%d seconds=%.1f seed=%s" % (
                name.replace(" ", ","), options.state, fields["calls"], fields["wrong"], seconds,
                fields.get("seed", "-")))
    print("result phase=%s library=%s status=%s seconds=%.1f" % (
        name.replace(" ", ","), options.state, status, seconds))
    last = "status %s: %s" % (status, other[-1][:200] if other else "nothing was said")
    if status == 0:
        last = " ".join("%s %s" % kv for fields in results for kv in fields.items())[:200] or "ended"
    print("case\tintercept %s\t%s\t%s" % (name, "FAIL" if status else "ok", last))
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
ALL = {"EP_OVERLAP_INTERPOSE_LEAST": "1"}  # messages of any size are carried
WAITS = {"EP_OVERLAP_INTERPOSE_WAIT": "2000000"}  # ... and none is NCCL's because a rank is late
SIZES = [0.25, 1, 2, 4, 8, 16, 64, 256]
SMALL = [["small", [100]]]
CASES = {
    # name: [(mode, [[part, arguments]], limit, environment)]
    "random": [("accelerate", [["random", [100000, 64 * MB, 2, 90]]], 110, ALL),
               ("accelerate", [["random", [100000, 256 * MB, 1, 40]]], 60, {}),
               ("plain", [["random", [400, 64 * MB]]], 40, {}), ("observe", [["random", [200, 64 * MB]]], 40, {}),
               ("accelerate", [["random", [20000, 64 * MB, 3, 8]]], 40, dict(ALL, **carries.SEGMENTS))],
    "churn": [("accelerate", [["churn", [100]]], 60, {}), ("accelerate", [["churn", [40]]], 60, carries.SEGMENTS)],
    "carries": carries.cases(),
    "groups": [(mode, [["groups", [6]]], 60, {}) for mode in ("accelerate", "observe", "plain")],
    "graph": [("accelerate", [["graph", [20]]], 30, {}), ("plain", [["graph", [20]]], 30, {})],
    "mismatch": [("accelerate", [["mismatch", []]], 20, WAITS), ("plain", [["mismatch", []]], 20, {})],
    "abort": [(mode, [["abort", [held]]], 30, {}) for held in (False, True) for mode in ("accelerate", "plain")],
    "time": [("plain", [["time", [SIZES]]], 90, {}), ("accelerate", [["time", [SIZES]]], 90, ALL)],
    "small": [(mode, SMALL, 60, extra) for extra in ({"RANKS": "1"}, {})
              for mode in ("plain", "accelerate", "observe")],
    "layer": [("plain", [["layer", [20]]], 60, {}), ("accelerate", [["layer", [20]]], 60, {})],
    "speed": [(mode, [["speed", [[4, 8, 16, 32, 64, 256], 64, 20]]], 60, THIRTY_TWO)
              for mode in ("accelerate", "plain")],
    "gemm": [("plain", [["gemm", [64]]], 60, THIRTY_TWO),
             ("plain", [["gemm", [64]]], 60, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
             ("accelerate", [["gemm", [64]]], 60, THIRTY_TWO)],
}
# Where ranks share a GPU: what only compares with NCCL's P2P, and what its socket refuses.
NEED_P2P = ("carries", "time", "layer", "speed", "gemm")
# ... and how long one of the long cases exchanges: its calls take ten times as long, and all are to have their turn.
SHARED_S = 15
# What compares times, or the memory that the GPU has left, of which every process that starts there takes
# hundreds of MB: nothing else starts beside it.
ALONE = ("carries", "churn", "time", "layer", "speed", "gemm", "small")
AHEAD = 6
PARTS = {"carries": carries.part_carries, "random": part_random, "churn": part_churn, "graph": part_graph, "mismatch": part_mismatch,
         "groups": part_groups, "abort": part_abort, "small": speed.part_small, "time": speed.part_time,
         "gemm": speed.part_gemm, "layer": speed.part_layer, "speed": speed.part_speed}


def cases_of(options, word):
    """(mode, parts, limit, environment) of one word of the command line, as far as this machine can."""
    group, _, only = word.partition(":")
    shared = options.gpus < options.ranks
    if shared and group in NEED_P2P:
        print("left out, as %d ranks share %d GPU: %s" % (options.ranks, options.gpus, group))
        return
    for mode, parts, limit, extra in [CASES[group][int(only)]] if only else CASES[group]:
        if group == "random" and parts[0][1][0] >= 50000:
            calls, most, seed, seconds = parts[0][1]
            seconds = min([seconds] + [options.seconds] * bool(options.seconds) + [SHARED_S] * shared)
            parts = [["random", [options.calls or calls, most, seed if options.seed is None else options.seed, seconds]]]
            limit = seconds + 20
        if shared and group == "mismatch" and mode == "plain":
            print("left out, as NCCL's socket refuses a message that is longer than its receiver: mismatch plain")
            continue
        if shared and group == "mismatch":
            extra = dict(extra, **ALL)
        yield mode, parts, limit, extra


def chosen(options):
    """(name, mode, parts, limit, environment) of what the command line asks for."""
    cases = []
    for word in options.part or list(CASES):
        members = [list(cases_of(options, one)) for one in word.split("+")]
        if len(members) > 1:  # the first of each, one after the other in the same processes
            firsts = [member[0] for member in members if member]
            members = [[(firsts[0][0], sum([f[1] for f in firsts], []), sum(f[2] for f in firsts),
                         {k: v for f in firsts for k, v in f[3].items()})]]
        for mode, parts, limit, extra in members[0]:
            name = " ".join([word.partition(":")[0] if "+" not in word else word, mode]
                            + ["%s=%s" % kv for kv in extra.items()])
            cases.append((name[:80], mode, parts, limit, extra))
    return cases


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "--rank":
        return rank_main(json.loads(sys.argv[2]))
    if sys.argv[1:] == ["--nursery"]:
        import torch.distributed  # noqa: F401 (before all children)

        return serve(rank_main) or 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("a signal: ended before the end"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("part", nargs="*")
    parser.add_argument("--calls", type=int, help="random calls of the long cases")
    parser.add_argument("--seconds", type=int, help="their limit")
    parser.add_argument("--seed", type=int, help="what they follow from")
    parser.add_argument("--within", type=float, default=1e9, help="seconds after which no case begins")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--together", action="store_true")
    options = parser.parse_intermixed_args()
    options.gpus, options.nurseries, options.began = gpus(), {}, time.time()
    if options.gpus < 1:
        print("left out: no GPU here")
        return 77
    unknown = sorted({one.partition(":")[0] for word in options.part for one in word.split("+")} - set(CASES))
    if unknown:
        parser.error("no part %s; there are: %s" % (" ".join(unknown), " ".join(CASES)))
    options.library = os.path.abspath(options.library)
    with open(options.library, "rb") as f:
        options.state = hashlib.sha256(f.read()).hexdigest()[:12]
    options.late = lambda: time.time() - options.began > options.within
    options.most = lambda limit: max(1, min(limit, int(options.began + options.within + 4 - time.time())))
    options.folder, options.started = tempfile.mkdtemp(prefix="ep-intercept-"), 0
    told(options.ranks, options.gpus)
    cases = chosen(options)
    if options.together:
        failed = in_turns(options, cases)
    else:
        failed = 0
        for name, mode, parts, limit, extra in cases:
            if options.late():
                left_out(name, options)
                continue
            begun = time.time()
            failed += not show(options, name, end(start(options, mode, parts, extra), options.most(limit)),
                               time.time() - begun)
    shutil.rmtree(options.folder, ignore_errors=True)
    print("intercept: %s" % ("all cases passed" if not failed else "%d cases FAILED" % failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
