#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Torch jobs that a preloaded library must not be noticed by, with it and without.

    preload.py LIBRARY [part ...] [--together]
        segments   allocations of all sizes come and go beside exchanges, with expandable
                   segments and without (segments-True, segments-False: one of them)
        loaders    data loaders that fork workers, again and again, beside exchanges
        groups     process groups made, used and destroyed; one aborted
        crash      a rank that dies of a signal inside a step
        plain      python without torch, with threads and processes
        programs   a shell with jobs and traps, /bin/true, a program linked statically
        reopen     python without torch that opens the job's NCCL, uses it and closes it, again and again

--together: all parts are started at once, by fork from one that has imported torch; three runs at a time (one
part's) touch the GPUs. The driver makes contexts and ends them one by one under a lock of the machine: nine
programs have theirs after 5 s, thirty stand in each other's way until some are refused theirs.
Two ranks, on two GPUs or on one. Each part prints a digest of what its ranks saw;
output, status and digest have to be the same plain, observed with the recorder, and accelerated, and
nothing of ours is left in /dev/shm. What the GPUs and the machine have free is said of each case; a rank
that fails ends its peer.
"""
import argparse
import concurrent.futures
import faulthandler
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from launch import at_gate, gpus, in_turn, sharing, told
from nursery import Nursery, Process, ended, serve

HERE = os.path.abspath(__file__)
ALONE = ("plain", "reopen")  # one rank without torch
LIMIT = 40  # seconds of a run, from its turn on
MB = 1 << 20


def machine():
    """What GPUs and machine have, and what the driver said last: where a context could not be made."""
    def said(*command):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            return done.stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired) as e:
            return [str(e)]

    with open("/proc/meminfo") as f:
        memory = [" ".join(line.split()) for line in f if re.match("Mem|Commit", line)]
    return "; ".join([
        "GPUs (used, total) " + ", ".join(said("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader")),
        "programs on them %d" % len(said("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")),
        ", ".join(memory), *[line for line in said("dmesg") if "NVRM" in line or "nvidia" in line][-4:]])


class Ranks:
    def __init__(self):
        import datetime

        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        at_gate(self.rank)  # (before there is a context, which takes memory of the GPU and of the host)
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
        try:
            torch.cuda.set_device(self.device)
        except RuntimeError:
            print("no context: " + machine(), file=sys.stderr, flush=True)
            raise
        print("FREE %d %d" % (self.device.index, torch.cuda.mem_get_info()[0] // MB), file=sys.stderr, flush=True)
        dist.init_process_group(
            "nccl", init_method=os.environ["PRELOAD_TEST_MEET"], rank=self.rank,
            world_size=self.ranks, timeout=datetime.timedelta(seconds=30),
        )
        self.digest = hashlib.sha256()
        self.rng = random.Random(7)  # the same on all ranks

    def exchange(self, elements, group=None):
        """Uneven, in memory that is new; what arrives goes into the digest."""
        torch = self.torch
        counts = [[1 + (elements * (s + 2 * d + 1)) // 7 for d in range(self.ranks)]
                  for s in range(self.ranks)]
        mine, theirs = counts[self.rank], [counts[s][self.rank] for s in range(self.ranks)]
        source = torch.arange(sum(mine), device=self.device, dtype=torch.int64) * (self.rank + 3)
        target = torch.empty(sum(theirs), device=self.device, dtype=torch.int64)
        self.dist.all_to_all_single(target, source, theirs, mine, group=group)
        del source
        weights = torch.arange(target.numel(), device=self.device, dtype=torch.int64) % 1009 + 1
        self.digest.update(str(int((target * weights).sum())).encode())

    def end(self):
        print(self.digest.hexdigest(), flush=True)
        self.dist.destroy_process_group()


def rank_segments():
    r = Ranks()
    torch, kept = r.torch, []
    for i in range(250):
        kept.append(torch.empty(r.rng.randrange(1, 64 * MB), dtype=torch.int8, device=r.device))
        if len(kept) > 12:
            for _ in range(r.rng.randrange(1, 12)):
                kept.pop(r.rng.randrange(len(kept)))
        r.exchange(int(2 ** r.rng.uniform(4, 21)))
        if i % 50 == 49:
            kept.clear()
            torch.cuda.empty_cache()
    r.end()


class Items:
    def __len__(self):
        return 256

    def __getitem__(self, i):
        import torch

        return torch.full((64,), i)


def rank_loaders():
    r = Ranks()
    from torch.utils.data import DataLoader

    for _ in range(4):
        for batch in DataLoader(Items(), batch_size=16, num_workers=6, pin_memory=True):
            r.digest.update(str(int(batch.sum())).encode())
            r.exchange(1 << 18)
    r.end()


def rank_groups():
    r = Ranks()
    everybody = list(range(r.ranks))
    for i in range(6):
        group = r.dist.new_group(everybody)
        r.exchange(1 << 19, group)
        r.exchange(1 << 12)
        r.torch.cuda.synchronize()
        if i % 3 == 2 and hasattr(r.dist.distributed_c10d, "_abort_process_group"):
            r.dist.distributed_c10d._abort_process_group(group)
        else:
            r.dist.destroy_process_group(group)
    r.exchange(1 << 19)
    r.end()


def rank_crash():
    r = Ranks()
    for i in range(40):
        r.exchange(1 << 18)
        if i == 30 and r.rank == r.ranks - 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if i == 30:
            time.sleep(1)
            print(r.digest.hexdigest(), flush=True)
            os._exit(5)


def rank_plain():
    import multiprocessing
    import threading

    def fork_some():
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    threads = [threading.Thread(target=fork_some) for _ in range(4)]
    for t in threads:
        t.start()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(sum(pool.map(abs, range(-50, 50))), flush=True)
    for t in threads:
        t.join()


def rank_reopen():
    """One rank's communicator in an NCCL that is opened and closed twice."""
    import _ctypes
    import ctypes

    at_gate(0)
    faulthandler.dump_traceback_later(LIMIT - 3)
    path, begun = os.environ["PRELOAD_TEST_NCCL"], time.time()
    for _ in range(2):
        print("%.1f s: opens it" % (time.time() - begun), file=sys.stderr, flush=True)
        nccl = ctypes.CDLL(path)
        number = ctypes.c_int()
        print(nccl.ncclGetVersion(ctypes.byref(number)), number.value, flush=True)
        for _ in range(100):
            nccl.ncclGroupStart()
            nccl.ncclGroupEnd()
        comm, device = ctypes.c_void_p(), ctypes.c_int(0)
        print("%.1f s: makes a communicator" % (time.time() - begun), file=sys.stderr, flush=True)
        print(nccl.ncclCommInitAll(ctypes.byref(comm), 1, ctypes.byref(device)), flush=True)
        print(nccl.ncclCommDestroy(comm), flush=True)
        _ctypes.dlclose(nccl._handle)
        with open("/proc/self/maps") as maps:
            print("libnccl.so" in maps.read(), flush=True)


def nccl_path():
    """torch's own NCCL, without torch."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else []:
        path = os.path.join(folder, "nccl", "lib", "libnccl.so.2")
        if os.path.exists(path):
            return path
    return "libnccl.so.2"


# ---- runs ----------------------------------------------------------------------------------


def rank_of(part):
    globals()["rank_" + part]()
    return 0


def run(library, mode, part, ranks, extra, limit, turn, nurseries):
    folder = tempfile.mkdtemp(prefix="ep-preload-")
    gate = os.path.join(folder, "gate")
    if turn and part != "plain":
        extra = dict(extra, EP_TEST_GATE=gate)
    jobs = []
    for r in range(ranks):
        env = dict(RANK=str(r), WORLD_SIZE=str(ranks), PRELOAD_TEST_MEET=f"file://{folder}/meet",
                   PRELOAD_TEST_NCCL=nccl_path(), **sharing(r, ranks, gpus()), **extra)
        if part == "reopen":  # what NCCL did, where it does not come back
            env.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=os.path.join(folder, "nccl"))
        if mode != "plain":
            env.update(EP_OVERLAP_INTERPOSE=mode, EP_OVERLAP_INTERPOSE_LEAST="64k", EP_OVERLAP_INTERPOSE_WAIT="200000")
        if mode == "observe":
            env.update(EP_OVERLAP_RECORD=folder, EP_OVERLAP_RECORD_WINDOW="0.1-55s")
        if nurseries and part not in ALONE + ("segments",):  # (torch may have read that when it was imported)
            jobs.append(nurseries[mode != "plain"].start(env, part, apart=True))
            continue
        jobs.append(Process([sys.executable, HERE, "--rank", part], dict(os.environ, **env, **preload(library, mode)),
                            os.path.join(folder, str(r)), apart=True))
    # A rank's peer does not wait for one that has failed; in a crash it has its last second.
    after = 5 if part == "crash" else 0.5
    if "EP_TEST_GATE" not in extra:
        return gather(jobs, limit, after)
    with in_turn(turn, gate, jobs):
        return gather(jobs, limit, after)


def preload(library, mode):
    return {} if mode == "plain" else {"LD_PRELOAD": library}


def gather(jobs, limit, after):
    """Of each rank what it said; free: GPU and MB that were free when it had its context."""
    out, begun = [], time.time()
    late = ended(jobs, limit, after)
    for job in jobs:
        text, errors = job.output()
        text += "TIMEOUT" if job in late else ""
        ours = [line for line in errors.splitlines() if "ep-overlap" in line]
        out.append({"status": job.returncode, "out": text, "ours": ours, "seconds": round(time.time() - begun, 1),
                    "nccl": last_of(os.path.join(os.path.dirname(job.path), "nccl")),
                    "free": re.findall(r"^FREE (\d+) (\d+)$", errors, re.M), "errors": errors[-2500:]})
    return out


def last_of(path):
    try:
        with open(path, errors="replace") as f:
            return f.read()[-1500:]
    except OSError:
        return ""


def free_of(runs):
    """The least that was free on each GPU when its ranks had their contexts, in words."""
    least = {}
    for r in sum(runs.values(), []):
        for gpu, mb in r["free"]:
            least[gpu] = min(int(mb), least.get(gpu, 1 << 60))
    return ", ".join("%d MB of GPU %s" % (least[gpu], gpu) for gpu in sorted(least)) or "not asked"


def same(library, name, ranks, turn, nurseries, extra=None, limit=LIMIT):
    part = name.split("-")[0]
    modes = ["plain", "observe", "accelerate"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = dict(zip(modes, pool.map(
            lambda m: run(library, m, part, ranks, extra or {}, limit, turn, nurseries), modes)))
    plain = [(r["status"], r["out"]) for r in runs["plain"]]
    bad = any("TIMEOUT" in out for _, out in plain)
    ends = [5] * (ranks - 1) + [-signal.SIGSEGV] if part == "crash" else [0] * ranks
    bad |= [status for status, _ in plain] != ends
    for mode in modes[1:]:
        bad |= [(r["status"], r["out"]) for r in runs[mode]] != plain
        # whoever asked for nothing hears nothing; the recorder has its lines
        bad |= mode == "accelerate" and any(r["ours"] for r in runs[mode])
    print(f"{name}: {'FAILED' if bad else 'ok'}; plain {plain}", flush=True)
    print("case\tpreload %s\t%s\t%s; free at least %s; %.1f s" % (name, "FAIL" if bad else "ok", ", ".join(
        "%s %s" % (mode, [r["status"] for r in runs[mode]]) for mode in modes), free_of(runs),
        max(r["seconds"] for mode in modes for r in runs[mode])), flush=True)
    for mode in modes:
        print(f"  {mode}: {[r['ours'] for r in runs[mode]]}", flush=True)
        for r in runs[mode]:
            if bad:
                print(json.dumps(r), flush=True)
    return bad


STATIC = """#include <unistd.h>
int main(void) { return write(1, "s", 1) != 1; }
"""
SHELL = """trap 'echo trapped' TERM
for i in 1 2 3 4; do (exit $i) & done
wait
kill -TERM $$
{ (kill -9 $BASHPID); } 2>/dev/null
echo $? $((6 * 7))
exit 3"""


def programs(library):
    """Programs that have nothing to do with a GPU: output and status in every mode."""
    bad, folder = False, tempfile.mkdtemp(prefix="ep-preload-")
    static, source = os.path.join(folder, "static"), os.path.join(folder, "static.c")
    with open(source, "w") as f:
        f.write(STATIC)
    commands = {"true": ["/bin/true"], "shell": ["bash", "-c", SHELL]}
    built = subprocess.run(["gcc", "-static", "-o", static, source], capture_output=True, text=True)
    if built.returncode == 0:
        commands["static"] = [static]
    else:
        print("programs: left out: a static program: " + built.stderr[-200:], flush=True)
    for name, command in commands.items():
        said = {}
        for mode in ("plain", "off", "observe", "accelerate"):
            env = dict(os.environ)
            if mode != "plain":
                env.update(LD_PRELOAD=library, EP_OVERLAP_INTERPOSE=mode, EP_OVERLAP_RECORD="1")
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
            said[mode] = (done.returncode, done.stdout, done.stderr)
        wrong = any(s != said["plain"] for s in said.values())
        print(f"programs, {name}: {'FAILED ' + str(said) if wrong else 'ok'}; plain {said['plain']}", flush=True)
        print("case\tpreload programs %s\t%s\tstatus %s" % (name, "FAIL" if wrong else "ok", said["plain"][0]), flush=True)
        bad |= wrong
    return bad


def rooms():
    return {name for name in os.listdir("/dev/shm") if name.startswith("ep-overlap-")}


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "--rank":
        return rank_of(sys.argv[2])
    if sys.argv[1:] == ["--nursery"]:
        import torch.distributed
        import torch.utils.data  # noqa: F401 (before all children)

        return serve(rank_of) or 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("parts", nargs="*",
                        default=["programs", "segments", "loaders", "groups", "crash", "plain", "reopen"])
    parser.add_argument("--together", action="store_true")
    options = parser.parse_intermixed_args()
    if gpus() == 0:
        print("preload.py: no GPU here: nothing was run", file=sys.stderr)
        return 77
    told(2, gpus())
    ranks, library = 2, os.path.abspath(options.library)
    turn = threading.Semaphore(3) if options.together else None
    cases, before = [], rooms()
    failed = ["programs"] if "programs" in options.parts and programs(library) else []
    for part in [part for part in options.parts if part != "programs"]:
        words = ([part[9:]] if part[9:] else ["True", "False"]) if part.startswith("segments") else []
        cases += [(f"segments-{word}", {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{word}"})
                  for word in words] or [(part, None)]
    nurseries = [Nursery([sys.executable, HERE, "--nursery"], dict(os.environ, **preload(library, mode)))
                 for mode in ("plain", "observe")] if turn else None
    with concurrent.futures.ThreadPoolExecutor(max(1, len(cases)) if turn else 1) as pool:
        bad = list(pool.map(lambda case: same(library, case[0], 1 if case[0] in ALONE else ranks,
                                              turn, nurseries, case[1]), cases))
    for nursery in nurseries or []:
        nursery.end()
    failed += [name for (name, _), wrong in zip(cases, bad) if wrong]
    left = rooms() - before
    if left:
        print(f"left in /dev/shm: {sorted(left)}", flush=True)
        failed.append("shared memory")
    print("failed: " + (" ".join(failed) or "none"), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
