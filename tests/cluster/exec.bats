#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154,SC2016 # work, output: plugin_common.bash and bats; texts for other shells
# What programs really get as their arguments, and what becomes of those that do not go
# with the options.

bats_require_minimum_version 1.5.0
load plugin_common

moe='--bf16 --num-experts 8 --expert-model-parallel-size 4'
overlap='[--overlap-moe-expert-parallel-comm][--moe-token-dispatcher-type][alltoall]'
read_moe='[--bf16][--num-experts][8][--expert-model-parallel-size][4]'

# A python that prints "RANK: [argument][argument]...".
recorder() {
    chmod 755 "$work"
    mkdir "$work/bin"
    printf '#!/bin/sh\nline=$SLURM_PROCID:\\ \nfor a; do line="$line[$a]"; done\necho "$line"\n' >"$work/bin/python"
    chmod -R 755 "$work/bin"
    export PATH=$work/bin:$PATH
}
line() { grep -qxF -- "$1" <<<"$output" || { echo "no line: $1" && echo "$output" && false; }; }

@test "exec: srun and sbatch, blanks and quotes, inside bash -c" {
    recorder
    cluster -- "printf '#!/bin/bash\n#SBATCH --ep-overlap=on --delay-wgrad\nsrun -n2 ep-overlap exec -- python pretrain_gpt.py $moe \"\$@\"\n' >\$work/job
t srun -n2 --ep-overlap=on ep-overlap exec -- python pretrain_gpt.py $moe 'a  b' \"it's \\\"*\\\"\" ''
echo == batch
batch -n2 -o \$work/out \$work/job 'x y' '\$HOME'; cat \$work/out
echo == shell
t srun -n1 --ep-overlap=on ep-overlap exec -- bash -c 'cd / && python pretrain_gpt.py $moe \"a  b\" 2>&1 | cat'"
    between '' '== batch'
    for rank in 0 1; do line "$rank: [pretrain_gpt.py]${read_moe}[a  b][it's \"*\"][]$overlap"; done
    times 1 'ep-overlap exec: on, megatron-lm (added '
    between '== batch' '== shell'
    for rank in 0 1; do line "$rank: [pretrain_gpt.py]${read_moe}[x y][\$HOME]${overlap}[--delay-wgrad-compute]"; done
    between '== shell' ''
    line "0: [pretrain_gpt.py]${read_moe}[a  b]$overlap"
}

@test "exec: --multi-prog, each program by itself" {
    recorder
    cat >"$work/multi" <<END
0 python server.py --port 7
# the trainers
1-2 ep-overlap exec -- python pretrain_gpt.py $moe 'a b' %t
END
    cluster -- 't srun -n3 --ep-overlap=on --multi-prog $work/multi
sed -i "s/exec -- //; s/ep-overlap //" $work/multi
t srun -n3 --ep-overlap=on --multi-prog $work/multi'
    line '0: [server.py][--port][7]'
    for rank in 1 2; do times 1 "^$rank: .pretrain_gpt.py."; done
    line "1: [pretrain_gpt.py]${read_moe}[a b][1]$overlap"
    has 'rc 0: srun'
    times 1 'ARG-OVERLAP: found overlap_moe_expert_parallel_comm = False'
    has 'add --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall'
    times 1 'rc 0: srun'
}

@test "exec: --multi-prog and sbatch, quotes, given arguments, contradictions" {
    recorder
    cat >"$work/multi" <<END
0-1 ep-overlap exec -- python pretrain_gpt.py $moe 'a  b' 'it is "*"' --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type=alltoall
END
    cat >"$work/contradict" <<END
0-1 ep-overlap exec -- python pretrain_gpt.py $moe --moe-token-dispatcher-type flex --moe-router-dtype fp32
END
    cluster -- "t srun -n2 --ep-overlap=on --multi-prog \$work/multi
echo == contradict
t srun -n2 --ep-overlap=on --ep-dispatcher=alltoall --multi-prog \$work/contradict
echo == batch
printf '#!/bin/bash\n#SBATCH --ep-overlap=on --ep-dispatcher=alltoall\nsrun -n2 ep-overlap exec -- python pretrain_gpt.py $moe --moe-token-dispatcher-type flex --moe-router-dtype fp32 \"\$@\"; echo job rc \$?\n' >\$work/job
batch -n2 -o \$work/out \$work/job 'x y'; cat \$work/out"
    between '' '== contradict'
    for rank in 0 1; do line "$rank: [pretrain_gpt.py]${read_moe}[a  b][it is \"*\"][--overlap-moe-expert-parallel-comm][--moe-token-dispatcher-type=alltoall]"; done
    has 'on, megatron-lm, nothing is missing'
    between '== contradict' '== batch'
    times 1 'exec: error: --ep-dispatcher=alltoall contradicts the argument --moe-token-dispatcher-type flex'
    times 0 '^[01]: '
    has_not 'rc 0'
    between '== batch' ''
    times 1 'exec: error: --ep-dispatcher=alltoall contradicts the argument --moe-token-dispatcher-type flex'
    times 0 '^[01]: '
    has_not 'job rc 0'
}

@test "arguments that are given stay, or contradict; rules come together" {
    recorder
    cluster -- "t srun -n2 --ep-overlap=on python pretrain_gpt.py $moe --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type flex --moe-router-dtype fp32
echo == contradict
t srun -n2 --ep-overlap=on --ep-dispatcher=alltoall --no-delay-wgrad ep-overlap exec -- python pretrain_gpt.py $moe --moe-token-dispatcher-type flex --moe-router-dtype fp32
t srun -n2 --ep-overlap=on --ep-dispatcher=alltoall python pretrain_gpt.py $moe --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type flex --moe-router-dtype fp32
echo == rules
t srun -n2 --ep-overlap=on torchrun pretrain_gpt.py --num-experts 8 --pipeline-model-parallel-size 2 --recompute-granularity full --mtp-num-layers 2
t srun -n2 python pretrain_gpt.py --num-experts 8"
    between '' '== contradict'
    for rank in 0 1; do line "$rank: [pretrain_gpt.py]${read_moe}[--overlap-moe-expert-parallel-comm][--moe-token-dispatcher-type][flex][--moe-router-dtype][fp32]"; done
    has 'rc 0'
    between '== contradict' '== rules'
    has 'moe_token_dispatcher_type = flex (--moe-token-dispatcher-type), the options say alltoall'
    has 'ep-overlap exec: error: --ep-dispatcher=alltoall contradicts the argument --moe-token-dispatcher-type flex'
    times 0 '^[01]: '
    has_not 'rc 0'
    between '== rules' ''
    for rule in ARG-OVERLAP OVL-001 OVL-004 OVL-006 OVL-007 OVL-012; do times 1 "^ep-overlap: n[12]: $rule: "; done
    for rank in 0 1; do line "$rank: [pretrain_gpt.py][--num-experts][8]"; done
    has 'rc 0: srun -n2 python'
}

@test "auto: on for arguments that enable overlap; what cannot be read is undecided" {
    recorder
    echo 'version = 1; node_classes = ( { class = "h100"; nodes = "n[1-2]"; overlap = "on"; } );' >"$work/c.conf"
    printf 'echo "script $EP_OVERLAP_DECISION"\n' >"$work/run.sh"
    cluster -c "$work/c.conf" -- "t srun -N2 -n2 --ep-overlap=auto ep-overlap exec -- python pretrain_gpt.py $moe
t srun -N2 -n2 --ep-overlap=auto python pretrain_gpt.py $moe
t srun -N2 -n2 --ep-overlap=auto python pretrain_gpt.py $moe --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall
t srun -N2 -n2 --ep-overlap=auto bash \$work/run.sh --bf16"
    times 4 "^[01]: .pretrain_gpt.py.*.8..--expert-model-parallel-size..4.$"
    times 1 'exec: off (auto: the program.s arguments do not enable overlap), nothing is added'
    times 2 '^ep-overlap: off (auto: '
    times 1 '^ep-overlap: off (auto: .*overlap_moe_expert_parallel_comm = False'
    times 2 '^ep-overlap: on, dispatcher alltoall (auto: class h100, '
    times 1 'arguments undecided: a shell.s script is not read: ".*/run.sh"'
    times 2 '^script on$'
    times 4 '^rc 0'
}

@test "a node without the plugin is named, by exec and by the library" {
    recorder
    cluster -- 'kill "$(cat "$EPO_CLUSTER_DIR/run/slurmd.n2.pid")"
: >$EPO_CLUSTER_DIR/etc/none
sed "s|^PlugStackConfig=.*|PlugStackConfig=$EPO_CLUSTER_DIR/etc/none|" $SLURM_CONF >$EPO_CLUSTER_DIR/etc/n2.conf
for try in $(seq 50); do [ -e "$EPO_CLUSTER_DIR/run/slurmd.n2.pid" ] || break; sleep 0.1; done
SLURM_CONF=$EPO_CLUSTER_DIR/etc/n2.conf slurmd -N n2 -f $EPO_CLUSTER_DIR/etc/n2.conf >/dev/null 2>&1 </dev/null
for try in $(seq 100); do [ "$(sinfo -h -o %T)" = idle ] && break; sleep 0.1; done
t srun -N2 -n2 --ep-overlap=on sh -c "echo decision \$SLURMD_NODENAME \${EP_OVERLAP_DECISION-unset}"
echo == exec
t srun -N2 -n2 --ep-overlap=on ep-overlap exec -- true
echo == library
EP_OVERLAP_TIMEOUT=3 t srun -N2 -n2 --ep-overlap=on ep-train --steps 1 # n1 waits for the rank that ended
echo == off
t srun -N2 -n2 --ep-overlap=off ep-overlap exec -- true
t srun -N2 -n2 ep-overlap exec -- true'
    between '' '== exec'
    line 'decision n1 on'
    line 'decision n2 unset'
    between '== exec' '== library'
    times 1 'ep-overlap exec: node n2 has no ep-overlap plugin'
    has_not 'rc 0'
    between '== library' '== off'
    has 'node n2 has no ep-overlap plugin'
    has_not 'rc 0'
    between '== off' ''
    times 2 '^rc 0'
}
