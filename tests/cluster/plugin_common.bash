# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154 # loaded by bats: status and output are its own
# What the tests of the plugin share.

setup() {
    top=$(cd "$BATS_TEST_DIRNAME/../.." && pwd)
    work=$(mktemp -d "${BATS_TEST_TMPDIR:-/tmp}/plugin.XXXXXX")
}

# cluster [run.sh's options] -- SCRIPT: its output, status, and then what every
# test wants of the cluster afterwards: nothing left over, all nodes idle.  In
# SCRIPT "t COMMAND..." runs a command and prints "rc STATUS: COMMAND...", and
# "batch SBATCH'S WORDS..." submits a job and returns its status ($batch: the same, for programs).
cluster() {
    local options=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    cat >"$work/script" <<END
work='$work'
t() { "\$@"; echo "rc \$?: \$*"; }
batch='$top/tests/cluster/batch.sh'
batch() { "\$batch" "\$@"; }
$2
status=\$?
for try in \$(seq 100); do
    [ -z "\$(squeue -h)" ] && [ "\$(sinfo -h -o %T)" = idle ] && break
    sleep 0.1
done
squeue -h >"\$work/left"
sinfo -h -o %T >"\$work/states"
cat "\$EPO_CLUSTER_DIR"/log/slurmd.n*.log >"\$work/slurmd.log"
exit \$status
END
    local limit=${cluster_limit:-100}
    run timeout $((limit + 20)) "$top/tests/cluster/run.sh" -t "$limit" "${options[@]}" bash "$work/script"
    if [ ! -e "$work/states" ] || [ "$(cat "$work/states")" != idle ] || [ -s "$work/left" ]; then
        echo "$output"
        echo "status $status; jobs left and states:"
        cat "$work/left" "$work/states"
        return 1
    fi
}

has() { [[ $output == *"$1"* ]] || { echo "not found: $1" && echo "$output" && false; }; }
has_not() { [[ $output != *"$1"* ]] || { echo "found: $1" && echo "$output" && false; }; }
times() { [ "$(grep -c -- "$2" <<<"$output")" = "$1" ] || { echo "not $1 times: $2" && echo "$output" && false; }; }
ended() { [ "$status" = "$1" ] || { echo "status $status, not $1" && echo "$output" && false; }; }
failed() {
    if [ "$status" = 0 ] || [ "$status" = 124 ]; then
        echo "status $status" && echo "$output" && false
    fi
}

# Keeps of $output what stands behind the line $1 (from the start if empty) and before the line $2.
between() {
    whole=${whole-$output}
    output=$whole
    [ -z "$1" ] || output=${output#*"$1"}
    [ -z "$2" ] || output=${output%%"$2"*}
}
