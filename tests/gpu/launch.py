# SPDX-License-Identifier: Apache-2.0
"""Ranks of a test on one machine: the program once more for each, with torchrun's variables; and
programs that start together and take turns at the GPUs.

    launch.py [-n RANKS] [-l SECONDS] PROGRAM [ARGUMENT...]     any torch program as [2] ranks, [60] s at most;
                                                                the output of all
"""
import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time


AFTER = 10  # seconds that ranks have to end where one has failed


def gpus():
    """GPUs that a program here sees; asked without torch, which takes seconds."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    seen, there = os.environ.get("CUDA_VISIBLE_DEVICES"), said.count("GPU ")
    return there if seen is None else min(there, len([word for word in seen.split(",") if word.strip()]))


def sharing(rank, ranks, there):
    """The environment of a rank where `ranks` share `there` GPUs. NCCL refuses two ranks on one GPU of one host;
    ranks that say that they are of different hosts it serves, over sockets: real NCCL, slow."""
    if there == 0 or ranks <= there:
        return {}
    return {"NCCL_HOSTID": "rank-%d" % rank, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
            "NCCL_MNNVL_ENABLE": "0", "EP_TEST_SHARED": "1"}


def told(ranks, there):
    """Says what the ranks have; 1 where they share a GPU."""
    print("%d ranks, %s" % (ranks, "no GPU here: CPU tensors" if there == 0 else "%d GPU%s%s" % (
        there, "s" if there > 1 else "", ", shared: NCCL over sockets" if ranks > there else "")), flush=True)
    return int(0 < there < ranks)


def launch(program, ranks, limit, arguments=(), environment=None, name="rank", show_all=False, most=None):
    """Runs `ranks` processes, `limit` seconds all together at most. The output of rank 0, or of all, is shown as
    it comes, with the time; that of the others where they failed (its last `most` characters).  The first status
    that is not 0, else 0. (torch.compile in the rank itself: its pool of workers imports torch anew, and a rank that
    has ended waits for it.)"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    there, began = gpus(), time.time()
    told(ranks, there)
    running, said, readers = [], [[] for _ in range(ranks)], []

    def read(r, live):
        for line in running[r].stdout:
            said[r].append(line)
            if live:
                sys.stdout.write("-- %s %d, %5.1f s: %s\n" % (name, r, time.time() - began, line.rstrip()))
                sys.stdout.flush()

    for r in range(ranks):
        running.append(subprocess.Popen(
            [sys.executable, "-u", program, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=dict(os.environ, PYTHONFAULTHANDLER="1", TORCHINDUCTOR_COMPILE_THREADS="1", RANK=str(r),
                     WORLD_SIZE=str(ranks), LOCAL_RANK=str(r), MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=str(port), **sharing(r, ranks, there), **(environment or {}))))
        readers.append(threading.Thread(target=read, args=(r, show_all or r == 0), daemon=True))
        readers[-1].start()
    status, until, failed = 0, began + limit, None
    while any(p.poll() is None for p in running):
        if failed is None and any(p.poll() for p in running):
            failed = time.time()
        over = time.time() > until
        if over or (failed is not None and time.time() > failed + AFTER):
            late = [r for r, p in enumerate(running) if p.poll() is None]
            for r in late:  # where it was, Python's fault handler tells
                running[r].send_signal(signal.SIGABRT)
            time.sleep(1)
            for r in late:
                running[r].kill()
                running[r].wait()
                said[r].append("(no end after %d s)\n" % limit if over else
                               "(ended: another rank failed %d s before)\n" % AFTER)
                print("-- %s %d %s" % (name, r, said[r][-1]), end="")
        time.sleep(0.02)
    for r, p in enumerate(running):
        readers[r].join(2)
        if p.returncode != 0 and not (show_all or r == 0):
            text = "".join(said[r])
            print("-- %s %d:\n%s" % (name, r, text[-most:] if most else text))
        print("-- %s %d, %5.1f s: status %d" % (name, r, time.time() - began, p.returncode), flush=True)
        status = status or p.returncode
    return status


def at_gate(rank):
    """In a rank that has started and has not used the GPU yet, or not for what is tested: waits for
    its turn, where there are turns."""
    gate = os.environ.get("EP_TEST_GATE")
    if not gate:
        return
    open("%s-%d" % (gate, rank), "w").close()
    while not os.path.exists(gate):
        time.sleep(0.005)


@contextlib.contextmanager
def in_turn(turn, gate, jobs):
    """With all `jobs` (Popen) at their gate, the path that is their EP_TEST_GATE: opens it when it is
    their turn (a lock or semaphore), which lasts as long as the body."""
    until = time.time() + 90
    while (not all(os.path.exists("%s-%d" % (gate, r)) for r in range(len(jobs))) and time.time() < until
           and all(job.poll() is None for job in jobs)):
        time.sleep(0.01)
    with turn:
        open(gate, "w").close()
        yield


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", dest="ranks", type=int, default=2)
    parser.add_argument("-l", dest="limit", type=float, default=60)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    a = parser.parse_args()
    began = time.time()
    status = launch(a.program, a.ranks, a.limit, a.arguments, show_all=True)
    print("%s: status %d after %.1f s" % (os.path.basename(a.program), status, time.time() - began))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
