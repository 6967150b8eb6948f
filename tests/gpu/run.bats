#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# tests/gpu/run.sh where there is no GPU: its way through the phases with programs that stand in for the GPU's,
# of which some hang, fail, or leave others behind.

bats_require_minimum_version 1.5.0

setup() {
    top=$(cd "$BATS_TEST_DIRNAME/../.." && pwd)
    work=$BATS_TEST_TMPDIR
    mkdir "$work/bin" "$work/b"
    # Two GPUs, a make that builds nothing, a Python that has no torch.
    cat >"$work/bin/nvidia-smi" <<'END'
#!/bin/sh
case "$*" in
-L) printf 'GPU 0: stand-in\nGPU 1: stand-in\n' ;;
*memory.used*) cat "$WORK/used" 2>/dev/null || printf '0, 4\n1, 4\n' ;;
*compute-apps*) cat "$WORK/programs" 2>/dev/null ;;
*name*) echo stand-in ;;
*) echo 9.0 ;;
esac
END
    printf '#!/bin/sh\nexit "${MAKE_STATUS:-0}"\n' >"$work/bin/make"
    printf '#!/bin/sh\n[ -n "$TORCH_HERE" ] || exit 1\necho "$0 $*"\n' >"$work/bin/python3"
    chmod +x "$work"/bin/*
    export WORK=$work PATH=$work/bin:$PATH EPO_GPU_BUILD=$work/b CUDA=$work/none
    unset PYTHON PYTHONPATH
}

program() { # NAME: its shell commands from the input
    { echo '#!/bin/bash' && cat; } >"$work/b/$1"
    chmod +x "$work/b/$1"
}
ok() { program "$1" <<<"printf 'case\t$1 \$*\tok\tas wanted\n'"; }
run_sh() { run -"$1" timeout 60 "$top/tests/gpu/run.sh" "${@:2}"; echo "$output"; }
line() { grep -qE -- "$1" <<<"$output" || { echo "no line: $1" && false; }; }

@test "run.sh without a GPU: nothing is run, and said" {
    printf '#!/bin/sh\nexit 9\n' >"$work/bin/nvidia-smi"
    run_sh 2 units
    line 'no GPU here'
}

@test "run.sh: phases and their seconds are told; a phase that there is none of, and no number of seconds, are refused" {
    run_sh 0 -l
    [ "${#lines[@]}" -ge 40 ]
    [ "$(grep -cE '^[a-z0-9]+ [0-9]+$' <<<"$output")" = "${#lines[@]}" ]
    # each is one of the script's own, and the other way round
    diff <(cut -d' ' -f1 <<<"$output" | sort) <(sed -n '/^phase_run()/,/^}/s/^        \([a-z0-9]*\)).*/\1/p' "$top/tests/gpu/phases.sh" | sort)
    diff <(cut -d' ' -f1 <<<"$output" | sort) <(sed -n 's/^phases=${\*:-\(.*\)}$/\1/p' "$top/tests/gpu/run.sh" | tr ' ' '\n' | sort)
    run_sh 0 --help
    line 'bulk +[0-9]+ s   10,000 random small layers'
    run_sh 2 units unit
    line 'no phase unit '
    run_sh 2 -t soon units
    line "not 'soon'"
}

@test "run.sh: results of phases, one by one and at the end" {
    ok units
    program features <<<"printf 'case\ta\tok\tx\ncase\tb\tskip\ttoo few\ncase\tc\tFAIL\tother bits\n'; exit 1"
    run_sh 1 units comm dense
    line '^result phase=units state=[0-9a-f]{12} ok=1 fail=0 skip=0 seconds=[0-9]+ at=[0-9]+$'
    line '^result phase=comm state=[0-9a-f]{12} ok=1 fail=1 skip=1 '
    line '^comm	c	FAIL	other bits'
    line '^skipped: comm, b: too few'
    line '^\{"gpu":"stand-in","gpus":2,.*"ok":2,"failed":2'
}

@test "run.sh: a verdict's word in a case's text is no verdict" {
    program units <<<"printf 'case\ta\tok\tsaid\tFAIL\tonce\n'"
    run_sh 0 units
    line '^result phase=units .* ok=1 fail=0 skip=0 '
    line '"ok":1,"failed":0'
    [ -e "$work/b/results/units.done" ]
    # neither does it hide that a program ended badly, nor is a word that only begins alike a case
    program units <<<"printf 'case\ta\tok\tsaid\tFAIL\tonce\nno case\tb\tFAIL\tx\ncases\tc\tFAIL\tx\n'; exit 3"
    run_sh 1 units
    line '^result phase=units .* ok=1 fail=1 skip=0 '
    line '^units	units 	FAIL	status 3: '
}

@test "run.sh: a late communicator is told by a line, whatever the program makes of it" {
    mkdir "$work/lib" && : >"$work/lib/libnccl.so.2"
    printf '#!/bin/sh\necho "	libnccl.so.2 (libc6,x86-64) => %s"\n' "$work/lib/libnccl.so.2" >"$work/bin/ldconfig"
    printf '#!/bin/sh\nexit 0\n' >"$work/bin/cc"
    chmod +x "$work"/bin/*
    program layer <<'END'
[ -n "$LATE_NCCL_RANK" ] || { printf 'case\tlayer\tok\tx\n'; exit 0; }
printf 'case\tlayer x2\tFAIL\trank 0: NCCL'"'"'s making a communicator of 2 ranks: not complete after 2 s, though\n'
exit 1
END
    CC=cc run_sh 0 nccl
    line '^result phase=nccl .* ok=3 fail=0 '
    grep -q '^nccl	late communicator	ok	rank 0: NCCL' "$work/b/results/cases.tsv"
    program layer <<<"printf 'case\tlayer\tok\tx\n'"
    CC=cc run_sh 1 nccl
    line '^nccl	late communicator	FAIL	case	layer	ok'
}

@test "run.sh: what hangs is ended with all that it started, and the next phase begins" {
    program bulk <<<"trap '' TERM; setsid sleep 977 & sleep 978 & printf 'case\tfirst\tok\tx\n'; sleep 979"
    ok dense
    EPO_TEST_LIMIT=2 run_sh 1 bulk dense
    line '^result phase=bulk .* ok=2 fail=2 '
    line '^result phase=dense .* ok=1 fail=0 '
    pkill -KILL -f 'sleep 977$' # (a session of its own is its own affair)
    run ! pgrep -f 'sleep 97[89]$'
}

@test "run.sh -t: one phase does not take the time of the others" {
    program endure <<<"sleep 977"
    ok dense
    # two commands of 60 s, no second usually: 20 s
    sed 's/^#   repeats   10 s/#   repeats    0 s/' "$top/tests/gpu/run.sh" >"$work/run.sh"
    mkdir -p "$work/tree/tests/gpu" && cp "$work/run.sh" "$top/tests/gpu/phases.sh" "$work/tree/tests/gpu/" && chmod +x "$work/tree/tests/gpu/run.sh"
    run -1 timeout 100 "$work/tree/tests/gpu/run.sh" -t 200 repeats dense
    echo "$output"
    line '^repeats	endure repeats 	FAIL	stopped after [1-5]?[0-9] s'
    line '^repeats4	endure repeats 	FAIL	stopped after [0-9] s'
    line '^result phase=dense .* ok=1 fail=0 '
}

@test "run.sh: what a phase leaves on the GPUs is its failure; what was there before is not" {
    echo '71, 300 MiB, other' >"$work/programs"
    ok units
    run_sh 0 units
    line '^gpus before=units used_mb=4,4 programs=0 of_others=1$'
    line '^gpus before=end used_mb=4,4 programs=0 of_others=1$'
    program units <<<"printf 'case\tunits\tok\tx\n'; printf '0, 4\n1, 900\n' >'$work/used'; echo '72, 800 MiB, ours' >>'$work/programs'"
    program dense <<<"printf 'case\tdense\tok\tx\n'; rm '$work/used' '$work/programs'"
    run_sh 1 units dense
    line '^gpus before=dense used_mb=4,900 programs=1 of_others=1$'
    line '^units	left on the GPUs	FAIL	896 MB of GPU 1 72, 800 MiB, ours'
    line '^gpus before=end used_mb=4,4 programs=0 of_others=1$'
    [ ! -e "$work/b/results/units.done" ] && [ -e "$work/b/results/dense.done" ]
}

@test "run.sh PHASE=SECONDS: it gets no more, and begins where that is left" {
    program endure <<<"sleep 977"
    ok dense
    run_sh 1 -t 60 endure=6 dense
    line '^result phase=endure .* fail=[1-9] .* seconds=([6-9]|1[0-9]) '
    line '^result phase=dense .* ok=1 fail=0 '
    run_sh 2 dense=soon
    line "dense takes a number of seconds, not 'soon'"
}

@test "run.sh: a signal ends what runs, the rest is named" {
    program dense <<<"touch '$work/begun'; sleep 876"
    ok units
    (for _ in {1..300}; do [ ! -e "$work/begun" ] || break; sleep 0.1; done
        kill -TERM "$(pgrep -of "run.sh -o $work/out dense units")") &
    run_sh 1 -o "$work/out" dense units
    line '^result phase=dense '
    line '^skipped: units: a signal came before it'
    run ! pgrep -f 'sleep 876$'
}

@test "run.sh: no phase begins for which no time is left; done ones are not done again" {
    ok units
    ok dense
    run_sh 0 -t 150 scale units
    line '^skipped: scale: usually takes 200 s, 1[0-9]* s were left'
    line '^result phase=scale .*left_out=no-time-left'
    line '^result phase=units .* ok=1 fail=0 '
    run_sh 0 -r units dense
    line '^done before, counted above: units'
    line '^result phase=dense .* ok=1 fail=0 '
    [[ $output != *"result phase=units"* ]]
    run_sh 0 units dense
    line '^result phase=units '
}

@test "run.sh: what does not compile is told, the rest is run" {
    ok units
    MAKE_STATUS=2 run_sh 1 units dense
    line '^result phase=units .* ok=1 fail=0 '
    line '^dense	.*FAIL	status 12[67]'
    line 'the build failed'
}

@test "run.sh: without torch its phases are skipped, by name" {
    run_sh 0 random strong record
    for phase in random strong record; do line "^skipped: $phase: no PyTorch here"; done
}

real_python() { PATH=${PATH#"$work/bin:"} command -v python3; }

@test "launch.py: all ranks' output; one that fails or hangs does not hold up the others" {
    cat >"$work/rank.py" <<'END'
import os, sys, time
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
if sys.argv[1] == "hang" or sys.argv[1] == "half" and rank == "1":
    time.sleep(300)
sys.exit(3 if sys.argv[1] == "half" else 0)
END
    python=$(real_python)
    run -0 timeout 60 "$python" "$top/tests/gpu/launch.py" -n 3 "$work/rank.py" well
    for rank in 0 1 2; do line "^-- rank $rank, .*: rank $rank of 3"; done
    line '^rank.py: status 0 after'
    run -1 timeout 60 "$python" "$top/tests/gpu/launch.py" -l 100 "$work/rank.py" half
    line '^-- rank 1 \(ended: another rank failed 10 s before\)'
    line '^rank.py: status 3 after'
    run -1 timeout 60 "$python" "$top/tests/gpu/launch.py" -l 3 "$work/rank.py" hang
    line '^-- rank 0 \(no end after 3 s\)'
    line 'File ".*rank.py", line 5' # where it stood
}

@test "nursery.py: what was said by a process that had to be ended" {
    cat >"$work/nurse.py" <<'END'
import sys
sys.path.insert(0, sys.argv[1])
from nursery import Process, ended
jobs = [Process(["sh", "-c", "echo %s; echo apart >&2; %s" % w], None, sys.argv[2] + w[0], True)
        for w in (("quick", "exit 0"), ("slow", "exec sleep 300"))]
late = ended(jobs, 1)
print([job in late for job in jobs], [job.returncode for job in jobs], [job.output() for job in jobs])
END
    run -0 timeout 60 "$(real_python)" "$work/nurse.py" "$top/tests/gpu" "$work/"
    [ "$output" = "[False, True] [0, -9] [('quick\n', 'apart\n'), ('slow\n', 'apart\n')]" ]
}

@test "gather.py: runs of one library add up, a seed counts once, a wrong call is a failure" {
    say() { printf 'result phase=random,accelerate%s library=%s calls=%s wrong=%s seconds=9.0 seed=%s\n' "$@"; }
    { say "" a1 5000 0 1 && say ,LEAST=1 a1 3000 0 1 && echo "result phase=random,accelerate library=a1 status=0"; } >"$work/one"
    { say "" a1 7000 0 1 && say "" a1 100 0 2 && say "" b2 40 0 1 && echo "result phase=random,plain library=a1 calls=9 wrong=0 seed=1"; } >"$work/two"
    run -0 "$(real_python)" "$top/tests/gpu/gather.py" "$work/one" "$work/two"
    line '^result gathered library=a1 calls=10100 wrong=0$'
    line '^result gathered library=b2 calls=40 wrong=0$'
    say "" a1 100 1 3 >"$work/three"
    run -1 "$(real_python)" "$top/tests/gpu/gather.py" "$work/one" "$work/three"
    line '^result gathered library=a1 calls=8100 wrong=1$'
    : >"$work/none"
    run -1 "$(real_python)" "$top/tests/gpu/gather.py" "$work/none"
}

@test "run.sh: some commands of a phase, by name" {
    ok graph
    EPO_GRAPH="e4m3 errors-flex" run_sh 0 graph
    [ "$(grep -c '	graph ' "$work/b/results/cases.tsv")" = 2 ]
    grep -q '^graph-e4m3	.*	ok' "$work/b/results/cases.tsv"
    grep -q '^graph-errors-flex	.*	ok' "$work/b/results/cases.tsv"
    run_sh 0 graph
    [ "$(grep -c '	graph ' "$work/b/results/cases.tsv")" = 10 ]
}

@test "intercept.py: nothing starts beside what looks at the time, or at the GPU's memory" {
    cat >"$work/turns.py" <<'END'
import contextlib, sys, types
sys.path.insert(0, sys.argv[1])
import intercept
waited = set()
def turn(how, gate, ranks):
    begun = {g for g, _ in started}
    print(name_of[gate], "alone" if begun == waited else "among others")
    return contextlib.nullcontext()
started, name_of = [], {}
def start(options, mode, parts, extra, gate):
    started.append((gate, parts))
    name_of[gate] = parts[0][0]
    return []
intercept.start, intercept.in_turn, intercept.open_nurseries = start, turn, lambda *_: None
intercept.stand_at = lambda gate, ranks, limit=35: waited.add(gate) or True
intercept.end, intercept.show = lambda *_: None, lambda *_: True
options = types.SimpleNamespace(late=lambda: False, began=0, nurseries={}, most=lambda limit: limit)
cases = [(part, "plain", [[part, []]], 9, {}) for part in ("graph", "churn", "graph", "abort", "time", "graph")]
print(intercept.in_turns(options, cases))
END
    run -0 timeout 60 "$(real_python)" "$work/turns.py" "$top/tests/gpu"
    [ "$(grep -vx '[0-9.]* s: [a-z]*' <<<"$output" | tr '\n' ' ')" = "graph among others churn alone graph alone abort alone time alone graph alone 0 " ]
}
