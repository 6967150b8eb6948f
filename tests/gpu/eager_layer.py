# SPDX-License-Identifier: Apache-2.0
"""An eager PyTorch MoE layer with an all-to-all dispatcher, as training frameworks have it: permute by a
stable sort, counts to the host, all_to_all_single, rows sorted by expert, torch._grouped_mm and SwiGLU with
the router weight, and the same way back; autograd's backward. bench_torch.py times it, intercept.py trains it.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def move(out, rows, come, to):
    dist.all_to_all_single(out, rows, come, to)


def exchange_by(move):
    """An all-to-all of rows with its gradient: (rows, rows to each rank, rows from each) -> rows."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, to, come):
            ctx.splits = to, come
            out = rows.new_empty((sum(come), *rows.shape[1:]))
            move(out, rows.contiguous(), come, to)
            return out

        @staticmethod
        def backward(ctx, grad):
            to, come = ctx.splits
            out = grad.new_empty((sum(to), *grad.shape[1:]))
            move(out, grad.contiguous(), to, come)
            return out, None, None

    return Exchange.apply


def regroup(rows, splits, order):
    parts = rows.split(splits)
    return torch.cat([parts[i] for i in order])


class EagerLayer:
    """This rank's part, bf16: x and dy [T, H], chosen int64 [T, K] of E experts, probs float32 [T, K], w1 [E/R, 2F, H],
    w2 [E/R, H, F]. `move` makes the all-to-alls: (out, rows, sizes that come, sizes that go)."""

    def __init__(self, rank, ranks, device, tokens, hidden, ffn, experts, top_k, move=move):
        self.rank, self.ranks, self.device = rank, ranks, device
        self.experts, self.top_k, self.local = experts, top_k, experts // ranks
        torch.manual_seed(7 + rank)

        def weight(*shape):
            return (0.03 * torch.randn(*shape, device=device)).bfloat16().requires_grad_()

        self.w1, self.w2 = weight(self.local, 2 * ffn, hidden), weight(self.local, hidden, ffn)
        self.x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        self.dy = torch.randn(tokens, hidden, device=device).bfloat16()
        self.chosen = torch.rand(tokens, experts, device=device).topk(top_k, -1).indices
        self.probs = torch.full((tokens, top_k), 0.125, device=device, requires_grad=True)
        self.by_expert = [s * self.local + e for e in range(self.local) for s in range(ranks)]
        self.by_source = [e * ranks + s for s in range(ranks) for e in range(self.local)]
        self.exchange = exchange_by(move)

    def clear(self):
        self.x.grad = self.w1.grad = self.w2.grad = self.probs.grad = None

    def routed(self):
        """Rows as the experts made them, in the order of their experts; that order of the slots."""
        flat = self.chosen.reshape(-1)
        order = flat.argsort(stable=True)
        rows = self.x.index_select(0, order // self.top_k)
        prob = self.probs.reshape(-1).index_select(0, order)
        counts = torch.bincount(flat, minlength=self.experts)
        everyone = torch.empty(self.ranks * self.experts, dtype=counts.dtype, device=self.device)
        dist.all_gather_into_tensor(everyone, counts)
        everyone = everyone.view(self.ranks, self.ranks, self.local)
        mine = everyone[:, self.rank]
        offsets = mine.sum(0).cumsum(0).int()
        to = everyone[self.rank].sum(-1).tolist()
        come, pieces = mine.sum(-1).tolist(), mine.reshape(-1).tolist()
        rows = regroup(self.exchange(rows, to, come), pieces, self.by_expert)
        prob = regroup(self.exchange(prob, to, come), pieces, self.by_expert)
        gate, up = torch._grouped_mm(rows, self.w1.transpose(-2, -1), offs=offsets).chunk(2, -1)
        act = (F.silu(gate.float()) * up.float() * prob[:, None]).bfloat16()
        out = torch._grouped_mm(act, self.w2.transpose(-2, -1), offs=offsets)
        back = [pieces[i] for i in self.by_expert]
        return self.exchange(regroup(out, back, self.by_source), come, to), order

    def forward(self):
        """[T, H]; the last sum in no fixed order, as frameworks have it."""
        out, order = self.routed()
        return torch.zeros_like(self.x).index_add(0, order // self.top_k, out)

    def forward_in_order(self):
        """[T, H]; the same bits in every run."""
        out, order = self.routed()
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=self.device)
        return out.index_select(0, place).view(*self.chosen.shape, -1).sum(1)
