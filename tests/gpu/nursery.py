# SPDX-License-Identifier: Apache-2.0
"""Ranks by fork from a program that has imported torch once and has not touched the GPU: what takes
seconds for each process is done once for all.

    nursery = Nursery([program, "--nursery"], environment)    in the program: nursery.serve(run)
    child = nursery.start({"RANK": "0", ...}, job)            run(job) in a child with that environment
    child.poll(), kill(), returncode                          as of a Popen
    child.output()                                            what it said up to now; errors in it, or apart

Process: the same for a program of its own. Output goes to files: nobody waits for a reader, and what was said is
there when somebody is killed.
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

from launch import AFTER


class Child:
    def __init__(self, path):
        self.path, self.returncode = path, None

    def _read(self, what):
        try:
            with open(self.path + what, errors="replace") as f:
                return f.read()
        except OSError:
            return ""

    def poll(self):
        status = self._read(".status")
        if self.returncode is None and status.endswith("\n"):
            self.returncode = int(status)
        return self.returncode

    def output(self):
        """(its output up to now, its errors where they are apart)"""
        return self._read(".out"), self._read(".err")

    def said(self):
        return "".join(self.output())

    def kill(self):
        pid = self._read(".pid")
        if self.poll() is None and pid.endswith("\n"):
            os.kill(int(pid), signal.SIGKILL)


class Process(Child):
    """`command` with output in files beside `path` (None: in a new folder)."""

    def __init__(self, command, environment, path=None, apart=False):
        super().__init__(path or os.path.join(tempfile.mkdtemp(prefix="ep-process-"), "rank"))
        out = _file(self.path + ".out")
        errors = _file(self.path + ".err") if apart else subprocess.STDOUT
        self.job = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        os.close(out)
        if apart:
            os.close(errors)

    def poll(self):
        self.returncode = self.job.poll()
        return self.returncode

    def kill(self):
        self.job.kill()


def ended(jobs, limit, after=AFTER):
    """Waits for all, `limit` seconds at most, and `after` more at most once one has failed; those that had to
    be killed."""
    until, failed = time.time() + limit, False
    while any(job.poll() is None for job in jobs) and time.time() < until:
        if not failed and any(job.poll() for job in jobs):
            failed, until = True, min(until, time.time() + after)
        time.sleep(0.01)
    late = [job for job in jobs if job.poll() is None]
    for job in late:
        job.kill()
    gone = time.time() + 5
    while any(job.poll() is None for job in late) and time.time() < gone:
        time.sleep(0.01)
    return late


class Nursery:
    def __init__(self, command, environment):
        self.folder = tempfile.mkdtemp(prefix="ep-nursery-")
        self.count, self.lock = 0, threading.Lock()
        self.server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)

    def start(self, environment, job, apart=False):
        with self.lock:
            self.count += 1
            path = os.path.join(self.folder, str(self.count))
            self.server.stdin.write(json.dumps([path, environment, job, apart]) + "\n")
            self.server.stdin.flush()
        return Child(path)

    def end(self):
        self.server.stdin.close()
        self.server.wait()
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))
        os.rmdir(self.folder)


def _write(path, text):
    with open(path + ".new", "w") as f:
        f.write(text)
    os.rename(path + ".new", path)


def _file(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def _child(path, environment, job, apart, run):
    os.dup2(_file(path + ".out"), 1)
    os.dup2(_file(path + ".err") if apart else 1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = 1
    try:
        status = run(job)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def serve(run):
    """The program's side: a child for each line, until there are no more, and then those who are left
    are killed.  In a child this returns its status, for the program to end by; else None."""
    running, pipe = {}, sys.stdin.fileno()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # (goes to all of a group; the end of the pipe ends this one)
    os.set_blocking(pipe, False)
    rest, open_ = b"", True
    while open_ or running:
        try:
            more = os.read(pipe, 65536) if open_ else b""
            open_, rest = open_ and more != b"", rest + more
        except BlockingIOError:
            pass
        *lines, rest = rest.split(b"\n")
        for line in lines:
            path, environment, job, apart = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return _child(path, environment, job, apart, run)
            running[pid] = path
            _write(path + ".pid", "%d\n" % pid)
        for pid in [] if open_ else running:
            os.kill(pid, signal.SIGKILL)
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                _write(running.pop(pid) + ".status", "%d\n" % os.waitstatus_to_exitcode(status))
        time.sleep(0.005)
    return None
