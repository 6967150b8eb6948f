#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # work, output: plugin_common.bash and bats
# Files change under running jobs; plugin, library and engines of different versions meet. "Another
# version" is this build with its version's text replaced by one of equal length.

bats_require_minimum_version 1.5.0
load ../cluster/plugin_common

# For scripts in a cluster. own_plugin: it loads the plugin from a folder of its own. as_package
# FILE FROM: what a package manager does, a new file under the old name. version_9 FILE.
# hold, go_on: what is done between them is done under a running step, however fast it is.
functions='lib=$EPO_CLUSTER_DIR/lib d=$EPO_CLUSTER_DIR/etc
own_plugin() {
    cp "$EPO_PLUGIN" $d/ep_overlap.so
    sed -i "s|$EPO_PLUGIN|$d/ep_overlap.so|" $d/plugstack.conf
}
as_package() { cp "$2" "$1.dpkg-new" && chmod 755 "$1.dpkg-new" && mv -f "$1.dpkg-new" "$1"; }
hold() { # until the first step of the job trains, then it stands
    until grep -q "iteration" $work/out 2>/dev/null; do sleep 0.1; done
    scancel -s STOP $job.0
}
go_on() {
    grep -q "^first" $work/out && echo "too late: the first step was over"
    scancel -s CONT $job.0
    until [ -z "$(squeue -h)" ]; do sleep 0.2; done
}
version_9() { LC_ALL=C sed -i "s/\x00$version\x00/\x00$other\x00/g" "$1"; }
'

setup_versions() {
    version=$(sed -n 's/^#define PACKAGE_VERSION "\(.*\)"/\1/p' "${EPO_BUILD_DIR:-$top/build}/config.h")
    [ -n "$version" ]
    other=${version%?}9
    [ "$version" != "$other" ] || other=${version%?}8 # as long as the other one
    export version other
    chmod 755 "$work"
}

@test "upgrade: a running step keeps what it loaded, the next one of its job has the new" {
    setup_versions
    cluster -- "$functions"'own_plugin
cat >$work/job <<END
#!/bin/sh
#SBATCH -N2 -n4 --ep-overlap=on --delay-wgrad
srun ep-train --steps 40 --no-measure
echo "first \$?"
srun ep-train --steps 2 --no-measure
echo "second \$?"
srun -n1 sh -c "grep -c \\"libep_overlap.so.*deleted\\" /proc/self/maps"
END
job=$(sbatch --parsable -o $work/out $work/job)
hold
cp $lib/libep_overlap.so $work/new.so && version_9 $work/new.so
cp $lib/ep-overlap/engine_host.so $work/engine.so && version_9 $work/engine.so
cp $d/ep_overlap.so $work/plugin.so
as_package $lib/libep_overlap.so $work/new.so
as_package $lib/ep-overlap/engine_host.so $work/engine.so
as_package $d/ep_overlap.so $work/plugin.so
as_package $EPO_CLUSTER_DIR/libexec/probe $EPO_CLUSTER_DIR/libexec/probe
go_on
cat $work/out'
    has_not 'too late'
    has 'iteration       40/'
    times 1 '^first 0$'
    times 1 '^second 0$'
    has "ep-overlap $other" # the second step ran on the new library
    times 1 '^0$'
}

@test "removal under a running step: it ends as if nothing had happened, the next is told" {
    setup_versions
    cluster -- "$functions"'own_plugin
cat >$work/job <<END
#!/bin/sh
#SBATCH -n2 --ep-overlap=on
srun ep-train --steps 40 --no-measure
echo "first \$?"
srun env | grep -c -e EP_OVERLAP_DECISION -e LD_PRELOAD
END
job=$(sbatch --parsable -o $work/out $work/job)
hold
rm -rf $lib $d/ep_overlap.so $EPO_CLUSTER_DIR/libexec $d/ep_overlap.conf
go_on
cat $work/out
t srun -n1 --ep-overlap=on true
t srun -n1 true'
    has_not 'too late'
    times 1 '^first 0$'
    times 1 '^0$' # inherited options are ignored without the plugin
    has 'rc 255: srun -n1 --ep-overlap=on true'
    has 'rc 0: srun -n1 true'
}

@test "library and engine of two versions: refused by name, with both versions" {
    setup_versions
    cluster -- "$functions"'version_9 $lib/ep-overlap/engine_host.so
t srun -n1 --ep-overlap=on ep-train --steps 2 --no-measure
echo == others; t srun -n1 --ep-overlap=on true; t srun -n1 true'
    has "engine_host.so is version $other but libep_overlap is version $version; install both from one build"
    has 'rc 1: srun -n1 --ep-overlap=on ep-train'
    between '== others' ''
    times 2 '^rc 0'
}

@test "a plugin of one version with library and engine of another works: they share variables only" {
    setup_versions
    cluster -- "$functions"'version_9 $lib/libep_overlap.so; version_9 $lib/ep-overlap/engine_host.so
t srun -n2 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad ep-train --steps 2 --no-measure'
    has 'rc 0'
    has "ep-overlap $other"
    has 'overlap on, flex, weight gradients delayed'
}

@test "srun's plugin of another version than the nodes': what they do not know is decided anew" {
    setup_versions
    # srun without the plugin's hook sends what stands in its environment
    cluster -- 'd=$EPO_CLUSTER_DIR/etc
sed "s|^PlugStackConfig=.*|PlugStackConfig=$d/none|" $SLURM_CONF >$d/login.conf; : >$d/none
login() { SLURM_CONF=$d/login.conf "$@"; }
export SLURM_EP_OVERLAP_STEP="2 1 0 1 1 1 0 1 1 1 5 5 5 of another version"
SLURM_EP_OVERLAP=on t login srun -n1 sh -c "echo \$EP_OVERLAP_DECISION \$EP_OVERLAP_DISPATCHER"
echo == none
t login srun -n1 sh -c "echo [\$EP_OVERLAP_DECISION\$SLURM_EP_OVERLAP_STEP]"'
    between '' '== none'
    times 1 '^on alltoall$' # the user's default, not the record's flex
    between '== none' ''
    times 1 '^\[\]$'
}
