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
*name*) echo stand-in ;;
*) echo 9.0 ;;
esac
END
    printf '#!/bin/sh\nexit "${MAKE_STATUS:-0}"\n' >"$work/bin/make"
    printf '#!/bin/sh\n[ -n "$TORCH_HERE" ] || exit 1\necho "$0 $*"\n' >"$work/bin/python3"
    chmod +x "$work"/bin/*
    export PATH=$work/bin:$PATH EPO_GPU_BUILD=$work/b
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
    diff <(cut -d' ' -f1 <<<"$output" | sort) <(sed -n '/^phase_run()/,/^}/s/^        \([a-z0-9]*\)).*/\1/p' "$top/tests/gpu/run.sh" | sort)
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
    sed 's/^#   repeats   20 s/#   repeats    0 s/' "$top/tests/gpu/run.sh" >"$work/run.sh"
    mkdir -p "$work/tree/tests/gpu" && cp "$work/run.sh" "$work/tree/tests/gpu/" && chmod +x "$work/tree/tests/gpu/run.sh"
    run -1 timeout 100 "$work/tree/tests/gpu/run.sh" -t 200 repeats dense
    echo "$output"
    line '^repeats	endure repeats 	FAIL	stopped after [1-5]?[0-9] s'
    line '^repeats4	endure repeats 	FAIL	stopped after [0-9] s'
    line '^result phase=dense .* ok=1 fail=0 '
}

@test "run.sh: a signal ends what runs, the rest is named" {
    program dense <<<"sleep 876"
    ok units
    (sleep 3 && kill -TERM "$(pgrep -of "run.sh -o $work/out dense units")") &
    run_sh 1 -o "$work/out" dense units
    line '^result phase=dense '
    line '^skipped: units: a signal came before it'
    run ! pgrep -f 'sleep 876$'
}

@test "run.sh: no phase begins for which no time is left; done ones are not done again" {
    ok units
    ok dense
    run_sh 0 -t 7 units dense
    line '^skipped: units: usually takes 9 s, 7 s were left'
    line '^result phase=units .*left_out=no-time-left'
    line '^result phase=dense .* ok=1 fail=0 '
    run_sh 0 -r units dense
    line '^done before, counted above: dense'
    line '^result phase=units .* ok=1 fail=0 '
    [[ $output != *"result phase=dense"* ]]
    run_sh 0 units dense
    line '^result phase=dense '
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
