#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every fuzz target over its seeds, whole and cut off in many places.
set -u
build=${EPO_BUILD_DIR:-build} source=${EPO_SRC_DIR:-.}
failed=0
for target in log script yaml chrome nsight values config options probe route meet; do
    printf '%s: ' "$target"
    timeout 120 "$build/tests/fuzz/replay_$target" "$source/tests/fuzz/seeds/$target"/* || failed=1
done
exit $failed
