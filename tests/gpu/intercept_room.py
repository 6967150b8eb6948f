#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the exchanges of a rank stand that does not go on: the words of the interposer's rooms, which
lie in this process's memory.

    watch = Watch(4, "random")     says so on the output when no tick() came for 4 seconds
    watch.tick(); watch.stop()

The layout is that of lib/preload/intercept/agree.h; tests/unit/test_intercept.sh compares them.
"""
import struct
import sys
import threading
import time

RANKS, RING = 16, 16
LAYOUT = {"pair": 8192, "pair_size": 1984, "room_size": 516096, "taken": 0, "arrived": 64, "written": 128,
          "message": 136, "message_size": 112, "ticket": 104}
STATES = "nothing", "offered", "taken", "refused"


def rooms():
    """The bytes of every room of this process."""
    found = []
    with open("/proc/self/maps") as lines, open("/proc/self/mem", "rb", 0) as memory:
        for line in lines:
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            if "/ep-overlap-" in line and last - first >= LAYOUT["room_size"]:
                memory.seek(first)
                found.append(memory.read(LAYOUT["room_size"]))
    return found


def word(room, at):
    return struct.unpack_from("<I", room, at)[0]


def pairs(room):
    """One line for each direction in which anything was spoken of."""
    for sender in range(RANKS):
        for receiver in range(RANKS):
            at = LAYOUT["pair"] + (sender * RANKS + receiver) * LAYOUT["pair_size"]
            ring = [at + LAYOUT["message"] + i * LAYOUT["message_size"] for i in range(RING)]
            last = max(ring, key=lambda m: word(room, m))
            if sender == receiver or word(room, last) == 0:
                continue
            taken = [m for m in ring if word(room, m) & 3 == 2]
            ready = max(taken, key=lambda m: word(room, m)) if taken else last
            yield ("%d to %d: message %d is %s; of those that were taken the last is %d, to be ready with ticket %d: "
                   "ready %d, written %d" % (
                       sender, receiver, word(room, last) >> 2, STATES[word(room, last) & 3], word(room, ready) >> 2,
                       word(room, ready + LAYOUT["ticket"]), word(room, at + LAYOUT["arrived"]),
                       word(room, at + LAYOUT["written"])))


def tell(what):
    for i, room in enumerate(rooms()):
        for line in pairs(room):
            print("STAGE %s stands: room %d, closed %d, %s" % (what, i, word(room, 8), line), flush=True)


class Watch:
    def __init__(self, seconds, what):
        self.seconds, self.what, self.last, self.stopped = seconds, what, time.time(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while not self.stopped.wait(0.2):
            if time.time() - self.last > self.seconds:
                tell(self.what)
                return

    def tick(self):
        self.last = time.time()

    def stop(self):
        self.stopped.set()


if __name__ == "__main__":
    print(*LAYOUT.values())
    sys.exit(0)
