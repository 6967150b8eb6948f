#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A few cases of each kind; run.sh without -q runs them all.
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" -q -j 4 -l 3 "${EPO_BUILD_DIR:-build}"
