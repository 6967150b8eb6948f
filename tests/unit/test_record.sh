#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The recorder in the built libep_overlap_intercept.so, on a stand-in libcupti and a stand-in
# NCCL (tests/fake/record_job.c says what its steps hold: 9 ms of 20 are communication, 4 of
# them beside a GEMM): what it tells, that it gives way to profilers, what it leaves behind.
# shellcheck disable=SC2317 # functions called by name
set -u
top=${top_builddir:-.}
src=${srcdir:-.}
library=$(cd "$top" && pwd)/.libs/libep_overlap_intercept.so
failed=0
work=$(mktemp -d) || exit 99
export UNIQUE=record-$$
trap 'rm -rf "$work" /dev/shm/ep-fake-comm-"$UNIQUE"*' EXIT

# shellcheck source=tests/fake/intercept.sh
. "$src/tests/fake/intercept.sh"

headers=
for folder in "${CUDA:-/usr/local/cuda}/include" "${CUDA:-/usr/local/cuda}/extras/CUPTI/include" /usr/include; do
    [ -n "$headers" ] || [ ! -e "$folder/cupti.h" ] || headers=$folder
done
if [ -n "$headers" ]; then
    # shellcheck disable=SC2086 # CC may be a command with words
    check "layouts are those of $headers" ${CC:-cc} -I "$headers" -I "${CUDA:-/usr/local/cuda}/include" -I "$src/lib" \
        -c -o "$work/layout.o" "$src/tests/fake/cupti_layout.c"
else
    echo "left out: layouts (no cupti.h here)"
fi
if is_sanitized "$library"; then
    echo "left out in a sanitized build: everything that preloads"
    exit $failed
fi

# ---- stand-ins ----
flags=(-std=gnu11 -g -O1 -Wall -Wextra -Werror -I "$src/lib")
build() {
    ${CC:-cc} "${flags[@]}" -shared -fPIC -fvisibility=hidden -Wl,-soname,libcupti.so.13 -o "$work/libcupti.so.13" \
        "$src/tests/fake/cupti.c" -lpthread &&
        ${CC:-cc} "${flags[@]}" -shared -fPIC -fvisibility=hidden -Wl,-soname,libnccl.so.2 -o "$work/libnccl.so.2" \
            "$src/tests/fake/nccl.c" -ldl &&
        ${CC:-cc} "${flags[@]}" -rdynamic -o "$work/job" "$src/tests/fake/record_job.c" -L"$work" -l:libnccl.so.2 \
            -l:libcupti.so.13 -ldl
}
build || exit 99

# Steps that a busy machine let begin late are others than those that are asked about: once more, twice at most. They
# catch up with less than a step of 20 ms; where a profiler comes in the first step of a window, they have to be as long as said.
job() { # NAME WHAT STEPS [NAME=VALUE...]: output in $work/NAME.{out,err,log,status}, traces in $work/NAME
    local name=$1 what=$2 steps=$3 left=3 again='^late [0-9.]+ ms, lost [1-9]'
    shift 3
    [[ $what != *[wi]* ]] || again='^late ([5-9]|[0-9]{2,})\.'
    while [ $left -gt 0 ]; do
        rm -rf "${work:?}/$name" "$work/$name.log"
        mkdir -p "$work/$name"
        timeout -k 5 60 env RANK=0 WORLD_SIZE=1 LD_LIBRARY_PATH="$work" LD_PRELOAD="$library" EP_OVERLAP_INTERPOSE=observe \
            EP_OVERLAP_RECORD="$work/$name" FAKE_CUPTI_LOG="$work/$name.log" "$@" "$work/job" "$what" "$steps" \
            >"$work/$name.out" 2>"$work/$name.err"
        echo $? >"$work/$name.status"
        left=$((left - 1))
        if [[ $* = *FAKE_CUPTI_SLOW* ]] || ! grep -qE "$again" "$work/$name.out"; then break; fi
        echo "$name: $(grep '^late' "$work/$name.out")"
    done
}

# The jobs wait more than they work, so they run side by side.
job steps l 260 EP_OVERLAP_RECORD_WINDOW=150-170 EP_OVERLAP_RECORD_LEAVE=1 &
job seconds '' 150 EP_OVERLAP_RECORD_WINDOW=1s-2s &
job shorthand '' 200 EP_OVERLAP_RECORD=150-160 &
job given '' 80 EP_OVERLAP_RECORD_WINDOW=20-30 EP_OVERLAP_RECORD_CALLS=3 &
job early '' 30 EP_OVERLAP_RECORD_WINDOW=5000-6000 &
job ends '' 100 EP_OVERLAP_RECORD_WINDOW=1s-50s &
job before b 320 EP_OVERLAP_RECORD_WINDOW=200-220 EP_OVERLAP_RECORD_LEAVE=1 &
job after m 300 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s EP_OVERLAP_RECORD_LEAVE=1 &
job stays '' 120 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s &
job twice bB 350 EP_OVERLAP_RECORD_WINDOW=200-220 &
job middle m 300 EP_OVERLAP_RECORD_WINDOW=1s-5s &
job soon w 60 EP_OVERLAP_RECORD_WINDOW=0.5s-3s &
job again w 260 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s &
job idle i 200 EP_OVERLAP_RECORD_WINDOW=0.3s-1.1s &
job always u 150 EP_OVERLAP_RECORD_WINDOW=1s-2s &
job context c 240 EP_OVERLAP_RECORD_WINDOW=1s-2s &
job contexts C 240 EP_OVERLAP_RECORD_WINDOW=1s-2s &
job unseen U 150 EP_OVERLAP_RECORD_WINDOW=1s-2.8s &
job tool '' 100 EP_OVERLAP_RECORD_WINDOW=1s-2s CUDA_INJECTION64_PATH=/opt/nvidia/libToolsInjection64.so &
wait
job many E 120 EP_OVERLAP_RECORD_WINDOW=0.5s-2s &
job gpus G 100 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s &
job old '' 100 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s FAKE_CUPTI_VERSION=18 EP_OVERLAP_RECORD_LEAVE=1 &
job oldest '' 100 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s FAKE_CUPTI_VERSION=15 &
job newer '' 100 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s FAKE_CUPTI_VERSION=140200 &
job ancient '' 100 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s FAKE_CUPTI_VERSION=12 &
job refused '' 100 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s FAKE_CUPTI_FAIL=cuptiActivityEnable:28 &
job forks f 100 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s &
job aborts a 50 EP_OVERLAP_RECORD_WINDOW=0.3s-9s &
job leaves x 50 EP_OVERLAP_RECORD_WINDOW=0.3s-9s &
job running r 50 EP_OVERLAP_RECORD_WINDOW=0.3s-9s &
job slow '' 60 EP_OVERLAP_RECORD_WINDOW=0.3s-9s FAKE_CUPTI_SLOW=700 &
job stuck '' 60 EP_OVERLAP_RECORD_WINDOW=0.3s-9s FAKE_CUPTI_SLOW=9000 &
job starts B 10 EP_OVERLAP_RECORD_WINDOW=0.5s-1.5s FAKE_CUPTI_SLOW=3600 &
job spawned s 60 EP_OVERLAP_RECORD_WINDOW=0.3s-0.9s &
job rank1 '' 60 EP_OVERLAP_RECORD_WINDOW=0.3s-0.9s RANK=1 WORLD_SIZE=2 &
job word '' 20 EP_OVERLAP_RECORD_WINDOW=soon &
job folder '' 60 EP_OVERLAP_RECORD_WINDOW=0.3s-0.9s EP_OVERLAP_RECORD="$work/no/such" &
job handled h 50 EP_OVERLAP_RECORD_WINDOW=0.3s-9s &
job off '' 30 EP_OVERLAP_RECORD=0 &
job moves d 60 EP_OVERLAP_RECORD_WINDOW=0.3s-0.9s EP_OVERLAP_RECORD="$(realpath --relative-to=. "$work")/moves" &
job unread p 20 EP_OVERLAP_RECORD_WINDOW=0.1s-0.2s &
job cut z 40 EP_OVERLAP_RECORD_WINDOW=0.1s-0.3s &
job typed '' 20 EP_OVERLAP_INTERPOSE=accelerated EP_OVERLAP_RECORD_CALLS=3x &
wait

ended() { [ "$(cat "$work/$1.status")" = "${2:-0}" ]; }
figures() { # NAME RANK EXPRESSION: of the report r and its first GPU d, ns
    python3 -c "
import json, sys
r = json.load(open('$work/$1/ep-overlap-trace-$2.json'))['ep_overlap']
d = r['nanoseconds'][0] if r['nanoseconds'] else {}
lost = [float(line.split()[4]) for line in open('$work/$1.out') if line.startswith('late ')] or [0]
print(r)
sys.exit(not ($3))"
}
# 5 of 20 ms exposed, 4 of 9 hidden; a busy machine makes steps longer, not what ran in them, and so
# moves the ends of what is measured: part of one step, and what a late step did not catch up with
right='abs(d["overlapped"] / d["ep_comm"] - 4 / 9) < 0.01 + 0.5 / r["steps"] and abs(d["exposed"] / r["steps"] - 5e6) < 1e5 * (1 + 50 / r["steps"]) + 5e6 * lost[0] / 20 / r["steps"]'
told() { # NAME LEAST MOST: its line, and as many steps
    cat "$work/$1.err" "$work/$1.out"
    ended "$1" && grep -qE '^ep-overlap: exposed communication [45]\.[0-9]+ ms/step of [0-9.]+, 4[0-9] % hidden \([0-9]+ steps of rank 0' \
        "$work/$1.err" && figures "$1" 0 "$2 <= r['steps'] <= $3 and r['calls_per_step'] == 3 and $right"
}
not_told() { # NAME WORDS
    cat "$work/$1.err" "$work/$1.out"
    ended "$1" && grep -q '^ended' "$work/$1.out" && grep -qF "communication was not recorded: $2" "$work/$1.err" &&
        figures "$1" 0 "'$2' in r['not_recorded'] and not r['nanoseconds']"
}
given_back() { # NAME FINALIZED: all that was switched on was switched off
    cat "$work/$1.log"
    [ "$(grep -c '^enable' "$work/$1.log")" = "$(grep -c '^disable' "$work/$1.log")" ] &&
        [ "$(grep -c '^subscribe ok' "$work/$1.log")" = "$(grep -c '^unsubscribe' "$work/$1.log")" ] &&
        [ "$(grep -c finalize "$work/$1.log")" = "$2" ]
}
profiled() { # NAME TIMES KERNELS: the profiler's own traces are complete
    cat "$work/$1.out" "$work/$1.log"
    [ "$(grep -c "^profiled.* $3 kernels" "$work/$1.out")" = "$2" ] && ! grep -q 'not the profiler' "$work/$1.out"
}

check "by steps" told steps 18 21
check "by steps: given back" given_back steps 1
short() { cat "$work/shorthand.err" && grep -qE 'of [0-9.]+, (39|4[0-9]) % hidden \(([89]|1[01]) steps' "$work/shorthand.err"; }
check "by steps in EP_OVERLAP_RECORD itself" short
check "by seconds" told seconds 20 55 # (its end is seen up to a tick late, here and below)
check "calls of a step by the user's word" told given 9 11
unasked() { cat "$work"/*.err && ! grep -q "the recorder's thread asked" "$work"/*.err; }
check "the environment is read in the program's threads alone" unasked
check "the program ends first" not_told early "the program ended before its window"
check "CUPTI is not touched then" test ! -s "$work/early.log"
check "the program ends inside" told ends 20 99
check "given back then" given_back ends 0
check "a profiler before: its trace" profiled before 1 15
check "a profiler before: ours, with its clock put back" told before 18 21
clocks() { cat "$work/before.log" && [ "$(grep -c '^clock' "$work/before.log")" = 3 ]; }
left() { # NAME TIMES: CUPTI was taken out
    cat "$work/$1.log"
    [ "$(grep -c finalize "$work/$1.log")" = "$2" ]
}
check "beside a profiler that has been at work CUPTI stays" left before 0
check "a profiler after CUPTI has left: its trace" profiled after 1 60
check "that is after it" left after 1
check "without being asked CUPTI stays" given_back stays 0
check "a release that may not leave stays" given_back old 0
check "a profiler's clock is not ours, and comes back" clocks
check "a profiler twice: its traces" profiled twice 2 '\(15\|60\)'
check "a profiler twice: ours" told twice 18 21
check "a profiler in the window: its trace" profiled middle 1 60
# (it comes at a step: more of those before are in a window that began at a second, if they were late)
check "a profiler in the window: ours until then" told middle 40 "110 + lost[0] / 20"
check "it is told" grep -q 'a profiler ended it (cuptiSubscribe)' "$work/middle.err"
check "a profiler right after the window opened: its trace" profiled soon 1 60
check "then ours is too short and told to be" not_told soon "a profiler was at work each time"
check "a profiler when the window has just opened again: its trace" profiled again 1 60
check "then there is a second window" told again 15 55
check "that is told" figures again 0 "r['interrupted'] == 1"
check "a profiler when nothing has run since the window opened: its trace" profiled idle 1 60
check "then there is a second window, too" told idle 15 45
check "that is told, too" figures idle 0 "r['interrupted'] == 1"
check "a profiler that nobody sees, before" profiled always 1 450
check "it is left alone" not_told always "the program ended before its window"
check "a kind that was switched on and off for two contexts" told context 20 55
check "a kind that is on, but for one context" not_told contexts "the program ended before its window"
check "a profiler that nobody sees, within, hears it from CUPTI" grep -q 'the unseen profiler cannot subscribe' "$work/unseen.out"
check "it does not disturb" told unseen 30 90
check "a tool that was injected is left alone" not_told tool "another tool is attached: CUDA_INJECTION64_PATH"
check "CUPTI is not touched beside it" test ! -s "$work/tool.log"
check "kernels by the thousand" figures many 0 "d['kernels'] > 50000 and r['lost'] == dict.fromkeys(r['lost'], 0)"
check "two GPUs" figures gpus 0 "len(r['nanoseconds']) == 2 and $right"
check "two GPUs in the line" grep -q ', GPU [01] of 2)' "$work/gpus.err"
for release in old oldest newer; do check "records of another release: $release" told "$release" 15 55; done
check "a CUPTI that is too old" not_told ancient "$work/libcupti.so.13 is version 12, 15 is the least"
check "a CUPTI that refuses" not_told refused "$work/libcupti.so.13: CUPTI_ERROR_FAKE"
check "a refusal leaves nobody subscribed" test "$(grep -c '^unsubscribe' "$work/refused.log")" = "$(grep -c '^subscribe ok' "$work/refused.log")"
check "a fork within" told forks 15 55
check "the child ends well" grep -q '^child: 0' "$work/forks.out"
check "an abort within" ended aborts 134
check "_exit within" ended leaves 7
check "nothing is said then" test ! -s "$work/leaves.err"
check "a kernel that has no end" told running 9 60
check "it is counted" figures running 0 "r['lost']['unfinished'] == 1"
check "a slow CUPTI" ended slow
check "a CUPTI that does not come back: the program ends" ended stuck
check "it is told" grep -q 'the recorder did not end in time' "$work/stuck.err"
check "exit in a handler of a signal, in the middle of a call: the program ends" ended handled 9
check "that is told, too" grep -q 'the recorder did not end in time' "$work/handled.err"
check "rank 1 says nothing" test ! -s "$work/rank1.err"
check "rank 1 writes its file" figures rank1 1 "r['rank'] == 1 and r['steps'] > 10"
check "a profiler that takes long to start: its trace" profiled starts 1 60
by_communicator() { # ranks that no variable tells of: one line, and a file each
    cat "$work/spawned.err" && ls "$work/spawned"
    ended spawned && [ "$(grep -c '^ep-overlap: .*hidden' "$work/spawned.err")" = 1 ] &&
        figures spawned 0 "r['rank'] == 0 and r['ranks'] == 2" && figures spawned 1 "r['rank'] == 1 and r['ranks'] == 2" &&
        [ "$(find "$work/spawned" -name 'ep-overlap-nccl-[01].json' | wc -l)" = 2 ]
}
check "ranks that a program starts itself" by_communicator
whole() { ! find "$work" -name 'ep-overlap-trace-*' ! -name '*.json' | grep .; }
check "no part of a file is left" whole
check "a window that is none" grep -q 'warning: EP_OVERLAP_RECORD_WINDOW=soon is no window; steps as in 10-14' "$work/word.err"
check "a folder that is none" grep -q "$work/no/such/ep-overlap-trace-0.json: No such file or directory; no trace written" "$work/folder.err"
check "its line is told" grep -q '% hidden' "$work/folder.err"
check "it is told at the first communicator, too" grep -q "warning: EP_OVERLAP_RECORD=$work/no/such: No such file or directory" "$work/folder.err"
check "that is told of no other" test "$(grep -l 'warning: EP_OVERLAP_RECORD=' "$work"/*.err)" = "$work/folder.err"
moved() { ended moves && find "$work/moves" | tee /dev/stderr | grep -q nccl-0.json && [ -s "$work/moves/ep-overlap-trace-0.json" ]; }
check "a folder is meant from where the first communicator was made" moved
unread() { ended unread && [ -s "$work/unread/ep-overlap-nccl-0.json" ]; }
check "nobody reads what is said: the program ends well" unread
cut_short() { # no part of it stays, under whatever name
    cat "$work/cut.err" && ls "$work/cut"
    ended cut && grep -q 'nccl-0.json: File too large; no figures written' "$work/cut.err" && [ "$(ls "$work/cut")" = ep-overlap-trace-0.json ]
}
check "a file that cannot be written to its end" cut_short
typed() {
    cat "$work/typed.err"
    ended typed && grep -q 'warning: EP_OVERLAP_INTERPOSE=accelerated is no mode; .*off is taken' "$work/typed.err"
}
check "a mode that is none" typed
check "off" test ! -s "$work/off.log" -a ! -s "$work/off.err"
if [ -x "$top/ep-overlap" ]; then
    share() { "$top/ep-overlap" profile "$work/seconds/ep-overlap-trace-0.json" | tee /dev/stderr | grep -q 'overlapped share  *44\.[0-9]* %'; }
    check "ep-overlap profile reads it" share
    quoted() { "$top/ep-overlap" profile "$work/seconds/ep-overlap-trace-0.json" | grep -q '^  recorded: exposed communication .* steps of rank 0)$'; }
    check "it says how it was recorded" quoted
    reason() { "$top/ep-overlap" profile "$work/early/ep-overlap-trace-0.json" 2>&1 | grep -q 'holds no trace: communication was not recorded: the program ended before its window'; }
    check "it says why nothing was" reason
fi
exit $failed
