#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A STAND-IN for a training program, for tests of the job scripts: it trains nothing.
# train.sh megatron-lm|bridge ARGUMENTS...: prints its argument vector, then, on the last
# rank, a configuration and eight iterations as that framework does; the times are made up,
# shorter with overlap.
framework=$1 && shift
vector=
overlap=False delay=False dispatcher=alltoall
for word; do
    vector="${vector}[$word]"
    case $word in
    --overlap-moe-expert-parallel-comm | comm_overlap.overlap_moe_expert_parallel_comm=true) overlap=True ;;
    --delay-wgrad-compute | comm_overlap.delay_wgrad_compute=true) delay=True ;;
    flex | model.moe_token_dispatcher_type=flex) dispatcher=flex ;;
    esac
done
echo "stand-in rank ${RANK:?} of ${WORLD_SIZE:?}, local ${LOCAL_RANK:?}, ${MASTER_ADDR:?}: $vector"
[ "$RANK" = $((WORLD_SIZE - 1)) ] || exit 0
if [ "$framework" = megatron-lm ]; then
    echo "------------------------ arguments ------------------------"
    for setting in bf16=True expert_model_parallel_size=4 num_experts=8 train_iters=8 log_interval=1 \
        moe_token_dispatcher_type=$dispatcher overlap_moe_expert_parallel_comm=$overlap delay_wgrad_compute=$delay; do
        echo "  ${setting%%=*} ............................ ${setting#*=}"
    done
    echo "-------------------- end of arguments ---------------------"
else
    cat <<END
======================================================================
Configuration Summary (Non-Default Values vs Megatron Core)
======================================================================

[model] Non-default values (vs Mcore TransformerConfig):
  expert_model_parallel_size: 4  (Mcore default: 1)
  num_moe_experts: 8  (Mcore default: None)
  moe_token_dispatcher_type: '$dispatcher'  (Mcore default: 'allgather')
  bf16: True  (Mcore default: False)
END
    [ $overlap = False ] || echo "  overlap_moe_expert_parallel_comm: True  (Mcore default: False)"
    [ $delay = False ] || echo "  delay_wgrad_compute: True  (Mcore default: False)"
    echo "======================================================================"
fi
ms=41250.0
[ $overlap = False ] || ms=31310.0
[ $delay = False ] || ms=31200.0
for i in 1 2 3 4 5 6 7 8; do
    echo " [2026-01-02 03:04:0$i] iteration        $i/       8 | consumed samples:         ${i}00 | elapsed time per iteration (ms): $ms | learning rate: 1.0E-05 | global batch size:   100 | lm loss: 1.${i}E+00 | loss scale: 1.0 | grad norm: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
done
