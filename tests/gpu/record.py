#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The recorder in torch programs, on real GPUs.

    record.py LIBRARY [part ...] [--together]
        compare    torch.profiler, recorder, torch.profiler in one run: the same shares;
                   and the profiler's traces are complete (before, during, after a window)
        overhead   step times without, before, in and after a window, 20,000 kernels a second
        carried    the same with exchanges by copy engines
        during     torch.profiler inside a window
        across     torch.profiler is on when a window begins
        graph      a captured graph, replayed
        ends       the program ends, is killed or aborts inside a window
        leave      CUPTI taken out of the process after the window
        none       times where nothing is asked for, with the library and without

--together: three runs are started at once, and each takes its turn at the GPUs.
Two ranks, on two GPUs or on one. Prints a JSON line for each part; status 1 if one failed.
"""
import argparse
import concurrent.futures
import faulthandler
import functools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback

from launch import at_gate, gpus, in_turn, sharing, told
from nursery import Process, ended

HERE = os.path.abspath(__file__)


# ---- what a trace says, by its own code: the reference for the recorder's and profile's ------


def union(spans):
    out, last = [], None
    for start, end in sorted(spans):
        if last is not None and start <= last[1]:
            last[1] = max(last[1], end)
        else:
            last = [start, end]
            out.append(last)
    return out


def length(spans):
    return sum(end - start for start, end in spans)


def common(a, b):
    total = i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        total += max(0, high - low)
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def kind_of(event):
    name, cat = event["name"], event["cat"]
    if cat == "gpu_memcpy":
        return "comm" if "PtoP" in name else "copy"
    if cat == "gpu_memset":
        return "copy"
    low = name.lower()
    if "nccl" in low:
        return "comm" if "sendrecv" in low or "alltoall" in low else "other_comm"
    if any(w in low for w in ("nvjet", "gemm", "cutlass", "cublas", "xmma", "wgmma")):
        return "gemm"
    return "other"


def shares(path, cut=0.0):
    """|U(comm)|, overlapped with GEMM, extent, kernels of one device's trace; in ms. `cut`: the
    part of it that is left out at the beginning, where ranks do not go at one pace yet."""
    with open(path) as f:
        trace = json.load(f)
    spans, kernels, names = {}, 0, {}
    for e in trace["traceEvents"]:
        if e.get("ph") != "X" or e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        kernels += e["cat"] == "kernel"
        names[e["name"][:60]] = names.get(e["name"][:60], 0) + 1
        start, end = float(e["ts"]), float(e["ts"]) + float(e["dur"])
        spans.setdefault(kind_of(e), []).append((start, end))
    every = [s for list_ in spans.values() for s in list_]
    first, last = (min(s[0] for s in every), max(s[1] for s in every)) if every else (0, 0)
    first += cut * (last - first)
    clip = {k: [(max(a, first), b) for a, b in v if b > first] for k, v in spans.items()}
    comm, gemm = union(clip.get("comm", [])), union(clip.get("gemm", []))
    extent = last - first
    both = common(comm, gemm)
    return {
        "comm_ms": length(comm) / 1e3,
        "gemm_ms": length(gemm) / 1e3,
        "hidden": both / length(comm) if comm else None,
        "exposed_ms": (length(comm) - both) / 1e3,
        "extent_ms": extent / 1e3,
        "kernels": kernels,
        "names": len(names),
    }


# ---- ranks ---------------------------------------------------------------------------------


SHARED = "EP_TEST_SHARED" in os.environ  # a GPU: exchanges go over sockets, so there is less to send


class Job:
    """A step like a MoE model's: exchanges on a stream of their own beside GEMMs, some bare."""

    def __init__(self, tokens=1024 if SHARED else 8192, hidden=4096, layers=6, profiles=False):
        import datetime

        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        torch.ones(1, device=self.device)
        if profiles:  # its first time takes seconds
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]):
                torch.ones(1, device=self.device)
        at_gate(int(os.environ["RECORD_TEST_RANK"]))  # windows are counted from the communicator on
        faulthandler.dump_traceback_later(float(os.environ["RECORD_TEST_LIMIT"]) - 9)
        dist.init_process_group(
            "nccl", init_method=os.environ["RECORD_TEST_MEET"], rank=self.rank,
            world_size=self.ranks, timeout=datetime.timedelta(seconds=40),
        )
        self.x = torch.randn(tokens, hidden, device=self.device, dtype=torch.bfloat16)
        self.w = torch.randn(hidden, hidden, device=self.device, dtype=torch.bfloat16) / hidden**0.5
        self.y = torch.empty_like(self.x)
        self.side = torch.cuda.Stream()
        self.layers = layers
        self.grad = torch.ones(1 << 20, device=self.device)
        # uneven: grouped sends and receives
        n = tokens // self.ranks
        odd = [n - 64 if (self.rank + p) % 2 else n + 64 for p in range(self.ranks)]
        self.split = odd if self.ranks > 1 else [tokens]
        self.out = torch.empty(sum(self.split), hidden, device=self.device, dtype=torch.bfloat16)

    def exchange(self):
        source = self.x[: sum(self.split)]
        self.dist.all_to_all_single(self.out, source, self.split, self.split)

    def step(self):
        torch = self.torch
        for layer in range(self.layers):
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self.exchange()
            for _ in range(2 + layer % 3):
                torch.mm(self.x, self.w, out=self.y)
                self.y.mul_(0.5)
            torch.cuda.current_stream().wait_stream(self.side)
            if layer % 2:
                self.exchange()  # nothing beside it
        self.dist.all_reduce(self.grad, op=self.dist.ReduceOp.MAX)

    def until(self, begin, seconds, times=None, body=None):
        """Steps until `seconds` after `begin`; all ranks stop after the same step."""
        torch = self.torch
        flag = torch.zeros(1, device=self.device)
        while True:
            start = time.perf_counter()
            for _ in range(10):
                (body or self.step)()
            torch.cuda.synchronize()
            if times is not None:
                times.append((time.perf_counter() - start) / 10)
            flag.fill_(float(time.time() - begin > seconds))
            self.dist.all_reduce(flag, op=self.dist.ReduceOp.MAX)
            if flag.item():
                return

    def steps_in(self, seconds, most):
        """How many steps that is, some at least; the same number on all ranks. They are slow on a shared GPU."""
        for turn in range(2):  # the first time there is more to do
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                self.step()
            self.torch.cuda.synchronize()
        took = self.torch.full((1,), (time.perf_counter() - start) / 5, device=self.device)
        self.dist.all_reduce(took, op=self.dist.ReduceOp.MAX)
        return max(10, min(most, int(seconds / took.item())))

    def profiled(self, steps, path):
        from torch.profiler import ProfilerActivity, profile

        self.dist.all_reduce(self.grad, op=self.dist.ReduceOp.MAX)
        self.torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(steps):
                self.step()
            self.torch.cuda.synchronize()
        p.export_chrome_trace(path)
        return shares(path, 0.3)

    def say(self, **fields):
        print("RESULT " + json.dumps(dict(fields, rank=self.rank)), flush=True)


def rank_compare(folder):
    """The profiler, the recorder from 5 to 7 s, the profiler again."""
    job = Job(profiles=True)
    path = os.path.join(folder, f"torch-{job.rank}.json")
    begin = time.time()
    steps = job.steps_in(1.2, 120)
    before = job.profiled(steps, path)
    quiet, inside, after_ = [], [], []
    job.until(begin, 4.8, quiet)
    job.until(begin, 7.2, inside)
    job.until(begin, 7.6, after_)
    after = job.profiled(steps, path)
    job.say(steps=steps, before=before, after=after, first=inside[:3], worst=max(inside),
            quiet_ms=1e3 * statistics.median(quiet), inside_ms=1e3 * statistics.median(inside[2:] or inside),
            after_ms=1e3 * statistics.median(after_))


def rank_steps(folder):
    job = Job()
    times = []
    job.until(time.time(), 3.2, times)
    job.say(step_ms=1e3 * statistics.median(times))


# (seconds and most steps of the profiler's part, when it begins, when the one without begins, when that is over)
BESIDE = {"during": (0.6, 50, 2.5, 4, 4.5),  # the recorder's window is 1 s to 12 s
          "across": (1.6, 400, 1.2, 5.5, 0)}  # 2 s to 5 s


def rank_beside(folder, part):
    """torch.profiler beside a window, and once more without one."""
    seconds, most, first, second, over = BESIDE[part]
    job = Job(profiles=True)
    path = os.path.join(folder, f"torch-{job.rank}.json")
    begin = time.time()
    steps = job.steps_in(seconds, most)
    job.until(begin, first)
    profiled = job.profiled(steps, path)
    job.until(begin, second)
    again = job.profiled(steps, path)
    job.until(begin, over)
    job.say(profiled=profiled, again=again)


def rank_overhead(folder):
    """Kernels of some 45 us, one after the other, on a single rank; blocks of 200."""
    os.environ.update(RANK="0", WORLD_SIZE="1")
    job = Job(tokens=64, hidden=64)
    torch = job.torch
    a = torch.randn(2560, 2560, device=job.device, dtype=torch.bfloat16)
    small = torch.ones(1024, device=job.device)
    kernels = 0

    def device_bound():
        nonlocal kernels
        for _ in range(200):
            torch.mm(a, a)
        kernels += 200

    def host_bound():
        nonlocal kernels
        for _ in range(200):
            small.add_(1)
            limit = time.perf_counter_ns() + 44000
            while time.perf_counter_ns() < limit:
                pass
        kernels += 200

    def busy_host():
        nonlocal kernels
        for _ in range(600):
            small.add_(1)
        kernels += 600

    bodies = {"device": device_bound, "host": host_bound, "launches": busy_host}
    job.exchange()
    times = {name: [] for name in bodies}
    begin = time.time()
    end = float(os.environ["RECORD_TEST_END"])
    while time.time() - begin < end:
        for name, body in bodies.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(2):
                body()
            torch.cuda.synchronize()
            now = time.perf_counter()
            times[name].append((time.time() - begin, now - start))
        job.dist.all_reduce(job.grad)
    windows = json.loads(os.environ["RECORD_TEST_PARTS"])
    for name in bodies:
        found = {}
        for part, (low, high) in windows.items():
            inside = [t for at, t in times[name] if low < at < high]
            found[part] = {"median_ms": 1e3 * statistics.median(inside), "max_ms": 1e3 * max(inside),
                           "n": len(inside)}
        job.say(body=name, **found)


def rank_graph(folder):
    job = Job(tokens=2048, hidden=1024, layers=2, profiles=True)
    torch = job.torch
    path = os.path.join(folder, f"torch-{job.rank}.json")
    job.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            torch.mm(job.x, job.w, out=job.y)
            job.y.mul_(0.5)

    def body():
        graph.replay()
        job.exchange()
        job.dist.all_reduce(job.grad, op=job.dist.ReduceOp.MAX)

    begin = time.time()
    times = []
    job.until(begin, 3.5, times, body)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(20):
            body()
        torch.cuda.synchronize()
    p.export_chrome_trace(path)
    job.say(profiler=shares(path), step_ms=1e3 * statistics.median(times))


def rank_leave(folder):
    os.environ.update(RANK="0", WORLD_SIZE="1")
    job = Job(tokens=64, hidden=64)
    torch = job.torch
    small = torch.ones(1024, device=job.device)
    weight = torch.ones(64, 64, device=job.device, requires_grad=True)
    job.exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            small.add_(1)

    def launches(seconds):
        best, begin = [], time.time()
        while time.time() - begin < seconds:
            start = time.perf_counter()
            for _ in range(400):
                small.add_(1)
            best.append((time.perf_counter() - start) / 400)
            torch.cuda.synchronize()
            graph.replay()
            (weight @ weight).sum().backward()  # on another thread
            job.dist.all_reduce(job.grad)
            torch.cuda.synchronize()
        print(f"RECORD launches {seconds} s", file=sys.stderr, flush=True)
        return 1e6 * statistics.median(best)

    begin = time.time()
    before = launches(1.2)
    launches(max(0.1, 1.8 - (time.time() - begin)))
    inside = launches(0.9)
    launches(1.0)  # the window ends
    after = launches(1.2)
    from torch.profiler import ProfilerActivity, profile

    path = os.path.join(folder, "torch.json")
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(20):
            graph.replay()
            job.exchange()
        torch.cuda.synchronize()
    p.export_chrome_trace(path)
    print("RECORD profiled", file=sys.stderr, flush=True)
    launches(0.3)
    job.say(before_us=before, inside_us=inside, after_us=after, profiled=shares(path)["kernels"])


def rank_ends(folder):
    job = Job(tokens=2048, hidden=1024, layers=2)
    begin = time.time()
    job.until(begin, 4)
    how = os.environ["RECORD_TEST_HOW"]
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise SystemExit(9)


TURN = []  # the lock, where runs take turns
AHEAD = threading.Semaphore(3)  # runs that have begun: contexts are made one by one, and each is in the way of the next

# ---- runs ----------------------------------------------------------------------------------


def run(*what, **how):
    """Ranks of one run: (status, RESULTs, stderr lines of ours, recorded JSON) each."""
    with AHEAD:
        return run_ahead(*what, **how)


def run_ahead(library, part, ranks, record, window, limit=60, extra=None, mode="observe"):
    folder = tempfile.mkdtemp(prefix="ep-record-")
    jobs, gate = [], os.path.join(folder, "gate")
    for r in range(ranks):
        env = dict(os.environ, RANK=str(r), WORLD_SIZE=str(ranks), LOCAL_RANK=str(r),
                   RECORD_TEST_MEET=f"file://{folder}/meet", RECORD_TEST_LIMIT=str(limit),
                   RECORD_TEST_RANK=str(r), **sharing(r, ranks, gpus()), **(extra or {}))
        if TURN:
            env["EP_TEST_GATE"] = gate
        if library:
            env.update(LD_PRELOAD=library, EP_OVERLAP_INTERPOSE=mode)
        if record:
            env.update(EP_OVERLAP_RECORD=folder, EP_OVERLAP_RECORD_WINDOW=window)
        jobs.append(Process([sys.executable, HERE, "--rank", part, folder], env, os.path.join(folder, str(r)), True))
    if not TURN:
        return gather(jobs, folder, limit)
    with in_turn(TURN[0], gate, jobs):
        return gather(jobs, folder, limit)


def gather(jobs, folder, limit):
    out = []
    late = ended(jobs, limit)
    for r, job in enumerate(jobs):
        text, errors = job.output()
        errors += "\nTIMEOUT" if job in late else ""
        results = [json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")]
        ours = [l for l in errors.splitlines() if "ep-overlap" in l]
        others = [l for l in errors.splitlines() if "ep-overlap" not in l and l.strip()]
        path = os.path.join(folder, f"ep-overlap-trace-{r}.json")
        trace = report = None
        if os.path.exists(path):
            try:
                with open(path) as f:
                    report = json.load(f)["ep_overlap"]
                trace = shares(path) if not report["not_recorded"] else None
            except (ValueError, KeyError) as e:
                report = {"broken": str(e)}
        out.append({"status": job.returncode, "results": results, "ours": ours,
                    "others": others[-40 if job.returncode not in (0, 7, 9) else -3:], "report": report,
                    "trace": trace, "path": path})
    return out


def hidden_of(report):
    d = max(report["nanoseconds"], key=lambda d: d["ep_comm"])
    return d["overlapped"] / d["ep_comm"] if d["ep_comm"] else None


def show(name, value):
    print(name + " " + json.dumps(value), flush=True)


def side_by_side(call, names):
    """{name: call(name)}, started at once where runs take turns."""
    with concurrent.futures.ThreadPoolExecutor(len(names) if TURN else 1) as pool:
        return dict(zip(names, pool.map(call, names)))


def part_compare(library, ranks):
    bad = 0
    runs = run(library, "compare", ranks, True, "5s-7s", 28)
    for r in runs:
        show("compare", {k: r[k] for k in ("status", "results", "ours", "others", "report", "trace")})
        ok = r["status"] == 0 and r["results"] and r["report"] and not r["report"]["not_recorded"]
        if ok:
            before, after = r["results"][0]["before"], r["results"][0]["after"]
            mine = hidden_of(r["report"])
            apart = 100 * abs(mine - (before["hidden"] + after["hidden"]) / 2)
            ok = apart <= 2 and before["kernels"] == after["kernels"]
            print(f"compare: recorder {100 * mine:.2f} %, torch.profiler {100 * before['hidden']:.2f} "
                  f"and {100 * after['hidden']:.2f} %: {apart:.2f} points from their mean", flush=True)
        bad += not ok
    return bad


def part_carried(library, ranks):
    """Exchanges by copy engines, whose waits are no activity: in the figures by their marks."""
    bad = 0
    marks = {"EP_OVERLAP_RECORD_MARK": "1"}
    runs = side_by_side(lambda mode: run(library, "steps", ranks, True, "1s-2.5s", 18, marks, mode),
                        ("observe", "accelerate"))
    for mode, ranks_ in runs.items():
        for r in ranks_:
            report = r["report"] or {}
            comm = max((d["ep_comm"] for d in report.get("nanoseconds") or []), default=0)
            print(f"carried, {mode}: {r['ours'][:1]}, {report.get('nanoseconds')}", flush=True)
            bad += r["status"] != 0 or not report or report["not_recorded"] is not None or comm == 0
    return bad


def part_during(library, ranks):
    return complete(library, ranks, "during", "1s-12s")


def part_across(library, ranks):
    return complete(library, ranks, "across", "2s-5s")


def complete(library, ranks, part, window):
    """The profiler's trace in or across the window has the kernels of the one without."""
    bad = 0
    for r in run(library, part, ranks, True, window, 24):
        show(part, {k: r[k] for k in ("status", "results", "ours", "others", "report")})
        both = [r["results"][0][w]["kernels"] for w in ("profiled", "again")] if r["results"] else [0, -1]
        print(f"{part}: kernels {both[0]} with the window, {both[1]} without; {r['ours']}", flush=True)
        bad += r["status"] != 0 or both[0] != both[1]
    return bad


PIECES = {"before": [0.6, 1.9], "window": [2.7, 4.8], "after": [5.7, 7.3]}  # window: 2 to 5 s


def overhead(library, record):
    extra = {"RECORD_TEST_END": "7.4", "RECORD_TEST_PARTS": json.dumps(PIECES)}
    return run(library, "overhead", 1, record, "2s-5s", 20, extra)[0]


def part_overhead(library, ranks):
    """In a window at most 1 % slower than before it; the same again after it."""
    r = overhead(library, True)
    show("overhead", {k: r[k] for k in ("status", "ours", "others", "report")})
    bad = r["status"] != 0 or not r["results"]
    for body in r["results"]:
        base = body["before"]["median_ms"]
        slower = {p: 100 * (body[p]["median_ms"] / base - 1) for p in ("window", "after")}
        print(f"overhead {body['body']}: before {base:.3f} ms, window {slower['window']:+.2f} % (longest "
              f"{body['window']['max_ms']:.2f} ms), after {slower['after']:+.2f} %", flush=True)
        # a program that waits for its launches pays 1.7 us for each as long as CUPTI is there
        bad |= body["body"] == "device" and max(slower.values()) > 1
    return bad


def part_leave(library, ranks):
    """CUPTI taken out of the process: launches cost what they did, graphs and profilers work."""
    extra = {"EP_OVERLAP_RECORD_LEAVE": "1"}
    r = run(library, "leave", 1, True, "1.5s-3s", 18, extra)[0]
    show("leave", {k: r[k] for k in ("status", "results", "ours", "others", "report")})
    bad = r["status"] != 0 or not r["results"]
    for body in r["results"]:
        slower = 100 * (body["after_us"] / body["before_us"] - 1)
        print(f"leave: a launch {body['before_us']:.2f} us before, {body['inside_us']:.2f} in, "
              f"{body['after_us']:.2f} after the window ({slower:+.2f} %)", flush=True)
        bad |= slower > 3 or body["profiled"] < 400
    return bad


def part_none(library, ranks):
    """Nothing asked for: the same as without the library."""
    libraries = {"plain": None, "library": library}
    runs = side_by_side(lambda name: overhead(libraries[name], False), libraries)
    for name, r in runs.items():
        for body in r["results"]:
            print(f"none {name} {body['body']}: " + ", ".join(
                f"{p} {body[p]['median_ms']:.3f} ms" for p in PIECES), flush=True)
    return any(r["status"] != 0 for r in runs.values())


def part_graph(library, ranks):
    r = run(library, "graph", ranks, True, "1s-2.5s", 22)[0]
    show("graph", {k: r[k] for k in ("status", "results", "ours", "others", "report", "trace")})
    return r["status"] != 0 or not r["report"]


def part_ends(library, ranks):
    wanted = {"normal": 0, "raise": 9, "exit": 7, "abort": -6, "kill": -9}

    def one(how):
        start = time.time()
        r = run(library, "ends", 1, True, "2s-30s", limit=18, extra={"RECORD_TEST_HOW": how})[0]
        print(f"ends {how}: status {r['status']} (wanted {wanted[how]}), {time.time() - start:.1f} s, "
              f"{r['ours']}, {r['others'][-1:]}", flush=True)
        return r["status"] != wanted[how]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return sum(pool.map(one, wanted))


PARTS = {"compare": part_compare, "carried": part_carried, "during": part_during, "across": part_across,
         "overhead": part_overhead,
         "graph": part_graph, "ends": part_ends, "leave": part_leave, "none": part_none}
RANKS = {"compare": rank_compare, "steps": rank_steps, "overhead": rank_overhead,
         **{part: functools.partial(rank_beside, part=part) for part in BESIDE},
         "graph": rank_graph, "ends": rank_ends, "leave": rank_leave}


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "--rank":
        RANKS[sys.argv[2]](sys.argv[3])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--together", action="store_true")
    options = parser.parse_intermixed_args()
    ranks = options.ranks
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error("no part %s; there are: %s" % (" ".join(unknown), " ".join(PARTS)))
    if gpus() == 0:
        print("record.py: no GPU here: nothing was run", file=sys.stderr)
        return 77
    told(ranks, gpus())
    if options.together:
        TURN.append(threading.Lock())

    def judged(part):
        begun, why = time.time(), "as wanted"
        try:
            wrong = PARTS[part](os.path.abspath(options.library), ranks)
        except Exception as e:  # (a rank said something else than was asked for: the other parts go on)
            traceback.print_exc()
            wrong, why = True, repr(e)
        text = "see its lines" if wrong and why == "as wanted" else why
        print("case\trecord %s\t%s\t%s, %.1f s" % (part, "FAIL" if wrong else "ok", text, time.time() - begun), flush=True)
        return wrong

    with concurrent.futures.ThreadPoolExecutor(len(options.parts) if TURN else 1) as pool:
        bad = pool.map(judged, options.parts)
        failed = [p for p, wrong in zip(options.parts, bad) if wrong]
    print("failed: " + (" ".join(failed) or "none"), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
