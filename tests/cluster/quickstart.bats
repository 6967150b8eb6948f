#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# quickstart.sh around a stand-in build and stand-in package tools: what it asks, says and
# returns. The real run in a fresh root is .ci/run's and tests/cluster/clean-root.sh's matter.

setup() {
    tree=$BATS_TEST_TMPDIR/tree
    mkdir -p "$tree/build/stage/lib" "$tree/bin" "$tree/tests/cluster"
    cp "$BATS_TEST_DIRNAME/../../quickstart.sh" "$tree/"
    touch "$tree/configure.ac" "$tree/build/stage/lib/ep_overlap.so" "$tree/build/stage/lib/ep-train"
    script configure 'exit 0'
    script build/config.status 'exit 0'
    script tests/cluster/run.sh 'echo "the job: $*"; exit ${JOB_STATUS:-0}'
    script bin/dpkg-query 'case " $MISSING " in *" ${4:-$3} "*) printf not-installed ;; *) printf installed ;; esac'
    script bin/apt-get 'echo "apt-get $*" >>'"$tree/apt.log"'; exit ${APT_STATUS:-0}'
    printf 'all stage:\n\t@true\ncheck:\n\t@echo "PASS: one"; echo "quiet line"; echo "# TOTAL: 1"; exit $${CHECK_STATUS:-0}\n.PHONY: all stage check\n' >"$tree/build/Makefile"
    export MISSING=''
    PATH=$tree/bin:$PATH
}

script() { # name code
    printf '#!/bin/sh\n%s\n' "$2" >"$tree/$1"
    chmod 755 "$tree/$1"
}

as_user() { # runs quickstart.sh as nobody, who may write the tree and has no sudo unless planted
    chmod -R a+rwX "$BATS_TEST_TMPDIR"
    chmod a+rx "$BATS_RUN_TMPDIR" "$BATS_RUN_TMPDIR/test"
    if [ "$(id -u)" = 0 ]; then
        setpriv --reuid="$(id -u nobody)" --regid="$(id -g nobody)" --clear-groups env PATH="$tree/bin:/usr/bin:/bin" "$tree/quickstart.sh" "$@"
    else
        PATH=$tree/bin:/usr/bin:/bin "$tree/quickstart.sh" "$@"
    fi
}

@test "usage, and the list of packages" {
    run "$tree/quickstart.sh" --help
    [ "$status" = 0 ]
    [[ $output == Usage:*"srun -N2 -n4 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad ep-train --steps 50"* ]]
    run "$tree/quickstart.sh" --fast
    [ "$status" = 2 ]
    run "$tree/quickstart.sh" packages
    [ "$status" = 0 ]
    grep -qx slurmctld <<<"$output"
    [ "$(grep -c ' ' <<<"$output")" = 0 ]
}

@test "nothing missing: builds, stages, runs the job, shows its lines" {
    run "$tree/quickstart.sh" </dev/null
    echo "$output"
    [ "$status" = 0 ]
    [[ $output == *"All packages are there."* ]]
    [[ $output == *"the job: -t 300 srun -N2 -n4 --ep-overlap=on"* ]]
    [ ! -e "$tree/apt.log" ]
}

@test "a job that fails fails the quickstart" {
    JOB_STATUS=3 run "$tree/quickstart.sh" </dev/null
    [ "$status" = 1 ]
    [[ $output == *"ended with status 3"* ]]
    [[ $output == *"build/quickstart.log"* ]]
}

@test "check: results are shown, a failure too" {
    run "$tree/quickstart.sh" check </dev/null
    echo "$output"
    [ "$status" = 0 ]
    [[ $output == *"PASS: one"* ]]
    [[ $output == *"# TOTAL: 1"* ]]
    [[ $output != *"quiet line"* ]]
    [[ $output == *"Left out of this tier: "* ]]
    mkdir -p "$tree/build/tests"
    printf ':test-result: FAIL\n' >"$tree/build/tests/two.sh.trs"
    echo 'what went wrong' >"$tree/build/tests/two.sh.log"
    CHECK_STATUS=1 run "$tree/quickstart.sh" check </dev/null
    [ "$status" = 1 ]
    [[ $output == *"what went wrong"* ]]
}

@test "a skipped test is named with its reason" {
    mkdir -p "$tree/build/tests"
    printf ':test-result: SKIP\n' >"$tree/build/tests/two.sh.trs"
    printf 'no such tool\nSKIP tests/two.sh (exit status: 77)\n' >"$tree/build/tests/two.sh.log"
    run "$tree/quickstart.sh" check </dev/null
    [[ $output == *"Skipped: build/tests/two.sh: no such tool"* ]]
}

@test "a build that fails shows its last lines" {
    printf 'all:\n\t@echo "fatal: no such header"; exit 1\n' >"$tree/build/Makefile"
    run "$tree/quickstart.sh" </dev/null
    [ "$status" = 1 ]
    [[ $output == *"fatal: no such header"* ]]
    [[ $output == *"'make' failed"* ]]
}

@test "a tree that was configured in place is told, with the way out" {
    : >"$tree/config.status"
    run "$tree/quickstart.sh" </dev/null
    rm "$tree/config.status"
    [ "$status" = 1 ]
    [[ $output == *"./configure was run in this folder itself"*"make distclean"* ]]
}

@test "neither root nor sudo: says what an administrator runs" {
    export MISSING="munge bats"
    # shellcheck disable=SC2317
    command() { [ "$2" != sudo ] && builtin command "$@"; }
    export -f command
    run as_user
    echo "$output"
    [ "$status" = 1 ]
    [[ $output == *"apt-get install --no-install-recommends munge bats"* ]]
    [ ! -e "$tree/apt.log" ]
}

@test "sudo without a terminal: asks for --yes, installs nothing" {
    export MISSING="munge"
    script bin/sudo 'echo "sudo $*" >>'"$tree/apt.log"
    run as_user
    echo "$output"
    [ "$status" = 1 ]
    [[ $output == *"add --yes"*"apt-get install --no-install-recommends munge"* ]]
    [ ! -e "$tree/apt.log" ]
}

@test "--yes with sudo: exactly what is missing, by sudo" {
    export MISSING="munge libconfig-dev"
    script bin/sudo 'echo "sudo $*" >>'"$tree/apt.log"
    run as_user --yes
    echo "$output"
    [ "$status" = 0 ]
    grep -q '^sudo env DEBIAN_FRONTEND=noninteractive apt-get .* update$' "$tree/apt.log"
    grep -q '^sudo env .* install -y --no-install-recommends libconfig-dev munge$' "$tree/apt.log"
}

@test "sudo that is refused" {
    export MISSING="munge"
    script bin/sudo 'exit 1'
    run as_user --yes
    [ "$status" = 1 ]
    [[ $output == *"sudo was refused"* ]]
}

@test "another distribution: says what it takes, and tries" {
    rm "$tree/bin/dpkg-query" "$tree/bin/apt-get"
    # shellcheck disable=SC2317
    command() { [ "$2" != dpkg-query ] && builtin command "$@"; }
    export -f command
    run "$tree/quickstart.sh" </dev/null
    echo "$output"
    [ "$status" = 0 ]
    [[ $output == *"Not a Debian or Ubuntu system"*slurmctld* ]]
}

@test "stopped: the step's process ends with it" {
    printf 'all:\n\t@exec sleep 300\n' >"$tree/build/Makefile"
    "$tree/quickstart.sh" </dev/null >/dev/null 2>&1 3>&- &
    pid=$!
    for _ in $(seq 100); do
        read -ra children <"/proc/$pid/task/$pid/children" || true
        for maker in "${children[@]}"; do
            ! tr '\0' ' ' <"/proc/$maker/cmdline" | grep -q '^timeout .* make ' || break 2
        done
        maker=
        sleep 0.1
    done
    [ -n "$maker" ]
    kill -TERM "$pid"
    result=0
    wait "$pid" || result=$?
    [ "$result" = 130 ]
    [ ! -e "/proc/$maker/cmdline" ] || [ -z "$(cat "/proc/$maker/cmdline")" ]
}
