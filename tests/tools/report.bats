#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
load common.sh
load logs.sh

published_sft() {
    { common False False; run_log 8 60000.0 41250.0 146.2; } >base.log
    { common True False; run_log 8 50000.0 31310.0 192.6; } >overlap.log
    { common True True; run_log 8 50000.0 31200.0 193.3; } >wgrad.log
}

@test "the published fine-tuning figures: 1.000x, 1.317x, 1.322x" {
    published_sft
    run "$tool" report base.log overlap.log wgrad.log --window 3-8
    [ "$status" -eq 0 ]
    [[ $output =~ base[[:space:]]+41.2500\ s[[:space:]]+1.000x ]]
    [[ $output =~ overlap[[:space:]]+31.3100\ s[[:space:]]+1.317x ]]
    [[ $output =~ wgrad[[:space:]]+31.2000\ s[[:space:]]+1.322x ]]
}

@test "the published pretraining figures: -15.059 % time, +17.729 % throughput" {
    { common False False; run_log 50 30000.0 24713.76 244.039; } >base.log
    { common True False; run_log 50 30000.0 21072.5 286.2; } >win.log
    { common True False; run_log 50 30000.0 20992.04 287.305; } >again.log
    run "$tool" report base=base.log win=win.log again=again.log@41-50 --window 5-20
    [ "$status" -eq 0 ]
    [[ $output =~ base[[:space:]]+24.7138\ s ]]
    [[ $output =~ win[[:space:]]+21.0725\ s ]]
    [[ $output =~ again[[:space:]]+20.9920\ s[[:space:]]+1.177x[[:space:]]+-15.059\ %[[:space:]]+\+17.729\ % ]]
    [[ $output == *"window         41-50, 10 lines"* && $output == *"window         5-20, 16 lines"* ]]
}

@test "the JSON's figures are those of the lines" {
    varied() { # MS-of-iteration...: one log of them
        local i=0 ms
        for ms; do line $((++i)) $# "$ms" $((ms / 10)) "$((9 - i)).5"; done
    }
    { common False False; varied 900 100 116 104 136 125; } >base.log
    { common True False; varied 800 90 111 96 99 108; } >overlap.log
    { common True True; varied 800 90 111 96 99 108; } | sed 's/throughput per GPU[^|]*|//' >bare.log
    run --separate-stderr "$tool" report --json base.log overlap.log bare.log --window 2-6
    is_json
    echo "$output" >report.json
    python3 - <<'END'
import json, math, statistics
arms = json.load(open("report.json"))["arms"]
taken = [[.100, .116, .104, .136, .125], [.090, .111, .096, .099, .108], [.090, .111, .096, .099, .108]]
def near(a, b): return math.isclose(a, b, rel_tol=1e-6)
def errors(t): return statistics.stdev(t) / math.sqrt(len(t)) / statistics.mean(t)
for arm, t in zip(arms, taken):
    s = arm["iteration_seconds"]
    assert s["count"] == 5 and (s["least"], s["most"]) == (min(t), max(t)) and s["median"] == statistics.median(t), s
    assert near(s["mean"], statistics.mean(t)) and near(s["deviation"], statistics.stdev(t)), s
    if arm is arms[0]:
        assert "speedup" not in arm
        continue
    change = statistics.mean(t) / statistics.mean(taken[0])
    assert near(arm["speedup"], 1 / change) and near(arm["time_change"], change - 1), arm
    assert near(arm["noise"], 2 * math.hypot(errors(taken[0]), errors(t))), arm["noise"]
means = [statistics.mean(int(1000 * ms + .5) // 10 for ms in t) for t in taken[:2]]
assert near(arms[0]["tflops_per_gpu"]["mean"], means[0])
assert near(arms[1]["throughput_change"], means[1] / means[0] - 1), arms[1]["throughput_change"]
assert arms[2]["tflops_per_gpu"] is None and arms[2]["throughput_change"] is None # not in both
END
}

@test "every criterion is answered" {
    published_sft
    echo '[Rank 0] (after 2 iterations) memory (GB) | mem-max-allocated-gigabytes: 62.166 | mem-max-reserved-gigabytes: 66.75 |' >>overlap.log
    run "$tool" report base.log overlap.log --window 3-8 --memory-gate 65GiB
    [ "$status" -eq 0 ]
    [[ $output == *"overlap: YES"* ]]
    for criterion in "configuration valid" "run complete" "throughput not lower" \
        "loss consistent" "memory under the gate" "comparison sound"; do
        [[ $output == *"yes        $criterion"* ]] || { echo "$criterion"; false; }
    done
    [[ $output == *"allocated 62.166 GB = 57.897 GiB, reserved 66.750 GB = 62.166 GiB"* ]]
    run "$tool" report base.log overlap.log --window 3-8 --memory-gate 62GiB
    [ "$status" -eq 1 ]
    [[ $output == *"no         memory under the gate    62.166 GiB reserved, gate 62.000 GiB"* ]]
    [[ $output == *"ABP-008"* ]]
}

@test "arms that differ in more than the overlap are not compared" {
    published_sft
    { common True False seq_length=8192 num_layers=3; run_log 8 50000.0 1.0 9; } >other.log
    run "$tool" report base.log other.log
    [ "$status" -eq 4 ]
    [[ $output == *"seq_length"*"4096 -> 8192"* && $output == *"num_layers"*"not printed -> 3"* ]]
    [[ $output != *"speed-up"* ]]
    run "$tool" report base.log other.log --allow seq_length --allow num_layers
    [ "$status" -eq 0 ]
    run --separate-stderr "$tool" report --json base.log other.log
    [ "$status" -eq 4 ]
    is_json
}

@test "outputs of a run and CUDA_DEVICE_MAX_CONNECTIONS may differ" {
    { common False False tensorboard_dir=/a cuda_device_max_connections=1; run_log 8 60.0 50.0 9; } >a.log
    { common True False tensorboard_dir=/b cuda_device_max_connections=32; run_log 8 60.0 40.0 9; } >b.log
    run "$tool" report a.log b.log
    [ "$status" -eq 0 ]
    [[ $output == *"cuda_device_max_connections"*"1 -> 32"* && $output != *"tensorboard_dir"* ]]
}

@test "another batch on the iteration lines is a difference without any dump" {
    run_log 8 60.0 50.0 9 >a.log
    run_log 8 60.0 40.0 9 | sed 's/size:   512/size:   256/' >b.log
    run "$tool" report a.log b.log
    [ "$status" -eq 4 ]
    [[ $output == *"global batch size"*"512 -> 256"* ]]
}

@test "a slower arm, a lost loss, a run that ends early, a violated rule: no" {
    published_sft
    { common True False; run_log 8 60000.0 45000.0 130; } >slow.log
    run "$tool" report base.log slow.log --window 3-8
    [ "$status" -eq 1 ]
    [[ $output == *"no         throughput not lower"*"9.091 % more time"* ]]

    sed '/iteration        5/s/lm loss: [^|]*|//' overlap.log >lost.log
    run "$tool" report base.log lost.log --window 3-8
    [ "$status" -eq 1 ]
    [[ $output == *"no         loss consistent          NaN loss in 1 iterations"* ]]

    sed '/iteration        7/,$d' overlap.log >early.log
    run "$tool" report base.log early.log --window 3-6
    [ "$status" -eq 1 ]
    [[ $output == *"no         run complete             ends at iteration 6 of 8"* ]]

    { common True False expert_model_parallel_size=1; run_log 8 60000.0 31310.0 190; } >bad.log
    run "$tool" report base.log bad.log --window 3-8 --allow expert_model_parallel_size
    [ "$status" -eq 1 ]
    [[ $output == *"no         configuration valid"*"OVL-001"* ]]
}

@test "skipped iterations and a profiler spoil the comparison" {
    published_sft
    sed '/iteration        5/s/skipped iterations:   0/skipped iterations:   1/' overlap.log >skip.log
    run "$tool" report base.log skip.log --window 3-8
    [ "$status" -eq 1 ]
    [[ $output == *"no         comparison sound"*"ABP-006"* ]]
    { echo "nsys profile -o x"; cat overlap.log; } >nsys.log
    run "$tool" report base.log nsys.log --window 3-8
    [ "$status" -eq 1 ]
    [[ $output == *"ABP-007"* ]]
}

@test "losses that wander apart: no; --identical asks for every digit" {
    published_sft
    { common True False; for i in 1 2 3 4 5 6 7 8; do line "$i" 8 31310.0 192.6 "$i.0E+00"; done; } >wander.log
    run "$tool" report base.log wander.log --window 3-8
    [ "$status" -eq 1 ]
    [[ $output == *"no         loss consistent          correlation -"* ]]
    sed '/iteration        6/s/lm loss: 12.3E/lm loss: 12.3001E/' overlap.log >close.log
    run ! cmp -s overlap.log close.log
    run "$tool" report base.log close.log --window 3-8
    [ "$status" -eq 0 ]
    run "$tool" report base.log close.log --window 3-8 --identical
    [ "$status" -eq 1 ]
    [[ $output == *"1 of 8 iterations differ"* ]]
}

@test "delayed wgrad that gains less than the noise is told" {
    mk() { common True "$1"; for i in 1 2 3 4 5 6 7 8; do line "$i" 8 "$(($2 + (i % 3) * 400)).0" 9 2.0E+00; done; }
    { common False False; run_log 8 60000.0 41250.0 9; } | sed 's/lm loss: [^|]*/lm loss: 2.0E+00 /' >base.log
    mk False 31000 >overlap.log
    mk True 30950 >wgrad.log
    run "$tool" report base.log overlap.log wgrad.log --window 3-8
    [[ $output == *"DWG-018"*"drop --delay-wgrad"* ]]
}

@test "a log against itself saves nothing, and not less" {
    published_sft
    run "$tool" report base.log again=base.log
    [[ $output == *"1.000x, 0.000 % of the time saved: within the noise"* ]]
}

@test "one log: its figures; --json of one and of several" {
    published_sft
    run "$tool" report overlap.log
    [ "$status" -eq 0 ]
    [[ $output != *baseline* && $output != *throughput\ not* ]] # there is nothing to compare with
    [[ $output == *"window         2-8, 7 lines"* && $output == *"31.3100 .. 50.0000"* ]]
    run --separate-stderr "$tool" report --json base.log overlap.log wgrad.log --window 3-8
    [ "$status" -eq 0 ]
    is_json
    [[ $output == *'"speedup": 1.317470457'* ]]
}

@test "torchtitan's logs, coloured or not, are compared by the clock of their lines" {
    for arm in base:500 on:400; do
        python3 - "${arm#*:}" >"${arm%:*}.log" <<'END'
import sys
for step in range(1, 21):
    ms = 1000 + step * int(sys.argv[1])
    print(f"[rank0]:[titan] 2026-07-17 12:00:{ms // 1000:02},{ms % 1000:03} - root - INFO - \033[31mstep: {step:2}  "
          f"\033[32mloss:  {8 - step / 10:.5f}  \033[38;2;180;60;0mgrad_norm:  3.7  memory:  3.87GiB(2.17%)  "
          f"tps: {4096 * 1000 // int(sys.argv[1]):,}  tflops: 39.59  mfu: N/A\033[39m")
END
    done
    run "$tool" report base.log on.log --window 3-20
    [[ $output == *"base.log (torchtitan)"*"mean 0.5000 s"*"1.250x"*"identical as printed, 20 iterations"* ]]
}

@test "unreadable, empty, binary, without iterations: status 3, and why" {
    run "$tool" report missing.log
    [ "$status" -eq 3 ]
    : >empty.log
    run "$tool" report empty.log
    [ "$status" -eq 3 ]
    [[ $output == *"no iteration line in 0 lines"* ]]
    run "$tool" report /bin/true
    [ "$status" -eq 3 ]
    published_sft
    run "$tool" report base.log --window 30-40
    [ "$status" -eq 3 ]
    [[ $output == *"no iteration of 30-40 is in the log (1-8)"* ]]
}

@test "wrong usage is status 2" {
    for args in "" "--window 8-3 x" "--window x y" "--memory-gate 65 x" "--nope" "--set a x"; do
        run "$tool" report $args
        [ "$status" -eq 2 ] || { echo "$args: $status"; false; }
    done
}

@test "logs of one name are called by their paths; a name given twice is refused" {
    mkdir base on
    { common False False && run_log 8 9000 900 100; } >base/train.log
    { common True False && run_log 8 9000 700 120; } >on/train.log
    run "$tool" report base/train.log on/train.log
    [ "$status" -eq 0 ]
    [[ $output == *"base/train.log (baseline): base/train.log"*"on/train.log: nothing against it"* ]]
    run "$tool" report a=base/train.log a=on/train.log
    [ "$status" -eq 2 ]
    [[ $output == *"two logs are called a"* ]]
}

@test "a run that starts again: the crash is overcome, its start-up does not count" {
    { common False False && run_log 8 9000 900 100 && echo "torch.OutOfMemoryError: CUDA out of memory." &&
        line 5 8 9000 100 4.5E+00 && line 6 8 900 100 4.4E+00 && line 7 8 900 100 4.3E+00 && line 8 8 900 100 4.2E+00; } >again.log
    run "$tool" report again.log --window 3-8
    [ "$status" -eq 0 ]
    [[ $output == *"mean 0.9000 s"*"first iteration behind each restart: 1"*"8 of 8 iterations, restarted in between"* ]]
    run --separate-stderr "$tool" report --json again.log
    is_json
    [[ $output == *'"restarts": 1'* ]]
}
