#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # work, output: plugin_common.bash and bats
# What administrators set up around the plugin, in a real Slurm: the samples of etc/, the order
# of an upgrade, the ways to switch off.

bats_require_minimum_version 1.5.0

load plugin_common

# sample FILE TABLE: the Lua sample into the cluster's folder, its policy replaced.
samples='sample() {
    awk -v table="$2" "/^local policy = \{/ { print \"local policy = {\" table \"}\"; skip = 1 } !skip; /^}/ { skip = 0 }" \
        "$top/etc/$1" >"$EPO_CLUSTER_DIR/etc/$1"
}
reconfigure() { # lines...: into slurm.conf, and read
    printf "%s\n" "$@" >>"$SLURM_CONF"
    scontrol reconfigure
    for try in $(seq 50); do grep -q "$changed" "$EPO_CLUSTER_DIR/log/slurmctld.log" && return; sleep 0.1; done
}'

has_lua() {
    [ -n "$(find /usr/lib /usr/lib64 -name job_submit_lua.so 2>/dev/null)" ] || skip "this Slurm has no job_submit/lua"
}

@test "job_submit.lua: slurmctld refuses by partition, whatever the user's side says" {
    has_lua
    cluster -x 'PartitionName=moe Nodes=n1\n' -- "top='$top'
$samples"'
sample job_submit.lua "{ partition = \"moe\" }, { deny = \"use partition moe\" }"
changed="JobSubmitPlugins changed" reconfigure JobSubmitPlugins=lua
printf "#!/bin/sh\n#SBATCH --ep-overlap=on\ntrue\n" >$work/job
t srun --ep-overlap=on true
t srun -p debug --ep-overlap=on --delay-wgrad true
t salloc -Q -p debug --ep-overlap=auto true
t sbatch -Q $work/job
SLURM_EP_OVERLAP=on t sbatch -Q --wrap true
echo "== allowed"
t srun -p moe --ep-overlap=on printenv EP_OVERLAP_DECISION
t srun --ep-overlap=off true
t srun true
t sbatch -Q -o /dev/null -p moe $work/job'
    times 1 '^rc 1: srun --ep-overlap=on true'
    times 1 '^rc 1: srun -p debug'
    times 1 '^rc 1: salloc'
    times 1 "^rc 1: sbatch -Q $work/job"
    times 1 '^rc 1: sbatch -Q --wrap'
    times 5 'ep-overlap: --ep-overlap=[a-z]* is denied in partition debug: use partition moe'
    between '== allowed' ''
    times 4 '^rc 0: '
    times 1 '^on$'
}

@test "cli_filter.lua: told at once, for a srun inside a job too" {
    has_lua
    cluster -x 'PartitionName=moe Nodes=n1\n' -- "top='$top'
$samples"'
sample cli_filter.lua "{ partition = \"debug\", deny = \"use partition moe\" }"
echo CliFilterPlugins=lua >>$SLURM_CONF
t srun -p debug --ep-overlap=on true
t srun -p moe --ep-overlap=on true
t salloc -Q -p debug srun --ep-dispatcher=flex --ep-overlap=on true
t srun -p debug true'
    times 1 '^rc 1: srun -p debug --ep-overlap=on'
    times 1 '^rc 0: srun -p moe'
    times 1 '^rc 1: salloc'
    times 1 '^rc 0: srun -p debug true'
    times 2 'ep-overlap: --ep-overlap=on is denied in partition debug: use partition moe'
}

@test "HealthCheckProgram: a fit node stays, one without the plugin is drained with the reason" {
    cluster -n 1 -- "health='${EPO_BUILD_DIR:-$top/build}/etc/node-health.sh'"'
sed -e "s|^library=.*|library=$EPO_LIBDIR/libep_overlap.so|; s|^conf=.*|conf=$EPO_CLUSTER_DIR/etc/ep_overlap.conf|" "$health" >$EPO_CLUSTER_DIR/health
chmod 755 $EPO_CLUSTER_DIR/health
t sh $EPO_CLUSTER_DIR/health
SLURMD_NODENAME=n1 t sh $EPO_CLUSTER_DIR/health
sinfo -h -o "state %T"
mv $EPO_CLUSTER_DIR/etc/plugstack.conf $work/aside && : >$EPO_CLUSTER_DIR/etc/plugstack.conf
SLURMD_NODENAME=n1 t sh $EPO_CLUSTER_DIR/health
sinfo -h -o "state %T"
sinfo -h -o "why %E"
mv $work/aside $EPO_CLUSTER_DIR/etc/plugstack.conf
scontrol update nodename=n1 state=resume'
    times 2 '^rc 0: sh '
    times 1 '^rc 1: sh '
    times 1 '^state idle$'
    times 1 '^state drained$'
    times 1 "^why ep-overlap: this node's Slurm does not load the plugin"
}

@test "upgrade order: nodes first breaks nothing; login first runs without overlap" {
    cluster -- 'd=$EPO_CLUSTER_DIR/etc
login() { SLURM_CONF=$d/login.conf "$@"; }
sed "s|^PlugStackConfig=.*|PlugStackConfig=$d/login.plugstack|" $d/slurm.conf >$d/login.conf
: >$d/login.plugstack
echo "== nodes only"
t login srun -N2 sh -c "printenv EP_OVERLAP_DECISION SLURM_EP_OVERLAP_STEP; true"
t login srun --ep-overlap=on true
printf "#!/bin/sh\n#SBATCH --ep-overlap=on\ntrue\n" >$work/job
t login sbatch -Q $work/job
echo "== login only"
mv $d/plugstack.conf $d/login.plugstack && : >$d/plugstack.conf
t login srun -N2 --ep-overlap=on sh -c "printenv EP_OVERLAP_DECISION SLURM_EP_OVERLAP_STEP | cut -c1-2"
grep -h "option .ep-overlap. not found" $EPO_CLUSTER_DIR/log/slurmd.n1.log
echo "== handed on, and then removed"
login salloc -Q --ep-overlap=on sh -c ": >$d/login.plugstack; srun -n1 true; echo inner \$?"'
    between '== nodes only' '== login only'
    times 1 '^rc 0: login srun -N2'
    times 2 '^rc 255: '
    times 0 '^[01on]'
    between '== login only' '== handed on'
    times 1 '^rc 0: '
    times 2 '^1 $' # only the record that no plugin took away
    has_not '^on'
    has 'SPANK plugin "ep_overlap" option "ep-overlap" not found'
    between '== handed on' ''
    times 1 '^inner 0$'
}

@test "switching off: by a deny, with the message; or so that everything goes on" {
    cluster -- 'site=$EPO_CLUSTER_DIR/etc/ep_overlap.conf
cat >$site <<"END"
version = 1;
policy = ( { action = "deny"; message = "switched off, see ticket 4711"; } );
END
t srun --ep-overlap=on true
t srun --ep-overlap=auto true
SLURM_EP_OVERLAP=on t srun true
t srun true
echo "== goes on"
cat >$site <<"END"
version = 1;
on_failed_request = "warn";
preload = { path = "/switched-off-see-ticket-4711"; };
END
t srun -n2 --ep-overlap=on --ep-dispatcher=flex printenv EP_OVERLAP_DECISION
srun --ep-overlap=on env >$work/env
t grep -c LD_PRELOAD $work/env'
    between '' '== goes on'
    times 1 '^rc 1: '
    times 3 '^rc 0: '
    has 'denied by the site'
    has 'switched off, see ticket 4711'
    between '== goes on' ''
    times 1 '^rc 0: srun'
    times 2 '^off$'
    has 'off instead of on'
    has see-ticket-4711
    times 1 '^rc 1: grep'
}

@test "the plugstack drop-in: included from a folder, behind a plugin of another name" {
    cluster -- 'd=$EPO_CLUSTER_DIR/etc
mkdir $d/plugstack.conf.d
grep -vE "^ *(#|$)" '"'$top'"'/etc/zz-ep-overlap.conf >$work/lines
sed "s|ep_overlap.so|$EPO_PLUGIN conf=$d/ep_overlap.conf|" $work/lines >$d/plugstack.conf.d/zz-ep-overlap.conf
echo "optional nothing-of-this-name.so" >$d/plugstack.conf.d/pyxis.conf
echo "include $d/plugstack.conf.d/*.conf" >$d/plugstack.conf
cat $work/lines
t srun --ep-overlap=on printenv EP_OVERLAP_DECISION'
    times 1 '^optional ep_overlap.so$'
    times 1 '^rc 0: '
    times 1 '^on$'
}
