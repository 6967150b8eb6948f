# SPDX-License-Identifier: Apache-2.0
"""Whether most is carried with the variables that the plugin itself sets and with one GPU for each rank (not
both: there NCCL is faster, and the reason is told): a part of intercept.py's ranks, and what its driver reads of their last words."""
import re
import time

from intercept_speed import MB, median, say

ONE_GPU = "ONE_GPU"  # of a case's environment: each rank sees its own GPU alone
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PLUGIN = dict(SEGMENTS, TORCH_NCCL_HIGH_PRIORITY="1", NCCL_GRAPH_REGISTER="0", NVTE_FWD_LAYERNORM_SM_MARGIN="16",
              NVTE_BWD_LAYERNORM_SM_MARGIN="16")
SETTINGS = [{}, SEGMENTS, PLUGIN, dict({ONE_GPU: "1"}, **PLUGIN), {ONE_GPU: "1"}]
TOLD = {"EP_OVERLAP_RECORD": "1"}  # rank 0 says at its end what was carried
LINE = re.compile(r"NCCL messages of rank 0: ([0-9.]+) MB in .*; ([0-9.]+) MB carried by copy engines(.*)")


def cases():
    return [("accelerate", [["carries", [[4, 64, 256], 20]]], 40, dict(setting, **TOLD)) for setting in SETTINGS]


def environment(extra, rank):
    """The variables of one rank."""
    return dict({k: v for k, v in extra.items() if k != ONE_GPU},
                **({"CUDA_VISIBLE_DEVICES": str(rank)} if ONE_GPU in extra else {}))


def needs_own_process(extra):
    """torch, or the driver, may have read these when they were loaded."""
    return bool({"PYTORCH_CUDA_ALLOC_CONF", ONE_GPU} & set(extra))


def part_carries(r, sizes, turns):
    """Even and uneven exchanges in memory that the allocator gives: the same buffers, and such as come, go
    and are given back to the driver. All that arrives is right."""
    torch, dist = r.torch, r.dist
    wrong, n = torch.zeros((), dtype=torch.int64, device=r.device), r.ranks
    for mb in sizes:
        for uneven in (False, True):
            times, each = [], int(mb * MB) // 8 // n
            share = [each + (each // 4 if uneven else 0) * (1 if p % 2 else -1) for p in range(n)]
            for turn in range(turns):
                base = 10**6 * turn
                send = torch.cat([base + torch.arange(share[p], device=r.device) + 1000 * r.rank + p for p in range(n)])
                recv = torch.empty(n * share[r.rank], dtype=torch.int64, device=r.device)
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.synchronize()
                start = time.perf_counter()
                if uneven:
                    dist.all_to_all_single(recv, send, [share[r.rank]] * n, share)
                else:
                    dist.all_to_all_single(recv, send)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
                want = base + r.rank + torch.arange(share[r.rank], device=r.device)
                for s in range(n):
                    wrong += torch.ne(recv.view(n, -1)[s], want + 1000 * s).any()
                del send, recv, want
                if turn % 5 == 4 and uneven:
                    torch.cuda.empty_cache()
            if r.rank == 0:
                say(carries="uneven" if uneven else "even", mb=mb, us=round(1e6 * median(times)),
                    us_least=round(1e6 * min(times)))
    activities(r, sizes[-1])
    return wrong.item() == 0


def activities(r, mb, turns=6):
    """What the GPU did for even exchanges, and how long each took: whether an engine or a kernel, and which part
    is the slow one."""
    torch, dist, activity = r.torch, r.dist, r.torch.profiler.ProfilerActivity
    send = torch.zeros(int(mb * MB) // 8, dtype=torch.int64, device=r.device)
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity.CUDA]) as profile:
        for _ in range(turns):
            dist.barrier()
            torch.cuda.synchronize()
            dist.all_to_all_single(recv, send)
            torch.cuda.synchronize()
    took = {}
    for event in profile.events():
        if str(event.device_type).endswith("CUDA"):
            took.setdefault(event.name[:40], []).append(event.time_range.elapsed_us())
    if r.rank == 0:
        say(mb=mb, activities={name: [len(us), round(median(us), 1)] for name, us in took.items()})


def wrongly_carried(name, said):
    """Of what rank 0 of such a case said: None, or what is wrong."""
    unseen = ONE_GPU in name and "PYTORCH" in name
    lines = [m for m in map(LINE.search, said) if m]
    if not lines:
        return "rank 0 does not tell what it carried"
    whole, carried, rest = float(lines[-1].group(1)), float(lines[-1].group(2)), lines[-1].group(3)
    if unseen:
        return None if carried == 0 and "cannot be mapped" in rest else "%.1f MB were carried%s" % (carried, rest)
    return None if carried > whole / 2 else "%.1f MB of %.1f MB were carried%s" % (carried, whole, rest)
