#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
load common.sh
load logs.sh

healthy() { { common "$@"; run_log 8 60000.0 41250.0 146.2; }; }

@test "every symptom of the table is found in a log that shows it" {
    healthy True False >healthy.log
    "$tool" doctor --table | awk '/^[A-Z]/ { id = $1 } /^    like / { sub(/^    like     /, ""); print id "\t" $0 }' >table
    [ "$(wc -l <table)" -ge 50 ]
    while IFS=$'\t' read -r id line; do
        { cat healthy.log; echo "[rank2]: $line"; } >sick.log
        run "$tool" doctor --json sick.log
        [[ $output == *"\"id\": \"$id\""* ]] || { echo "$id: $line"; false; }
        [[ $output == *"\"where\": \"sick.log:$(($(wc -l <healthy.log) + 1))\""* ]] || { echo "$id: place"; false; }
    done <table
}

@test "healthy logs show nothing" {
    healthy True False >on.log
    healthy False False >off.log
    healthy True True >wgrad.log
    run_log 8 60.0 50.0 9 >bare.log
    for log in on off wgrad bare; do
        run "$tool" doctor $log.log
        [ "$status" -eq 0 ] || { echo "$log: $output"; false; }
        [[ $output == "nothing known was found in 1 file, "* ]] || { echo "$log: $output"; false; }
        run --separate-stderr "$tool" doctor --json $log.log
        is_json
        [[ $output == *'"problems": 0,'*'"notes": 0,'*'"files": 1,'*"\"lines\": $(wc -l <$log.log),"*'"may_be_more": false'* ]]
    done
}

@test "a log that ends early without an error" {
    healthy True False | sed '/iteration        6/,$d' >hang.log
    run "$tool" doctor hang.log
    [ "$status" -eq 1 ]
    [[ $output == *"ENDS-EARLY"*"iteration 5 of 8 is the last"* ]]
    echo "CUDA out of memory" >>hang.log
    run "$tool" doctor hang.log
    [[ $output == *"OOM-GPU"* && $output != *"ENDS-EARLY"* ]]
}

@test "a loss that is NaN, by its absence and by its count" {
    healthy True False | sed '/iteration        5/s/lm loss: [^|]*|//' >nan.log
    run "$tool" doctor nan.log
    [ "$status" -eq 1 ]
    [[ $output == *"NAN-LOSS"*"1 of 8 iterations"* ]]
    healthy True False | sed '/iteration        5/s/nan iterations:   0/nan iterations:   1/' >nan.log
    run "$tool" doctor nan.log
    [[ $output == *"NAN-LOSS"* ]]
    healthy True False | sed '/iteration        1\//s/skipped iterations:   0/skipped iterations:   1/' >skip.log
    run "$tool" doctor skip.log
    [ "$status" -eq 0 ]
    [[ $output == *"note     SKIPPED"* ]]
}

@test "a configuration that violates a rule, in a log and in a script" {
    healthy True False recompute_granularity=full >full.log
    run "$tool" doctor full.log
    [ "$status" -eq 1 ]
    [[ $output == *"problem  OVL-007"*"recompute_granularity = full (full.log:"* ]]
    echo 'srun python pretrain_gpt.py --num-experts 8 --delay-wgrad-compute' >job.sh
    run "$tool" doctor job.sh
    [ "$status" -eq 1 ]
    [[ $output == *"problem  DWG-001"* ]]
}

@test "no speed-up over the first log" {
    healthy False False >base.log
    { common True False; run_log 8 60000.0 41200.0 146.2; } >same.log
    run "$tool" doctor base.log same.log
    [ "$status" -eq 1 ]
    [[ $output == *"NO-SPEED-UP"*"41200.0 ms an iteration, the baseline 41250.0 ms"* ]]
    { common True False; run_log 8 60000.0 31310.0 190.0; } >fast.log
    run "$tool" doctor base.log fast.log
    [ "$status" -eq 0 ]
}

@test "flex configured, no flex kernel in the profile; overlap on, nothing hidden" {
    { common True False moe_token_dispatcher_type=flex moe_flex_dispatcher_backend=deepep moe_router_dtype=fp32
      run_log 8 60000.0 31310.0 190.0; } >flex.log
    cat >trace.json <<'END'
{"traceEvents":[{"ph":"X","cat":"kernel","name":"ncclDevKernel_SendRecv","pid":0,"ts":0,"dur":10},
{"ph":"X","cat":"kernel","name":"nvjet_x","pid":0,"ts":20,"dur":10}]}
END
    run "$tool" doctor flex.log trace.json
    [ "$status" -eq 1 ]
    [[ $output == *"FLEX-UNSEEN"* && $output == *"NOT-HIDDEN"* ]]
    sed -e 's/ncclDevKernel_SendRecv/deep_ep::dispatch/' -e 's/"ts":20/"ts":5/' trace.json >good.json
    run "$tool" doctor flex.log good.json
    [ "$status" -eq 0 ]
}

@test "an error that the table does not know is shown" {
    { healthy True False; echo "AssertionError: tomorrow's trouble"; } >new.log
    run "$tool" doctor new.log
    [ "$status" -eq 1 ]
    [[ $output == *"REFUSED"*"tomorrow's trouble"* ]]
}

@test "a log on standard input" {
    run "$tool" doctor - <<<'RuntimeError: DeepEP is not installed. Please install DeepEP'
    [ "$status" -eq 1 ]
    [[ $output == *"DEEPEP-MISSING"*"standard input:1"*"1 problem, 0 notes in 1 file, 1 line" ]]
    run "$tool" doctor - < <(head -c 100 /dev/zero)
    [ "$status" -eq 3 ]
    [[ $output == *"standard input: byte 1 is zero"* ]]
    printf 'iteration 1/ 2 |\n' | gzip >log.gz
    for command in doctor report lint; do
        run "$tool" "$command" log.gz
        [ "$status" -eq 3 ]
        [[ $output == *"log.gz: is compressed: give its text on standard input"* ]]
    done
}

@test "a trace that is an array, a log that begins with a bracket" {
    echo '[ {"ph":"X","cat":"kernel","name":"nvjet","ts":0,"dur":1,"pid":0} ]' >trace.json
    run "$tool" doctor trace.json
    [ "$status" -eq 0 ]
    [[ $output == *"in 1 file, 0 lines" ]]
    echo '[rank0]: RuntimeError: DeepEP is not installed. Please install DeepEP' >rank.log
    run "$tool" doctor rank.log
    [ "$status" -eq 1 ]
}

@test "JSON, usage, unreadable" {
    healthy True False >on.log
    run --separate-stderr "$tool" doctor --json on.log
    [ "$status" -eq 0 ]
    is_json
    run "$tool" doctor --table --json
    [ "$status" -eq 0 ]
    is_json
    run "$tool" doctor
    [ "$status" -eq 2 ]
    run "$tool" doctor --nope
    [ "$status" -eq 2 ]
    run "$tool" doctor missing.log
    [ "$status" -eq 3 ]
    run "$tool" doctor /bin/true
    [ "$status" -eq 3 ]
}
