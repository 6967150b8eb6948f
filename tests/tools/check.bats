#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# ep-overlap check: with a stand-in for NVML, GPUs that this machine lacks.
. "$BATS_TEST_DIRNAME/common.sh"

# site TABLE-LINE [MORE CONFIGURATION]: a trusted probe, stand-in and configuration.
site() {
    umask 022
    local here
    here=$(pwd -P)
    cp -L "$build/probe" probe
    cp -L "$build/tests/fake/.libs/fake_nvml.so" .
    echo "$1" >nvml.table
    cat >site.conf <<END
version = 1;
probe = { path = "$here/probe"; };
checks = { timeout_ms = ${timeout:-20000}; nvml_path = "$here/fake_nvml.so"; ${2:-} };
${3:-}
END
    unset CUDA_VISIBLE_DEVICES SLURM_STEP_GPUS SLURM_CONF SLURM_EP_OVERLAP
    export SLURMD_NODENAME=n1
}

check() { run timeout 100 "$tool" check --config "$PWD/site.conf" "$@"; }
has() { [[ $output == *"$1"* ]] || { echo "not found: $1" && echo "$output" && false; }; }
row() { grep -qx "  $1 *$2" <<<"$output" || { echo "not so: $1 $2" && echo "$output" && false; }; }

@test "check: every dispatcher on every kind of GPU, as the frameworks' gates have it" {
    # kind, and what flex:deepep and flex:hybridep answer
    while read -r kind deepep hybridep; do
        site "* $kind 4"
        mkdir -p "venv/lib/python3.12/site-packages/deep_ep" venv/bin
        echo 'version = 3.12' >venv/pyvenv.cfg
        printf '\177ELF' >venv/bin/python3 && chmod +x venv/bin/python3
        echo 'class HybridEPBuffer: pass' >venv/lib/python3.12/site-packages/deep_ep/__init__.py
        echo 'class EventOverlap: pass' >venv/lib/python3.12/site-packages/deep_ep/utils.py
        mkdir -p cuda/bin && cp /bin/true cuda/bin/nvcc
        PATH=$PWD/venv/bin:$PATH CUDA_HOME=$PWD/cuda check
        echo "$kind"
        [ "$status" = 0 ]
        row alltoall yes
        row flex yes
        row flex:deepep "$deepep"
        row flex:hybridep "$hybridep"
    done <<END
a100 yes yes
h100 yes yes
h200 yes yes
b200 yes yes
b300 yes yes
gb200 no yes
gb300 no yes
l40s yes yes
v100 no no
t4 no no
rtx5090 no no
END
}

@test "check: GPUs without P2P serve alltoall alone, and it says between which" {
    site '* l40s 4 nop2p'
    check --node
    [ "$status" = 0 ]
    row alltoall yes
    row flex no
    row flex:deepep no
    has 'NODE-P2P'
    has 'GPUs 0 and 1'
}

@test "check: a node that is below the site's least versions is status 1, all of them told" {
    site '* h100 8' 'minimum = { driver = "580"; cuda = "13.0"; };'
    check --node
    [ "$status" = 1 ]
    has 'error MIN-DRIVER'
    has 'node.driver_version = 570.86.15'
    has 'error MIN-CUDA'
    has 'not as the site wants it'
    site '* h100 8' 'minimum = { driver = "570.86"; cuda = "12.8"; };'
    check --node
    [ "$status" = 0 ]
}

@test "check --node: what jobs bring along is not the node's" {
    site '* h100 8' 'on_unknown = "fail"; minimum = { driver = "550"; nccl = "99"; torch = "99"; te = "99"; };'
    LD_LIBRARY_PATH=/nonexistent check --node
    [ "$status" = 0 ]
    [[ $output != *MIN-* ]]
    printf '\177ELF' >python3 && chmod +x python3
    PATH=$PWD:$PATH check
    [ "$status" = 1 ]
    has MIN-TORCH
}

@test "check: a node that contradicts its class is told" {
    site '* l40s 4' '' 'node_classes = ( { class = "h100"; nodes = "n1"; overlap = "on"; } );'
    check --node
    [ "$status" = 1 ]
    has 'NODE-CLASS'
    has 'NVIDIA L40S'
}

@test "check: no GPU is fine unless the site requires one" {
    site '* none 0'
    check --node
    [ "$status" = 0 ]
    row alltoall 'yes, by the host engine'
    row flex:deepep no
    site '* none 0' 'require_gpu = true;'
    check --node
    [ "$status" = 1 ]
    has 'NODE-GPU'
}

@test "check: an NVML that hangs or crashes is status 4 with the reason" {
    timeout=1500
    site '* hang 0'
    check --node
    [ "$status" = 4 ]
    has 'while it asked NVML'
    row flex 'not known'
    site '* stuck 0'
    check --node
    [ "$status" = 4 ]
    has 'did not end within 1500 ms'
    timeout=20000
    site '* crash 0'
    check --node
    [ "$status" = 4 ]
    has 'while it asked NVML'
}

@test "check: CUDA_VISIBLE_DEVICES counts for a step, not with --node" {
    site '* h100 8'
    export CUDA_VISIBLE_DEVICES=GPU-000000a3,1
    check
    has 'task sees      2 ('
    check --node
    has 'GPUs           8 ('
}

@test "check: which engines a step gets, and that there is none for GPUs" {
    site '* h100 1' '' "preload = { path = \"$(pwd -P)/lib/libep_overlap.so\"; };"
    mkdir -p lib/ep-overlap
    check
    has "engines        none, in $(pwd -P)/lib/ep-overlap (none for GPUs: configure --with-cuda"
    touch lib/ep-overlap/engine_host.so
    check
    has "engines        host, in $(pwd -P)/lib/ep-overlap (none for GPUs"
    touch lib/ep-overlap/engine_cuda.so
    check
    has "engines        host, cuda, in $(pwd -P)/lib/ep-overlap"
    [[ $output != *'none for GPUs'* ]]
    check --json
    [[ $output == *'"engine_cuda": true'* ]]
}

@test "check --show: settings with their sources; --json is JSON" {
    site '* h100 2' '' 'defaults = { dispatcher = "flex"; };'
    export SLURM_EP_OVERLAP=on
    check --show
    has "ep-overlap     on (the user's environment)"
    has 'ep-dispatcher  flex (the site'
    has 'checks.minimum    driver -'
    check --json
    [ "$status" = 0 ]
    [[ $output == *'"served"'* ]]
    is_json
}

@test "check: a broken or untrusted configuration is status 1 with file and line" {
    site '* h100 2' '' 'nonsense = 1;'
    check
    [ "$status" = 1 ]
    has 'site.conf:4: '
    site '* h100 2'
    chmod o+w site.conf
    check
    [ "$status" = 1 ]
    has 'writable by group or others'
}

@test "check: a probe that others can write is not run" {
    site '* h100 2'
    chmod o+w probe
    check
    [ "$status" = 4 ]
    has 'not looked at'
    has 'writable by group or others'
}

@test "check: hostile names of a driver reach no terminal" {
    site '* hostile 1'
    check --node
    [ "$status" = 0 ]
    [[ $output != *$'\033'* ]]
    has 'NVIDIA??[2J'
}

@test "check: wrong usage is status 2" {
    run "$tool" check --bad
    [ "$status" = 2 ]
    run "$tool" check word
    [ "$status" = 2 ]
    run "$tool" check --config
    [ "$status" = 2 ]
}

@test "check: of several lines in plugstack.conf the last counts, and they are told" {
    site '* h100 8'
    local here
    here=$(pwd -P)
    mkdir -p etc/plugstack.conf.d
    export SLURM_CONF=$here/etc/slurm.conf
    echo "optional /gone/ep_overlap.so conf=/gone.conf" >etc/plugstack.conf
    run timeout 100 "$tool" check --node --json
    [[ $output == *'"plugstack_lines": 1,'* ]]
    [[ $output == *'"configuration": "/gone.conf"'* ]]
    echo "include plugstack.conf.d/*" >>etc/plugstack.conf
    echo "required pyxis.so" >etc/plugstack.conf.d/pyxis.conf
    echo "# optional ep_overlap.so conf=/no.conf" >etc/plugstack.conf.d/zy.conf
    echo "optional $here/ep_overlap.so conf=$here/site.conf" >etc/plugstack.conf.d/zz.conf
    run timeout 100 "$tool" check --node
    [ "$status" = 0 ]
    row configuration "$here/site.conf"
    grep -q "^  plugin *$here/ep_overlap.so, in $here/etc/plugstack.conf.d/zz.conf," <<<"$output"
    grep -qx '    WARNING: listed 2 times in plugstack.conf: the last line counts, take the others out' <<<"$output"
    echo "optional ep_overlap.so" >etc/plugstack.conf.d/zz.conf # without its own: the built-in one
    run timeout 100 "$tool" check --node --json
    [[ $output == *'"plugstack_lines": 2,'* ]]
    [[ $output != *gone* ]]
}

@test "check: a plugin that no plugstack.conf loads is told, and slurm.conf may name that file" {
    site '* h100 8'
    local here
    here=$(pwd -P)
    mkdir -p etc bin lib/slurm && : >lib/slurm/ep_overlap.so
    cp "$build/.libs/ep-overlap" bin/ 2>/dev/null || cp "$build/ep-overlap" bin/
    export LD_LIBRARY_PATH=$build/.libs
    printf '#!/bin/sh\necho slurm 23.11.4\n' >bin/slurmd && chmod +x bin/slurmd
    export SLURM_CONF=$here/etc/slurm.conf PATH=$here/bin:$PATH
    : >etc/plugstack.conf
    tool=$here/bin/ep-overlap check --node
    grep -q "^  plugin *$here/lib/slurm/ep_overlap.so, in no plugstack.conf," <<<"$output"
    has '    WARNING: no plugstack.conf of this machine loads it, so srun has no --ep-overlap'
    printf '%s\n' 'ClusterName=x' " plugstackconfig = $here/etc/other # here" >etc/slurm.conf
    echo "optional ep_overlap.so" >etc/other
    tool=$here/bin/ep-overlap check --node
    grep -q "^  plugin *$here/lib/slurm/ep_overlap.so, in $here/etc/other," <<<"$output"
    [[ $output != *WARNING* ]]
}

@test "check: a plugstack.conf that is no file, or has no end, and a slurmd that never ends hold up nothing" {
    site '* h100 8'
    local here kind
    here=$(pwd -P)
    mkdir -p etc bin
    export SLURM_CONF=$here/etc/slurm.conf
    mkfifo etc/pipe
    for kind in "cp -a etc/pipe" "truncate -s 20G" "ln -s /dev/zero"; do
        rm -f etc/plugstack.conf && $kind etc/plugstack.conf
        run timeout 30 "$tool" check --config "$here/site.conf"
        [ "$status" != 124 ]
        has ', in no plugstack.conf,'
    done
    rm -f etc/plugstack.conf && printf 'include pipe\noptional ep_overlap.so\n' >etc/plugstack.conf
    mkfifo etc/slurm.conf
    printf '#!/bin/sh\necho slurm 23.11.4\nexec sleep 60\n' >bin/slurmd && chmod +x bin/slurmd
    PATH=$here/bin:$PATH run timeout 30 "$tool" check --config "$here/site.conf"
    [ "$status" != 124 ]
    has ", in $here/etc/plugstack.conf,"
}

@test "check: a word behind the plugin in plugstack.conf that it does not know breaks requests, and is told" {
    site '* h100 8'
    local here
    here=$(pwd -P)
    mkdir -p etc
    export SLURM_CONF=$here/etc/slurm.conf
    echo "optional ep_overlap.so conf=$here/site.conf mode=fast # a pilot" >etc/plugstack.conf
    run timeout 100 "$tool" check
    [ "$status" = 1 ]
    has '    ERROR: plugstack.conf: found "mode=fast", allowed is conf=FILE'
    check # a file that is asked about
    [[ $output != *mode=fast* ]]
    sed -i 's/mode=fast//' etc/plugstack.conf # what stands behind # is no word
    run timeout 100 "$tool" check
    [ "$status" = 0 ]
}
