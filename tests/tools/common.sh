# SPDX-License-Identifier: Apache-2.0
# What the tests of the ep-overlap command share.
bats_require_minimum_version 1.5.0
build=$(cd "$BATS_TEST_DIRNAME/../.." && realpath -m -- "${EPO_BUILD_DIR:-build}")
tool=$build/ep-overlap
setup() {
    [ -x "$tool" ] || { echo "$tool was not built"; return 1; }
    cd "$BATS_TEST_TMPDIR" || return 1
}

# Every line of $output is JSON together: parsed by Python, if there is one.
is_json() {
    command -v python3 >/dev/null || skip "no python3 to read JSON with"
    python3 -c 'import json,sys; json.load(sys.stdin)' <<<"$output"
}
