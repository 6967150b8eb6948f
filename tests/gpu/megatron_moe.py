#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's MoE layer, as published: alltoall against flex with the deep_ep drop-in.

    megatron_moe.py [--parts|--parts=profile] [BACKEND ...]
                                      deepep, hybridep (default: both); PYTHONPATH=python:python/dropin
                                      and Megatron-Core, EP_OVERLAP_LIBRARY and the engine beside it
    --parts                           also where the time goes: each part of the forward on the GPU and on the
                                      CPU, our calls on the CPU, and `nothing:BACKEND`, the same dispatcher over
                                      a module that gives back what it gave before: Megatron's own time
    --parts=profile                   and kernels as torch.profiler sees them

Two ranks, the same weights and tokens in every arm: outputs and gradients are compared, then the
dispatcher is timed alone (permute to unpermute, experts left out), arms in turns. No
TransformerEngine, no Apex: local spec, SequentialMLP. With two ranks on one GPU alltoall goes over sockets: what is
compared is the results, and the times say nothing.
"""
import os
import sys

from launch import gpus, launch

HERE = os.path.abspath(__file__)
R = 2
SHARED = "EP_TEST_SHARED" in os.environ  # a GPU: less to send, fewer turns
TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 1024 if SHARED else 4096, 2048, 768, 32, 8
TURNS, CALLS = (2, 2) if SHARED else (7, 5)


def layer_of(arm):
    """(layer, its dispatcher's name): arm is alltoall, deepep or hybridep."""
    import torch
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=16, num_moe_experts=EXPERTS,
        ffn_hidden_size=FFN, moe_ffn_hidden_size=FFN, moe_router_topk=TOP_K, moe_router_dtype="fp32",
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16,
        expert_model_parallel_size=R, moe_grouped_gemm=False, moe_permute_fusion=False,
        moe_token_dispatcher_type="alltoall" if arm == "alltoall" else "flex",
        **({} if arm == "alltoall" else {"moe_flex_dispatcher_backend": arm}))
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 looks at it without TransformerEngine, too
        moe_utils.te_general_gemm = None
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    return MoELayer(config, spec.submodules, layer_number=1).cuda()


def relative(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


def run(layer, x0, dy):
    """Output and gradients, by name."""
    x = x0.detach().requires_grad_()
    for p in layer.parameters():
        p.grad = None
    y, _ = layer(x)
    y.backward(dy)
    out = {"y": y.detach(), "dx": x.grad}
    for name, p in layer.named_parameters():
        if p.grad is not None:
            out["d " + name] = p.grad
    return out


def experts_left_out(torch):
    """rows as they are, and a gradient for their probs: what stands where the experts would, at no cost."""
    ones = {}

    class LeftOut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, probs):
            ctx.like = probs.shape, probs.dtype
            if ctx.like not in ones:
                ones[ctx.like] = torch.ones(probs.shape, dtype=probs.dtype, device=probs.device)
            return rows.view_as(rows)

        @staticmethod
        def backward(ctx, grad):
            return grad, ones[ctx.like]

    return LeftOut.apply


def dispatcher_alone(torch, layer, x0, dy):
    """One pass from permute to unpermute, forward and backward, experts left out."""
    left_out = experts_left_out(torch)
    d = layer.token_dispatcher
    x = x0.detach().requires_grad_()
    probs, routing = layer.route(x0.detach())
    probs = probs.detach().requires_grad_()

    def forward(mark=lambda name: None):
        mark("")
        h, p = d.dispatch_preprocess(x, routing, probs)
        mark("dispatch_preprocess")
        h, p = d.token_dispatch(h, p)
        mark("token_dispatch")
        h, _, p = d.dispatch_postprocess(h, p)
        mark("dispatch_postprocess")
        h = left_out(h, p)
        mark("(no experts)")
        h = d.combine_preprocess(h)
        mark("combine_preprocess")
        h = d.token_combine(h)
        mark("token_combine")
        h = d.combine_postprocess(h)
        mark("combine_postprocess")
        return h

    def forward_only(mark=lambda name: None):
        with torch.no_grad():
            forward(mark)

    def both():
        x.grad = probs.grad = None
        forward().backward(dy)

    return forward_only, both


class Replay:
    """Instead of a buffer of deep_ep: records what each call returns, then returns it without doing anything."""

    def __init__(self, real):
        self.real, self.made, self.recording = real, {}, True
        for name in ("group", "num_nvl_bytes", "num_rdma_bytes"):
            if hasattr(real, name):
                setattr(self, name, getattr(real, name))

    def _call(self, name, kind, arguments, named):
        if self.recording:
            self.made[name, kind] = getattr(self.real, name)(*arguments, **named)
        return tuple(v.detach() if hasattr(v, "detach") else v for v in self.made[name, kind])

    def get_dispatch_layout(self, *a, **k):
        return self._call("get_dispatch_layout", 0, a, k)

    def dispatch(self, *a, **k):
        return self._call("dispatch", "handle" in k, a, k)

    def combine(self, *a, **k):
        return self._call("combine", k.get("topk_weights") is not None, a, k)

    def dispatch_with_permute(self, *a, **k):
        return self._call("dispatch_with_permute", k.get("handle") is not None, a, k)

    def combine_with_unpermute(self, *a, **k):
        return self._call("combine_with_unpermute", k.get("probs") is not None, a, k)


def over_nothing(arm, works):
    """The same calls with the arm's buffer replaced while they run."""
    from megatron.core.transformer.moe import fused_a2a

    name = "_buffer" if arm == "deepep" else "_hybrid_ep_buffer"
    replay = Replay(getattr(fused_a2a, name))

    def inside(work):
        def call():
            real = getattr(fused_a2a, name)
            setattr(fused_a2a, name, replay)
            try:
                work()
            finally:
                setattr(fused_a2a, name, real)

        return call

    out = tuple(inside(work) for work in works)
    for work in out:
        work()
    replay.recording = False
    return out


def show_parts(torch, dist, arm, work, calls=9):
    """Medians of this rank, us: on the GPU from the part before it, and the CPU's time in it."""
    import statistics
    import time

    rows = []
    for _ in range(calls):
        marks = []

        def mark(name):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((name, time.perf_counter(), event))

        dist.barrier()
        torch.cuda.synchronize()
        work[0](mark)
        torch.cuda.synchronize()
        rows.append([(b[0], 1e3 * a[2].elapsed_time(b[2]), 1e6 * (b[1] - a[1])) for a, b in zip(marks, marks[1:])])
    lines = [(r[0][0], statistics.median(v[1] for v in r), statistics.median(v[2] for v in r)) for r in zip(*rows)]
    for name, gpu, cpu in lines + [("sum", sum(r[1] for r in lines), sum(r[2] for r in lines))]:
        print("part %-9s %-22s GPU %7.1f  CPU %7.1f us" % (arm, name, gpu, cpu))
    sys.stdout.flush()


def show_calls(torch, arm, work, passes=10):
    """The CPU's time in our calls, us a pass of forward + backward; one inside the other, so they do not add up."""
    import time

    from deep_ep import buffer, pack, utils, windows
    from ep_overlap import _capi, ops

    places = [(_capi.library(), n) for n in ("epo_plan_create", "epo_dispatch", "epo_combine", "epo_plan_release")]
    places += [(pack, n) for n in ("layout", "pack", "unpack", "widen", "join", "columns", "dense")]
    places += [(ops, "dispatch_rows"), (ops, "combine_weights"), (windows.Windows, "plan"), (buffer, "on_stream"),
               (utils.EventHandle, "__init__"), (utils.EventHandle, "current_stream_wait"),
               (torch.Tensor, "record_stream"), (torch.Tensor, "tolist")]
    for name, whole in (("Buffer", ("get_dispatch_layout", "dispatch", "combine")),
                        ("HybridEPBuffer", ("dispatch_with_permute", "combine_with_unpermute"))):
        places += [(getattr(sys.modules["deep_ep"], name), n) for n in whole]
    took, before = {}, []

    def timed_call(name, real):
        def call(*a, **k):
            start = time.perf_counter()
            try:
                return real(*a, **k)
            finally:
                entry = took.setdefault(name, [0.0, 0])
                entry[0] += time.perf_counter() - start
                entry[1] += 1

        return call

    for place, name in places:
        real = getattr(place, name)
        before.append((place, name, real))
        setattr(place, name, timed_call(name, real))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(passes):
        work[1]()
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    for place, name, real in before:
        setattr(place, name, real)
    print("calls %s: a pass %.0f us" % (arm, 1e6 * whole / passes))
    for name, (seconds, count) in sorted(took.items(), key=lambda item: -item[1][0]):
        print("  CPU %8.1f us  x%-4.1f %s" % (1e6 * seconds / passes, count / passes, name))
    sys.stdout.flush()


def show_profile(torch, arm, work, calls=5):
    """Kernels of forward + backward, us a pass."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        for _ in range(calls):
            work[1]()
        torch.cuda.synchronize()
    gpu = [r for r in p.key_averages() if r.self_device_time_total > 0 and r.cpu_time_total == 0]
    print("profile %s: kernels %.0f us a pass" % (arm, sum(r.self_device_time_total for r in gpu) / calls))
    for r in sorted(gpu, key=lambda r: -r.self_device_time_total)[:22]:
        print("  GPU %8.1f us  x%-4.1f %s" % (r.self_device_time_total / calls, r.count / calls, r.key[:110]))
    sys.stdout.flush()


def timed(torch, dist, work, calls=CALLS):
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    a.record()
    for _ in range(calls):
        work()
    b.record()
    torch.cuda.synchronize()
    t = torch.tensor([a.elapsed_time(b) / calls], device="cuda")
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


def rank_main(arms, parts):
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(expert_model_parallel_size=R)
    torch.manual_seed(40 + rank)
    model_parallel_cuda_manual_seed(123)
    x0 = torch.randn(TOKENS, 1, HIDDEN, device="cuda").to(torch.bfloat16)
    dy = torch.randn(TOKENS, 1, HIDDEN, device="cuda").to(torch.bfloat16)
    layers = {arm: layer_of(arm) for arm in ["alltoall"] + arms}
    if rank == 0:
        print("layers made", flush=True)
    for arm in arms:
        layers[arm].load_state_dict(layers["alltoall"].state_dict())
    want, failed = run(layers["alltoall"], x0, dy), 0
    again = run(layers["alltoall"], x0, dy)
    noise = max(relative(again[k], want[k]) for k in want)
    for arm in arms:
        for turn in range(2):
            got = run(layers[arm], x0, dy)
            worst = max(want, key=lambda k: relative(got[k], want[k]))
            error = relative(got[worst], want[worst])
            ok = set(got) == set(want) and error < 1e-2  # bf16: sums in another order
            failed += not ok
        if rank == 0:
            print("flex:%s against alltoall: %d tensors, largest relative error %.1e (%s; alltoall against itself "
                  "%.1e) %s" % (arm, len(want), error, worst, noise, "ok" if ok else "FAILED"), flush=True)
    work = {arm: dispatcher_alone(torch, layer, x0, dy) for arm, layer in layers.items()}
    if parts:
        work.update({"nothing:" + arm: over_nothing(arm, work[arm]) for arm in arms})
    for i, what in enumerate(("forward", "forward + backward")):
        for arm in work:
            for _ in range(3):
                work[arm][i]()
        times = {arm: [] for arm in work}
        for _ in range(TURNS):
            for arm in work:
                times[arm].append(timed(torch, dist, work[arm][i]))
        middle = {arm: sorted(t)[len(t) // 2] for arm, t in times.items()}
        if rank == 0:
            print("dispatcher alone, %s, ms: %s" % (what, "  ".join(
                "%s %.3f (%.2f)" % (arm, t, middle["alltoall"] / t) for arm, t in middle.items())), flush=True)
    for arm in [*arms, "alltoall"] if parts else []:
        shown = rank == 0
        with open(os.devnull, "w") as nothing:
            said, sys.stdout = sys.stdout, sys.stdout if shown else nothing
            show_parts(torch, dist, arm, work[arm])
            if arm != "alltoall":
                show_calls(torch, arm, work[arm])
                if "profile" in parts:
                    show_profile(torch, arm, work[arm])
            sys.stdout = said
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(1 if failed else 0)


def main():
    arguments = sys.argv[1:]
    parts = next((a for a in arguments if a.startswith("--parts")), None)
    arms = [a for a in arguments if a != parts] or ["deepep", "hybridep"]
    if "RANK" in os.environ:
        return rank_main(arms, parts)
    if gpus() == 0:
        print("left out: Megatron-Core's layer needs a GPU, and there is none")
        return 77
    status = launch(HERE, R, 60, arguments, most=30000 if parts else 6000)
    print("Megatron-Core's MoE layer: %s" % ("ok" if status == 0 else "FAILED"))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
