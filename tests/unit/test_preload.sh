#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a preloaded libep_overlap_intercept.so must bear without anybody noticing: data loaders
# that fork, crashes, communicators by the hundred, on the stand-ins of tests/fake. In every mode,
# with the recorder and without: the same output and status, nothing left, nothing that grows.
# (/bin/true, bash, python, static programs, dlopen and dlclose: test_intercept.sh.)
# shellcheck disable=SC2317 # functions called by name
set -u
top=${top_builddir:-.}
src=${srcdir:-.}
library=$(cd "$top" && pwd)/.libs/libep_overlap_intercept.so
failed=0
work=$(mktemp -d) || exit 99
trap 'rm -rf "$work"' EXIT

# shellcheck source=tests/fake/intercept.sh
. "$src/tests/fake/intercept.sh"

if is_sanitized "$library"; then
    echo "left out in a sanitized build: everything that preloads"
    exit 77
fi
fakes_build "$work" "$src" || exit 99
${CC:-cc} -std=gnu11 -g -O1 -Wall -Wextra -Werror -I "$src/lib" -o "$work/preload_job" "$src/tests/fake/preload_job.c" \
    -L"$work" -l:libnccl.so.2 -ldl -lpthread || exit 99
${CC:-cc} -std=gnu11 -g -O1 -Wall -Wextra -Werror -I "$src/lib" -shared -fPIC -fvisibility=hidden \
    -Wl,-soname,libcupti.so.13 -o "$work/libcupti.so.13" "$src/tests/fake/cupti.c" -lpthread || exit 99
export PROGRAM=preload_job
least=(EP_OVERLAP_INTERPOSE_LEAST=64k EP_OVERLAP_INTERPOSE_WAIT=100000)

# ---- programs that fork and crash, without NCCL ----
quiet() { # COMMAND...: the same output and status with and without
    local plain with status mode
    plain=$("$@" 2>&1)
    status=$?
    for mode in off observe accelerate; do
        with=$(LD_PRELOAD=$library EP_OVERLAP_INTERPOSE=$mode EP_OVERLAP_RECORD=1 "$@" 2>&1)
        if [ $? != "$status" ] || [ "$plain" != "$with" ]; then
            echo "$mode: status $status, said '$with' for '$plain'"
            return 1
        fi
    done
}
if command -v python3 >/dev/null; then
    cat >"$work/loader.py" <<'P'
import multiprocessing as m, os, signal, sys
def item(n):
    if n % 7 == 0 and os.fork() == 0:
        os._exit(0)
    return n * n
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        with m.get_context(method).Pool(4) as pool:
            print(sum(pool.map(item, range(200))))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    print(os.waitpid(child, 0)[1] & 127)
    sys.exit(3)
P
    check "python's workers, forked and spawned" quiet python3 "$work/loader.py"
    check "a crash in python" quiet bash -c 'ulimit -c 0; { python3 -c "import os; print(1, flush=True); os.abort()"; } 2>/dev/null; echo $?'
fi
check "a shell's background jobs and traps" quiet bash -c \
    'trap "echo trapped" TERM; for i in 1 2 3 4; do (exit $i) & done; wait; kill -TERM $$; { (kill -9 $BASHPID); } 2>/dev/null; echo $?'

# ---- NCCL programs ----
modes=(plain off observe accelerate)
each_mode() { # CHECK ARGUMENTS...: with every mode, recorder on and off
    local mode record
    for mode in "${modes[@]}"; do
        for record in 0 "$work"; do
            RANK_LIMIT=100 "$1" "$mode" "${@:2}" "${least[@]}" EP_OVERLAP_RECORD="$record" EP_OVERLAP_RECORD_WINDOW=0-30s || {
                echo "mode $mode, record $record"
                cat "$work"/out.*
                return 1
            }
            [ "$mode" != plain ] || break
        done
    done
}
forks() { ranks "$1" 2 loaders 24 "${@:2}" && [ "$(grep -c '^killed 18, left 18, ended 36$' "$work"/out.[01] | grep -c ':1$')" = 2 ]; }
check "24 workers at a time, killed and ended, beside exchanges" each_mode forks
crashes() { # the first rank's end: by the signal
    (
        ulimit -c 0
        ranks "$1" 2 crash 3 "${@:2}"
    ) 2>/dev/null
    [ $? = 139 ] && grep -q '^now' "$work/out.0" && ! grep -q 'ok$' "$work/out.0"
}
check "a crash is the program's own" each_mode crashes
silent() { # off: not a word
    ranks off 2 loaders 8 EP_OVERLAP_RECORD=1 && ! grep -q ep-overlap "$work"/out.*
}
check "off: no output" silent

# What the process holds does not grow with communicators that are gone: between a tenth of
# them and the end. A few pages are the program's own heap.
grows() { # MODE [NAME=VALUE...]
    ranks "$1" 2 churn 150 "${@:2}" || return 1
    cat "$work"/out.*
    awk '/^early:/ { f = $3; t = $5; m = $7; p = $9 }
        /^late:/ { n++; if ($3 > f || $5 > t || $7 > m + 8 || $9 > p + 400) bad++ }
        END { exit !(n == 2 && !bad) }' "$work"/out.[01]
}
check "300 communicators: nothing is left" each_mode grows
exit $failed
