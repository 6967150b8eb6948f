#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws scaling.sh's figures: scaling_plot.py [--cpu] scaling.tsv scaling.svg
(needs matplotlib).  One panel a sweep, both axes logarithmic; the thin line is what grows
linearly.  --cpu: CPU time of a rank instead of the slowest rank's time, for a machine with
fewer cores than ranks.  (With many cores, waits spin: there CPU time is waiting, too.)
"""
import sys

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

SWEEPS = {"ranks": 2, "experts": 3, "tokens": 4}
COSTS = [("plan", "-"), ("pass", "--")]
COLORS = {"alltoall": "#1f5fa8", "flex": "#c05a1c"}


def read(path):
    with open(path, encoding="ascii") as f:
        return [line.rstrip("\n").split("\t") for line in f]


def draw(axis, rows, sweep, column):
    at = SWEEPS[sweep]
    for dispatcher, color in COLORS.items():
        mine = [r for r in rows if r[0] == sweep and r[1] == dispatcher]
        x = [int(r[at]) for r in mine]
        for i, (name, style) in enumerate(COSTS):
            y = [float(r[column + i]) for r in mine]
            axis.plot(x, y, style, color=color, marker="o", markersize=3, linewidth=1.2,
                      label=f"{dispatcher} {name}")
    low = min(float(r[column]) for r in rows if r[0] == sweep)
    axis.plot([x[0], x[-1]], [low, low * x[-1] / x[0]], color="#999999", linewidth=0.8,
              label="linear")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(x, [str(v) for v in x])
    axis.minorticks_off()
    first = next(r for r in rows if r[0] == sweep)
    fixed = ", ".join(f"{first[c]} {s}" for s, c in SWEEPS.items() if s != sweep)
    axis.set_title(f"against {sweep} ({fixed})", fontsize=9)
    axis.set_xlabel(sweep + (" of each rank" if sweep == "tokens" else ""), fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(True, linewidth=0.3)


def main():
    cpu = sys.argv[1] == "--cpu"
    rows = read(sys.argv[1 + cpu])
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    matplotlib.rcParams["svg.hashsalt"] = "scaling"
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.4))
    for axis, sweep in zip(axes, SWEEPS):
        draw(axis, rows, sweep, 8 if cpu else 5)
    axes[0].set_ylabel("CPU time of a rank, us" if cpu else "us, the slowest rank", fontsize=8)
    axes[0].legend(fontsize=6, frameon=False)
    figure.tight_layout()
    figure.savefig(sys.argv[2 + cpu], metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
