# SPDX-License-Identifier: Apache-2.0
"""What intercept.py times: parts of its ranks, each printing what rank 0 saw."""
import json
import struct
import time

MB = 1 << 20


def say(**fields):
    print("RESULT " + json.dumps(fields), flush=True)


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def part_small(r, turns):
    """What the interposer costs where it carries nothing: microseconds of the CPU until a call returns, and
    from call to result, of messages too small for it and of collectives; the least of ten medians."""
    torch, dist, n = r.torch, r.dist, r.ranks
    one, many = torch.ones(n * 256, device=r.device), torch.ones(n * 16384, device=r.device)
    kinds = {
        "even_1k": lambda: dist.all_to_all_single(torch.empty_like(one), one),
        "uneven_1k": lambda: dist.all_to_all_single(torch.empty_like(one), one, [256] * n, [256] * n),
        "uneven_64k": lambda: dist.all_to_all_single(torch.empty_like(many), many, [16384] * n, [16384] * n),
        "all_reduce": lambda: dist.all_reduce(one),
    }
    for name, call in kinds.items():
        issue, whole = [], []
        for _ in range(10):
            dist.barrier()
            torch.cuda.synchronize()
            a, b = [], []
            for _ in range(turns):
                start = time.perf_counter()
                call()
                a.append(time.perf_counter() - start)
                torch.cuda.synchronize()
                b.append(time.perf_counter() - start)
            issue.append(1e6 * median(a))
            whole.append(1e6 * median(b))
        if r.rank == 0:
            say(small=name, ranks=n, issue_us=round(min(issue), 2), issue_median_us=round(median(issue), 2),
                whole_us=round(min(whole), 1), whole_median_us=round(median(whole), 1))
    return True


def part_time(r, sizes):
    """all_to_all_single, total MB per rank, even: median of single calls and of ten in a row."""
    times(r, sizes)
    return True


def times(r, sizes, uneven=False):
    """uneven: a rank keeps 3/8 of its bytes and sends 5/8; torch
    makes sends and receives of it, of an even one ncclAlltoAll."""
    torch, dist = r.torch, r.dist
    for mb in sizes:
        n = int(mb * MB) // 4 // 8 * 8
        share = [3 * n // 8, 5 * n // 8] if uneven else [n // 2, n // 2]
        to = share if r.rank == 0 else share[::-1]  # of two ranks: what comes has the same sizes
        x, y = torch.ones(n, device=r.device), torch.empty(n, device=r.device)

        def exchange():
            if uneven:
                dist.all_to_all_single(y, x, to, to)
            else:
                dist.all_to_all_single(y, x)

        for _ in range(5):
            exchange()
        one, ten = [], []
        for _ in range(20):
            dist.barrier()
            torch.cuda.synchronize()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400000)  # the host issues while the device waits
            a.record()
            exchange()
            b.record()
            torch.cuda.synchronize()
            one.append(a.elapsed_time(b) * 1000)
        for _ in range(5):
            dist.barrier()
            torch.cuda.synchronize()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1000000)
            a.record()
            for _ in range(10):
                exchange()
            b.record()
            torch.cuda.synchronize()
            ten.append(a.elapsed_time(b) * 100)
        if r.rank == 0:
            say(exchange="uneven" if uneven else "even", mb=mb, us=round(median(one), 1), us_least=round(min(one), 1),
                us_of_ten=round(median(ten), 1), gbs=round(to[1] * 4 / median(ten) / 1e3, 1))


def part_gemm(r, mb):
    """20 exchanges beside 20 GEMMs of 8192 x 4096 x 4096."""
    beside_gemms(r, mb)
    return True


def beside_gemms(r, mb):
    torch, dist = r.torch, r.dist
    n = int(mb * MB) // 4
    x, y = torch.ones(n, device=r.device), torch.empty(n, device=r.device)
    a = torch.randn(8192, 4096, device=r.device, dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device=r.device, dtype=torch.bfloat16)
    c = torch.empty(8192, 4096, device=r.device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(priority=-1)

    def run(exchanges, gemms):
        dist.barrier()
        torch.cuda.synchronize()
        e = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda._sleep(1000000)
        start = torch.cuda.Event()
        start.record()
        side.wait_event(start)
        e[2].record()
        with torch.cuda.stream(side):
            e[0].record()
        for i in range(20):
            if exchanges:
                with torch.cuda.stream(side):
                    dist.all_to_all_single(y, x)
            if gemms:
                torch.mm(a, b, out=c)
        with torch.cuda.stream(side):
            e[1].record()
        e[3].record()
        torch.cuda.synchronize()
        return e[0].elapsed_time(e[1]), e[2].elapsed_time(e[3])

    for _ in range(2):
        run(True, True)
    both = [run(True, True) for _ in range(9)]
    alone = [run(True, False)[0] for _ in range(5)]
    plain = [run(False, True)[1] for _ in range(5)]
    if r.rank == 0:
        remote = 20 * mb * MB * (r.ranks - 1) / r.ranks / 1e6
        say(mb=mb, gbs_beside=round(remote / median([t[0] for t in both]), 1),
            gbs_alone=round(remote / median(alone), 1),
            gemm_ms_beside=round(median([t[1] for t in both]), 2),
            gemm_ms_alone=round(median(plain), 2))


def part_layer(r, steps):
    """The eager MoE layer that bench_torch.py times with a training step around it, as a program has it that
    knows nothing of us: time of a step; of its all-to-alls, each behind a barrier; the same where the
    CPU is ahead of the GPU; and the losses to the bit."""
    layer = Trained(r)
    layer.train(steps, None)
    layer.train(steps, "barrier")
    layer.train(steps // 2, "ahead")
    return True


def part_speed(r, sizes, mb, steps):
    """All that is timed, in one pair of processes."""
    times(r, sizes)
    times(r, sizes, uneven=True)
    beside_gemms(r, mb)
    part_layer(r, steps)
    return True


class Trained:
    """Workload Q's layer, trained in the same bits in every run."""

    def __init__(self, r):
        from eager_layer import EagerLayer

        self.r, self.how, self.spans, self.losses = r, None, [], []
        self.token = r.torch.zeros(1, device=r.device)
        self.layer = EagerLayer(r.rank, r.ranks, r.device, tokens=4096, hidden=2048, ffn=768, experts=128, top_k=8,
                                move=self.move)

    def move(self, out, rows, come, to):
        """`how`: None, as programs do it; "barrier": both ranks are here when the time begins; "ahead":
        the GPU has other work until all is issued."""
        torch, dist = self.r.torch, self.r.dist
        timed = self.how is not None and rows.dim() > 1
        if timed:
            if self.how == "ahead":
                torch.cuda._sleep(1000000)
            dist.all_reduce(self.token)
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
        start = time.perf_counter()
        dist.all_to_all_single(out, rows, come, to)
        call = time.perf_counter() - start
        if timed:
            b.record()
            other = to[1 - self.r.rank] * rows.shape[1] * rows.element_size()
            self.spans.append((a, b, call * 1e6, other / 1e6))

    def step(self):
        layer, torch = self.layer, self.r.torch
        layer.clear()
        loss = layer.forward_in_order().float().square().sum(1).mean()
        loss.backward()
        with torch.no_grad():
            layer.w1.sub_(layer.w1.grad, alpha=1.0)
            layer.w2.sub_(layer.w2.grad, alpha=1.0)
        self.losses.append(loss.detach())

    def train(self, steps, how):
        """Four steps in a row at a time."""
        r, torch, times = self.r, self.r.torch, []
        self.how = None
        for _ in range(3):
            self.step()
        self.how = how
        self.spans.clear()
        for _ in range(steps // 4 + 1):
            r.dist.barrier()
            torch.cuda.synchronize()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            for _ in range(4):
                self.step()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) / 4)
        if r.rank == 0:
            fields = {"layer": how or "as it is", "step_ms": round(median(times), 3),
                      "least_ms": round(min(times), 3)}
            moved = [1e3 * s[0].elapsed_time(s[1]) for s in self.spans]
            if moved:
                one = [median(moved[k::4]) for k in range(4)]
                fields.update(alltoalls_us=round(sum(one)), each_us=[round(t) for t in one],
                              call_us=round(median([s[2] for s in self.spans])),
                              mb=[round(s[3], 1) for s in self.spans[:4]])
            bits = [struct.pack("f", v.item()).hex() for v in self.losses]
            say(**fields, losses=" ".join(bits[:: max(1, len(bits) // 3)]))
