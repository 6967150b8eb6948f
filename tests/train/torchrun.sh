#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Usage: torchrun.sh N COMMAND...: N ranks of COMMAND in this one task, with the
# variables that torchrun gives its workers (and Slurm's still there, as under
# `srun -n1 torchrun`). Status: of the first rank that failed.
set -u
n=$1
shift
pids='' rank=0
while [ $rank -lt "$n" ]; do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n GROUP_RANK=0 \
        MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 20000)) TORCHELASTIC_RUN_ID=$$ "$@" &
    pids="$pids $!"
    rank=$((rank + 1))
done
status=0
for pid in $pids; do
    wait "$pid"
    one=$?
    [ $status != 0 ] || status=$one
done
exit $status
