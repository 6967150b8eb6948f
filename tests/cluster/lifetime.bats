#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What may happen around a step while it runs, and what one leaves to those after it.
# shellcheck disable=SC2016,SC2154 # the scripts are for the cluster; status and output are bats'
bats_require_minimum_version 1.5.0
load plugin_common

@test "a job submitted from a step or from a job inherits nothing of it" {
    cluster -- 'cat >$work/next <<"E"
#!/bin/bash
#SBATCH -n1
echo "batch $(env | grep -cE "EP_OVERLAP|^LD_PRELOAD")"
srun bash -c "echo step \$(env | grep -cE \"EP_OVERLAP|^LD_PRELOAD\")"
srun --ep-overlap=on bash -c "echo on \$EP_OVERLAP_DISPATCHER \$EP_OVERLAP_DELAY_WGRAD"
E
t srun -n1 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad $batch -o $work/step.out $work/next
printf "#!/bin/bash\n$batch -o $work/plain.out $work/next; $batch --ep-overlap=on -o $work/on.out $work/next\n" >$work/outer
t $batch --ep-overlap=on --ep-dispatcher=flex --delay-wgrad -o $work/outer.out $work/outer
for name in step plain on; do sed "s/^/$name: /" $work/$name.out; done'
    times 2 '^rc 0'
    for name in step plain; do
        has "$name: batch 0"
        has "$name: step 0"
        has "$name: on alltoall 0"
    done
    has 'on: batch 0'
    has_not 'on: step 0' # its own option, without the other's dispatcher
    has 'on: ep-overlap: on, dispatcher alltoall (--ep-overlap=on, inherited from sbatch or salloc'
    has 'on: on alltoall 0'
}

@test "off on the command line wins over a decision that the user exported" {
    cluster -- 'export EP_OVERLAP_DECISION=on
t srun -n1 bash -c "echo none \$EP_OVERLAP_DECISION"
t srun -n1 --ep-overlap=off bash -c "echo off \$EP_OVERLAP_DECISION; srun --overlap -n1 bash -c \"echo inner \\\$EP_OVERLAP_DECISION\""'
    has 'none on'
    has 'off off'
    has 'inner on'
}

@test "scontrol reconfigure and sattach while a step runs" {
    # Its tasks keep speaking, so that it is seen when they run and when sattach hears them.
    printf '#!/bin/bash\nuntil [ -e %s/go ]; do echo tick $SLURM_PROCID; sleep 0.1; done; echo end $SLURM_PROCID $EP_OVERLAP_DECISION\n' "$work" >"$work/task"
    chmod 755 "$work/task"
    cluster -- 'hears() { until [ "$(grep "^tick" $1 2>/dev/null | sort -u | wc -l)" = 2 ]; do sleep 0.1; done; }
printf "#!/bin/bash\nsrun $work/task\n" >$work/job
job=$(sbatch --parsable -N2 -n2 --ep-overlap=on -o $work/out $work/job)
hears $work/out
t scontrol reconfigure
sattach $job.0 >$work/attached 2>&1 & attached=$!
t srun -N2 -n2 --overcommit --overlap --ep-overlap=on bash -c "echo beside \$EP_OVERLAP_DECISION"
hears $work/attached; touch $work/go; wait $attached; echo "sattach rc $?"
until [ -z "$(squeue -h)" ]; do sleep 0.1; done
sed "s/^/out: /" $work/out; sed "s/^/attached: /" $work/attached'
    times 2 'beside on'
    times 2 '^out: end [01] on'
    times 2 '^attached: end [01] on'
    has 'sattach rc 0'
}

@test "a requeued job has its options again" {
    # Slurm takes the job's credentials back at its end and holds it until none of them can be alive:
    # brought forward by an update, its next step is refused where it begins within the same second.
    cluster -e 5 -- 'printf "#!/bin/bash\nsrun bash -c '\''echo run \${SLURM_RESTART_COUNT-0} \$EP_OVERLAP_DECISION \$EP_OVERLAP_DISPATCHER; [ -n \"\$SLURM_RESTART_COUNT\" ] || sleep 60'\''\n" >$work/job
job=$(sbatch --parsable -N2 -n2 --requeue --open-mode=append --ep-overlap=on --ep-dispatcher=flex -o $work/out $work/job)
until [ "$(grep -c "^run 0" $work/out 2>/dev/null)" = 2 ]; do sleep 0.1; done
t scontrol requeue $job
until [ -z "$(squeue -h)" ]; do sleep 0.2; done
cat $work/out'
    times 2 '^run 0 on flex$'
    times 2 '^run 1 on flex$'
}

@test "a configuration that is replaced under running steps: each is one of both, or is refused with the place" {
    printf 'version = 1;\n' >"$work/site"
    cluster_limit=150 cluster -c "$work/site" -- 'site=$(sed -n "s/.*conf=\([^ ]*\).*/\1/p" $EPO_CLUSTER_DIR/etc/plugstack.conf); cp $site $work/whole
(while [ ! -e $work/stop ]; do
    (cat $work/whole; echo "policy = ( { action = \"lock\"; overlap = \"off\"; message = \"locked\"; } );") >$site.new && mv $site.new $site; sleep 0.2
    (cat $work/whole; printf "policy = ( { action") >$site; sleep 0.2 # by hand, not yet whole
    cat $work/whole >$site; sleep 0.6
done; cat $work/whole >$site) & writer=$!
for i in $(seq 15); do
    srun -N2 -n2 --ep-overlap=on bash -c "echo task \$EP_OVERLAP_DECISION" >$work/one 2>&1; rc=$?
    echo "step $rc: $(grep -c "^task on" $work/one) $(grep -cE "ep_overlap.conf:[0-9]+" $work/one)"
    [ $rc = 0 ] || sed "s/^/  /" $work/one | head -3
done
touch $work/stop; wait $writer
srun -N2 -n2 --ep-overlap=on bash -c "echo afterwards \$EP_OVERLAP_DECISION"'
    times 2 'afterwards on'
    # on everywhere and status 0, or a failure with its reason, before which the other node's task may have begun
    [ "$(grep -cE '^step 0: 2 0$|^step [1-9][0-9]*: [01] [1-9]' <<<"$output")" -eq 15 ] || { echo "$output" && false; }
}

@test "forty short steps in a row, on and off in turns: each ends well" {
    cluster -- 'salloc -Q -n1 bash -c '\''for i in $(seq 10); do
srun -Q -n1 --ep-overlap=on true && srun -Q -n1 --ep-overlap=off true && srun -Q -n1 true && srun -Q -n1 --ep-overlap=auto true && echo four
done 2>/dev/null'\'''
    times 10 '^four$'
}
