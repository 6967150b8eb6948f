#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
load common.sh

# event CAT NAME TS DUR STREAM
event() { printf '{"ph":"X","cat":"%s","name":"%s","pid":0,"ts":%s,"dur":%s,"args":{"device":0,"stream":%s}}' "$@"; }

# trace FILE EVENT...
trace() {
    local file=$1 first=1
    shift
    { printf '{"traceEvents":['
      for e; do [ $first = 1 ] || printf ','; first=0; printf '%s' "$e"; done
      printf ']}'; } >"$file"
}

serial_and_overlapped() {
    trace serial.json "$(event kernel deep_ep::dispatch 0 100 1)" "$(event kernel nvjet_a 100 100 2)"
    trace overlap.json "$(event kernel deep_ep::dispatch 0 100 1)" "$(event kernel nvjet_a 25 100 2)"
}

@test "two files are an A/B of unions" {
    serial_and_overlapped
    run "$tool" profile serial.json overlap.json
    [ "$status" -eq 0 ]
    [[ $output =~ busy[^$'\n']*0.200\ ms[[:space:]]+0.125\ ms[[:space:]]+-37.500\ % ]]
    [[ $output =~ beside\ GEMM\ and\ attention[[:space:]]+0.000\ ms[[:space:]]+0.075\ ms ]]
    [[ $output =~ overlapped\ share[[:space:]]+0.00\ %[[:space:]]+75.00\ % ]]
    [[ $output =~ exposed[[:space:]]+0.100\ ms[[:space:]]+0.025\ ms ]]
    [[ $output != *"PRO-005"* ]]
    run grep -nE '^.{81}' <<<"$output"
    [ -z "$output" ]
}

@test "durations are never added" {
    trace nested.json "$(event kernel deep_ep::dispatch 0 100 1)" "$(event kernel deep_ep::combine 10 20 2)" \
        "$(event kernel nvjet_x 0 50 3)" "$(event kernel nvjet_x 0 50 4)"
    run "$tool" profile nested.json
    [[ $output =~ expert\ communication[[:space:]]+0.100\ ms && $output =~ overlapped\ share[[:space:]]+50.00\ % ]]
}

@test "other kernels in an arm are told" {
    serial_and_overlapped
    trace more.json "$(event kernel deep_ep::dispatch 0 100 1)" "$(event kernel nvjet_x 0 1 2)" "$(event kernel nvjet_x 2 1 2)"
    run "$tool" profile serial.json more.json
    [[ $output == *"PRO-005"* ]]
}

@test "classes can be given" {
    trace own.json "$(event kernel my_moe_send 0 100 1)" "$(event kernel nvjet_x 50 100 2)"
    run "$tool" profile own.json
    [[ $output =~ expert\ communication[[:space:]]+0.000\ ms ]]
    run "$tool" profile own.json --class '*moe_send*=ep_comm' --names
    [[ $output =~ overlapped\ share[[:space:]]+50.00\ % ]]
    [[ $output =~ ep_comm[[:space:]]+1[[:space:]]+my_moe_send ]]
}

@test "a range cuts" {
    serial_and_overlapped
    run "$tool" profile overlap.json --range 0-0.00005
    [[ $output =~ expert\ communication[[:space:]]+0.050\ ms && $output =~ overlapped\ share[[:space:]]+50.00\ % ]]
    run "$tool" profile overlap.json --range 100-200
    [ "$status" -eq 3 ]
    [[ $output == *"overlap.json: --range begins behind the end: the record is 0.000 s long"* ]]
}

@test "a share is refused where copies cannot be classified" {
    trace copies.json "$(event kernel deep_ep::dispatch 0 100 1)" "$(event gpu_memcpy 'Memcpy ??? (x)' 0 100 1)"
    run "$tool" profile copies.json
    [ "$status" -eq 4 ]
    [[ $output == *"refused"* && $output == *"no overlapped share: copies may be communication"* ]]
    run --separate-stderr "$tool" profile copies.json --json
    [ "$status" -eq 4 ]
    is_json
    [[ $output == *'"overlapped_share": null'* ]]
}

@test "a share is refused where kernels have no name; what has no time is counted" {
    command -v python3 >/dev/null || skip "no python3"
    python3 - <<'END'
import sqlite3
for file, row in ("nameless", (100, 150)), ("timeless", (None, 150)):
    c = sqlite3.connect(file + ".sqlite")
    c.execute('CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, "end", deviceId, streamId, demangledName INTEGER)')
    c.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, 1)", [row, row])
    c.commit()
END
    run "$tool" profile nameless.sqlite
    [ "$status" -eq 4 ]
    [[ $output == *"nameless.sqlite: no overlapped share: 2 kernels have no name in the file"* ]]
    run --separate-stderr "$tool" profile --json nameless.sqlite
    [ "$status" -eq 4 ]
    is_json
    [[ $output == *'"nameless": 2'*'"share_refused": "2 kernels'* ]]
    run "$tool" profile timeless.sqlite
    [ "$status" -eq 3 ]
    [[ $output == *"timeless.sqlite: all 2 records of kernels and copies are without a time"* ]]
}

@test "the picture is XML that names the share, and opens" {
    serial_and_overlapped
    mv overlap.json 'a<&>b.json'
    run "$tool" profile serial.json 'a<&>b.json' --svg out.svg
    [ "$status" -eq 0 ]
    grep -q '75.0 % of 0.100 ms expert communication ran beside' out.svg
    grep -q 'a&lt;&amp;&gt;b.json' out.svg
    command -v python3 >/dev/null || skip "no python3 to read XML with"
    python3 - <<'END'
import xml.dom.minidom
parts = {"#009E73": [], "#D55E00": []} # of communication, hidden and exposed: serial.json's, the other's
for r in xml.dom.minidom.parse("out.svg").getElementsByTagName("rect"):
    if r.getAttribute("fill") in parts:
        parts[r.getAttribute("fill")].append((float(r.getAttribute("x")), float(r.getAttribute("width"))))
(at, none), (_, hidden) = parts["#009E73"]
(_, whole), (rest_at, exposed) = parts["#D55E00"]
assert none == 0 and whole > 100, parts
assert abs(hidden - .75 * whole) < .1 and abs(exposed - .25 * whole) < .1 and abs(rest_at - at - hidden) < .1, parts
END
    run "$tool" profile serial.json --svg /nowhere/out.svg
    [ "$status" -eq 3 ]
    run "$tool" profile serial.json --svg out2.svg --device 7
    [ "$status" -eq 3 ]
}

@test "a picture replaces a picture, and no other file" {
    serial_and_overlapped
    cp serial.json kept.json
    run "$tool" profile --svg serial.json overlap.json
    [ "$status" -eq 3 ]
    [[ $output == *"serial.json: is there already and is no picture"* ]]
    cmp serial.json kept.json
    : >empty.svg
    for svg in empty.svg empty.svg new.svg /dev/null; do
        run "$tool" profile overlap.json --svg "$svg"
        [ "$status" -eq 0 ]
    done
    [ "$(head -c 4 empty.svg)" = "<svg" ]
    printf '<s' >short
    run "$tool" profile overlap.json --svg short
    [ "$status" -eq 3 ]
    [ "$(cat short)" = "<s" ]
}

@test "a pipe with a name is read once, from its beginning" {
    serial_and_overlapped
    run "$tool" profile <(cat serial.json) <(cat overlap.json)
    [ "$status" -eq 0 ]
    [[ $output =~ overlapped\ share[[:space:]]+0.00\ %[[:space:]]+75.00\ % ]]
    mkfifo named
    cat overlap.json >named &
    run timeout 60 "$tool" profile named
    [ "$status" -eq 0 ]
    run "$tool" profile <(printf '')
    [ "$status" -eq 3 ]
    [[ $output == *"is empty"* ]]
}

@test "--json is JSON; a trace may come through a pipe" {
    serial_and_overlapped
    run --separate-stderr "$tool" profile --json serial.json overlap.json --names
    is_json
    [[ $output == *'"overlapped_share": 0.75'* && $output == *'"same_kernel_count": true'* ]]
    run bash -c "cat overlap.json | '$tool' profile -"
    [ "$status" -eq 0 ]
}

@test "what is no profile is status 3 with its reason" {
    run "$tool" profile missing.json
    [ "$status" -eq 3 ]
    : >empty.json
    run "$tool" profile empty.json
    [ "$status" -eq 3 ]
    [[ $output == *"empty.json: is empty"* ]]
    run "$tool" profile /bin/true
    [ "$status" -eq 3 ]
    [[ $output == *"neither an SQLite export"* ]]
    printf '{"traceEvents":[{"ph":"X",' >cut.json
    run "$tool" profile cut.json
    [ "$status" -eq 3 ]
    [[ $output == *"cut off at byte 26"* ]]
    printf 'SQLite format 3\0garbage' >bad.sqlite
    run "$tool" profile bad.sqlite
    [ "$status" -eq 3 ]
    [[ $output == *"bad.sqlite"* ]]
    printf '\037\213' >t.json.gz
    run "$tool" profile t.json.gz
    [ "$status" -eq 3 ]
    [[ $output == *"zcat"* ]]
}

@test "wrong usage is status 2" {
    run "$tool" profile --memory 1e9 a
    [[ $status -eq 2 && $output == *'--memory takes a number of 1 to 1048576, not "1e9"'* ]]
    run "$tool" profile --device -1 a
    [[ $status -eq 2 && $output == *'--device takes a number of 0 to 2147483647, not "-1"'* ]]
    for args in "" "a b c" "--class x a" "--class a=nope a" "--range 2-1 a" "--memory 0 a" "--nope"; do
        run "$tool" profile $args
        [ "$status" -eq 2 ] || { echo "$args: $status"; false; }
    done
}
