#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
load common.sh

fine="torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-experts 64 --bf16
  --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall
  --overlap-moe-expert-parallel-comm --micro-batch-size 1 --global-batch-size 128"

@test "an allowed command passes" {
    run "$tool" lint --no-environment --set torch_version=2.8.0 -- $fine
    [ "$status" -eq 0 ]
    [[ $output == *"0 errors, 0 warnings"* ]]
}

@test "all violations of one argument list come in one message" {
    run "$tool" lint -- pretrain_gpt.py --num-experts 8 --expert-model-parallel-size 1 \
        --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform \
        --recompute-num-layers 1 --moe-shared-expert-overlap --mtp-num-layers 2 \
        --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm
    [ "$status" -eq 1 ]
    for rule in OVL-001 OVL-004 OVL-006 OVL-007 OVL-008 OVL-009 OVL-011 OVL-012; do
        [[ $output == *"error    $rule"* ]] || { echo "$rule is missing"; false; }
    done
    [[ $output == *"expert_model_parallel_size = 1 (--expert-model-parallel-size)"* ]]
    [[ $output == *"bf16 = False (Megatron-LM's default)"* ]]
}

@test "the JSON's counts are its rules', and its verdict is the status" {
    while IFS='|' read -r wanted counts options arguments; do
        # shellcheck disable=SC2086
        run --separate-stderr "$tool" lint --json --no-environment $options --set torch_version=2.8.0 -- $fine $arguments
        [ "$status" -eq "$wanted" ]
        is_json
        echo "$output" >lint.json
        python3 - "$wanted" "$counts" <<'END'
import json, sys
r = json.load(open("lint.json"))
severities = [rule["severity"] for rule in r["rules"] if rule["outcome"] == "violated"]
errors, warnings = severities.count("error"), severities.count("warning")
assert [errors, warnings, len(severities) - errors - warnings] == [int(n) for n in sys.argv[2].split()], severities
assert [r["errors"], r["warnings"], r["notes"]] == [errors, warnings, len(severities) - errors - warnings]
for outcome in "passed", "undecided":
    assert r[outcome] == sum(rule["outcome"] == outcome for rule in r["rules"]) > 0
assert r["allowed"] == (sys.argv[1] == "0")
for rule in r["rules"]:
    names = [f["name"] for f in rule["found"]]
    assert len(names) == len(set(names)), names
END
    done <<'END'
0|0 0 0||
0|0 0 0|--strict|
0|0 0 1||--moe-shared-expert-intermediate-size 512
0|0 1 0||--global-batch-size 16
1|0 1 0|--strict|--global-batch-size 16
1|1 0 0||--recompute-num-layers 1
END
}

@test "delayed wgrad without overlap is refused" {
    run "$tool" lint -- pretrain_gpt.py --num-experts 8 --delay-wgrad-compute
    [ "$status" -eq 1 ]
    [[ $output == *"error    DWG-001"* ]]
}

@test "a job script is read with its variables" {
    cat >job.sbatch <<'END'
#!/bin/bash
#SBATCH -N 2
export CUDA_DEVICE_MAX_CONNECTIONS=1
EP=1
ARGS=( --num-experts 8 --bf16 --expert-model-parallel-size $EP )
srun bash -c "python pretrain_gpt.py ${ARGS[@]} --overlap-moe-expert-parallel-comm"
END
    run "$tool" lint job.sbatch
    [ "$status" -eq 1 ]
    [[ $output == *"expert_model_parallel_size = 1 (job.sbatch:5 --expert-model-parallel-size)"* ]]
    [[ $output == *"OVL-016"* && $output == *"ENV-011"* ]]
}

@test "a job script whose step asks for overlap: what ep-overlap exec adds counts" {
    printf '#!/bin/bash\n#SBATCH --ep-overlap=on --ep-dispatcher=flex:hybridep\nsrun --delay-wgrad ep-overlap exec -- python pretrain_gpt.py --bf16 --num-experts 8 --expert-model-parallel-size 4 --recompute-granularity full\n' >job.sbatch
    run "$tool" lint job.sbatch
    [ "$status" -eq 1 ]
    [[ $output == *"overlap_moe_expert_parallel_comm = true (job.sbatch:2 --ep-overlap=on, by ep-overlap exec)"* ]]
    [[ $output == *"error    OVL-007"* ]]
    run --separate-stderr "$tool" lint --json job.sbatch
    is_json
    echo "$output" >lint.json
    python3 - <<'END'
import json
found = {f["name"]: f["value"] for r in json.load(open("lint.json"))["rules"] for f in r["found"]}
assert (found["delay_wgrad_compute"], found["moe_token_dispatcher_type"], found["flex_backend"]) == ("true", "flex", "hybridep"), found
END
    # without exec the step will be refused
    sed -i 's/ep-overlap exec -- //; s/ --recompute-granularity full//' job.sbatch
    run "$tool" lint job.sbatch
    [ "$status" -eq 1 ]
    [[ $output == *"error    ARG-OVERLAP"*"1 error, 0 warnings"* ]]
    sed -i 's/$/ --overlap-moe-expert-parallel-comm/' job.sbatch
    run "$tool" lint job.sbatch
    [[ $output != *ARG-OVERLAP* ]]
    # a step that is off is nobody's wish
    sed -i 's/--ep-overlap=on/--ep-overlap=off/; s/ --overlap-moe-expert-parallel-comm//' job.sbatch
    run "$tool" lint job.sbatch
    [ "$status" -eq 0 ]
}

@test "recipes that keep Megatron-LM's arguments in YAML, both spellings" {
    cat >recipe.yaml <<'END'
DEPENDENCIES:
  dockerfile: |
    ARG FROM=x
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: '32'
ARGS:
  num_layers: 94
  num_experts: 128
  pipeline_model_parallel_size: 8
  expert_model_parallel_size: 32
  num_layers_per_virtual_pipeline_stage: 3
  account_for_embedding_in_pipeline_split: true
  account_for_loss_in_pipeline_split: true
  moe_token_dispatcher_type: flex
  moe_router_dtype: fp32
  overlap_moe_expert_parallel_comm: true
  recompute_modules: moe_act layernorm
  cuda_graph_impl: transformer_engine
  cuda_graph_scope:
  - moe_router
  - moe_preprocess
  load: ${LOAD_PATH}
  finetune: false
  bf16: true
END
    run "$tool" lint --no-environment recipe.yaml
    [ "$status" -eq 0 ]
    [[ $output == *"virtual_pipeline_model_parallel_size = 4"* ]]
    # as --NAME, and violated: the place is told
    sed -E 's/^ARGS:/MODEL_ARGS:/; /^MODEL_ARGS/,$s/^  ([a-z])/  --\1/; /^MODEL_ARGS/,$y/_/-/; s/MODEL-ARGS/MODEL_ARGS/; s/moe-act layernorm/"[moe layernorm]"/; s/-router$/_router/; s/-preprocess$/_preprocess/; s/: .?32.?$/: 1/' recipe.yaml >model.yaml
    run "$tool" lint --no-environment model.yaml
    [ "$status" -eq 1 ]
    [[ $output == *"error    OVL-010"*"recompute_modules = moe,layernorm (model.yaml:17 --recompute-modules)"* ]]
    [[ $output == *"error    OVL-001"*"expert_model_parallel_size = 1 (model.yaml:10 "* ]]
    # what only a shell knows stays undecided
    sed -i 's/num_layers_per_virtual_pipeline_stage: 3/num_layers_per_virtual_pipeline_stage: ${VPP}/' recipe.yaml
    run "$tool" lint --no-environment recipe.yaml
    [ "$status" -eq 0 ]
    [[ $output == *"virtual_pipeline_model_parallel_size: OVL-006"* ]]
}

@test "nothing speaks against the job scripts that we ship" {
    for script in "$BATS_TEST_DIRNAME"/../../jobscripts/*.sbatch; do
        run "$tool" lint "$script" # 4: they name no argument of a framework
        [ "$status" -eq 0 ] || [ "$status" -eq 4 ] || { echo "$script: $output"; false; }
    done
    # an override in an array is no program that a step starts without it
    printf '#SBATCH --ep-overlap=on\noff=(comm_overlap.delay_wgrad_compute=false)\nsrun "$@" "${off[@]}"\n' >job.sh
    run "$tool" lint job.sh
    [ "$status" -eq 0 ]
    echo 'srun python train.py comm_overlap.delay_wgrad_compute=false' >>job.sh
    run "$tool" lint job.sh
    [[ $status -eq 1 && $output == *"error    ARG-OVERLAP"* ]]
}

@test "scripts as people write them: options in one text, added to where a condition holds" {
    cat >job.sh <<'END'
AC=${15:-"none"}
if [ "$AC" = full ]; then
    recompute=" --recompute-granularity full"
fi
options="  \
    --num-experts 64 \
    --expert-model-parallel-size ${EP:-${TP:-"8"}} \
    --overlap-moe-expert-parallel-comm --bf16"
options+=" --moe-token-dispatcher-type alltoall"
if [ "$WG" = 1 ]; then
    options="$options --delay-wgrad-compute"
fi
cat >run.yaml <<X
num_experts: 1 --expert-model-parallel-size 1
X
: <<'COMMENT'
torchrun pretrain_gpt.py $options --expert-model-parallel-size 1
COMMENT
run_cmd="torchrun $DISTRIBUTED pretrain_gpt.py ${options} ${recompute}"
eval ${run_cmd}
END
    run --separate-stderr "$tool" lint --json --no-environment job.sh
    [ "$status" -eq 0 ]
    is_json
    echo "$output" >lint.json
    python3 - <<'END'
import json
found = {f["name"]: f["value"] for r in json.load(open("lint.json"))["rules"] for f in r["found"]}
assert found["expert_model_parallel_size"] == "8" and found["overlap_moe_expert_parallel_comm"] == "true", found
assert found["moe_token_dispatcher_type"] == "alltoall" and found["bf16"] == "true", found
assert found["delay_wgrad_compute"] is None and found["recompute_granularity"] is None, found
END
}

@test "a function counts where it is called; one that nothing calls is told of" {
    cat >job.sh <<'END'
old() {
    srun python pretrain_gpt.py --recompute-granularity full --delay-wgrad-compute
}
launch() {
    local EP=8
    srun python pretrain_gpt.py --bf16 --num-experts 8 --expert-model-parallel-size $EP \
        --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall
}
EP=1
(EP=2)
launch
END
    run "$tool" lint --no-environment --all job.sh
    [ "$status" -eq 0 ]
    [[ $output == *"job.sh:1: nothing here calls old(): what it says does not count"* ]]
    [[ ${output#*passed:} == *OVL-001*OVL-007* ]]
    run --separate-stderr "$tool" lint --no-environment --json job.sh
    is_json
    [[ $output == *'"sources_another_file": false'*'"function_never_called": "old"'* ]]
    # called at a condition it may train so, what it sets is not known; called by name it is
    sed -i 's/^launch$/[ "$1" ] \&\& old/' job.sh
    run "$tool" lint --no-environment job.sh
    [[ $status -eq 1 && $output == *"launch(): what it says"*"error    DWG-001"* ]]
    # nothing is left, and the reason is told; a file that is sourced is not read
    printf '. ./args.sh\nlaunch() { srun python pretrain_gpt.py --bf16; }\n' >job.sh
    run "$tool" lint --no-environment job.sh
    [[ $status -eq 4 && $output == *"nothing calls launch() of line 2"* ]]
    echo launch >>job.sh
    run "$tool" lint --no-environment job.sh
    [[ $status -eq 0 && $output == *"job.sh:1: sources a file that is not read"* ]]
}

@test "options that a blank behind the backslash or a comment cuts off are told, and do not count" {
    # shellcheck disable=SC1003 # backslashes, no escapes
    for end in '\ ' '\
    # --seq-length 4096 \'; do
        printf 'torchrun pretrain_gpt.py --bf16 --num-experts 8 %s\n    --delay-wgrad-compute\n' "$end" >job.sh
        run "$tool" lint --no-environment --all job.sh
        [ "$status" -eq 0 ]
        line=$(wc -l <job.sh)
        [[ $output == *"job.sh:$line: cut off from the command above (a blank behind \\, a comment)"* ]]
        [[ ${output#*passed:} == *DWG-001* ]]
        run --separate-stderr "$tool" lint --no-environment --json job.sh
        is_json
        [[ $output == *'"cut_off_at_line": '"$line,"* ]]
    done
    sed -i '2d; s/\\ *$/\\/' job.sh
    run "$tool" lint --no-environment job.sh
    [[ $status -eq 1 && $output == *"error    DWG-001"* && $output != *"cut off"* ]]
    run "$tool" lint --no-environment --json job.sh
    [[ $output == *'"cut_off_at_line": null'* ]]
}

@test "a function's arguments count where its body uses them" {
    cat >job.sh <<'END'
log() { echo "[$(date)] $*" >&2; }
launch() {
    local name=$1 ep=${2:-8}
    shift 2
    srun -J "$name" torchrun pretrain_gpt.py --bf16 --num-experts 8 \
        --expert-model-parallel-size "$ep" "$@" >"$name.log" 2>&1
}
log --recompute-granularity full
NCCL_DEBUG=INFO launch overlap 1 --overlap-moe-expert-parallel-comm \
    --moe-token-dispatcher-type alltoall
END
    run "$tool" lint --no-environment --all job.sh
    [ "$status" -eq 1 ]
    [[ $output == *"OVL-001"*"overlap_moe_expert_parallel_comm = true (job.sh:9 --overlap-moe-expert-parallel-comm)"* ]]
    [[ $output == *"expert_model_parallel_size = 1 (job.sh:6 --expert-model-parallel-size)"*"1 error, "* ]]
    [[ $output != *"more arguments"* && $output != *"nothing here calls"* && ${output#*passed:} == *OVL-007* ]]
    # in a loop that shifts only a shell can tell
    sed -i 's/shift 2/while [ $# -gt 2 ]; do shift; done/' job.sh
    run "$tool" lint --no-environment --all job.sh
    [ "$status" -eq 0 ]
    [[ $output == *"more arguments come from the shell"* && ${output#*passed:} != *OVL-007* ]]
}

@test "what lint takes for known is what bash passes, in random scripts" {
    command -v python3 >/dev/null || skip "no python3"
    run timeout 120 "$BATS_TEST_DIRNAME/shell.py" "$tool" 150
    echo "$output"
    [ "$status" -eq 0 ]
}

@test "arguments that only the shell knows leave undecided what they may say" {
    for more in '$EXTRA' '"$@"' '$(cat more)' '"${MORE[@]}"'; do
        printf 'ARGS=(--bf16 --num-experts 8)\nsrun python pretrain_gpt.py "${ARGS[@]}" --expert-model-parallel-size 4 --overlap-moe-expert-parallel-comm %s\n' "$more" >job.sh
        run "$tool" lint --all job.sh
        [ "$status" -eq 0 ]
        [[ $output == *"job.sh:2: more arguments come from the shell"* ]] || { echo "$more: $output"; false; }
        [[ ${output#*passed:} != *OVL-012* ]] # mtp_num_layers may be among them
    done
    # a value, a launcher's option and words of another command are none
    printf 'ARGS=(--bf16 --num-experts 8)\nsrun $OPTIONS torchrun --nnodes=$N pretrain_gpt.py "${ARGS[@]}" --data-path $DATA --expert-model-parallel-size 4 --overlap-moe-expert-parallel-comm\necho $DONE\n' >job.sh
    run "$tool" lint --all job.sh
    [[ $output != *"more arguments"* ]]
    [[ ${output#*passed:} == *OVL-012* ]]
}

@test "a Bridge YAML file is read, and overrides win over it" {
    cat >run.yaml <<'END'
model:
  num_moe_experts: 128
  expert_model_parallel_size: 8
  moe_token_dispatcher_type: alltoall
  bf16: true
  recompute_modules: [moe_act, moe]
comm_overlap:
  tp_comm_overlap: false
  overlap_moe_expert_parallel_comm: true
  delay_wgrad_compute: false
END
    run "$tool" lint run.yaml
    [ "$status" -eq 1 ]
    [[ $output == *"error    OVL-010"* && $output == *"recompute_modules = moe_act,moe (run.yaml:6)"* ]]
    run "$tool" lint run.yaml -- python run.py "model.recompute_modules=[moe_act]"
    [ "$status" -eq 0 ]
}

@test "a log with a configuration dump is read, rank prefixes or not" {
    for prefix in "" "0: " "[rank0]:"; do
        cat >train.log <<END
${prefix}some line
${prefix}------------------------ arguments ------------------------
${prefix}  bf16 ............................................ True
${prefix}  expert_model_parallel_size ...................... 1
${prefix}  num_experts ..................................... 8
${prefix}  overlap_moe_expert_parallel_comm ................ True
${prefix}-------------------- end of arguments ---------------------
END
        run "$tool" lint train.log
        [ "$status" -eq 1 ]
        [[ $output == *"expert_model_parallel_size = 1 (train.log:4)"* ]]
    done
}

@test "Bridge's summary: what is not printed is the default" {
    cat >bridge.log <<'END'
======================================================================
Configuration Summary (Non-Default Values vs Megatron Core)
======================================================================

[model] Non-default values (vs Mcore TransformerConfig):
  moe_token_dispatcher_type: 'flex'  (Mcore default: 'allgather')
  num_moe_experts: 128  (Mcore default: None)

[train]:
  global_batch_size: 512
======================================================================
END
    run "$tool" lint bridge.log
    [ "$status" -eq 1 ]
    [[ $output == *"error    DSP-020"* ]] # EP=1 by default
    [[ $output == *"flex_backend = deepep (Megatron-Core's default)"* ]]
    [[ $output == *"ABP-014"* ]]
}

@test "warnings fail with --strict only" {
    command=(pretrain_gpt.py --num-experts 8 --expert-model-parallel-size 2 --bf16
        --tensor-model-parallel-size 2)
    run "$tool" lint --no-environment -- "${command[@]}"
    [ "$status" -eq 0 ]
    [[ $output == *"warning  OVL-040"* ]]
    run "$tool" lint --no-environment --strict -- "${command[@]}"
    [ "$status" -eq 1 ]
}

@test "the environment counts for a command" {
    CUDA_LAUNCH_BLOCKING=1 run "$tool" lint -- $fine
    [ "$status" -eq 1 ]
    [[ $output == *"env.CUDA_LAUNCH_BLOCKING = 1 (environment)"* ]]
}

@test "undecided rules say what they need" {
    run "$tool" lint -- pretrain_gpt.py --num-experts 8 --delay-wgrad-compute
    [[ $output == *"te_version: DWG-002 DWG-005"* ]]
    run "$tool" lint --set te_version=2.2.0 -- pretrain_gpt.py --num-experts 8 --delay-wgrad-compute
    [[ $output == *"error    DWG-002"* ]]
}

@test "--json is JSON with every rule" {
    run --separate-stderr "$tool" lint --json -- $fine
    [ "$status" -eq 0 ]
    is_json
    [ "$(grep -c '"outcome":' <<<"$output")" -eq "$("$tool" explain | wc -l)" ]
}

@test "explain tells one rule, a scope, or that there is none" {
    run "$tool" explain dwg-001
    [ "$status" -eq 0 ]
    [[ $output == *"turn overlap on, or drop delayed wgrad"* ]]
    run "$tool" explain delay_wgrad
    [ "${#lines[@]}" -eq 19 ]
    run "$tool" explain NOPE-1
    [ "$status" -eq 2 ]
    run --separate-stderr "$tool" explain --json
    is_json
}

@test "wrong usage is status 2 with one line" {
    for args in "lint" "lint --nope x" "lint --set x -- a" "lint --set nokey=1 -- a" "lint --set" "nope"; do
        run "$tool" $args
        [ "$status" -eq 2 ] || { echo "$args: $status"; false; }
    done
}

@test "what --set cannot take is told with what it can; an empty name is no file" {
    while IFS='|' read -r set wanted; do
        for command in "lint --no-environment" report; do
            run "$tool" $command --set "$set" job.log
            [ "$status" -eq 2 ]
            [[ $output == *"--set: ${set%%=*} takes $wanted, not \"${set#*=}\""* ]] || { echo "$set: $output"; false; }
        done
    done <<'END'
te_version=abc|a version (2.9.0)
bf16=ture|true or false
bf16=2|true or false
gpu_major=H100|a number
num_moe_experts=[8]|a number
END
    for set in te_version=2.9.0.dev0+cu12 te_version= bf16=1 bf16=False gpu_major=9 num_moe_experts=None \
        'moe_layer_freq=[1]*48' env.CUDA_DEVICE_MAX_CONNECTIONS=x gpu_name=9; do
        run "$tool" lint --no-environment --set "$set" -- a --bf16
        [ "$status" -eq 0 ] || { echo "$set: $output"; false; }
    done
    run "$tool" report --set nokey=1 job.log
    [[ $status -eq 2 && $output == *'--set: no rule reads "nokey"'* ]]
    for command in lint report profile doctor "report base="; do
        if [[ $command == *base= ]]; then run "$tool" $command; else run "$tool" $command ""; fi
        [ "$status" -eq 2 ]
        [[ $output == *"a file's name is empty: is a variable not set?"* ]]
    done
}

@test "inputs that cannot be read are status 3, and name the place" {
    run "$tool" lint missing.yaml
    [ "$status" -eq 3 ]
    [[ $output == *"missing.yaml: cannot be opened: No such file"* ]]
    run "$tool" lint .
    [ "$status" -eq 3 ]
    run "$tool" lint /bin/true
    [ "$status" -eq 3 ]
    [[ $output == *"is zero: this is not a text file"* ]]
    printf 'model:\n  a: [1\n' >cut.yaml
    run "$tool" lint cut.yaml
    [ "$status" -eq 3 ]
    [[ $output == *"cut.yaml:3: not YAML"* ]]
    printf 'echo "open\n' >cut.sh
    run "$tool" lint cut.sh
    [ "$status" -eq 3 ]
    [[ $output == *"line 1: a quote"* ]]
    for command in "bash -c" eval; do
        printf 'A=(--bf16)\n%s "python pretrain_gpt.py it'"'"'s"\n' "$command" >inner.sh
        run "$tool" lint inner.sh
        [ "$status" -eq 3 ]
        [[ $output == "ep-overlap lint: inner.sh:2: what its shell is given: line 1: a quote (') is never closed" ]]
    done
    run "$tool" lint -- bash -c "it's"
    [[ $status -eq 3 && $output == *"lint: the command: what its shell is given: line 1: a quote"* ]]
}

@test "inputs without settings are status 4" {
    : >empty.log
    run "$tool" lint empty.log
    [ "$status" -eq 4 ]
    run "$tool" lint -- true
    [ "$status" -eq 4 ]
}

@test "standard input, a closed output" {
    run "$tool" lint - <<<'srun python pretrain_gpt.py --num-experts 8 --delay-wgrad-compute'
    [ "$status" -eq 1 ]
    run bash -c "'$tool' explain > /dev/full"
    [ "$status" -eq 5 ]
}

@test "an option without its value is named, by every command" {
    tried=0
    while read -r command; do
        while read -r option; do
            run "$tool" "$command" "$option"
            [ "$status" -eq 2 ]
            [[ $output == "ep-overlap $command: $option needs a value"* ]] || { echo "$command $option: $output" && false; }
            tried=$((tried + 1))
        done < <("$tool" "$command" --help | grep -oE '^ {1,6}--[a-z-]+ [A-Z]+' | grep -oE -- '--[a-z-]+' | sort -u)
    done < <("$tool" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p')
    [ "$tried" -ge 20 ]
}

@test "the help of every command fits 80 columns" {
    run "$tool" --help
    while read -r command; do
        output+=$'\n'$("$tool" "$command" --help)
    done < <(sed -n 's/^  \([a-z]*\)  .*/\1/p' <<<"$output")
    [[ $output == *"ep-overlap bench ["* && $output == *"ep-overlap lint ["* ]]
    run grep -nE '^.{81}' <<<"$output"
    [ -z "$output" ]
}
