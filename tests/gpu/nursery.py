# SPDX-License-Identifier: Apache-2.0
"""Ranks by fork from a program that has imported torch once and has not touched the GPU: what takes
seconds for each process is done once for all.

    nursery = Nursery([program, "--nursery"], environment)    in the program: nursery.serve(run)
    child = nursery.start({"RANK": "0", ...}, job)            run(job) in a child with that environment
    child.communicate(timeout), poll(), kill(), returncode    as of a Popen; errors are in the output, or apart
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time


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

    def said(self):
        """Its output up to now."""
        return self._read(".out") + self._read(".err")

    def kill(self):
        pid = self._read(".pid")
        if self.poll() is None and pid.endswith("\n"):
            os.kill(int(pid), signal.SIGKILL)

    def communicate(self, timeout=30):
        until = time.time() + timeout
        while self.poll() is None:
            if time.time() > until:
                raise subprocess.TimeoutExpired(self.path, timeout)
            time.sleep(0.01)
        return self._read(".out"), self._read(".err")


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
