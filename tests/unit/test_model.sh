#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tests/bench/model.py finds costs that it is given made-up times of.
set -u
src=$(cd "${srcdir:-.}" && pwd)
command -v python3 >/dev/null || { echo "left out: no python3" && exit 77; }
PYTHONDONTWRITEBYTECODE=1 exec timeout 60 python3 "$src/tests/bench/model_test.py"
