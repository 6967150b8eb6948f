#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random job scripts: what lint takes for known is what bash passes.

shell.py TOOL COUNT [SEED]: a value that `TOOL lint` tells must be the one with which bash
calls the program; it may leave undecided what it cannot tell, but not all of it.
"""
import json
import os
import random
import subprocess
import sys

FLAGS = ["expert-model-parallel-size", "tensor-model-parallel-size", "pipeline-model-parallel-size",
         "context-parallel-size", "num-experts"]
NAMES = "ABCDE"
FUNCTIONS = "fghk"


def word(r, depth=0):
    kind = r.randrange(9)
    name = r.choice("ABC")  # D and E may be unset
    if kind < 3 or depth > 3:
        return str(r.randrange(1, 65))
    if kind == 3:
        return "$" + name
    if kind == 4:
        return "${%s}" % name
    if kind == 5:
        return "$((%d*2))" % r.randrange(1, 9)
    return "${%s%s%s}" % (r.choice(NAMES), r.choice([":-", "-", ":=", "="]), word(r, depth + 1))


def assignment(r):
    value, name = word(r), r.choice(NAMES)
    if r.random() < 0.3:
        value = '"%s"' % value
    if r.random() < 0.2:
        return "export %s=%s" % (name, value)
    return "%s=%s" % (name, value)


def options(r):
    kind = r.randrange(4)
    flags = FLAGS[3:] if kind == 3 else FLAGS[:3]  # an array counts where it is assigned, a text where it is used
    text = " ".join("--%s %s" % (r.choice(flags), word(r)) for _ in range(r.randrange(1, 3)))
    if kind == 0:
        return 'O="$O %s"' % text
    if kind == 1:
        return 'O+=" %s"' % text
    if kind == 2:
        return 'O="%s"' % text
    return "L+=(%s)" % text


def set_otherwise(r, depth, low):
    """What sets a variable without NAME=value at a command's start, or looks so and does not."""
    name, value = r.choice(NAMES), r.randrange(1, 65)
    inner = "\n%s\n" % (line(r, depth + 1, low) if depth < 2 else ":").replace("%", "%%")
    return r.choice(["for %s in 1 %d; do :; done", "read -r %s <<<%d", "(( %s = %d ))", "let %s=%d",
                     "printf -v %s %%s %d", "echo %s=%d >&2", "false && %s=%d", "grep -q x /dev/null && %s=%d",
                     "while false; do %s=%d" + inner + "done", "until (( 1 )); do" + inner + "%s=%d; done",
                     "for i in 1; do %s=%d; done", "unset %s # %d", "true \"${%s/%d/1}\""]) % (name, value)


def function(r, depth, low):
    """A function, called or not, before or behind others, in a subshell, in a pipe, at a condition.

    It calls those alone whose letters come later: none calls itself.
    """
    if low >= len(FUNCTIONS):
        return assignment(r)
    at = r.randrange(low, len(FUNCTIONS))
    name = FUNCTIONS[at]
    first = r.choice(["", "", "local %s=%d" % (r.choice(NAMES), r.randrange(1, 65)), "local %s" % r.choice(NAMES)])
    last = r.choice(["", "", "", "return", "[ %d = 1 ] || return 0" % r.randrange(2),
                     "if [ 1 = %d ]; then return; fi" % r.randrange(2)])
    body = "\n".join(l for l in [first, line(r, depth + 1, at + 1), last, line(r, depth + 1, at + 1)] if l)
    if r.random() < 0.5:
        body = "%s\n%s" % (argument(r), body)
    head = r.choice(["%s() {", "%s () {", "function %s {", "function %s() {", "%s()\n{", "%s() ("]) % name
    text = "%s\n%s\n%s" % (head, body, ")" if head.endswith("(") else "}")
    return "\n".join([text] + [call(r, low) for _ in range(r.randrange(3))])


def argument(r):
    """What a function makes of what it is called with: numbers, in any number."""
    name, other, at = r.choice(NAMES), r.choice("ABC"), r.randrange(1, 4)
    return r.choice(["%s=${%d:-%d}" % (name, at, r.randrange(1, 65)), "%s=${%d-$%s}" % (name, at, other),
                     "shift; %s=${1:-7}" % name, "shift %d; %s=${2:-7}" % (at, name),
                     "[ %d = 1 ] && shift; %s=${1:-7}" % (r.randrange(2), name),
                     "if [ -n \"$1\" ]; then %s=$1; fi" % name,
                     "while [ $# -gt 0 ]; do %s=$1; shift; done" % name,
                     "local all=(\"$@\"); %s=${1:-${2:-5}}" % name,
                     "set -- \"$@\" 9; %s=$1" % name, "for i in \"$@\"; do %s=$i; done" % name])


def passes(r):
    """A function that passes on what it is called with, perhaps without the first."""
    flags = FLAGS[3:] if r.random() < 0.5 else FLAGS[:3]
    add = 'L+=(%s)' if flags[0] == FLAGS[3] else 'O+=" %s"'
    body, words = r.choice([("$@", ""), ("$*", ""), ("${@}", ""), ("${@:1}", ""), ("--%s $2" % flags[0], ""),
                            ("${@:2}", "x "), ("--%s ${3:-4}" % flags[1], "x ")])
    body = '"%s"' % body.replace("*", "@") if body[0] == "$" and add[0] == "L" else body
    before = r.choice(["", "", "echo \"$@\" >&2\n", "local first=$1\n"])
    text = "p() {\n%s%s\n}\np %s" % (before, add % body, words)
    if r.random() < 0.3:
        text = "q() { p \"$@\" 2>&1; }\n" + text.replace("\np ", "\nq ")
    return text + "--%s %s --%s %s" % (r.choice(flags), word(r), r.choice(flags), r.randrange(1, 65))


def call(r, low):
    if low >= len(FUNCTIONS):
        return assignment(r)
    name = FUNCTIONS[r.randrange(low, len(FUNCTIONS))]
    return r.choice([name, name, name, "( %s )" % name, "%s | cat" % name, ": | %s" % name, "%s || :" % name,
                     "if %s; then :; fi" % name, "[ %d = 1 ] && %s" % (r.randrange(2), name), "{ %s; }" % name, "%s %d $A" % (name, r.randrange(1, 65)),
                     "Z=1 %s %d 2 $B" % (name, r.randrange(1, 65)), "%s $B \"$C\" 3 >/dev/null" % name,
                     "for i in 1; do %s; done" % name, "%s 1 2 >/dev/null 2>&1" % name])


def subshell(r, depth, low):
    return "( %s\n)" % line(r, depth + 1, low) if r.random() < 0.5 else "(\n%s\n%s\n)" % (line(r, depth + 1, low), line(r, depth + 1, low))


def line(r, depth=0, low=0):
    kind = r.randrange(15)
    if kind == 14:
        return passes(r) if depth == 0 else call(r, low)
    if kind == 11:
        return subshell(r, depth, low) if depth < 3 else assignment(r)
    if kind == 12:
        return function(r, depth, low) if depth < 3 else call(r, low)
    if kind == 13:
        return call(r, low)
    if kind < 4:
        return assignment(r)
    if kind == 10:
        return set_otherwise(r, depth, low)
    if kind < 7:
        return options(r)
    if kind == 7:
        return ": %s" % word(r)
    if kind == 8 and depth < 2:
        other = "else\n%s\n" % line(r, depth + 1, low) if r.random() < 0.5 else ""
        return "if [ %d = 1 ]; then\n%s\n%sfi" % (r.randrange(2), line(r, depth + 1, low), other)
    return "[ %d = 1 ] && %s" % (r.randrange(2), assignment(r))


def script(r):
    lines = ["%s=%d" % (name, r.randrange(1, 65)) for name in "ABC"]
    lines += [line(r) for _ in range(r.randrange(2, 9))]
    return "\n".join(lines + ['python pretrain_gpt.py $O "${L[@]}" --num-layers 4 --%s %s'
                              % (r.choice(FLAGS[:3]), word(r)), ""])


def passed(text, path):
    with open(path, "w") as f:
        f.write("python() { printf '%s\\n' \"$@\"; }\n" + text)
    out = subprocess.run(["bash", path], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    words = out.stdout.split("\n")
    return {flag: words[max(i for i, w in enumerate(words) if w == "--" + flag) + 1]
            for flag in FLAGS if "--" + flag in words}


def told(tool, text, path):
    with open(path, "w") as f:
        f.write(text)
    out = subprocess.run([tool, "lint", "--json", "--no-environment", path], capture_output=True, text=True, check=False)
    found = {f["name"]: f for rule in json.loads(out.stdout).get("rules", []) for f in rule["found"]}
    return {flag: found.get("num_moe_experts" if flag == "num-experts" else flag.replace("-", "_"))
            for flag in FLAGS}


def main():
    tool, count = sys.argv[1], int(sys.argv[2])
    known = settings = 0
    for i in range(count):
        r = random.Random("%s %d" % (sys.argv[3] if len(sys.argv) > 3 else "1", i))
        text = script(r)
        want, found = passed(text, "bash.sh"), told(tool, text, "lint.sh")
        for flag in FLAGS:
            fact = found[flag]
            settings += flag in want
            if fact is None or fact["value"] is None:
                continue
            is_default = "default" in (fact["from"] or "")
            if is_default and flag not in want:
                continue
            if is_default or fact["value"] != want.get(flag):
                sys.exit("script %d, --%s: bash passes %s, lint tells %s (%s)\n%s"
                         % (i, flag, want.get(flag), fact["value"], fact["from"], text))
            known += 1
    print("%d scripts: %d settings, %d of them known" % (count, settings, known))
    if known < settings / 4:
        sys.exit("lint knows too little of what bash passes")


main()
