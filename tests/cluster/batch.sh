#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# batch.sh SBATCH'S OPTIONS AND ARGUMENTS...: submits a job, returns its exit status once it has ended.
# As sbatch --wait, which asks after 2, then 8, then each 32 s. Whoever calls it has a limit.
job=$(sbatch --parsable "$@") || exit
# All tasks of an array; a controller that is too busy to answer is asked again.
until jobs=$(scontrol -o show job "$job") && ! echo "$jobs" | grep -qE 'JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING) '; do
    sleep 0.2
done
echo "$jobs" | sed 's/.* ExitCode=\([0-9]*\):\([0-9]*\) .*/\1 \2/' |
    awk '{ s = $2 > 0 ? 128 + $2 : $1; if (s > most) most = s } END { exit most }'
