#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # work, output: plugin_common.bash and bats
# Every way in which srun starts programs: the plugin does the same in each of them.

bats_require_minimum_version 1.5.0
load plugin_common

@test "srun --pty, --overlap, --mpi, --multi-prog, one inside another" {
    printf '0 printenv EP_OVERLAP_DECISION\n1-2 env\n' >"$work/multi"
    cluster -- 'echo "== pty"; t script -qec "srun --pty --ep-overlap=on printenv EP_OVERLAP_DECISION" /dev/null
echo "== mpi"
for mpi in none pmi2; do t srun -n2 --mpi=$mpi --ep-overlap=on printenv EP_OVERLAP_DECISION; done
echo "== multi"; t srun -n3 --ep-overlap=on --multi-prog $work/multi
echo "== overlap"; t salloc -Q -n1 srun --overlap --ep-overlap=on bash -c "srun --overlap printenv EP_OVERLAP_DECISION; srun --overlap --ep-overlap=on printenv EP_OVERLAP_DECISION LD_PRELOAD"'
    between '== pty' '== mpi'
    times 1 '^\(\^@\)\?on.\?$' # a terminal's line ends otherwise, and may echo what ended its input
    has 'rc 0'
    between '== mpi' '== multi'
    times 4 '^on$'
    times 2 '^rc 0'
    between '== multi' '== overlap'
    times 1 '^on$'
    times 2 '^EP_OVERLAP_DECISION=on$'
    times 2 '^LD_PRELOAD=/[^:]*libep_overlap.so[^:]*$'
    between '== overlap' ''
    times 1 '^on$' # the inner one without an option is off
    times 1 '^/[^:]*libep_overlap.so[^:]*$'
}

@test "srun --mpi=pmix: ranks by PMIx have the decision and the library" {
    cluster -- 't srun -n2 --mpi=pmix --ep-overlap=on sh -c "echo \"rank \$PMIX_RANK \$EP_OVERLAP_DECISION\""
t srun -n2 --mpi=pmix --ep-overlap=on --delay-wgrad ep-train --steps 2 --no-measure'
    if [[ $output == *"can not load PMIx library"* || $output == *"Invalid MPI type"* ]]; then
        skip "this Slurm has no PMIx (Debian and Ubuntu: libpmix-dev)"
    fi
    for rank in 0 1; do times 1 "^rank $rank on$"; done
    times 2 '^rc 0'
    has 'iteration        2/'
}

@test "arrays: every task has the options, #SBATCH or not" {
    cluster -- 'printf "#!/bin/sh\\n#SBATCH --array=1-3 --ep-overlap=on\\nsrun printenv EP_OVERLAP_DECISION\\n" >$work/job
batch -o $work/out.%a $work/job; cat $work/out.*'
    ended 0
    times 3 '^on$'
}

@test "sbatch --export=NONE; the script adds what was dropped" {
    cluster -- 'printf "#!/bin/sh\\nsrun /usr/bin/printenv EP_OVERLAP_DECISION; srun --ep-overlap=on /usr/bin/printenv EP_OVERLAP_DECISION\\n" >$work/job
batch --export=NONE -o $work/out --ep-overlap=on $work/job; cat $work/out'
    times 2 '^on$'
}

@test "salloc's interactive step is left alone, srun in it is not" {
    cluster -x 'LaunchParameters=use_interactive_step' -- 'export SHELL=/bin/sh; echo "echo shell \${EP_OVERLAP_DECISION-unset} \${SLURM_EP_OVERLAP_STEP-unset}; srun --overlap printenv EP_OVERLAP_DECISION" >$work/in
t salloc -Q --ep-overlap=on <$work/in'
    has 'shell unset unset'
    times 1 '^on$'
}

@test "a TaskProlog that changes LD_PRELOAD wins; a nested off takes only ours away" {
    printf '#!/bin/sh\necho "export LD_PRELOAD=libm.so.6:$LD_PRELOAD"\n' >"$work/prolog"
    chmod 755 "$work" "$work/prolog"
    cluster -x "TaskProlog=$work/prolog" -- 'srun --ep-overlap=on sh -c "echo \$LD_PRELOAD"; echo "== nested"
srun -n1 --ep-overlap=on sh -c "srun --overlap --ep-overlap=off printenv LD_PRELOAD"'
    between '' '== nested'
    times 1 '^libm.so.6:/[^:]*libep_overlap.so[^:]*$'
    between '== nested' ''
    times 1 '^libm.so.6:libm.so.6$' # the nested task's prolog adds one more
}

@test "a library that the loader refuses: TaskProlog and program start, nothing but the reason is said" {
    gcc -shared -fPIC -o "$work/libgone.so" -xc - <<<'int gone;'
    gcc -shared -fPIC -o "$work/libep.so" -xc - -L"$work" -Wl,--no-as-needed -lgone <<<'int x;'
    rm "$work/libgone.so"
    printf '#!/bin/sh\necho "export PROLOG=ran"\n' >"$work/prolog"
    chmod 755 "$work" "$work/prolog"
    cluster -x "TaskProlog=$work/prolog" -- 'cp $work/libep.so $EPO_CLUSTER_DIR/etc/libep.so
echo "version = 1; preload = { path = \"$EPO_CLUSTER_DIR/etc/libep.so\"; };" >$EPO_CLUSTER_DIR/etc/ep_overlap.conf
srun -n4 -N2 --ep-overlap=on printenv PROLOG LD_PRELOAD 2>$work/err; echo "rc $?"; cat $work/err | grep -v "^srun: error"'
    times 4 '^ran$'
    has_not 'LD_PRELOAD='
    times 1 'ep-overlap: on, .*not preloaded: the loader does not take the library: .*libgone.so'
    has_not 'ld.so'
}

@test "a program that enters a container by itself gets no library" {
    printf '#!/bin/sh\nenv\n' >"$work/apptainer"
    chmod 755 "$work" "$work/apptainer"
    cluster -- 't srun --ep-overlap=on $work/apptainer exec image.sif python train.py'
    has 'rc 0'
    has EP_OVERLAP_DECISION=on
    has_not LD_PRELOAD=/
    times 1 'ep-overlap: on, .*not preloaded: apptainer enters a container'
}

@test "a program that may call NCCL itself gets the interceptor, where it holds GPUs; a user's off wins" {
    cluster -g 2 -- '[ -e $EPO_CLUSTER_DIR/lib/ep-overlap/libep_overlap_intercept.so ] || echo "no interceptor"
echo "echo mode [\$EP_OVERLAP_INTERPOSE]; echo \$LD_PRELOAD; /bin/true" >$work/show
t srun -n1 --gpus=1 --ep-overlap=on sh $work/show
echo == off; EP_OVERLAP_INTERPOSE=off t srun -n1 --gpus=1 --ep-overlap=on sh $work/show
echo == without; t srun -n1 --ep-overlap=on sh $work/show
echo == nested; srun -n1 --gpus=1 --ep-overlap=on srun --overlap --ep-overlap=off sh $work/show'
    if [[ $output == *"no interceptor"* ]]; then skip "the interceptor was not built"; fi
    has_not 'ld.so'
    between '' '== off'
    times 1 '^mode .accelerate.$'
    times 1 '^/[^:]*/ep-overlap/libep_overlap_intercept.so:/[^:]*/libep_overlap.so[^:]*$'
    times 1 '^ep-overlap: on, .*; NCCL accelerated)$'
    between '== off' '== without'
    times 1 '^mode .off.$'
    times 1 '^/[^:]*/libep_overlap.so[^:]*$'
    between '== without' '== nested'
    times 1 '^mode ..$'
    between '== nested' ''
    times 1 '^mode ..$'
    times 0 'libep_overlap'
}

@test "a hostile environment and argument vector stay in their lines" {
    cluster -- 'export SLURM_JOB_ACCOUNT=$(printf "a\\nslurmd: forged\\033[2J")
big=$(head -c 100000 /dev/zero | tr "\\0" x)
A=$big B=$big C=$big D=$big E=$big F=$big G=$big H=$big I=$big EP_OVERLAP_SET="LD_PRELOAD=x;$big" t srun --ep-overlap=on printenv EP_OVERLAP_DECISION
SLURM_EP_OVERLAP=$(printf "on\\nforged") t srun true
t srun --ep-dispatcher="$(printf "flex\\033[31m\\nforged")" true'
    times 1 '^on$'
    times 1 '^rc 1: srun true'
    has 'found "on?forged"'
    has 'found "flex?[31m?forged"'
    run grep -c '^forged\|^slurmd: forged' "$work/slurmd.log"
    [ "$output" = 0 ]
}
