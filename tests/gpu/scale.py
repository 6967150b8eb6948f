#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of scale.sh's reports:
    scale.py [--svg FILE] REPORT.json...            (a picture needs matplotlib)

For each workload, EP and arm: forward over its floor, efficiency, exposed time, what the
serial arm's rows reached of the peer copy of the same run, and the bytes that a token sent
beside those that theory gives.
"""
import argparse
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench"))
import model  # noqa: E402

HEAD = ("| workload | EP | arm | forward ms | T / floor | x | efficiency | exposed ms | f+b ms | x "
        "| efficiency | of peer copy | bytes a token, over theory |")


def load(paths):
    runs = []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            run = json.load(f)
        if run.get("schema") != "ep-overlap-bench/1":
            raise model.Wrong(f"{path}: not a report of ep-overlap bench --json")
        runs.append(run)
    return sorted(runs, key=lambda r: (r["workload"], r["ranks"]))


def theory(run, arm):
    """Bytes that a token sends to other ranks, one way."""
    p = model.Point(run, arm, run["workload"])
    return p.wire / p.tokens


def measured(run, arm):
    """The same, from the counters of one forward and backward of rank 0."""
    return arm["dispatch_bytes"] / 2 / run["tokens"]


def of_copy(run, arm):
    """Rows over the time that any of them were on their way, over the copy's rate."""
    took = arm["union_comm_ns"]
    sent = arm["dispatch_bytes"] + arm["combine_bytes"]
    if arm["overlap"] or took == 0 or sent == 0 or run["copy_of"] != "peer copy":
        return "-"
    return f"{sent / took / run['copy_gbs']:.2f}"


def number(value):
    return "-" if value is None else f"{value:.2f}"


def line(run, arm):
    f, b = arm["forward"], arm["forward_backward"]
    over = measured(run, arm) / theory(run, arm) if run["ranks"] > 1 else None
    return (f"| {run['workload']} | {run['ranks']} | {arm['name']} ({arm['chunks']}) | "
            f"{f['ms']['median']:.3f} | {f['ms']['median'] / f['floor_ms']:.2f} | "
            f"{f['speedup']['median']:.2f} | {number(f['efficiency'])} | {f['exposed_ms']:.3f} | "
            f"{b['ms']['median']:.3f} | {b['speedup']['median']:.2f} | {number(b['efficiency'])} | "
            f"{of_copy(run, arm)} | {measured(run, arm):.0f}, {number(over)} |")


def table(runs):
    for run in runs:
        if run["ranks_share"]:
            on = f"{run['gpus']} GPU(s)" if run["gpus"] > 0 else f"{run['cores']} cores"
            print(f"STAND-IN: {run['workload']} at EP {run['ranks']} on {on}: ranks share them; its "
                  "times say nothing about a machine with one GPU for each")
    print(HEAD + "\n|" + "---|" * 13)
    for run in runs:
        for arm in run["arms"]:
            print(line(run, arm) + (" STAND-IN |" if run["ranks_share"] else ""))
        if not all(arm["identical"] for arm in run["arms"]):
            raise model.Wrong(f"{run['workload']} at EP {run['ranks']}: an arm has not the bits of "
                              "its serial one")


def picture(runs, path):
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scale"})
    workloads = sorted({r["workload"] for r in runs})
    figure, axes = pyplot.subplots(2, len(workloads), figsize=(5 * len(workloads), 6),
                                   squeeze=False)
    for column, name in enumerate(workloads):
        mine = [r for r in runs if r["workload"] == name]
        ep = [r["ranks"] for r in mine]
        note = " (STAND-IN: ranks share GPUs)" if any(r["ranks_share"] for r in mine) else ""
        for arm in [a["name"] for a in mine[0]["arms"] if not a["delay_wgrad"]]:
            of = [next(a for a in r["arms"] if a["name"] == arm) for r in mine]
            axes[0][column].plot(ep, [a["forward"]["ms"]["median"] for a in of], marker="o",
                                 label=arm)
            if not of[0]["overlap"]:
                axes[1][column].plot(ep, [measured(r, a) for r, a in zip(mine, of)], "o",
                                     label=f"{arm.split()[0]}, measured")
                axes[1][column].plot(ep, [theory(r, a) for r, a in zip(mine, of)],
                                     label=f"{arm.split()[0]}, theory")
        axes[0][column].set_title(f"{name}: forward of a layer, ms{note}", fontsize=9)
        axes[1][column].set_title(f"{name}: bytes that a token sends, one way", fontsize=9)
        for row in (0, 1):
            axes[row][column].set_xscale("log", base=2)
            axes[row][column].set_xticks(ep, [str(e) for e in ep])
            axes[row][column].set_ylim(bottom=0)
            axes[row][column].set_xlabel("EP", fontsize=8)
            axes[row][column].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main():
    ap = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--svg")
    ap.add_argument("reports", nargs="+")
    args = ap.parse_args()
    try:
        runs = load(args.reports)
        table(runs)
        if args.svg:
            picture(runs, args.svg)
    except ImportError as e:
        print(f"scale.py: no picture: {e}", file=sys.stderr)
    except (model.Wrong, OSError, ValueError, KeyError) as e:
        print(f"scale.py: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
