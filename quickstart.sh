#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh Debian 12, 13 or Ubuntu 24.04 to a running job; see usage below.
set -u
top=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$top" || exit 1

# What apt-get installs, by names that Debian 12, Debian 13 and Ubuntu 24.04 share.
packages_build="gcc libc6-dev make autoconf automake libtool pkg-config libconfig-dev libopenblas-dev libslurm-dev libyaml-dev libsqlite3-dev libyajl-dev"
packages_cluster="slurmctld slurmd slurm-client munge"
packages_check="libcunit1-dev bats shellcheck python3"

job=(srun -N2 -n4 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad ep-train --steps 50)

usage() {
    cat <<END
Usage: ./quickstart.sh [--yes] [check | packages]

Installs what is missing from the distribution's packages (after a question),
builds and stages ep-overlap under build/, starts a private Slurm cluster of two
virtual nodes on this machine, runs in it

    ${job[*]}

and stops the cluster. Nothing outside this folder is changed but the packages.

  check      the same set-up, then the fast tier of tests (make check)
  packages   only print the packages that this needs
  --yes      install without a question
END
}

mode=job yes=0
for word in "$@"; do
    case $word in
    --yes | -y) yes=1 ;;
    check | packages) mode=$word ;;
    --help | -h) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
    esac
done
packages="$packages_build $packages_cluster $packages_check"
if [ "$mode" = packages ]; then
    tr ' ' '\n' <<<"$packages"
    exit 0
fi

fail() {
    printf 'quickstart: %s\n' "$@" >&2
    exit 1
}

# --- steps: quiet work with a sign of life, the log shown when it fails ---------------
log=$top/build/quickstart.log
begin_all=$SECONDS child=
trap 'stop' EXIT
trap 'exit 130' INT TERM HUP
stop() {
    [ -z "$child" ] || { kill -TERM "$child" && wait "$child"; } 2>/dev/null
    policy_remove
}

step() { # title limit_s command...
    local title=$1 limit=$2 begin=$SECONDS told=$SECONDS
    shift 2
    start "$title" "$limit" "$@"
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - told)) -ge 10 ]; then
            told=$SECONDS
            printf '      %d s: %.90s\n' $((SECONDS - begin)) "$(tail -n 1 "$log" | tr -d '\r')"
        fi
    done
    finish "$title" "$limit" "$begin" || {
        tail -n 30 "$log" >&2
        fail "'$title' failed; all of it is in $log"
    }
}

show() { # title limit_s filter command...: the same, with the lines that pass the filter shown as they come
    local title=$1 limit=$2 filter=$3 begin=$SECONDS viewer result=0
    shift 3
    start "$title" "$limit" "$@"
    tail -q -n "+$((first_line + 1))" -s 0.2 -f --pid="$child" "$log" | grep --line-buffered -E "$filter" &
    viewer=$!
    finish "$title" "$limit" "$begin" || result=1
    wait "$viewer"
    return $result
}

start() { # title limit_s command...: sets child
    local title=$1 limit=$2
    shift 2
    printf '==> %s\n' "$title"
    echo "=== $title: $*" >>"$log"
    first_line=$(wc -l <"$log")
    timeout -k 10 "$limit" "$@" </dev/null >>"$log" 2>&1 &
    child=$!
}

finish() { # title limit_s begin: 0 when the child succeeded
    local status=0
    wait "$child" || status=$?
    child=
    case $status in
    0) printf '      done in %d s\n' $((SECONDS - $3)) ;;
    124) echo "quickstart: '$1' was not done after $2 s" >&2 ;;
    *) echo "quickstart: '$1' ended with status $status after $((SECONDS - $3)) s" >&2 ;;
    esac
    return "$status"
}

# --- packages -----------------------------------------------------------------------
missing_packages() {
    local name
    for name in $packages; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || echo "$name"
    done
}

# Packages must not start their daemons (munged): the private cluster has its own. policy-rc.d
# is how Debian asks; an existing one stays as it is.
policy=/usr/sbin/policy-rc.d policy_ours=0
policy_add() {
    [ -e "$policy" ] && return
    $sudo sh -c "printf '#!/bin/sh\n# ep-overlap quickstart, only while it installs\nexit 101\n' >$policy && chmod 755 $policy" && policy_ours=1
}
policy_remove() {
    [ "$policy_ours" = 0 ] || $sudo rm -f "$policy"
    policy_ours=0
}

apt_install() {
    local apt="$sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=3 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=120"
    policy_add
    # shellcheck disable=SC2086
    step "package lists" 180 $apt update
    # shellcheck disable=SC2086
    step "install packages" 420 $apt -o APT::Status-Fd=1 install -y --no-install-recommends $missing
    policy_remove
}

sudo=
packages_install() {
    local answer
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        echo "Not a Debian or Ubuntu system: nothing is installed. What it takes, by Debian's names:"
        echo "  $packages" | fold -s -w 100
        return
    fi
    missing=$(missing_packages | tr '\n' ' ')
    if [ -z "$missing" ]; then
        echo "All packages are there."
        return
    fi
    echo "To be installed from the distribution's packages:"
    fold -s -w 90 <<<"  $missing"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || fail "neither root nor sudo: let an administrator run" \
            "  apt-get install --no-install-recommends $missing"
        sudo=sudo
    fi
    if [ "$yes" = 0 ] && [ -t 0 ]; then
        read -r -p "Install them${sudo:+ with sudo}? [Y/n] " answer || answer=n
        case $answer in '' | y* | Y*) ;; *) fail "nothing was installed" ;; esac
    elif [ "$yes" = 0 ] && [ -n "$sudo" ]; then
        fail "no terminal to ask on: add --yes, or let an administrator run" \
            "  apt-get install --no-install-recommends $missing"
    fi
    [ -z "$sudo" ] || sudo -v || fail "sudo was refused"
    apt_install
}

# --- build ------------------------------------------------------------------------
configured_for_this() { # a build folder made with tests switched off cannot serve
    [ -f build/Makefile ] && [ -x build/config.status ] &&
        ! build/config.status --config | grep -qE -e '--(disable|without)-(tests|cluster-tests|slurm|host-engine)'
}

build() {
    if [ ! -x configure ] || [ configure.ac -nt configure ]; then
        step "./autogen.sh" 120 ./autogen.sh
    fi
    [ ! -e config.status ] || fail "./configure was run in this folder itself, and a build in build/ does not go with that:" \
        "  make distclean    # here, or take another checkout"
    configured_for_this || step "configure" 180 sh -c 'cd build && ../configure --enable-cluster-tests'
    step "make" 3600 make -C build -j"$(nproc)"
    step "stage an install under build/stage" 120 make -C build stage
}

run_job() {
    local name
    for name in ep_overlap.so ep-train; do
        [ -n "$(find build/stage -name "$name" -type f | head -n 1)" ] || fail "the build made no $name (see $log)"
    done
    show "a private Slurm cluster of two virtual nodes, and in it: ${job[*]}" 320 '' tests/cluster/run.sh -t 300 "${job[@]}" ||
        fail "the job failed; all of it is in $log"
    echo "The cluster is stopped. Try other commands in one: tests/cluster/run.sh COMMAND ..."
}

run_check() {
    local result=0
    # More at once than cores: the cluster tests mostly wait.
    show "make check" 3600 '^((PASS|FAIL|SKIP|ERROR|XPASS|XFAIL): |# (TOTAL|PASS|FAIL|SKIP|ERROR): )' \
        make -C build -j$(($(nproc) + 2)) check || result=1
    [ "$result" = 0 ] || show_failures
    show_left_out
    [ "$result" = 0 ] || fail "make check failed; all of it is in $log"
}

results() { # pattern -> the tests (without suffix) whose result matches it
    find build -path build/stage -prune -o -name '*.trs' -exec grep -lE "^:test-result: ($1)" {} + | sed 's/\.trs$//'
}

show_failures() {
    local name
    for name in $(results 'FAIL|ERROR|XPASS'); do
        echo "--- $name.log" >&2
        tail -n 40 "$name.log" >&2
    done
}

show_left_out() {
    local name
    echo "Left out of this tier: sanitizers, the second compiler, distcheck, the cross build (.ci/run has them); all that needs a GPU."
    for name in $(results SKIP); do
        echo "Skipped: $name: $(grep -v '^SKIP ' "$name.log" | tail -n 1)"
    done
    find build -name '*.log' -path '*/tests/*' -exec sed -n 's/^ok [0-9]* \(.*\) # skip/Skipped: \1:/p' {} +
}

mkdir -p build || fail "cannot write to $top/build"
: >"$log"
packages_install
build
"run_$mode"
printf 'quickstart: all done in %d s\n' $((SECONDS - begin_all))
