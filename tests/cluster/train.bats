#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2030,SC2031 # run sets them in each test
# ep-train as Slurm's step, job and launcher start it: the path from srun's option
# to a loss that falls.

setup() {
    here=$(cd "$BATS_TEST_DIRNAME" && pwd)
    top=$(cd "$here/../.." && pwd)
    TMPDIR=$(mktemp -d /tmp/epo-train.XXXXXX)
    chmod 755 "$TMPDIR"
    export TMPDIR
    unset EP_OVERLAP_CHUNKS EP_OVERLAP_HOST_LINK
    export CUDA_VISIBLE_DEVICES= # the host engine, also where there is a GPU
    # a time-out of our own, so that whatever waits says so within the test's limit
    export EP_OVERLAP_TIMEOUT=20 EP_OVERLAP_BLAS_THREADS=1
}

teardown() { rm -rf "$TMPDIR"; }

cluster() { timeout 200 "$here/run.sh" -t 120 "$@"; }

# The lines of a good run: the decision, 50 iterations from the last rank, a loss
# that ends below 60 % of the first, the table.
trained() { # DECISION
    echo "$output" | cut -c 1-300
    [ "$status" = 0 ]
    grep -q "^ep-train: $1, .*host engine, 4 ranks" <<<"$output"
    [ "$(grep -c 'iteration .*lm loss: ' <<<"$output")" = 50 ]
    sed -n 's/.*lm loss: \([0-9.E+-]*\).*/\1/p' <<<"$output" |
        awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < 0.6 * first) }'
    grep -q '^  T_floor ' <<<"$output"
}

@test "srun: flex with delayed weight gradients" {
    run cluster srun -N2 -n4 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad ep-train --steps 50
    trained "overlap on, dispatcher flex, weight gradients delayed"
}

@test "srun: alltoall" {
    run cluster srun -N2 -n4 --ep-overlap=on --ep-dispatcher=alltoall ep-train --steps 50
    trained "overlap on, dispatcher alltoall, weight gradients at once"
}

@test "srun: off" {
    run cluster srun -N2 -n4 --ep-overlap=off ep-train --steps 50
    trained "overlap off, dispatcher alltoall"
}

@test "sbatch with an inner srun: the job script" {
    run cluster -u 8 sh -c "$here/batch.sh -o $TMPDIR/out $top/jobscripts/quickstart.sbatch; status=\$?
        cat $TMPDIR/out; exit \$status"
    trained "overlap on, dispatcher flex, weight gradients delayed"
}

@test "an inner srun's off wins over the job's lines and drops their companions" {
    sed 's/^exec srun/& --ep-overlap=off/' "$top/jobscripts/quickstart.sbatch" >"$TMPDIR/off.sbatch"
    run cluster sh -c "$here/batch.sh -o $TMPDIR/out $TMPDIR/off.sbatch; status=\$?
        cat $TMPDIR/out; exit \$status"
    trained "overlap off, dispatcher alltoall, weight gradients at once"
}

@test "a program that the batch script starts without srun is one rank and waits for nobody" {
    run cluster sh -c "$here/batch.sh -n4 -o $TMPDIR/out --wrap 'ep-train --steps 2 --no-measure'; cat $TMPDIR/out"
    echo "$output" | cut -c 1-300
    grep -q '^ep-train: overlap off, .*host engine, 1 rank$' <<<"$output"
}

@test "one task that forks four ranks under torchrun's variables" {
    run cluster srun -n1 -c4 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad \
        "$top/tests/train/torchrun.sh" 4 ep-train --steps 50
    trained "overlap on, dispatcher flex, weight gradients delayed"
}

@test "mpirun inside a task, and over the nodes of a job" {
    mpirun --version 2>/dev/null | grep -q 'Open MPI' || skip "no mpirun of Open MPI (Debian and Ubuntu: openmpi-bin)"
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # the virtual node's name is not this machine's: without ^slurm mpirun would start a step for it
    run cluster srun -n1 -c4 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad \
        mpirun --mca plm ^slurm --mca ras ^slurm -np 4 --oversubscribe ep-train --steps 50
    trained "overlap on, dispatcher flex, weight gradients delayed"
    run cluster salloc -Q -N2 -n4 --ep-overlap=on mpirun -np 4 ep-train --steps 2 --no-measure
    echo "$output" | cut -c 1-300
    [ "$status" = 0 ]
    grep -q '^ep-train: overlap on, dispatcher alltoall, .*host engine, 4 ranks$' <<<"$output"
}

@test "the program's own options win over the job's" {
    run cluster srun -n2 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad \
        ep-train --steps 2 --no-measure --overlap off --dispatcher alltoall
    [ "$status" = 0 ]
    grep -q '^ep-train: overlap off, dispatcher alltoall, weight gradients at once' <<<"$output"
}

@test "losses and weights do not depend on the option" {
    run cluster sh -c "
        srun -n4 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad ep-train --steps 5 --no-measure --save-weights $TMPDIR/late &&
        srun -n4 --ep-overlap=off ep-train --steps 5 --no-measure --dispatcher flex --save-weights $TMPDIR/flex &&
        cmp $TMPDIR/late $TMPDIR/flex"
    echo "$output" | cut -c 1-300
    [ "$status" = 0 ]
}

# What is wrong with the text: one line, status 1, nothing hangs, nodes idle.
wrong_text() { # FILE WORDS
    local begin=$SECONDS
    run cluster sh -c "srun -n4 --ep-overlap=on ep-train $1; status=\$?
        for i in 1 2 3 4 5 6 7 8 9 10; do [ \"\$(sinfo -h -o %T | sort -u)\" = idle ] && break; sleep 1; done
        echo nodes=\$(sinfo -h -o %T | sort -u); exit \$status"
    echo "$output"
    [ "$status" = 1 ]
    [ "$(grep -c "^ep-train: .*$2" <<<"$output")" = 1 ]
    [ "$(grep -c '^ep-train: ' <<<"$output")" = 1 ]
    grep -q '^nodes=idle$' <<<"$output"
    [ $((SECONDS - begin)) -lt 60 ]
}

@test "a text that does not exist" { wrong_text /nonexistent/text "/nonexistent/text cannot be read"; }

@test "a text that is empty" {
    : >"$TMPDIR/empty"
    wrong_text "$TMPDIR/empty" "is empty"
}

@test "experts that the ranks do not divide: both numbers, once" {
    run cluster srun -n4 ep-train --experts 6
    echo "$output"
    [ "$status" = 2 ]
    [ "$(grep -c '^ep-train: .*6.*4' <<<"$output")" = 1 ]
}

@test "a rank that is killed: the step ends and names what happened" {
    begin=$SECONDS
    run cluster srun -n4 --kill-on-bad-exit=0 sh -c '
        [ "$SLURM_PROCID" = 2 ] && (sleep 4; kill -9 $$) &
        exec ep-train --steps 1000000 --no-measure --log-interval 1000000'
    echo "$output"
    [ "$status" != 0 ]
    grep -q 'rank 2' <<<"$output"
    [ $((SECONDS - begin)) -lt 100 ]
}

@test "a rank that is stopped: the others end within the limit, srun -K1 ends it too" {
    begin=$SECONDS
    # shellcheck disable=SC2016
    EP_OVERLAP_TIMEOUT=3 run cluster sh -c '
        srun -N2 -n4 -K1 --ep-overlap=on sh -c "
            [ \$SLURM_PROCID = 2 ] && (sleep 3; kill -STOP \$\$) &
            exec ep-train --steps 1000000 --no-measure --log-interval 1000000"
        status=$?
        for i in 1 2 3 4 5 6 7 8 9 10; do
            [ "$(sinfo -h -o %T | sort -u)" = idle ] && break
            sleep 0.5
        done
        echo "nodes=$(sinfo -h -o %T | sort -u)"
        exit $status'
    echo "$output"
    [ "$status" != 0 ]
    grep -q 'ep-train: .*waited 3.* s for rank 2' <<<"$output"
    grep -q '^nodes=idle$' <<<"$output"
    [ $((SECONDS - begin)) -lt 100 ]
}
