#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's MoE layer, as published: alltoall against flex with the deep_ep drop-in.

    megatron_moe.py [BACKEND ...]     deepep, hybridep (default: both); PYTHONPATH=python:python/dropin and
                                      Megatron-Core, EP_OVERLAP_LIBRARY and the engine beside it

Two ranks, the same weights and tokens in every arm: outputs and gradients are compared, then the
dispatcher is timed alone (permute to unpermute, experts left out), arms in turns. No
TransformerEngine, no Apex: local spec, SequentialMLP. Needs two GPUs: NCCL refuses two ranks on one.
"""
import os
import sys

from launch import launch

HERE = os.path.abspath(__file__)
R = 2
TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 4096, 2048, 768, 32, 8


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


def dispatcher_alone(torch, layer, x0):
    """One pass from permute to unpermute, forward and backward, experts left out."""
    d = layer.token_dispatcher
    x = x0.detach().requires_grad_()
    probs, routing = layer.route(x0.detach())
    probs = probs.detach().requires_grad_()

    def forward():
        h, p = d.dispatch_preprocess(x, routing, probs)
        h, p = d.token_dispatch(h, p)
        h, _, p = d.dispatch_postprocess(h, p)
        h = h * p.unsqueeze(-1).to(h.dtype)
        h = d.combine_preprocess(h)
        h = d.token_combine(h)
        return d.combine_postprocess(h)

    def forward_only():
        with torch.no_grad():
            forward()

    def both():
        x.grad = probs.grad = None
        forward().sum().backward()

    return forward_only, both


def timed(torch, dist, work, calls=5):
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


def rank_main(arms):
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(expert_model_parallel_size=R)
    torch.manual_seed(40 + rank)
    model_parallel_cuda_manual_seed(123)
    x0 = torch.randn(TOKENS, 1, HIDDEN, device="cuda").to(torch.bfloat16)
    dy = torch.randn(TOKENS, 1, HIDDEN, device="cuda").to(torch.bfloat16)
    layers = {arm: layer_of(arm) for arm in ["alltoall"] + arms}
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
    work = {arm: dispatcher_alone(torch, layer, x0) for arm, layer in layers.items()}
    for i, what in enumerate(("forward", "forward + backward")):
        for arm in work:
            for _ in range(3):
                work[arm][i]()
        times = {arm: [] for arm in work}
        for _ in range(7):
            for arm in work:
                times[arm].append(timed(torch, dist, work[arm][i]))
        middle = {arm: sorted(t)[len(t) // 2] for arm, t in times.items()}
        if rank == 0:
            print("dispatcher alone, %s, ms: %s" % (what, "  ".join(
                "%s %.3f (%.2f)" % (arm, t, middle["alltoall"] / t) for arm, t in middle.items())), flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(1 if failed else 0)


def main():
    arms = sys.argv[1:] or ["deepep", "hybridep"]
    if "RANK" in os.environ:
        return rank_main(arms)
    import torch

    if torch.cuda.device_count() < R:
        print("left out: %d GPU here, %d are needed" % (torch.cuda.device_count(), R))
        return 77
    status = launch(HERE, R, 60, arms, most=6000)
    print("Megatron-Core's MoE layer: %s" % ("ok" if status == 0 else "FAILED"))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
