#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Every reader on inputs that nobody writes on purpose; by hand with 4096 MB:
#     tests/tools/huge.py build/ep-overlap
# shellcheck source=tests/tools/common.sh
. "$BATS_TEST_DIRNAME/common.sh"

@test "newlines, one line, zeros, noise, brackets, endless strings: an answer in bounded memory" {
    command -v python3 >/dev/null || skip "no python3"
    run timeout 300 "$BATS_TEST_DIRNAME/huge.py" "$tool" 20
    echo "$output"
    [ "$status" -eq 0 ]
    [ "${#lines[@]}" -eq 48 ]
}
