# SPDX-License-Identifier: Apache-2.0
"""Ranks of a test on one machine: the program once more for each, with torchrun's variables."""
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
