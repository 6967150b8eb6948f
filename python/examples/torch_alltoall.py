#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A loop of all-to-alls as a PyTorch program has them; it knows nothing of ep-overlap.

    srun -N1 -n8 --gpus=8 --ep-overlap=on python torch_alltoall.py [--sizes 4,64] [--loops 20]

Under --ep-overlap=on the interposer carries what it can, under off everything is NCCL's. Every
element that arrives is compared with what its sender sent. Without GPUs the ranks use gloo, and
there is nothing to accelerate.

Prints, from rank 0, one line for each size and kind: the median of the slowest rank.
"""
import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist


def ranks_of_step():
    """torch.distributed's variables from srun's, where torchrun did not set them. A program that a batch script starts
    itself is none of a step's tasks: it is alone, as on a machine without Slurm."""
    task = "SLURM_STEP_NUM_TASKS" in os.environ
    for ours, slurms, alone in (("RANK", "SLURM_PROCID", 0), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", 1),
                                ("LOCAL_RANK", "SLURM_LOCALID", 0)):
        os.environ.setdefault(ours, os.environ[slurms] if task else str(alone))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")


def element(sender, receiver, count, device):
    """What `sender` sends to `receiver`: a ramp that tells both and the place."""
    return torch.arange(count, device=device, dtype=torch.float32) + 1000.0 * sender + receiver


def splits(kind, total, rank, ranks):
    """Elements from each rank to each: even, or sizes like those of a router."""
    if kind == "even":
        return [[total // ranks] * ranks for _ in range(ranks)]
    weights = [[1 + (3 * s + 5 * d) % 7 for d in range(ranks)] for s in range(ranks)]
    return [[total * w // sum(row) for w in row] for row in weights]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1,4,16,64", help="MB that a rank sends in all, by commas")
    parser.add_argument("--loops", type=int, default=20)
    options = parser.parse_args()
    ranks_of_step()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if os.environ.get("RANK") == "0":
        print(f"torch {torch.__version__}: {os.environ.get('WORLD_SIZE')} ranks meet", flush=True)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{ranks} ranks, rank 0 on {torch.cuda.get_device_name() if gpu else 'the CPU'}", flush=True)
    sync = torch.cuda.synchronize if gpu else (lambda: None)
    wrong = torch.zeros(1, device=device)
    for mb in (float(s) for s in options.sizes.split(",")):
        for kind in ("even", "uneven"):
            table = splits(kind, int(mb * 1e6) // 4, rank, ranks)
            send = torch.cat([element(rank, d, n, device) for d, n in enumerate(table[rank])])
            come = [table[s][rank] for s in range(ranks)]
            want = torch.cat([element(s, rank, n, device) for s, n in enumerate(come)])
            recv, times = torch.empty_like(want), []
            for loop in range(options.loops + 3):
                recv.zero_()
                dist.barrier()
                sync()
                start = time.perf_counter()
                dist.all_to_all_single(recv, send, come, table[rank])
                sync()
                times.append(time.perf_counter() - start)
                wrong += (recv != want).any()
            mine = torch.tensor(times[3:], device=device)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            if rank == 0:
                ms = 1e3 * statistics.median(mine.tolist())
                remote = 4e-6 * (sum(table[0]) - table[0][0])
                print(f"all-to-all {mb:7.1f} MB {kind:6s} {ms:8.3f} ms {remote / ms:7.1f} GB/s to other ranks", flush=True)
    dist.all_reduce(wrong)
    if rank == 0:
        print("every element as its sender sent it" if wrong.item() == 0 else "WRONG elements arrived", flush=True)
    status = int(wrong.item() != 0)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
