# SPDX-License-Identifier: Apache-2.0
"""Ranks of a test on one machine: the program once more for each, with torchrun's variables; and
programs that start together and take turns at the GPUs."""
import contextlib
import os
import socket
import subprocess
import sys
import time


def launch(program, ranks, limit, arguments=(), environment=None, name="rank", show_all=False, most=None):
    """Runs `ranks` processes, `limit` seconds all together at most; shows the output (its last `most`
    characters) of rank 0 and of those that failed, or of all.  The first status that is not 0, else 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    running = [
        subprocess.Popen([sys.executable, program, *arguments], text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT,
                         env=dict(os.environ, RANK=str(r), WORLD_SIZE=str(ranks), LOCAL_RANK=str(r),
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **(environment or {})))
        for r in range(ranks)
    ]
    status, until = 0, time.time() + limit
    for r, p in enumerate(running):
        try:
            said = p.communicate(timeout=max(1, until - time.time()))[0]
        except subprocess.TimeoutExpired:
            for q in running:
                q.kill()
            said = p.communicate()[0] + "\n(no end)"
        if show_all or p.returncode != 0 or r == 0:
            print("-- %s %d, status %d\n%s" % (name, r, p.returncode, said[-most:] if most else said))
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
