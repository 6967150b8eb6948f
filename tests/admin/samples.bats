#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The samples and completions of etc/, without a cluster: each does what its head says.

setup() {
    top=$(cd "$BATS_TEST_DIRNAME/../.." && pwd)
    build=${EPO_BUILD_DIR:-$top/build}
    cd "$BATS_TEST_TMPDIR" || return 1
}

has() { [[ $output == *"$1"* ]] || { echo "not found: $1" && echo "$output" && false; }; }
has_not() { [[ $output != *"$1"* ]] || { echo "found: $1" && echo "$output" && false; }; }

any_lua() {
    for lua in lua5.4 lua5.3 lua; do command -v "$lua" >/dev/null && return; done
    skip "no Lua is installed (Debian and Ubuntu: lua5.4)"
}

# --- Prometheus ---------------------------------------------------------------------
@test "prometheus: steps are counted, the file is whole and 0644" {
    cat >log <<'END'
[2026-11-29T18:12:21.040] [1.0] ep-overlap: step 1.0: off (the built-in default)
[2026-11-29T18:12:21.041] [2.0] ep-overlap: step 2.0: on, dispatcher flex, delayed wgrad (--ep-overlap=on, the command line)
[2026-11-29T18:12:21.042] [2.1] ep-overlap: step 2.1: on, dispatcher flex:deepep (--ep-overlap=on, the command line)
[2026-11-29T18:12:21.043] [2.2] ep-overlap: step 2.2: on, dispatcher flex (auto: class h100, f:3)
[2026-11-29T18:12:21.044] [3.0] error: ep-overlap: step 3.0: refused: --ep-overlap=on is denied
[2026-11-29T18:12:21.045] [4.0] error: ep-overlap: step 4.0: off: /etc/ep_overlap.conf:3: unknown key "a"
[2026-11-29T18:12:21.046] [4.0] another line: ep-overlap is on
[2026-11-29T18:12:21.047] [5.0] ep-overlap: step 5.0: on, dispatcher alltoall (--ep-overlap=on, the command line)
[2026-11-29T18:12:21.048] [6.0] ep-overlap: step 6.0: on, dispatcher alltoall (--ep-overlap=on, the command line)
[2026-11-29T18:12:21.049] [5.0] error: ep-overlap: step 5.0: was refused by a task: ARG-OVERLAP: found nothing
[2026-11-29T18:12:21.050] [6.0] error: ep-overlap: step 6.0: was off instead of on, and does not count as on: no GPU
[2026-11-29T18:12:21.051] [7.0] ep-overlap: step 7.0: off instead of on (the library cannot be preloaded: gone)
[2026-11-29T18:12:21.052] [8.0] error: ep-overlap: step 8.0: refused: found "ep-overlap: step 2.0: was refused by a task: x", allowed off, on
END
    (umask 077 && run "$top/etc/prometheus.sh" log out.prom)
    [ "$(stat -c %a out.prom)" = 644 ]
    run cat out.prom
    has 'ep_overlap_steps_total{decision="on"} 3'
    has 'ep_overlap_steps_total{decision="off"} 4'
    has 'ep_overlap_steps_total{decision="refused"} 3' # and no step that an earlier line tells of
    has 'ep_overlap_steps_on_total{dispatcher="alltoall"} 0'
    has 'ep_overlap_requests_not_served_total 2'
    has 'ep_overlap_steps_on_total{dispatcher="flex"} 2'
    has 'ep_overlap_steps_on_total{dispatcher="flex:deepep"} 1'
    has 'ep_overlap_broken_configuration_total 1'
    # the format: comments, and names with a number
    run grep -vE '^(# (HELP|TYPE) ep_overlap_[a-z_]+ .+|ep_overlap_[a-z_]+(\{[a-z]+="[a-z:]+"\})? [0-9]+)$' out.prom
    [ -z "$output" ]
    [ "$(ls)" = "$(printf 'log\nout.prom')" ]
}

@test "prometheus: what a log may not do, and wrong use" {
    printf '%s\n' 'ep-overlap: step 1.0: on, dispatcher x"} 9, (r)' 'ep-overlap: step 1.1: nothing' >log
    run "$top/etc/prometheus.sh" log out.prom
    [ "$status" = 0 ]
    run cat out.prom
    has 'decision="on"} 1'
    has 'dispatcher="other"} 1'
    has_not 'x"'
    run "$top/etc/prometheus.sh" none out.prom
    [ "$status" = 1 ]
    run "$top/etc/prometheus.sh" log out.txt
    [ "$status" = 2 ]
    run "$top/etc/prometheus.sh"
    [ "$status" = 2 ]
    mkdir locked.prom.d
    run "$top/etc/prometheus.sh" log missing/out.prom
    [ "$status" != 0 ]
}

# --- node health --------------------------------------------------------------------
health() { # with a srun that says $said, a library that loads
    mkdir -p bin etc
    printf '#!/bin/sh\ncat <<"END"\n%s\nEND\n' "$said" >bin/srun
    printf '#!/bin/sh\necho "$*" >>"%s/scontrol.log"\n' "$BATS_TEST_TMPDIR" >bin/scontrol
    chmod 755 bin bin/*
    # its own PATH comes first: the stand-ins stand in a copy of the script
    sed "s|^PATH=|PATH=$BATS_TEST_TMPDIR/bin:|" "$build/etc/node-health.sh" >health.sh
    EP_HEALTH_LIBRARY=${library:-$build/.libs/libep_overlap.so.0} EP_HEALTH_CONF=$PWD/etc/ep_overlap.conf \
        run sh health.sh "$@"
}

@test "health: fit, and each way not to be" {
    said='      --ep-overlap=on|off|auto   [ep] overlap'
    health
    echo "$output"
    [ "$status" = 0 ]
    said='Usage: srun'
    health
    [ "$status" = 1 ]
    has "does not load the plugin"
    [ ! -e scontrol.log ] # nobody is drained by hand
    SLURMD_NODENAME=n7 health
    has "does not load the plugin"
    grep -q '^update nodename=n7 state=drain reason=ep-overlap: ' scontrol.log
    rm scontrol.log
    SLURMD_NODENAME=n7 health --no-drain
    [ "$status" = 1 ]
    [ ! -e scontrol.log ]
    said='--ep-overlap=on'
    library=/nonexistent health
    has "/nonexistent is missing"
    library=$PWD/health.sh health
    has "does not load"
    echo 'version = 1;' >etc/ep_overlap.conf
    chmod 666 etc/ep_overlap.conf
    health
    has "writable by others"
    chmod 644 etc/ep_overlap.conf
    chmod 777 etc
    health
    has "etc is writable by others"
}

# --- module files -------------------------------------------------------------------
@test "module file for Lmod: loads, and sets paths only" {
    any_lua
    run "$lua" -e '
        function help() end function whatis() end function family() end
        function prepend_path(name, path) print(name .. "=" .. path) end
        setmetatable(_G, { __index = function(_, name) error("unknown: " .. name) end })
        dofile(arg[1])' "$build/etc/modulefile.lua"
    echo "$output"
    [ "$status" = 0 ]
    has PATH=/
    has LD_LIBRARY_PATH=/
    has_not @
    has_not LD_PRELOAD
}

@test "module file for Environment Modules: the same paths" {
    command -v tclsh >/dev/null || skip "no tclsh is installed (Debian and Ubuntu: tcl)"
    [ "$(head -n 1 "$build/etc/modulefile.tcl")" = '#%Module1.0' ]
    cat >module.tcl <<'END'
proc module-whatis {text} {}
proc conflict {name} {}
proc prepend-path {name path} { puts "$name=$path" }
source [lindex $argv 0]
ModulesHelp
END
    run tclsh module.tcl "$build/etc/modulefile.tcl"
    echo "$output"
    [ "$status" = 0 ]
    has 'man 8 ep_overlap'
    [ "$(grep -E '^[A-Z_]+=/' <<<"$output" | sort)" = "$(sed -nE 's/^prepend_path\("([A-Z_]+)", "(.*)"\)/\1=\2/p' "$build/etc/modulefile.lua" | sort)" ]
    has_not @
}

# --- completion ---------------------------------------------------------------------
complete_line() { # words...: the completion's answer for the last of them
    run env PATH="$build:$build/tools/ep-train:$PATH" bash -c '
        . "$1" && . "$2" && shift 2
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        spec=$(complete -p "$1") && [[ $spec =~ -F\ ([^ ]+) ]] && "${BASH_REMATCH[1]}" "$1" "${*: -1}"
        printf "%s\n" "${COMPREPLY[@]}"' bash "$top/etc/completion/ep-train" "$top/etc/srun-completion.bash" "$@"
}

@test "completion: commands, options and values are those of --help" {
    [ -x "$build/ep-overlap" ] || skip "the tools are not built"
    complete_line ep-overlap ''
    for command in lint explain report profile --version; do has "$command"; done
    complete_line ep-overlap re
    [ "$output" = report ]
    complete_line ep-overlap lint --s
    [ "$output" = "$(printf -- '--set\n--strict')" ]
    complete_line ep-overlap explain --
    has --json
    complete_line ep-overlap explain OVL-00
    has OVL-006
    complete_line ep-overlap bench --engine ''
    [ "$output" = "$(printf 'auto\nhost\ncuda')" ]
    complete_line ep-overlap bench --workload m
    [ "$output" = mixtral ]
    complete_line ep-overlap env --dispatcher a
    [ "$output" = alltoall ]
    complete_line ep-overlap bench --tokens 4
    [ -z "$output" ]
    complete_line ep-overlap report log
    [ -z "$output" ] # file names
}

@test "completion: ep-train" {
    complete_line ep-train --d
    [ "$output" = "$(printf -- '--dispatcher\n--delay-wgrad\n--dtype' | sort)" ] || [ "$(sort <<<"$output")" = "$(printf -- '--delay-wgrad\n--dispatcher\n--dtype')" ]
    complete_line ep-train --dispatcher f
    [ "$output" = flex ]
    complete_line ep-train --optimizer ''
    has adamw
}

@test "completion: srun's own stays, ours is added" {
    complete_line srun --ep-o
    [ "$output" = --ep-overlap= ]
    complete_line sbatch --ep-overlap = a
    [ "$output" = auto ]
    complete_line salloc --ep-dispatcher=flex:h
    [ "$output" = flex:hybridep ]
    complete_line srun -p de
    [ -z "$output" ]
    run bash -c '
        _other() { COMPREPLY=(--time= --exclusive); }
        complete -o nospace -F _other srun
        . "$1" && . "$1"
        complete -p srun
        COMP_WORDS=(srun --e) COMP_CWORD=1
        _ep_overlap_srun srun --e
        echo "${COMPREPLY[@]}"' bash "$top/etc/srun-completion.bash"
    has 'complete -o nospace -F _ep_overlap_srun srun'
    has '--time= --exclusive --ep-overlap= --ep-dispatcher='
}

@test "completion: the words that srun's options take" {
    for word in $(sed -nE '/^static const char \*const (overlap|dispatcher)_values\[\]/,/;/p' "$top/lib/core/options.c" | grep -oE '"[a-z:]+"' | tr -d '"'); do
        grep -qE "words=\".*\b$word\b" "$top/etc/srun-completion.bash" || { echo "missing: $word" && false; }
    done
}

# --- Lua for slurmctld and srun -----------------------------------------------------
@test "job_submit.lua and cli_filter.lua: decisions of the sample, without Slurm" {
    any_lua
    run "$lua" - "$top/etc/job_submit.lua" "$top/etc/cli_filter.lua" <<'END'
slurm = { SUCCESS = 0, ERROR = -1, log_info = function() end, log_user = function() end, log_error = function() end }
local function sample(path, policy)
    local text = io.open(path):read("a"):gsub("local policy = {.-\n}\n", "local policy = " .. policy .. "\n")
    return assert(load(text))()
end
local policy = [[{ { partition = "debug", deny = "not here" }, { account = "llm" }, { partition = "moe" }, { deny = "trial" } }]]
sample(arg[1], policy)
local parts = { debug = { flag_default = 0 }, moe = { flag_default = 1 } }
local function job(partition, account, ...)
    local env = {}
    for i, word in ipairs({...}) do env[i - 1] = "_SLURM_SPANK_OPTION_ep_overlap_" .. word end
    return { partition = partition, account = account, spank_job_env = env }
end
local function expect(want, got) if (got == nil) ~= want then error("expected " .. tostring(want) .. ", got " .. tostring(got), 2) end end
expect(true, ep_overlap_check(job("debug", "x"), parts))
expect(false, ep_overlap_check(job("debug", "x", "ep_overlap=on"), parts))
expect(false, ep_overlap_check(job("debug", "llm", "ep_overlap=on"), parts))
expect(true, ep_overlap_check(job("debug", "x", "ep_overlap=off"), parts))
expect(true, ep_overlap_check(job("other", "llm", "ep_overlap=on"), parts))
expect(false, ep_overlap_check(job("other", "x", "ep_overlap=auto"), parts))
expect(false, ep_overlap_check(job("other", "x", "delay_wgrad=(null)"), parts))
expect(true, ep_overlap_check(job(nil, "x", "ep_overlap=on"), parts))
expect(false, ep_overlap_check(job("moe,debug", "x", "ep_overlap=on"), parts))
expect(false, ep_overlap_check({ partition = "debug", script = "#!", environment = { SLURM_EP_OVERLAP = "on" } }, parts))
if not ep_overlap_check(job("debug", "x", "ep_overlap=on"), parts):find("--ep%-overlap=on is denied in partition debug: not here") then error("message") end
sample(arg[1], "{}")
expect(true, ep_overlap_check(job("debug", "x", "ep_overlap=on"), parts))
sample(arg[2], policy)
local function cli(partition, given) return ep_overlap_filter({ partition = partition, spank = { ep_overlap = given } }) end
expect(false, cli("debug", { ["ep-overlap"] = "on" }))
expect(true, cli("debug", { ["ep-overlap"] = "off" }))
expect(true, cli("debug", { ["delay-wgrad"] = "unset" }))
expect(false, cli("debug", { ["delay-wgrad"] = "set" }))
expect(true, cli("moe", { ["ep-overlap"] = "on" }))
print("all as expected")
END
    echo "$output"
    [ "$status" = 0 ]
    has "all as expected"
}
