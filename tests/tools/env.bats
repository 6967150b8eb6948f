#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
load common.sh

@test "variables of each dispatcher" {
    run "$tool" env --dispatcher alltoall --gpu h100 --ep 8
    [ "$status" -eq 0 ]
    [[ $output == *'NVTE_FWD_LAYERNORM_SM_MARGIN-16}'* && $output != *HYBRID* ]]
    [[ $output == *'CUDA_DEVICE_MAX_CONNECTIONS-32}'* ]]
    run "$tool" env --dispatcher flex:hybridep --gpu h100 --ep 16
    [[ $output == *'RANKS_PER_NVLINK_DOMAIN-8}'* && $output == *'NVLINK_DOMAIN_SIZE-8}'* && $output == *'USE_MNNVL-0}'* ]]
    run "$tool" env --dispatcher flex:hybridep --gpu gb300 --ep 64
    [[ $output == *'RANKS_PER_NVLINK_DOMAIN-64}'* && $output == *'NVLINK_DOMAIN_SIZE-72}'* && $output == *'USE_MNNVL-1}'* ]]
    [[ $output == *'NVTE_BWD_LAYERNORM_SM_MARGIN-20}'* ]]
}

@test "flex alone is the backend that the GPU can have" {
    run "$tool" env --dispatcher flex --gpu h100 --ep 8 --format megatron-lm
    [[ $output == *"--moe-flex-dispatcher-backend deepep"* ]]
    run "$tool" env --dispatcher flex --gpu gb200 --ep 8 --format megatron-lm
    [[ $output == *"--moe-flex-dispatcher-backend hybridep"* ]]
}

@test "a shell takes it; what the user set is kept" {
    script=$("$tool" env --dispatcher alltoall --gpu h100 --ep 8 --delay-wgrad)
    run bash -uc "CUDA_DEVICE_MAX_CONNECTIONS=8; eval \"\$1\"; echo \$CUDA_DEVICE_MAX_CONNECTIONS \$TORCH_NCCL_HIGH_PRIORITY \$EP_OVERLAP_MEGATRON_ARGS" - "$script"
    [ "$output" = "8 1 --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 --delay-wgrad-compute" ]
}

@test "the arguments pass lint" {
    run bash -c "'$tool' lint --no-environment --set torch_version=2.8.0 --set te_version=2.10.0 -- \
        torchrun pretrain_gpt.py --bf16 --num-experts 64 --nnodes 4 \
        \$('$tool' env --dispatcher flex --gpu h100 --ep 8 --delay-wgrad --format megatron-lm)"
    [ "$status" -eq 0 ]
    [[ $output == *"0 errors, 0 warnings"* ]]
}

@test "the baseline says off in so many words" {
    run "$tool" env --dispatcher alltoall --gpu h100 --ep 8 --tp 2 --baseline
    [ "$status" -eq 0 ]
    [[ $output == *'CUDA_DEVICE_MAX_CONNECTIONS-1}'* ]]
    [[ $output == *"comm_overlap.overlap_moe_expert_parallel_comm=false comm_overlap.delay_wgrad_compute=false"* ]]
    [[ $output != *"--overlap-moe-expert-parallel-comm"* ]]
    run "$tool" env --dispatcher alltoall --gpu b200 --ep 8 --tp 2 --baseline
    [[ $output != *'CUDA_DEVICE_MAX_CONNECTIONS'* ]]
}

@test "forbidden combinations name their rule" {
    run "$tool" env --dispatcher flex:deepep --gpu gb200 --ep 64
    [ "$status" -eq 1 ]
    [[ $output == *"DSP-002"* && $output != *export* ]]
    run "$tool" env --dispatcher flex:hybridep --gpu gb200 --ep 128
    [ "$status" -eq 1 ]
    [[ $output == *"DSP-028"* ]]
    run "$tool" env --dispatcher flex --gpu h100 --ep 48
    [ "$status" -eq 1 ]
    [[ $output == *"DSP-021"* ]]
    run "$tool" env --dispatcher flex --gpu v100 --ep 8
    [ "$status" -eq 1 ]
    run "$tool" env --dispatcher alltoall --gpu h100 --ep 1
    [ "$status" -eq 1 ]
    [[ $output == *"OVL-001"* ]]
}

@test "a harmful value of the user's is warned about" {
    CUDA_LAUNCH_BLOCKING=1 run "$tool" env --dispatcher alltoall --gpu h100 --ep 8
    [ "$status" -eq 1 ]
    [[ $output == *"ENV-001"* ]]
    NCCL_P2P_DISABLE=1 run "$tool" env --dispatcher alltoall --gpu h100 --ep 8
    [ "$status" -eq 0 ]
    [[ $output == *"warning ENV-018"* ]]
}

@test "JSON and pyxis" {
    run --separate-stderr "$tool" env --dispatcher flex --gpu h100 --ep 8 --json
    is_json
    run "$tool" env --dispatcher alltoall --gpu h100 --ep 8 --format pyxis
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == --container-env=CUDA_DEVICE_MAX_CONNECTIONS,*EP_OVERLAP_BRIDGE_OVERRIDES ]]
}

@test "graphs and NCCL user buffers" {
    run "$tool" env --dispatcher alltoall --gpu h100 --ep 8 --cuda-graphs full_iteration --nccl-ub
    [[ $output == *'TORCH_NCCL_AVOID_RECORD_STREAMS-0}'* && $output != *PYTORCH_CUDA_ALLOC_CONF* ]]
}

@test "wrong usage is status 2" {
    for args in "" "--dispatcher alltoall --gpu h100" "--dispatcher x --gpu h100 --ep 8" \
        "--dispatcher alltoall --gpu x99 --ep 8" "--dispatcher alltoall --gpu h100 --ep 0" \
        "--dispatcher alltoall --gpu h100 --ep 8 --format x" \
        "--dispatcher alltoall --gpu h100 --ep 8 --baseline --delay-wgrad" "extra"; do
        run "$tool" env $args
        [ "$status" -eq 2 ] || { echo "$args: $status"; false; }
    done
}
