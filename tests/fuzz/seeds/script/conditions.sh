#!/bin/bash
A=(--num-experts 8)
if [ $X = full ]; then
  A+=(--recompute-granularity full)
elif (( X > 1 )); then E=4; else E=8; fi
case $PP in 4) P="--pipeline-model-parallel-size 4" ;; *) P= ;; esac
[[ -n $S ]] && A+=(
  --moe-shared-expert-overlap
) || exit 1
cat <<-"EOF" >note
	don't
	EOF
sbatch <<EOF
srun --ep-overlap=on ep-overlap exec -- python pretrain_gpt.py ${A[@]} $P --bf16
EOF
