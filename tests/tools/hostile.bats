#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Inputs and surroundings as people have them: every failure says what was found and what to
# do, and stays JSON for programs.
load common.sh
load logs.sh

# failing STATUS PATTERN COMMAND...: that status, the message on stderr, and with --json an object
# that says the same
failing() {
    local wanted=$1 pattern=$2
    shift 2
    run --separate-stderr "$tool" "$@"
    # shellcheck disable=SC2053,SC2154 # a pattern; stderr is set by run
    [[ $status -eq $wanted && $stderr == $pattern ]] || { echo "$*: $status $stderr" && return 1; }
    [ "$(wc -l <<<"$stderr")" -eq 1 ] || { echo "$*: more than one line: $stderr" && return 1; }
    run --separate-stderr "$tool" "$1" --json "${@:2}"
    [ "$status" -eq "$wanted" ] || { echo "$* --json: $status" && return 1; }
    is_json || { echo "$* --json: $output" && return 1; }
    python3 -c 'import json, sys
e = json.loads(sys.argv[1])["error"]
assert e["command"] == sys.argv[2] and e["status"] == int(sys.argv[3]), e
assert sys.argv[4].startswith("ep-overlap " + sys.argv[2] + ": ") and e["message"] in sys.argv[4], (e, sys.argv[4])' \
        "$output" "$1" "$wanted" "$stderr"
}

@test "what is no text is refused by what it is, and by what to do" {
    run_log 4 100 50 10 >train.log
    printf '#!/bin/bash\nsrun python pretrain_gpt.py --num-experts 8\n' >job.sbatch
    for file in train.log job.sbatch; do
        iconv -f UTF-8 -t UTF-16 "$file" >"16-$file"
        gzip -k "$file" && mv "$file.gz" "gz-$file" # by what it holds, not by its name
        for command in lint report doctor profile; do
            failing 3 "*: 16-$file: is UTF-16*iconv -f UTF-16 -t UTF-8*" "$command" "16-$file"
            failing 3 "*: gz-$file: is compressed*zcat*" "$command" "gz-$file"
        done
    done
    head -c 5000 /dev/zero >zeros
    failing 3 "*: zeros: neither an SQLite export*" profile zeros
    for command in lint report doctor profile; do
        [ "$command" = profile ] || failing 3 "*: zeros: byte 1 is zero*" "$command" zeros
        failing 3 "*: .: is a folder; name a file" "$command" .
        failing 3 "*: none: cannot be *: No such file or directory" "$command" none
    done
}

@test "wrong usage is JSON, too" {
    failing 2 '*--window takes A-B*' report --window 9-3 x
    failing 2 '*unknown option --nope*' doctor --nope
    failing 2 '*name a file, or a command*' lint
    failing 2 '*there is no rule or scope "nope"*' explain overlap nope
    failing 2 '*--tokens: found "-4"*' bench --tokens -4
    failing 2 '*multiple of the 2 ranks*' bench --engine host --experts 7
    failing 2 '*unknown dispatcher "flop"*' env --dispatcher flop --gpu h100 --ep 8
    failing 1 '*DSP-002: use hybridep*' env --dispatcher flex:deepep --gpu gb200 --ep 8
    failing 4 '*no setting that a rule reads*' lint /dev/null
    failing 3 '*no iteration line in 0 lines*' report /dev/null
    run --separate-stderr "$tool" env --format json --dispatcher alltoall --gpu h100 --ep x
    [ "$status" -eq 2 ] && is_json
    run --separate-stderr "$tool" exec --dry-run --json
    [ "$status" -eq 2 ] && is_json
    run --separate-stderr env EP_OVERLAP_DECISION=on EP_OVERLAP_DISPATCHER=nope "$tool" exec --dry-run --json -- ls
    [ "$status" -eq 2 ] && is_json
    run --separate-stderr "$tool" nope --json
    [ "$status" -eq 2 ] && is_json
    # bench's ranks leave the answer to the first one, every other command's answer for themselves;
    # a program's --json is its own
    run --separate-stderr env SLURM_PROCID=3 "$tool" bench --json --tokens -4
    [[ $status -eq 2 && -z $output ]]
    run --separate-stderr env SLURM_PROCID=3 "$tool" lint --json none
    [ "$status" -eq 3 ] && is_json
    run --separate-stderr "$tool" exec --nope ls --json
    [[ $status -eq 2 && -z $output ]]
}

@test "a script with DOS line ends is refused, as sbatch does; a log and YAML with them are read" {
    printf '#!/bin/bash\r\nsrun python pretrain_gpt.py --num-experts 8\r\n' >job.sbatch
    failing 3 "*: job.sbatch:1: ends in CR LF*sed -i*" lint job.sbatch
    run_log 4 100 50 10 >train.log
    "$tool" report --json train.log >unix.json
    sed -i 's/$/\r/' train.log
    "$tool" report --json train.log >dos.json
    cmp unix.json dos.json
    printf 'model:\r\n  num_moe_experts: 8\r\n  expert_model_parallel_size: 1\r\ncomm_overlap:\r\n  overlap_moe_expert_parallel_comm: true\r\n' >run.yaml
    run "$tool" lint run.yaml
    [[ $status -eq 1 && $output == *"OVL-001"* ]]
}

@test "the mark of UTF-8 before a text is passed over" {
    arguments bf16=True num_experts=8 expert_model_parallel_size=1 overlap_moe_expert_parallel_comm=True >train.log
    printf 'model:\n  num_moe_experts: 8\n' >run.yaml
    printf '#!/bin/bash\nsrun python pretrain_gpt.py --num-experts 8\n' >job
    for file in train.log run.yaml job; do
        "$tool" lint --json "$file" >plain.json || true
        { printf '\xef\xbb\xbf' && cat "$file"; } >marked && mv marked "$file"
        "$tool" lint --json "$file" >marked.json || true
        diff plain.json marked.json
    done
}

@test "numbers with a decimal comma are refused with their line, not read as less" {
    run_log 6 100 50 10 >train.log
    sed -E '4,$s/([0-9])\.([0-9])/\1,\2/g' train.log >comma.log
    failing 3 '*: comma.log: line 4: "*,*" has a comma*LC_ALL=C*' report comma.log
    # a list, and other words behind a number, are none
    sed -E 's/ \| (learning)/, more 5,3 | \1/' train.log >list.log
    "$tool" report list.log
    LC_ALL=de_DE.UTF-8 "$tool" report --json train.log >there.json
    LC_ALL=C "$tool" report --json train.log >here.json
    cmp here.json there.json
}

@test "names with a line break, blanks and control characters stay in one line" {
    run_log 4 100 50 10 >train.log
    cp train.log $'a b\nc\e[31m.log'
    run "$tool" report --json $'a b\nc\e[31m.log'
    [ "$status" -eq 0 ] && is_json
    failing 3 '*cannot be opened*' report $'no\nsuch\e[31m'
    [[ $stderr != *$'\e'* ]]
    run "$tool" report $'a b\nc\e[31m.log'
    [ "$status" -eq 0 ]
    [[ $output != *$'\e'* ]]
}

@test "an empty file is said to be one" {
    : >slurm.out
    run "$tool" doctor slurm.out
    [[ $status -eq 1 && $output == *"LOG-EMPTY"*"slurm.out"* ]]
}

@test "standard input is kept in TMPDIR, and without room there the message says so" {
    printf '#!/bin/bash\nsrun python pretrain_gpt.py --num-experts 8 --delay-wgrad-compute\n' >job
    mkdir room && chmod 755 room
    TMPDIR=$PWD/room run "$tool" lint - <job
    [ "$status" -eq 1 ]
    [ -z "$(ls -A room)" ]
    run --separate-stderr env TMPDIR="$PWD/none" "$tool" lint --json - <job
    [[ $status -eq 3 && $stderr == *"standard input: cannot be kept"*"No such file"*"TMPDIR"* ]]
    is_json
}

@test "neither HOME nor a writable folder is needed, nor an open stdin" {
    run_log 4 100 50 10 >train.log
    printf '#!/bin/bash\nsrun python pretrain_gpt.py --num-experts 8 --delay-wgrad-compute\n' >job
    mkdir away
    for command in "report ../train.log" "doctor ../train.log" "lint --no-environment ../job" "explain OVL-001" \
        "env --dispatcher alltoall --gpu h100 --ep 8"; do
        # shellcheck disable=SC2086
        (cd away && "$tool" $command) >with.txt || true
        # shellcheck disable=SC2086
        (cd away && rmdir ../away && env -i "$tool" $command <&-) >without.txt || true # the folder is gone
        mkdir away
        diff with.txt without.txt
        [ -s with.txt ]
    done
}

@test "a reader that closes early, and a full disk" {
    run bash -c "set -o pipefail; '$tool' explain --json | head -n 1"
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == "[" ]]
    for command in "explain --json" "lint --json --set num_experts=8" "doctor --table"; do
        # shellcheck disable=SC2086
        run bash -c "'$tool' $command >/dev/full"
        [[ $status -eq 5 && $output == *"cannot write the output: No space left"* ]]
    done
}
