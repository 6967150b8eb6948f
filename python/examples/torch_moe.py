#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small mixture-of-experts model in PyTorch, experts spread over the ranks.

    srun -N1 -n8 --gpus=8 --ep-overlap=on python torch_moe.py [--layer torch|ep_overlap] [--steps 50]

--layer torch       all_to_all_single, as frameworks have it: knows nothing of ep-overlap; the interposer
                    serves it under --ep-overlap=on
--layer ep_overlap  the library itself (python/ep_overlap): dispatch, experts and combine overlap, weight
                    gradients are delayed under --delay-wgrad

Prints iteration lines as Megatron-LM does, so `ep-overlap report off.log on.log` compares two runs.
Without GPUs it trains on the CPU, over gloo or the library's host engine: the way through the script, not a
measurement.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F


def ranks_of_step():
    """torch.distributed's variables from srun's, where torchrun did not set them. A program that a batch script starts
    itself is none of a step's tasks: it is alone, as on a machine without Slurm."""
    task = "SLURM_STEP_NUM_TASKS" in os.environ
    for ours, slurms, alone in (("RANK", "SLURM_PROCID", 0), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", 1),
                                ("LOCAL_RANK", "SLURM_LOCALID", 0)):
        os.environ.setdefault(ours, os.environ[slurms] if task else str(alone))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")


class Exchange(torch.autograd.Function):
    """all_to_all_single with a gradient: the same the other way."""

    @staticmethod
    def forward(ctx, x, to, come):
        ctx.splits = to, come
        out = x.new_empty((sum(come), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), come, to)
        return out

    @staticmethod
    def backward(ctx, grad):
        to, come = ctx.splits
        out = grad.new_empty((sum(to), *grad.shape[1:]))
        dist.all_to_all_single(out, grad.contiguous(), to, come)
        return out, None, None


class TorchExperts(torch.nn.Module):
    """y [T, H] of x [T, H], experts [T, K], weights [T, K]: permute, all-to-all, experts, and back.

    Each run gives the same bits: rows go home by a permutation and are summed in the order of top_k. (index_add
    adds in the order in which the GPU's threads come.)"""

    def __init__(self, a, device, dtype):
        super().__init__()
        self.ranks, self.local = dist.get_world_size(), a.experts // dist.get_world_size()
        self.w1 = torch.nn.Parameter(torch.randn(self.local, 2 * a.ffn, a.hidden, device=device, dtype=dtype) * a.hidden**-0.5)
        self.w2 = torch.nn.Parameter(torch.randn(self.local, a.hidden, a.ffn, device=device, dtype=dtype) * a.ffn**-0.5)

    def forward(self, x, experts, weights):
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.bincount(flat, minlength=self.ranks * self.local)
        everyone = [torch.empty_like(counts) for _ in range(self.ranks)]
        dist.all_gather(everyone, counts)
        table = torch.stack(everyone).view(self.ranks, self.ranks, self.local)  # [from][to][expert]
        to = table[dist.get_rank()].sum(1).tolist()
        mine = table[:, dist.get_rank()]
        come, pieces = mine.sum(1).tolist(), mine.flatten().tolist()
        rows = Exchange.apply(x[order // experts.shape[1]], to, come).split(pieces)  # by (source, expert)
        out = [None] * len(pieces)
        for e in range(self.local):
            at = [s * self.local + e for s in range(self.ranks)]
            z = torch.cat([rows[i] for i in at]) @ self.w1[e].t()
            gate, up = z.chunk(2, -1)
            done = ((F.silu(gate) * up) @ self.w2[e].t()).split([pieces[i] for i in at])
            for i, part in zip(at, done):
                out[i] = part
        home = Exchange.apply(torch.cat(out), come, to).index_select(0, back).view(*experts.shape, -1)
        return (home * weights[..., None].to(home.dtype)).sum(1)


def library_experts(a, dtype):
    """The same layer by the library. Its gradients are there after flush()."""
    import ep_overlap

    group = ep_overlap.Group(dist.group.WORLD)
    return group, ep_overlap.MoELayer(group, hidden=a.hidden, ffn=a.ffn, experts=a.experts, top_k=a.top_k,
                                      max_tokens=a.tokens, dtype=dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", choices=("torch", "ep_overlap"), default="torch")
    for name, value in (("steps", 50), ("tokens", 4096), ("hidden", 1024), ("ffn", 512), ("experts", 32), ("top_k", 4)):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    a = parser.parse_args()
    ranks_of_step()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    if os.environ.get("RANK") == "0":
        print(f"torch {torch.__version__}: {os.environ.get('WORLD_SIZE')} ranks meet", flush=True)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if a.experts % ranks:
        parser.error(f"--experts {a.experts} is no multiple of {ranks} ranks")

    if rank == 0:
        print(f"{ranks} ranks, rank 0 on {torch.cuda.get_device_name() if gpu else 'the CPU'}: {a.experts} experts, layer {a.layer}",
              flush=True)
    torch.manual_seed(1)  # router, head and task: the same on all ranks
    router = torch.nn.Linear(a.hidden, a.experts, bias=False, device=device)
    head = torch.randn(a.hidden, a.hidden, device=device) * a.hidden**-0.5  # the function to be learnt
    torch.manual_seed(2 + rank)  # experts and tokens: each rank its own
    group = None
    if a.layer == "torch":
        experts = TorchExperts(a, device, dtype)
    else:
        group, experts = library_experts(a, dtype)
    optimizer = torch.optim.Adam([router.weight, experts.w1, experts.w2], lr=1e-3)
    for step in range(1, a.steps + 1):
        start = time.perf_counter()
        x = torch.randn(a.tokens, a.hidden, device=device)
        want = torch.tanh(x @ head)
        weights, chosen = torch.softmax(router(x), -1).topk(a.top_k, -1)
        y = experts(x.to(dtype), chosen, weights.float())
        loss = F.mse_loss(y.float(), want)
        loss.backward()
        if group is not None:
            experts.flush()  # delayed weight gradients: complete from here on
        dist.all_reduce(router.weight.grad)  # the router is the same everywhere; experts are one rank's alone
        router.weight.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        value = shown.item() / ranks
        if rank == ranks - 1:
            ms = 1e3 * (time.perf_counter() - start)
            print(f" iteration {step:8d}/{a.steps:8d} | consumed samples: {step * ranks:12d} | elapsed time per iteration (ms): "
                  f"{ms:.1f} | global batch size: {ranks:5d} | lm loss: {value:.6E} |", flush=True)
    if group is not None:
        del y, loss
        experts.close()
        group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
