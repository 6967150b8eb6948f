# SPDX-License-Identifier: Apache-2.0
"""Ranks of a test on one machine: the program once more for each, with torchrun's variables; and
programs that start together and take turns at the GPUs."""
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time


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
    status, until = 0, began + limit
    for r, p in enumerate(running):
        try:
            p.wait(max(1, until - time.time()))
        except subprocess.TimeoutExpired:
            for q in running:  # where it was, Python's fault handler tells
                q.send_signal(signal.SIGABRT)
            time.sleep(1)
            for q in running:
                q.kill()
            p.wait()
            said[r].append("(no end after %d s)\n" % limit)
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
