#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A few cases of each kind; run.sh without -q runs them all. Then groups that meet by a caller's
# bootstrap, and two groups of a step, of which one is struck.
set -e
run=$(dirname "${BASH_SOURCE[0]}")/run.sh
build=${EPO_BUILD_DIR:-build}
"$run" -q -j 4 -l 3 "$build"
"$run" -q -w bootstrap -k 'killed stopped' -j 4 -l 2 "$build"
"$run" -q -n 4 -G 2 -k killed -j 4 -l 3 "$build"
