#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# run.sh itself: statuses, limits, many at once, and that nothing is ever left behind.

setup() {
    here=$(cd "$BATS_TEST_DIRNAME" && pwd)
    run_sh=$here/run.sh
    # In a folder of its own, so that what is left of this test is told from the others'.
    TMPDIR=$(mktemp -d /tmp/epo-harness.XXXXXX)
    chmod 755 "$TMPDIR"
    export TMPDIR
}

teardown() {
    left=$(left_behind)
    rm -rf "$TMPDIR"
    [ -z "$left" ] || { echo "left behind: $left" && return 1; }
}

left_behind() { # folders and processes of this test's clusters
    find "$TMPDIR" -maxdepth 1 -name 'epo-cluster.*'
    grep -lsz "^EPO_CLUSTER_DIR=$TMPDIR/" /proc/[0-9]*/environ || true
}

gone_within() { # seconds
    for _ in $(seq $(($1 * 10))); do
        [ -n "$(left_behind)" ] || return 0
        sleep 0.1
    done
    return 1
}

cluster() { timeout 120 "$run_sh" -t 60 "$@"; }

stage_of_this_build() {
    local build=${EPO_BUILD_DIR:-$here/../../build}
    [ -e "$build/stage/stage.env" ] || make -s -C "$build" stage >&2 || return 1
    (cd "$build/stage" && pwd)
}

start_sleeper() { # sets pid once the step runs on both nodes
    "$run_sh" -P srun -N2 sh -c "touch $TMPDIR/started.\$SLURM_PROCID; exec sleep 300" 3>&- >"$TMPDIR/out" 2>&1 &
    pid=$!
    for _ in $(seq 200); do
        [ -e "$TMPDIR/started.0" ] && [ -e "$TMPDIR/started.1" ] && return 0
        sleep 0.1
    done
    cat "$TMPDIR/out"
    return 1
}

@test "runs the command in a cluster of two nodes and returns its status" {
    run cluster -P srun -N2 sh -c 'echo $SLURMD_NODENAME'
    echo "$output"
    [ "$status" = 0 ]
    [ "$(sort <<<"$output" | tr '\n' ' ')" = "n1 n2 " ]
    run cluster -P sh -c 'exit 7'
    [ "$status" = 7 ]
    run cluster -P sh -c 'kill -9 $$'
    [ "$status" = 137 ]
    run cluster -P /no/such/command
    [ "$status" = 127 ]
}

@test "standard input, arguments with blanks and the working folder reach the command" {
    cd "$TMPDIR"
    run cluster -P sh -c 'cat; printf "<%s>" "$@"; pwd' sh "a b" "" <<<"from stdin"
    [ "$status" = 0 ]
    [ "$output" = "from stdin
<a b><>$TMPDIR" ]
}

@test "-n, -u, -g and -x shape the cluster" {
    run cluster -P -n 3 -u 4 -g 2 -x 'PriorityType=priority/basic' -x 'KillWait=7' sh -c '
        sinfo -h -N -o "%N %c %G"; scontrol show config | grep -E "^KillWait"
        srun -N3 --gpus-per-node=2 sh -c "echo gpus=\$CUDA_VISIBLE_DEVICES"'
    [ "$status" = 0 ]
    [ "$(grep -c ' 4 gpu:h100:2' <<<"$output")" = 3 ]
    [ "$(grep -c 'gpus=0,1' <<<"$output")" = 3 ]
    [[ $output == *"KillWait"*"7 sec"* ]]
}

@test "sbatch and salloc work" {
    # shellcheck disable=SC2016
    printf '#!/bin/sh\nsrun -n2 sh -c "echo job \$SLURM_PROCID"\n' >"$TMPDIR/job.sh"
    run cluster -P sh -c 'salloc -n2 srun sh -c "echo task \$SLURM_PROCID"
        sbatch -n2 -o '"$TMPDIR/job.out $TMPDIR/job.sh"'
        while [ -n "$(squeue -h)" ]; do sleep 0.1; done; cat '"$TMPDIR"'/job.out'
    [ "$status" = 0 ]
    echo "$output"
    for line in "task 0" "task 1" "job 0" "job 1"; do [[ $output == *"$line"* ]]; done
}

@test "four at once, each in a cluster of its own" {
    for i in 1 2 3 4; do
        (cluster -P srun -N2 sh -c "echo \$SLURM_CONF" 3>&- >"$TMPDIR/out.$i" 2>&1; echo "status $?" >>"$TMPDIR/out.$i") &
    done
    wait
    cat "$TMPDIR"/out.*
    [ "$(cat "$TMPDIR"/out.* | grep -c 'status 0')" = 4 ]
    [ "$(cat "$TMPDIR"/out.* | grep slurm.conf | sort | uniq -c | awk '{ print $1 }' | tr '\n' ' ')" = "2 2 2 2 " ]
}

@test "a command that hangs is ended at the limit, with what it started" {
    run timeout 60 "$run_sh" -P -t 2 sh -c 'trap "" TERM; srun -N2 sleep 301 & (trap "" TERM; sleep 300; sleep 300) & wait; wait'
    [ "$status" = 124 ]
    [[ $output == *"ended after 2 s (-t SECONDS allows more)"* ]]
}

@test "a command's own 124 is no limit" {
    run cluster -P sh -c 'exit 124'
    [ "$status" = 124 ]
    [[ $output != *"ended after"* ]]
}

@test "a killed run cleans up: TERM" {
    start_sleeper
    kill -TERM "$pid"
    result=0
    wait "$pid" || result=$?
    [ "$result" = 143 ]
    [ -z "$(left_behind)" ]
}

@test "a killed run cleans up: KILL" {
    start_sleeper
    kill -KILL "$pid"
    gone_within 20
}

@test "a background process of the command does not outlive it" {
    run cluster -P sh -c 'sleep 300 >/dev/null 2>&1 & setsid sleep 300 >/dev/null 2>&1 & sbatch -o /dev/null --wrap "sleep 300"'
    [ "$status" = 0 ]
    [ -z "$(left_behind)" ]
}

@test "bad usage is named, status 2" {
    while read -r words; do
        # shellcheck disable=SC2086
        run "$run_sh" $words
        echo "$words -> $status $output"
        [ "$status" = 2 ]
        [[ $output == *"--help"* ]]
    done <<'END'

-n
-n 0 true
-n two true
-t -1 true
-g 65 true
-c /no/such/file true
--nodes 2 true
END
    run "$run_sh" --help
    [ "$status" = 0 ]
    [[ $output == Usage:* ]]
}

@test "a missing package is named with its remedy, status 69" {
    # shellcheck disable=SC2317
    command() { [ "$2" != munged ] && builtin command "$@"; }
    export -f command
    run "$run_sh" -P true
    [ "$status" = 69 ]
    [[ $output == *"not found: munged"* ]]
    [[ $output == *"apt-get install"*"munge"* ]]
}

@test "a cluster that does not start shows the daemons' last lines, status 70" {
    run timeout 60 "$run_sh" -P -x 'SelectType=select/nonesuch' true
    [ "$status" = 70 ]
    [[ $output == *"did not come up"* ]]
    [[ $output == *"select/nonesuch"* ]]
}

@test "-k keeps the logs of a failure, and only of a failure" {
    run cluster -P -k true
    [ -z "$(left_behind)" ]
    run cluster -P -k false
    [ "$status" = 1 ]
    [[ $output =~ kept:\ (.*) ]]
    [ -s "${BASH_REMATCH[1]}/log/slurmctld.log" ]
    rm -rf "${BASH_REMATCH[1]}"
}

fake_stage() { # a staged tree whose plugin is an empty file
    mkdir -p "$1/p/lib/slurm" "$1/p/bin"
    touch "$1/p/lib/slurm/ep_overlap.so"
    printf "stage_bindir='/p/bin'\nstage_libdir='/p/lib'\nstage_plugindir='/p/lib/slurm'\n" >"$1/stage.env"
}

@test "the staged plugin and the site's configuration stand in plugstack.conf" {
    fake_stage "$TMPDIR/stage"
    export EPO_STAGE_DIR=$TMPDIR/stage
    run cluster sh -c 'cat $EPO_CLUSTER_DIR/etc/plugstack.conf $EPO_CLUSTER_DIR/etc/ep_overlap.conf; echo "$PATH"'
    [[ ${lines[0]} == "optional $TMPDIR/stage/p/lib/slurm/ep_overlap.so conf=$TMPDIR/epo-cluster."*/etc/ep_overlap.conf ]]
    [[ $output == *"path = \"$TMPDIR/stage/p/lib/libep_overlap.so\""* ]]
    [[ ${lines[-1]} == "$TMPDIR/stage/p/bin:"* ]]
    printf 'preload = { path = "@libdir@/x.so"; };\n' >"$TMPDIR/site"
    run cluster -a 'more=1' -c "$TMPDIR/site" sh -c 'cat $EPO_CLUSTER_DIR/etc/plugstack.conf $EPO_CLUSTER_DIR/etc/ep_overlap.conf'
    [[ ${lines[0]} == *"/etc/ep_overlap.conf more=1" ]]
    [ "${lines[1]}" = "preload = { path = \"$TMPDIR/stage/p/lib/x.so\"; };" ]
    run cluster -C "$TMPDIR/site" sh -c 'cat $EPO_CLUSTER_DIR/etc/plugstack.conf'
    [[ $output == *" conf=$TMPDIR/site" ]]
    run cluster -P sh -c 'cat $EPO_CLUSTER_DIR/etc/plugstack.conf'
    [ "$output" = "" ]
    EPO_STAGE_DIR=$TMPDIR run cluster true
    [ "$status" = 69 ]
}

@test "blanks in the paths of the checkout and of TMPDIR" {
    ln -s "$(stage_of_this_build)" "$TMPDIR/a stage"
    mkdir "$TMPDIR/a folder"
    # shellcheck disable=SC2016
    run env EPO_STAGE_DIR="$TMPDIR/a stage" TMPDIR="$TMPDIR/a folder" timeout 120 "$run_sh" -t 60 srun --ep-overlap=on sh -c 'echo "decision $EP_OVERLAP_DECISION"'
    echo "$output"
    [ "$status" = 0 ]
    [[ $output == *"decision on"* ]]
}

@test "the build is staged first; a failing build is shown, status 70" {
    mkdir "$TMPDIR/build"
    export EPO_BUILD_DIR=$TMPDIR/build
    unset EPO_STAGE_DIR
    printf '.PHONY: stage\nstage:\n\tmkdir -p stage && echo "stage_bindir=/b stage_libdir=/l stage_plugindir=/p" >stage/stage.env\n' >"$TMPDIR/build/Makefile"
    run cluster sh -c 'echo $EPO_BINDIR'
    [ "$status" = 0 ]
    [ "${lines[-1]}" = "$TMPDIR/build/stage/b" ]
    printf '.PHONY: stage\nstage:\n\t@echo the compiler says no; exit 1\n' >"$TMPDIR/build/Makefile"
    run cluster true
    [ "$status" = 70 ]
    [[ $output == *"the compiler says no"* ]]
    EPO_BUILD_DIR=$TMPDIR/nothing run cluster true
    [ "$status" = 0 ]
    [[ $output == *"no build in $TMPDIR/nothing"* ]]
}

@test "as an ordinary user" {
    [ "$(id -u)" = 0 ] || skip "every test here runs as an ordinary user already"
    mkdir "$TMPDIR/cluster" "$TMPDIR/own"
    cp "$here"/*.sh "$TMPDIR/cluster/"
    chmod 755 "$TMPDIR/cluster"
    chown nobody "$TMPDIR/own"
    cd "$TMPDIR"
    run setpriv --reuid="$(id -u nobody)" --regid="$(id -g nobody)" --clear-groups \
        env -u EPO_STAGE_DIR HOME=/nonexistent TMPDIR="$TMPDIR/own" \
        timeout 60 "$TMPDIR/cluster/run.sh" -P srun -N2 id -un
    [ "$status" = 0 ]
    [ "$output" = "nobody
nobody" ]
    [ -z "$(ls -A "$TMPDIR/own")" ]
}

@test "a host name that does not resolve" {
    unshare --uts hostname nowhere.invalid 2>/dev/null || skip "this needs the right to name a host in a namespace of one's own"
    run unshare --uts sh -c "hostname nowhere-epo.invalid; timeout 60 $run_sh -P srun -N2 hostname"
    [ "$status" = 0 ]
    [ "$output" = "nowhere-epo.invalid
nowhere-epo.invalid" ]
}
