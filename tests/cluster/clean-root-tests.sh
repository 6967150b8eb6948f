#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# In a clean root (clean-root.sh): builds against the Slurm that is installed, runs the plugin's
# tests and those on private clusters, and lists what each came to.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 70
echo "== $(. /etc/os-release && echo "$PRETTY_NAME"), $(slurmd -V)"
{ ./autogen.sh && mkdir -p build && cd build && ../configure && make -j"$(nproc)"; } >/tmp/build.log 2>&1 ||
    { tail -n 30 /tmp/build.log && exit 70; }
grep -A6 'ep-overlap [0-9.]*$' /tmp/build.log
tests=${*:-tests/unit/test_spank_decide tests/unit/test_spank_task tests/cluster/harness.bats tests/cluster/plugin.bats tests/cluster/everywhere.bats tests/cluster/refuse.bats tests/cluster/containers.bats tests/cluster/train.bats}
programs=$(tr ' ' '\n' <<<"$tests" | grep -xE 'tests/unit/test_[a-z_]+' | tr '\n' ' ') # no others are compiled
status=0
make -j"$(nproc)" check check_PROGRAMS="$programs" TESTS="$tests" >/tmp/check.log 2>&1 || status=1
# bats numbers its tests; what failed is shown whole
for log in tests/cluster/*.log; do
    [ -s "$log" ] || continue
    echo "== $log: $(grep -c '^ *ok' "$log") passed, $(grep -c '^ *not ok' "$log") failed"
    grep -E '^ *(not )?ok' "$log"
    if grep -q '^ *not ok' "$log"; then tail -n 60 "$log"; fi
done
grep -E '^# (TOTAL|PASS|SKIP|FAIL|ERROR)|^(FAIL|ERROR):' /tmp/check.log
exit $status
