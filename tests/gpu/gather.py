#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up the random calls of several runs of intercept.py: of each library by itself, a seed once.

    gather.py FILE...      what the runs printed; status 1 where a call was wrong or there is none
"""
import sys


def gather(paths):
    """Random calls of each library and case: a seed counts once, with its longest run."""
    best, bad = {}, 0
    for path in paths:
        with open(path, errors="replace") as lines:
            for line in lines:
                words = dict(w.split("=", 1) for w in line.split()[1:] if "=" in w) if line.startswith("result ") else {}
                if "calls" in words and words["phase"].startswith("random,accelerate"):
                    key = words["library"], words["phase"].replace(",", " ", 1), words["seed"]
                    entry = max(best.get(key, (0, 0)), (int(words["calls"]), int(words["wrong"])))
                    best[key], bad = entry, bad + int(words["wrong"])
    for library in sorted({key[0] for key in best}):
        mine = {key[1:]: calls for key, calls in best.items() if key[0] == library}
        for (phase, seed), (calls, wrong) in sorted(mine.items()):
            print("library %s: %s, seed %s: %d calls, %d wrong" % (library, phase, seed, calls, wrong))
        print("result gathered library=%s calls=%d wrong=%d" % (
            library, sum(c for c, _ in mine.values()), sum(w for _, w in mine.values())))
    return 1 if bad or not best else 0


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    sys.exit(gather(sys.argv[1:]))
