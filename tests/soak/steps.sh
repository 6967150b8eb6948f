#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Many steps, some at a time, with every kind of end; then what is left of them; see usage below.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'END'
Usage: tests/soak/steps.sh [-P] [STEPS [1000]]

Starts a private cluster of four nodes and, in four jobs side by side, STEPS steps
of 16 tasks on two nodes each (64 tasks at a time): without an option, on, on with
all options, auto, off, nested off, a refused one, one that fails, one that is
cancelled. Every step's status is held against what it has to be. Afterwards: all
nodes idle, slurmd's descriptors and threads as after the first steps, no process,
shared memory, semaphore or file of a step left, slurmd's memory grown by less
than 2 MiB. Prints the figures; status 1 if one of them is not as it has to be.

  -P  without the plugin (its options left out): what Slurm itself does
END
}

plugin=1
while getopts :P-: option; do
    case $option in
    P) plugin=0 ;;
    -) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
    esac
done
shift $((OPTIND - 1))
steps=${1:-1000}
if ! [[ $steps =~ ^[0-9]{1,6}$ ]] || [ "$steps" -lt 100 ]; then
    echo "steps.sh: 100 steps or more, not '$steps'" >&2
    exit 2
fi
work=$(mktemp -d) && chmod 755 "$work" || exit 1
trap 'rm -rf "$work"' EXIT
printf '#!/bin/sh\nexit 0\n' >"$work/python" && chmod 755 "$work/python"

cat >"$work/worker" <<'END'
# worker NUMBER FROM TO: in a job of its own
number=$1 i=$2 to=$3 bad=0
PATH=$work:$PATH
[ "$plugin" = 1 ] || on='' off=''
on=${on---ep-overlap=on} off=${off---ep-overlap=off}
lacks="python pretrain_gpt.py --num-experts 8"
while [ "$i" -lt "$to" ]; do
    want=0
    case $((i % 9)) in
    0) srun -n16 true ;;
    1) srun -n16 $on true ;;
    2) srun -n16 $on ${on:+--ep-dispatcher=flex --delay-wgrad} true ;;
    3) srun -n16 ${on:+--ep-overlap=auto} true ;;
    4) srun -n16 $off true ;;
    5) srun -n16 $on sh -c '[ "$SLURM_PROCID" != 0 ] || srun --overlap -n1 '"$off"' true' ;;
    6) srun -n16 $on $lacks && [ "$plugin" = 1 ] && bad=$((bad + 1)) && echo "step $i was not refused" >>"$work/bad"
       want=any ;;
    7) srun -n16 $on sh -c 'exit 3' && true
       [ $? = 3 ] || echo "step $i: not status 3" >>"$work/bad"
       want=any ;;
    8) srun -n16 $on sleep 60 & child=$!
       for try in $(seq 100); do squeue -h -s -j "$SLURM_JOB_ID" -o %j | grep -qx sleep && break; sleep 0.05; done
       squeue -h -s -j "$SLURM_JOB_ID" -o '%i %j' | awk '$2 == "sleep" { print $1 }' | xargs -r scancel
       wait "$child" && echo "step $i was not cancelled" >>"$work/bad"
       want=any ;;
    esac >"$work/out.$number" 2>&1
    status=$?
    [ "$want" = any ] || [ "$status" = 0 ] || { echo "step $i: status $status" && cat "$work/out.$number"; } >>"$work/bad"
    i=$((i + 1))
    echo "$i" >>"$work/done"
done
END
cat >"$work/script" <<'END'
figures() { # what slurmd holds on each node, and what is left beside it
    local node pid
    for node in 1 2 3 4; do
        pid=$(cat "$EPO_CLUSTER_DIR/run/slurmd.n$node.pid")
        echo "n$node $(ls "/proc/$pid/fd" | wc -l) $(awk '/^VmRSS/ { r = $2 } /^Threads/ { t = $2 } END { print r, t }' "/proc/$pid/status")" \
            "$(pgrep -c -P "$pid")"
    done
    echo "left $(ls -A /dev/shm | wc -l) $(ipcs -m -s -q | grep -c '^0x')" \
        "$(find "$EPO_CLUSTER_DIR/spool" ! -type d | wc -l)"
}
settle() { for try in $(seq 300); do [ -z "$(squeue -h)" ] && ! pgrep -f "slurmstepd: .*$EPO_CLUSTER_DIR" >/dev/null && [ "$(sinfo -h -o %T)" = idle ] && break; sleep 0.1; done; sleep 1; }
run() { # from to: four workers
    local i share=$((($2 - $1 + 3) / 4)) from
    for i in 1 2 3 4; do
        from=$(($1 + (i - 1) * share))
        salloc -Q -N2 -n16 bash "$work/worker" "$i" "$from" $((from + share < $2 ? from + share : $2)) &
    done
    wait
    settle
}
run 0 72 # every kind twice by each worker
figures >"$work/before"
begin=$(date +%s)
run 72 $((72 + steps))
echo $(($(date +%s) - begin)) >"$work/seconds"
figures >"$work/after"
sinfo -h -N -o '%N %T %E' | sort -u >"$work/states"
grep -c 'ep-overlap: step' "$EPO_CLUSTER_DIR"/log/slurmd.n*.log | awk -F: '{ n += $NF } END { print n }' >"$work/lines"
true
END
export work plugin steps
touch "$work/bad"
options=(-n 4 -u 16 -t $((300 + steps)))
[ "$plugin" = 1 ] || options+=(-P)
"$here/../cluster/run.sh" "${options[@]}" bash "$work/script" || exit 1

failed=0
check() { # what condition...
    local what=$1
    shift
    if "$@"; then echo "ok: $what"; else echo "NOT OK: $what" && failed=1; fi
}
ended=$(wc -l <"$work/done")
echo "$steps steps of 16 tasks, 64 tasks at a time, in $(cat "$work/seconds") s; slurmd's lines of them: $(cat "$work/lines")"
echo "node: descriptors, memory kB, threads, children: before and after"
paste "$work/before" "$work/after" | awk '$1 != "left" { printf "  %s: %d %d %d %d   %d %d %d %d\n", $1, $2, $3, $4, $5, $7, $8, $9, $10 }'
check "every step ended ($ended of $((steps + 72)))" [ "$ended" = $((steps + 72)) ]
check "every status was right$(sed 's/^/\n    /' "$work/bad" | head -n 20)" [ ! -s "$work/bad" ]
check "all nodes idle" [ -z "$(awk '$2 != "idle"' "$work/states")" ]
# shellcheck disable=SC2317 # called by check
grow() { # column most
    paste "$work/before" "$work/after" | awk -v c="$1" -v most="$2" '$1 != "left" && $(c + 5) - $c > most { bad = 1 } END { exit bad }'
}
check "descriptors of slurmd as before" grow 2 0
check "memory of slurmd grew by less than 2 MiB" grow 3 2048
check "threads of slurmd as before" grow 4 0
check "no child of slurmd is left" grow 5 0
check "/dev/shm, System V objects and spool files as before" diff <(grep left "$work/before") <(grep left "$work/after")
exit "$failed"
