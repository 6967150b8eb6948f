#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Each check of this folder finds what is planted for it, and is quiet about what is right.

setup() {
    lint=$(cd "$BATS_TEST_DIRNAME" && pwd)
    tree=$BATS_TEST_TMPDIR/tree
    mkdir -p "$tree"/{lib/core,lib/moe,lib/include,lib/backend/host,lib/trace,spank,tools/one}
    head='/* SPDX-License-Identifier: Apache-2.0 */'
    plant lib/core/good.c '#include <stdio.h>' '#include "ep_overlap.h"' '#include "core/status.h"' '#include "config.h"'
}

plant() { # file lines...: after the licence line
    local file=$tree/$1
    shift
    mkdir -p "$(dirname "$file")"
    printf '%s\n' "$head" "$@" >"$file"
}

found() { # text: the last run failed and named it
    echo "$output"
    [ "$status" = 1 ]
    [[ $output == *"$1"* ]]
}

quiet() {
    echo "$output"
    [ "$status" = 0 ]
    [[ $output == *": 0 violations"* ]]
}

@test "includes: what the table allows" {
    plant lib/moe/a.c '#include "backend/backend.h"' '#include "core/status.h"' '#include "moe/moe.h"' '#  include <sys/mman.h>'
    plant lib/backend/host/a.c '#include <cblas.h>' '#include "backend/engine.h"' '#include "backend/host/host.h"'
    plant spank/b.h
    plant spank/a.c '#include <slurm/spank.h>' '#include "b.h"' '#include "rules/rules.h"'
    plant tools/one/a.c '#include "trace/intervals.h"' '#include "probe/facts.h"'
    run "$lint/includes.sh" "$tree"
    quiet
}

@test "includes: each kind of violation" {
    while IFS='|' read -r file line said; do
        plant "$file" "$line"
        run "$lint/includes.sh" "$tree"
        found "$file:2: $said"
        rm "$tree/$file"
    done <<'END'
lib/core/a.c|#include "moe/moe.h"|"moe/moe.h" is not for lib/core
lib/core/a.c|#include <dlfcn.h>|<dlfcn.h> is not for lib/core
lib/moe/a.c|#include "backend/host/host.h"|"backend/host/host.h" is not for lib/moe
lib/moe/a.c|  #  include <cuda.h>|<cuda.h> is not for lib/moe
lib/backend/host/a.c|#include "backend/cuda/gpu.h"|"backend/cuda/gpu.h" is not for lib/backend/host
lib/backend/a.h|#include "backend/host/host.h"|"backend/host/host.h" is not for lib/backend
lib/backend/host/a.c|#include "moe/moe.h"|"moe/moe.h" is not for lib/backend/host
lib/include/a.h|#include "core/status.h"|"core/status.h" is not for lib/include
lib/include/a.h|#include "config.h"|"config.h" is not in its folder
lib/trace/a.c|#include "backend/backend.h"|"backend/backend.h" is not for lib/trace
spank/a.c|#include <dlfcn.h>|<dlfcn.h> is not for spank
spank/a.c|#include <mpi.h>|<mpi.h> is not for spank
spank/a.c|#include "probe/probe.h"|"probe/probe.h" is not for spank
tools/one/a.c|#include "backend/host/host.h"|"backend/host/host.h" is not for tools
tools/one/a.c|#include "elsewhere.h"|"elsewhere.h" is not in its folder
lib/core/a.c|#include <slurm/slurm.h>|<slurm/slurm.h> is not for lib/core
END
}

@test "includes: a folder without a row, a tree without sources" {
    plant lib/fresh/a.c
    run "$lint/includes.sh" "$tree"
    found "lib/fresh/a.c:1: no row"
    mkdir "$BATS_TEST_TMPDIR/empty"
    run "$lint/includes.sh" "$BATS_TEST_TMPDIR/empty"
    [ "$status" = 2 ]
}

@test "calls: each forbidden one, in code only" {
    for name in strcpy strcat sprintf vsprintf atoi atol gets system popen pthread_mutex_timedlock sem_timedwait; do
        plant lib/core/a.c "int f(void) { return $name (0); }"
        run "$lint/calls.sh" "$tree"
        found "lib/core/a.c:2: $name() is not used here"
    done
    plant lib/core/a.c '/* strcpy(a, b) and' ' * system("x") */ int g; // popen()' 'const char *s = "a \" atoi(x)";' \
        'int my_system(int); int x(void) { return my_system(1) + o.gets(2) + snprintf(b, 1, "sprintf(");} char q = '"'\"'"';'
    run "$lint/calls.sh" "$tree"
    quiet
    plant lib/core/a.c 'char q = '"'\"'"'; int h(void) { /* c */ return atoi("1"); }'
    run "$lint/calls.sh" "$tree"
    found "lib/core/a.c:2: atoi()"
}

@test "calls: the licence line and the length of a file" {
    echo 'int a;' >"$tree/lib/core/a.c"
    run "$lint/calls.sh" "$tree"
    found "lib/core/a.c:1: no SPDX"
    rm "$tree/lib/core/a.c"
    echo 'true' >"$tree/tools/one/a.sh"
    run "$lint/calls.sh" "$tree"
    found "tools/one/a.sh:1: no SPDX"
    rm "$tree/tools/one/a.sh"
    # shellcheck disable=SC2046
    plant lib/core/a.c $(printf '//%d ' $(seq 700))
    run "$lint/calls.sh" "$tree"
    found "lib/core/a.c:701: longer than 700 lines"
}

@test "shell: a script's and a sourced part's fault" {
    command -v shellcheck || skip "shellcheck is not installed"
    printf '#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\necho "$1"\n' >"$tree/tools/one/run"
    run "$lint/shell.sh" "$tree"
    quiet
    printf '#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\nrm -rf $1/*\n' >"$tree/tools/one/run"
    run "$lint/shell.sh" "$tree"
    found "tools/one/run:3:"
    rm "$tree/tools/one/run"
    printf '# shellcheck shell=bash\nlocal x=$(date)\n' >"$tree/tools/one/part.sh"
    run "$lint/shell.sh" "$tree"
    found "tools/one/part.sh:2:"
}

@test "format: a line that clang-format would change" {
    command -v clang-format || skip "clang-format is not installed"
    cp "$lint/../../.clang-format" "$tree/"
    run "$lint/format.sh" "$tree"
    quiet
    plant lib/core/a.c 'int   a ;'
    run "$lint/format.sh" "$tree"
    found "lib/core/a.c:2:"
}

@test "docs: a link and a path that lead nowhere, a line too long" {
    mkdir -p "$tree/docs"
    plant tests/one.c 'int a;'
    # shellcheck disable=SC2016
    printf '%s\n' '[there](docs/a.md#part), [far](https://one.example/x), `tests/one`, ../tests/none.' >"$tree/README.md"
    { echo '[up](../README.md)' && printf '|%0121d|\n' 0; } >"$tree/docs/a.md"
    run "$lint/docs.sh" "$tree"
    quiet
    # shellcheck disable=SC2016
    printf '%s\n' '' '[gone](docs/none.md)' 'see `tests/two.sh`, then' >>"$tree/README.md"
    { echo '[up](README.md)' && printf '%0121d\n' 0; } >>"$tree/docs/a.md"
    run "$lint/docs.sh" "$tree"
    found "README.md:3: leads nowhere: docs/none.md"
    found "README.md:4: is not there: tests/two.sh"
    found "docs/a.md:3: leads nowhere: README.md"
    found "docs/a.md:4: longer than 120"
    rm "$tree/README.md" "$tree/docs/a.md"
    run "$lint/docs.sh" "$tree"
    [ "$status" = 2 ]
}

manual_tree() { # what manual.sh reads of the tree, and nothing built
    local file
    for file in docs/man lib/core/options.c lib/core/names.h lib/core/config.c spank/options.c tools/ep-overlap/tool.h etc/ep_overlap.conf; do
        mkdir -p "$tree/$(dirname "$file")"
        cp -r "$lint/../../$file" "$tree/$file"
    done
    chmod -R u+w "$tree"
    export EPO_BUILD_DIR=$tree/none
}

@test "manual: pages and code agree, each kind of difference is found" {
    while IFS='|' read -r file edit said; do
        rm -rf "$tree/docs" && manual_tree
        sed -i "$edit" "$tree/$file"
        run "$lint/manual.sh" "$tree"
        found "$said"
    done <<'END'
docs/man/ep_overlap.conf.5|/^.It Ic step_line/d|key of lib/core/config.c, not described here: step_line
docs/man/ep_overlap.conf.5|s/^.It Ic gres/.It Ic gris/|described here, but no key of lib/core/config.c: gris
lib/core/config.c|s/{"when", read_when/{"whenever", read_when/|key, not in the sample: whenever
docs/man/ep_overlap.8|/^.It Fl -no-delay-wgrad/d|option of srun, not described here: no-delay-wgrad
lib/core/options.c|s/"flex:ncclep"/"flex:other"/|value, not described here: flex:other
lib/core/names.h|s/"EP_OVERLAP_CHUNKS"/"EP_OVERLAP_PIECES"/|names.h, not described here: EP_OVERLAP_PIECES
tools/ep-overlap/tool.h|s/EPO_EXIT_SYSTEM = 5/EPO_EXIT_SYSTEM = 6/|not described here: 6
END
    rm -rf "$tree/docs" && manual_tree
    run "$lint/manual.sh" "$tree"
    quiet
}

@test "manual: a page that is no troff, or is missing" {
    command -v mandoc || command -v groff || skip "neither mandoc nor groff is installed"
    manual_tree
    echo '.Nosuch macro' >>"$tree/docs/man/ep-train.1"
    run "$lint/manual.sh" "$tree"
    found "docs/man/ep-train.1:"
    rm "$tree/docs/man/ep-train.1"
    run "$lint/manual.sh" "$tree"
    [ "$status" = 2 ]
}

@test "manual: the commands' own help" {
    manual_tree
    mkdir -p "$tree/none"
    printf '#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n%s\n' \
        'if [ "$1" = lint ]; then printf "usage: ep-overlap lint\n\n  --set K=V  x\n  --newer N  x\n"; else' \
        'printf "usage: x\n\n  lint      x\n  tune      x\n\nexamples:\n"; fi' >"$tree/none/ep-overlap"
    chmod +x "$tree/none/ep-overlap"
    run "$lint/manual.sh" "$tree"
    found "option of ep-overlap lint, not described here: newer"
    found "no option of ep-overlap lint: strict"
    found "command of ep-overlap, not described here: tune"
    found "no command of ep-overlap: report"
}

@test "switches: described and there" {
    plant lib/core/names.h '#define A "EP_OVERLAP_ONE"'
    mkdir -p "$tree"/{docs,jobscripts,tests/unit}
    echo 'EP_OVERLAP_ONE=1, and the others as EP_OVERLAP_CUDA_*' >"$tree/README.md"
    echo 'EP_OVERLAP_TOOL=x' | tee "$tree/jobscripts/a.sbatch" >"$tree/jobscripts/b.sbatch"
    run "$lint/switches.sh" "$tree"
    quiet
    plant lib/moe/a.c 'getenv("EP_OVERLAP_TWO");'
    echo 'EP_OVERLAP_ONCE is gone' >"$tree/docs/a.md"
    echo 'setenv("EP_OVERLAP_OLD", "1", 1);' >"$tree/tests/unit/a.c"
    run "$lint/switches.sh" "$tree"
    found "lib/moe/a.c:2: neither README.md nor docs/ describes EP_OVERLAP_TWO"
    found "docs/a.md:1: the code has no EP_OVERLAP_ONCE"
    found "tests/unit/a.c:1: the code has no EP_OVERLAP_OLD"
}

build_so() { # name code flags...: a shared object as the project links it
    local name=$1 code=$2
    shift 2
    local branches=
    [ "$(uname -m)" != x86_64 ] || branches=-fcf-protection=full
    mkdir -p "$tree/so"
    # shellcheck disable=SC2086
    ${CC:-cc} $branches -shared -fPIC -fvisibility=hidden -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack -Wl,--as-needed -o "$tree/so/$name" -x c - -x none "$@" <<<"
        #define EXPORT __attribute__((visibility(\"default\")))
        $code"
}

binaries() { run "$lint/binaries.sh" "$tree/so"; }

@test "binaries: what is right passes" {
    build_so libep_overlap.so.0.0.0 'EXPORT int epo_a(void) { return 0; }'
    build_so ep_overlap.so 'extern int slurm_b(void); EXPORT int slurm_spank_init(void) { return slurm_b(); } EXPORT char plugin_name[] = "a";'
    build_so engine_host.so 'EXPORT int epo_engine_entry(void) { return 0; }'
    binaries
    quiet
}

@test "binaries: an export too many, or none" {
    build_so libep_overlap.so 'EXPORT int epo_a(void) { return 0; } EXPORT int helper(void) { return 0; }'
    binaries
    found "libep_overlap.so: exports more than epo_[a-z0-9_]+: helper"
    build_so libep_overlap.so 'int epo_a(void) { return 0; }'
    binaries
    found "exports nothing"
    rm "$tree/so/libep_overlap.so"
    build_so ep_overlap.so 'EXPORT int slurm_spank_init(void) { return 0; } EXPORT int epo_fail(void) { return 0; }'
    binaries
    found "epo_fail"
    rm "$tree/so/ep_overlap.so"
    build_so engine_host.so 'EXPORT int epo_engine_entry(void) { return 0; } EXPORT int epo_engine_entry2;'
    binaries
    found "epo_engine_entry2"
}

@test "binaries: a symbol newer than GLIBC_2.34" {
    # arc4random is of 2.36; an older libc here cannot plant it.
    echo 'int arc4random(void); int main(void) { return arc4random(); }' >"$tree/try.c"
    ${CC:-cc} -o "$tree/try" "$tree/try.c" || skip "this libc has no symbol newer than GLIBC_2.34"
    build_so libep_overlap.so 'unsigned arc4random(void); EXPORT int epo_a(void) { return (int)arc4random(); }'
    binaries
    found "needs symbols newer than GLIBC_2.34: arc4random@GLIBC_2.36"
}

@test "binaries: a library too many" {
    ${CC:-cc} -shared -fPIC -o "$tree/libother.so.3" -Wl,-soname,libother.so.3 -x c - <<<'int other(void) { return 1; }'
    build_so libep_overlap.so 'int other(void); EXPORT int epo_a(void) { return other(); }' "$tree/libother.so.3"
    binaries
    found "needs more than libc: libother.so.3"
}

@test "binaries: hardening" {
    code='EXPORT int epo_a(void) { return 0; }'
    while IFS='|' read -r flag said; do
        [ "$(uname -m)" = x86_64 ] || [ "$flag" != -fcf-protection=none ] || continue
        # shellcheck disable=SC2086
        build_so libep_overlap.so "$code" $flag
        binaries
        found "$said"
    done <<'END'
-Wl,-z,execstack|its stack is executable
-Wl,-z,norelro|not linked with -z relro
-Wl,-z,lazy|not linked with -z now
-Wl,-rpath,/opt/x|has a RPATH
-fcf-protection=none|not built with -fcf-protection=full
END
}

@test "binaries: one that the table does not know, none at all" {
    build_so libnew.so 'EXPORT int epo_a(void) { return 0; }'
    binaries
    found "libnew.so: is not in binaries.tsv"
    rm "$tree/so/libnew.so"
    binaries
    [ "$status" = 2 ]
}

@test "security: a test that does not exist is named" {
    sed 's/a_rank_that_dies/a_rank_that_dyes/' "$lint/../../docs/security.md" >"$tree/security.md"
    run "$lint/security.sh" "$tree/security.md"
    [ "$status" = 1 ]
    found 'docs/security.md names "test_host_processes.c: a_rank_that_dyes"'
    echo none >"$tree/security.md"
    run "$lint/security.sh" "$tree/security.md"
    [ "$status" = 2 ]
}
