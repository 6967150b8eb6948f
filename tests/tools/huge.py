#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""huge.py EP-OVERLAP [MEGABYTES [READER]...]: every reader of ep-overlap on inputs of that size
(4096) that nobody writes on purpose, through a pipe.  Each must end by itself with a
documented status and, where it refuses, a line that names the place, in bounded memory.
Prints a row for each; status 1 if one of them does not."""
import os
import re
import subprocess
import sys
import time

BLOCK = 1 << 20
PEAK_MB = 400
LINE = (" [2026-01-02 03:04:05] iteration %8d/ 9999999 | consumed samples: %12d | elapsed time per iteration "
        "(ms): 41250.0 | global batch size:   512 | lm loss: 1.000000E+00 | grad norm: 1.0 |\n")
EVENT = ('%s{"ph": "X", "cat": "kernel", "name": "kernel %d", "pid": 0, "tid": 7, "ts": %d.5, "dur": 1.25, '
         '"args": {"device": %d, "stream": %d}}')


def repeated(block):
    block = block * max(1, BLOCK // len(block))
    while True:
        yield block


def counted(head, make, group):
    yield head
    number = 0
    while True:
        yield "".join(make(i) for i in range(number, number + group)).encode()
        number += group


INPUTS = {
    "newlines": lambda: repeated(b"\n"),
    "one line": lambda: repeated(b"x"),
    "zeros": lambda: repeated(b"\0"),
    "noise": lambda: repeated(bytes(range(1, 256)) * 7),
    "brackets": lambda: repeated(b"["),
    "objects": lambda: repeated(b'{"a":'),
    "one string": lambda: counted(b'{"traceEvents": [{"name": "', lambda i: "x" * BLOCK, 1),
    "iterations": lambda: counted(b"", lambda i: LINE % (i + 1, i * 512), 4000),
    "settings": lambda: counted(b"------------------------ arguments ------------------------\n",
                                lambda i: "  name_%d ............ %d\n" % (i, i), 20000),
    "words": lambda: counted(b"python pretrain_gpt.py", lambda i: " --name-%d %d" % (i, i), 20000),
    "names": lambda: counted(b"[", lambda i: EVENT % ("," * (i > 0), i, i, i % 8, i % 5), 8000),
    "streams": lambda: counted(b"[", lambda i: EVENT % ("," * (i > 0), 1, i, i % 8, i), 8000),
}


def run(tool, reader, make, megabytes):
    """Status, seconds of CPU time, peak in MB, what was said."""
    process = subprocess.Popen([tool, reader, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    left = megabytes << 20
    try:
        for block in make():
            process.stdin.write(block[:left])
            left -= len(block)
            if left <= 0:
                break
        process.stdin.close()
    except BrokenPipeError:
        pass
    said = process.stdout.read().decode(errors="replace").strip()
    _, status, usage = os.wait4(process.pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, said


def main():
    tool = sys.argv[1]
    megabytes = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    failed = 0
    for reader in sys.argv[3:] or ("lint", "report", "doctor", "profile"):
        for name, make in INPUTS.items():
            begin = time.monotonic()
            status, seconds, peak, said = run(tool, reader, make, megabytes)
            told = status in (0, 1) or re.search(r"(line|byte|lines) ?\d|:\d+|\d+ lines|MiB|was found|more than", said)
            fine = status in (0, 1, 3, 4, 5) and told and peak < PEAK_MB
            failed += not fine
            print("%-8s %-11s %s  status %d  %7.2f s CPU  %6.1f s  %6.1f MB  %s" %
                  (reader, name, "ok  " if fine else "FAIL", status, seconds, time.monotonic() - begin, peak,
                   said.splitlines()[-1][:150] if said else ""), flush=True)
    return 1 if failed else 0


sys.exit(main())
