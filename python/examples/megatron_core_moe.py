#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains one MoE layer of Megatron-Core (the published package, nothing changed in it).

    pip install megatron-core       # TransformerEngine and Apex are not needed
    srun -N1 -n8 --gpus=8 --ep-overlap=on python megatron_core_moe.py --dispatcher alltoall
    PYTHONPATH=.../python:.../python/dropin srun ... --ep-dispatcher=flex python megatron_core_moe.py --dispatcher flex

alltoall  Megatron's own, NCCL underneath: the interposer serves it
flex      Megatron's flex dispatcher on a module `deep_ep`; python/dropin has one on our library, for GPUs
          and nodes that DeepEP itself does not serve or where nobody built it

Prints iteration lines as Megatron-LM does; both dispatchers start from the same weights and see the same
tokens, so their losses agree within bf16.
"""
import argparse
import os
import time

# Megatron compiles small functions. A pool of compilers would import torch once more in each of its processes,
# and a rank that has done its steps would wait for them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

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
    os.environ.setdefault("MASTER_PORT", "29513")


def make_layer(a, ranks):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=1, hidden_size=a.hidden, num_attention_heads=a.hidden // 128, num_moe_experts=a.experts,
        ffn_hidden_size=a.ffn, moe_ffn_hidden_size=a.ffn, moe_router_topk=a.top_k, moe_router_dtype="fp32",
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16,
        expert_model_parallel_size=ranks, moe_grouped_gemm=False, moe_permute_fusion=False,
        moe_token_dispatcher_type=a.dispatcher,
        **({"moe_flex_dispatcher_backend": a.backend} if a.dispatcher == "flex" else {}))
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 looks at it without TransformerEngine, too
        moe_utils.te_general_gemm = None
    spec = get_moe_module_spec(use_te=False, num_experts=a.experts, moe_grouped_gemm=False)
    return MoELayer(config, spec.submodules, layer_number=1).cuda()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatcher", choices=("alltoall", "flex"), default="alltoall")
    parser.add_argument("--backend", choices=("deepep", "hybridep"), default="deepep", help="of flex")
    for name, value in (("steps", 20), ("tokens", 4096), ("hidden", 2048), ("ffn", 768), ("experts", 32), ("top_k", 8)):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    a = parser.parse_args()
    ranks_of_step()
    if not torch.cuda.is_available():
        parser.error("Megatron-Core's MoE layer needs GPUs, and torch sees none")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if os.environ.get("RANK") == "0":
        print(f"torch {torch.__version__}: {os.environ.get('WORLD_SIZE')} ranks meet", flush=True)
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if a.experts % ranks:
        parser.error(f"--experts {a.experts} is no multiple of {ranks} ranks")
    if rank == 0:
        print(f"{ranks} ranks, rank 0 on {torch.cuda.get_device_name()}: {a.experts} experts, dispatcher {a.dispatcher}"
              + (f" with {a.backend}" if a.dispatcher == "flex" else ""), flush=True)
    layer = make_layer(a, ranks)
    tokens = torch.Generator(device="cuda")
    tokens.manual_seed(40 + rank)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    for step in range(1, a.steps + 1):
        start = time.perf_counter()
        x = torch.randn(a.tokens, 1, a.hidden, generator=tokens, device="cuda").to(torch.bfloat16)
        y, _ = layer(x)
        loss = ((y.float() - x.float().tanh()) ** 2).mean()  # to be learnt: tanh
        loss.backward()
        dist.all_reduce(layer.router.weight.grad)  # the router is the same everywhere; experts are one rank's alone
        layer.router.weight.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        value = shown.item() / ranks
        if rank == ranks - 1:
            ms = 1e3 * (time.perf_counter() - start)
            print(f" iteration {step:8d}/{a.steps:8d} | consumed samples: {step * ranks:12d} | elapsed time per iteration (ms): "
                  f"{ms:.1f} | global batch size: {ranks:5d} | lm loss: {value:.6E} |", flush=True)
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
