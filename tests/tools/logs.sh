# SPDX-License-Identifier: Apache-2.0
# Makes training logs that carry given figures.

# arguments NAME=VALUE...: Megatron-LM's block
arguments() {
    echo "------------------------ arguments ------------------------"
    local setting
    for setting; do
        printf '  %s ............................ %s\n' "${setting%%=*}" "${setting#*=}"
    done
    echo "-------------------- end of arguments ---------------------"
}

# common OVERLAP DELAY [NAME=VALUE...]: a configuration that no rule forbids
common() {
    arguments bf16=True context_parallel_size=1 expert_model_parallel_size=16 log_interval=1 \
        moe_token_dispatcher_type=alltoall num_experts=128 pipeline_model_parallel_size=1 \
        seq_length=4096 overlap_moe_expert_parallel_comm="$1" delay_wgrad_compute="$2" "${@:3}"
}

# line N M MS TFLOPS [LOSS]
line() {
    local loss=
    [ -z "${5-}" ] || loss=" lm loss: $5 |"
    printf ' [2026-01-02 03:04:05] iteration %8d/%8d | consumed samples: %12d | elapsed time per iteration (ms): %s | throughput per GPU (TFLOP/s/GPU): %s | learning rate: 1.0E-05 | global batch size:   512 |%s loss scale: 1.0 | grad norm: 1.%03d | number of skipped iterations:   0 | number of nan iterations:   0 |\n' \
        "$1" "$2" $(($1 * 512)) "$3" "$4" "$loss" "$1"
}

# run_log N WARM-UP-MS MS TFLOPS: N iterations, the first two are slow; losses fall
run_log() {
    local i
    for ((i = 1; i <= $1; i++)); do
        line "$i" "$1" "$( ((i <= 2)) && echo "$2" || echo "$3")" "$4" "$((12 - i / 10)).$((9 - i % 10))E+00"
    done
}
