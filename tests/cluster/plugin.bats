#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # work, output: plugin_common.bash and bats
# The plugin in a real Slurm: every test starts its own two-node cluster.

bats_require_minimum_version 1.5.0

load plugin_common

@test "on: every task has decision, dispatcher, wgrad and the library" {
    cluster -- 'srun -N2 -n4 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad env'
    ended 0
    times 4 '^EP_OVERLAP_DECISION=on$'
    times 4 '^EP_OVERLAP_DISPATCHER=flex$'
    times 4 '^EP_OVERLAP_DELAY_WGRAD=1$'
    times 4 '^LD_PRELOAD=/.*/libep_overlap.so'
    times 1 '^ep-overlap: on, dispatcher flex, delayed wgrad (--ep-overlap=on, the command line; no GPUs: host engine)$'
    has_not SLURM_EP_OVERLAP_STEP
    [ "$(grep -c 'ep-overlap: step [0-9.]*: on, dispatcher flex' "$work/slurmd.log")" = 2 ]
}

@test "no option: nothing is set, one line in slurmd's log" {
    cluster -- 'srun -n2 env'
    ended 0
    has_not EP_OVERLAP
    has_not LD_PRELOAD
    has_not 'ep-overlap:'
    grep -q 'ep-overlap: step [0-9.]*: off (the built-in default)' "$work/slurmd.log"
}

@test "auto without node classes answers off, visibly" {
    cluster -- 'srun -n2 --ep-overlap=auto env'
    ended 0
    times 2 '^EP_OVERLAP_DECISION=off$'
    times 2 '^EP_OVERLAP_REASON=auto: '
    has_not LD_PRELOAD
    times 1 "^ep-overlap: off (auto: the site's configuration has no node_classes)$"
}

@test "auto is decided once, by the class of the step's nodes" {
    cat >"$work/c.conf" <<END
version = 1;
node_classes = ( { class = "h100"; nodes = "n1"; overlap = "on"; dispatcher = "flex"; },
                 { class = "h100"; gres = "gpu:h100"; overlap = "on"; dispatcher = "flex"; } );
END
    cluster -g 2 -c "$work/c.conf" -- 'show="printenv EP_OVERLAP_REASON EP_OVERLAP_DECISION EP_OVERLAP_DISPATCHER"
t srun -w n1 -n1 --ep-overlap=auto $show
t salloc -Q -N2 --ep-overlap=auto srun -n2 $show'
    times 3 '^on$'
    times 3 '^flex$'
    times 3 '^auto: class h100, '
    times 2 '^ep-overlap: on, dispatcher flex (auto: class h100, '
    sed -i 's/"gpu:h100"; overlap = "on"/"gpu:a100"; overlap = "on"/' "$work/c.conf"
    cluster -g 2 -c "$work/c.conf" -- 't srun -N2 -n2 --ep-overlap=auto printenv EP_OVERLAP_DECISION EP_OVERLAP_REASON'
    times 2 '^off$'
    times 3 'auto: node n2 belongs to no class'
}

@test "heterogeneous jobs: one decision, and differing values are told" {
    echo 'version = 1; node_classes = ( { class = "h100"; nodes = "n[1-2]"; overlap = "on"; } );' >"$work/c.conf"
    cluster -n 3 -c "$work/c.conf" -- 'show="printenv EP_OVERLAP_DECISION"
echo "== A"; t srun -n1 --ep-overlap=on --delay-wgrad : -n2 $show
echo "== B"; t srun -n1 --ep-overlap=off : -n1 --ep-overlap=on $show
echo "== C"; t srun -w n1 -n1 --ep-overlap=auto : -w n2 -n1 $show
echo "== D"; t srun -w n1 -n1 --ep-overlap=auto : -w n3 -n1 $show
echo "== E"; t salloc -Q -n1 --ep-overlap=on : -n1 srun --het-group=0,1 env'
    local all=$output
    output=${all#*== A}
    output=${output%%== B*}
    times 3 '^on$'
    times 1 '^ep-overlap: on, '
    output=${all#*== B}
    output=${output%%== C*}
    times 2 '^on$'
    times 1 'components of this heterogeneous job differ'
    output=${all#*== C}
    output=${output%%== D*}
    times 2 '^on$'
    output=${all#*== D}
    output=${output%%== E*}
    times 2 '^off$'
    output=${all#*== E}
    times 2 '^EP_OVERLAP_DECISION=on$'
    has_not SLURM_EP_OVERLAP_STEP
}

@test "heterogeneous batch jobs: the first component's options count, told; what sbatch would drop is refused" {
    cluster -- 'out="-o $work/out"
printf "#!/bin/sh\nsrun --het-group=0,1 printenv EP_OVERLAP_DECISION\n" >$work/job
{ printf "#!/bin/sh\n#SBATCH -n1 --ep-overlap=on\n#SBATCH hetjob\n#SBATCH -n1 --ep-overlap=off\n"; tail -n1 $work/job; } >$work/inside
echo "== A"; t batch $out -n1 --ep-overlap=on : -n1 --ep-overlap=off $work/job; cat $work/out
echo "== B"; t batch $out $work/inside; cat $work/out
echo "== C"; t batch $out -n1 : -n1 --ep-overlap=on $work/job
echo "== D"; t salloc -Q -n1 : -n1 --ep-overlap=on bash $work/job
echo "== E"; t batch $out -n1 --ep-overlap=on : -n1 $work/job; cat $work/out'
    local part
    for part in '== A/== B' '== B/== C'; do
        between "${part%/*}" "${part#*/}"
        times 1 'and what the first one gives counts'
        times 2 '^on$'
    done
    between '== C' '== D'
    has '--ep-overlap stands behind the first component'
    has 'rc 1: '
    for part in '== D/== E' '== E/'; do
        between "${part%/*}" "${part#*/}"
        times 2 '^on$'
        has_not differ
    done
}

@test "bad values are refused at submission with one line" {
    cluster -- 'printf "#!/bin/sh\n#SBATCH --ep-dispatcher=flexible\ntrue\n" >$work/job
t srun --ep-overlap=maybe true
t srun --ep-dispatcher= true
t sbatch --ep-overlap=maybe --wrap true
t sbatch $work/job
t salloc --ep-overlap=ON true'
    times 5 '^rc 255: '
    has '--ep-overlap: found "maybe", allowed off, on, auto'
    has '--ep-dispatcher: found "", allowed alltoall, flex'
    has 'found "flexible"'
    has 'found "ON"'
    times 5 'error: ep-overlap: '
    has_not Submitted
}

@test "delayed wgrad or a dispatcher with overlap off is refused before anything is allocated" {
    cluster -- 't srun --delay-wgrad true
t srun --ep-overlap=off --delay-wgrad true
t srun --delay-wgrad --ep-overlap=off true
t srun --ep-overlap=off --ep-dispatcher=flex true
t salloc --delay-wgrad true
t sbatch --ep-overlap=off --delay-wgrad --wrap true
SLURM_EP_OVERLAP=off t srun --ep-dispatcher=flex true'
    times 7 '^rc 1: '
    times 7 'needs --ep-overlap=on or auto, but overlap is off ('
    has 'SLURM_EP_OVERLAP=off in the environment'
    has_not Submitted
    has_not allocated
}

@test "--delay-wgrad --no-delay-wgrad: the last wins, handed on too" {
    cluster -- 'show="printenv EP_OVERLAP_DELAY_WGRAD"
echo "A $(srun --ep-overlap=on --delay-wgrad --no-delay-wgrad $show)"
echo "B $(srun --ep-overlap=on --no-delay-wgrad --delay-wgrad $show)"
echo "C $(salloc -Q --ep-overlap=on --delay-wgrad --no-delay-wgrad srun $show)"
echo "D $(salloc -Q --ep-overlap=on --no-delay-wgrad --delay-wgrad srun $show)"
echo "E $(salloc -Q --ep-overlap=on --delay-wgrad srun --no-delay-wgrad $show)"
batch -o $work/out --ep-overlap=on --delay-wgrad --no-delay-wgrad --wrap "srun $show"
echo "F $(grep -v ep-overlap $work/out)"'
    times 1 '^A 0$'
    times 1 '^B 1$'
    times 1 '^C 0$'
    times 1 '^D 1$'
    times 1 '^E 0$'
    times 1 '^F 0$'
}

@test "sbatch hands its options on; an inner off drops them" {
    cluster -- 'cat >$work/job <<"END"
#!/bin/bash
#SBATCH --ep-overlap=on --delay-wgrad
#SBATCH -N2
echo "batch: ${EP_OVERLAP_DECISION-unset} ${LD_PRELOAD-unset}"
srun -n2 env
echo "inner off"
srun -n1 --ep-overlap=off env
echo "inner dispatcher"
srun -n1 --ep-dispatcher=flex env
END
batch -o $work/out $work/job; cat $work/out'
    ended 0
    has 'batch: unset unset'
    times 3 '^EP_OVERLAP_DECISION=on$'
    times 3 '^EP_OVERLAP_DELAY_WGRAD=1$'
    times 1 '^EP_OVERLAP_DISPATCHER=flex$'
    has '(--ep-overlap=on, inherited from sbatch or salloc; '
    has 'ep-overlap: off (--ep-overlap=off, the command line)'
    has_not 'error'
}

@test "salloc hands its options on" {
    cluster -- 'salloc -Q -N2 --ep-overlap=on --ep-dispatcher=flex:deepep srun -n2 env'
    ended 0
    times 2 '^EP_OVERLAP_DISPATCHER=flex$'
    times 2 '^EP_OVERLAP_FLEX_BACKEND=deepep$'
}

@test "a batch script without srun is told, one with srun is not" {
    cluster -- 'sbatch -Q --wait -o $work/out --ep-overlap=on --wrap "env"; cat $work/out'
    ended 0
    times 1 "applies to srun's steps"
    has_not EP_OVERLAP_
    has_not LD_PRELOAD
    cluster -- 'batch -o $work/out --ep-overlap=on --wrap "srun true"; cat $work/out'
    ended 0
    has_not "applies to srun's steps"
}

@test "the user's LD_PRELOAD is kept, once each, no empty part" {
    cluster -- 'LD_PRELOAD=":libdl.so.2::libm.so.6 " srun --ep-overlap=on sh -c "echo \$LD_PRELOAD; srun --overlap --ep-overlap=on printenv LD_PRELOAD"'
    ended 0
    times 2 '^libdl.so.2:libm.so.6:/[^ :]*/libep_overlap.so[^ :]*$'
}

# The environment of a nested step without what differs from run to run: the
# values of ports, pids, times and the cluster's folder (and what run.sh tells).
nested() { # run.sh's option, inner srun's option
    cluster "$1" -- "
for preload in none LD_PRELOAD=libm.so.6 LD_PRELOAD=:libm.so.6:: LD_PRELOAD=; do
    echo \"== \$preload\"
    [ \$preload != none ] || preload=A=b
    env \$preload srun -w n1 -n1 $2 sh -c 'srun --overlap -n1 $3 env -0' 2>/dev/null | tr '\\0' '\\n' |
        sed -E 's/^(SLURM_(SRUN_COMM_PORT|STEP_LAUNCHER_PORT|TASK_PID|LAUNCH_NODE_IPADDR|JOB_START_TIME|JOB_END_TIME|WORKING_CLUSTER)|EPO_PLUGIN)=.*/\1/; s|epo-cluster.[A-Za-z0-9]*|CLUSTER|g'
done"
    ended 0
}

@test "nested off equals the environment without the plugin, byte for byte" {
    nested -P '' ''
    local without=$output
    [ "$(grep -c '^SLURM_STEP_ID=1$' <<<"$without")" = 4 ]
    nested -v '--ep-overlap=on --ep-dispatcher=flex' --ep-overlap=off
    diff <(grep -v '^run.sh: ' <<<"$output") <(echo "$without")
    nested -v '' ''
    diff <(grep -v '^run.sh: ' <<<"$output") <(echo "$without")
}

@test "a broken configuration: requests fail with file and line, the rest runs" {
    printf 'version = 1;\n\nmistake = 2;\n' >"$work/broken.conf"
    cluster -c "$work/broken.conf" -- 't srun --ep-overlap=on true
t sbatch --ep-overlap=auto --wrap true
t srun --ep-overlap=off true
echo "--"
t srun -n2 env'
    has 'rc 1: srun --ep-overlap=on true'
    has 'rc 1: sbatch'
    has_not Submitted
    times 2 'ep_overlap.conf:3: unknown key "mistake"'
    has 'rc 0: srun --ep-overlap=off true'
    has 'rc 0: srun -n2 env'
    output=${output#*--$'\n'}
    has_not EP_OVERLAP
    has_not 'ep-overlap'
    [ "$(grep -c 'error: ep-overlap: step [0-9.]*: off: .*ep_overlap.conf:3' "$work/slurmd.log")" = 2 ]
}

@test "a configuration that breaks on the nodes fails the task and drains nothing" {
    cluster -- 'salloc -Q -N2 --ep-overlap=on sh -c "echo nonsense >>$EPO_CLUSTER_DIR/etc/ep_overlap.conf; srun -n4 true"'
    ended 1
    has 'syntax error'
}

@test "an untrusted configuration counts as broken" {
    cluster -- 'cd $EPO_CLUSTER_DIR/etc
chmod 666 ep_overlap.conf; t srun --ep-overlap=on true; t srun true; chmod 644 ep_overlap.conf
chmod 777 .; t srun --ep-overlap=on true; chmod 755 .
mv ep_overlap.conf x; ln -s x ep_overlap.conf; t srun --ep-overlap=on true; rm ep_overlap.conf
t srun --ep-overlap=on true; mv x ep_overlap.conf
t srun --ep-overlap=on true'
    times 4 '^rc 1: srun --ep-overlap=on true'
    times 2 'writable by group or others'
    times 1 'symbolic link'
    times 1 'No such file'
    times 1 '^rc 0: srun true'
    times 1 '^rc 0: srun --ep-overlap=on true'
}

@test "a missing library fails a request on every kind of step, and no node is lost" {
    echo 'version = 1; preload = { path = "/nonexistent/libep_overlap.so"; };' >"$work/c.conf"
    # other tasks wait for the failing one: they are ended with it
    cluster -c "$work/c.conf" -- 't srun -N1 -n1 --ep-overlap=on true
echo "two"
t srun -N2 -n4 --ep-overlap=on sleep 60
batch -N2 -n4 -o $work/out --ep-overlap=on --wrap "srun -n4 true || exit 3"
echo "rc $?: sbatch"; cat $work/out
echo "off"
t srun -n2 env; t srun --ep-overlap=off true; SLURM_EP_OVERLAP=on t srun env'
    times 1 '^rc 1: srun -N1'
    has_not 'rc 0: srun -N2'
    times 1 '^rc 3: sbatch'
    local all=$output
    output=${all%%two*}
    times 1 'ep-overlap: n1: the library cannot be preloaded: /nonexistent'
    output=${all#*two}
    output=${output%%off*}
    [ "$(grep -c 'n[12]: the library cannot be preloaded' <<<"$output")" -ge 2 ]
    output=${all#*off}
    times 3 '^rc 0: '
    times 1 '^EP_OVERLAP_REASON=the library cannot be preloaded'
    has_not LD_PRELOAD=/
}

@test "one node of another opinion: the step ends at once, with that node's reason" {
    cluster -- 'etc=$EPO_CLUSTER_DIR/etc
mkdir $work/client; chmod 755 $work $work/client
cp $etc/ep_overlap.conf $work/client/
sed "s|conf=[^ ]*|conf=$work/client/ep_overlap.conf|" $etc/plugstack.conf >$work/client/plugstack.conf
sed "s|^PlugStackConfig=.*|PlugStackConfig=$work/client/plugstack.conf|" $etc/slurm.conf >$work/client/slurm.conf
echo "policy = ( { match = { node = \"n2\"; }; action = \"lock\"; overlap = \"off\"; message = \"no link\"; } );" >>$etc/ep_overlap.conf
SECONDS=0
SLURM_CONF=$work/client/slurm.conf t srun -N2 -n2 --ep-overlap=on sleep 60
echo "after $((SECONDS / 20))"'
    has_not 'rc 0'
    times 1 'ep-overlap: n2: --ep-overlap=on is locked to another value .*: no link'
    has 'after 0'
}

@test "a program that cannot take the library runs without it, and is told why" {
    cat >"$work/static.c" <<'END'
int main(void) { return 0; }
END
    gcc -static -o "$work/static" "$work/static.c" || skip "no static libc"
    cluster -- "srun --ep-overlap=on $work/static"
    ended 0
    has 'not preloaded: the program is linked statically'
}

@test "--export=NONE and --export=NAME keep the options" {
    cluster -- 'srun --export=NONE --ep-overlap=on --delay-wgrad /usr/bin/env; FOO=1 srun --export=FOO --ep-overlap=on /usr/bin/env'
    ended 0
    times 2 '^EP_OVERLAP_DECISION=on$'
    times 2 '(--ep-overlap=on, the command line; '
    has_not SLURM_EP_OVERLAP_STEP
}

@test "policy: deny and lock are refused at submission with the administrator's words" {
    cat >"$work/c.conf" <<END
version = 1;
policy = ( { match = { user = $(id -u); }; action = "deny"; message = "ask hpc-support"; } );
END
    cluster -c "$work/c.conf" -- 'srun --ep-overlap=on true'
    ended 1
    times 1 'denied by the site.s policy .*: ask hpc-support'
    cluster -c "$work/c.conf" -- 'SLURM_EP_OVERLAP=on srun env'
    ended 0
    has_not LD_PRELOAD
    cat >"$work/c.conf" <<END
version = 1;
policy = ( { match = { partition = "debug"; }; action = "lock"; dispatcher = "alltoall"; message = "no flex here"; },
           { match = { node = "n2"; }; action = "deny"; message = "n2 is special"; } );
END
    cluster -c "$work/c.conf" -- 'salloc -Q srun --ep-overlap=on --ep-dispatcher=flex true'
    ended 1
    has 'no flex here'
}

@test "policy by node is found out after the allocation and fails the step, not the node" {
    cat >"$work/c.conf" <<END
version = 1;
policy = ( { match = { node = "n2"; }; action = "deny"; message = "n2 is special"; } );
END
    cluster -c "$work/c.conf" -- 'srun -w n2 -N1 -n1 --ep-overlap=on true'
    ended 1
    has 'n2: --ep-overlap=on is denied'
    cluster -c "$work/c.conf" -- 'srun -w n1 -N1 --ep-overlap=on printenv EP_OVERLAP_DECISION'
    ended 0
    cluster -c "$work/c.conf" -- 'srun -N2 -n2 --ep-overlap=on sleep 60'
    failed
    has 'n2 is special'
}

@test "a step with GPUs gets the variables of an overlap run, one without does not" {
    cluster -g 2 -- 'CUDA_DEVICE_MAX_CONNECTIONS=1 srun --gres=gpu:1 --ep-overlap=on --ep-dispatcher=flex env'
    ended 0
    has CUDA_DEVICE_MAX_CONNECTIONS=1
    has TORCH_NCCL_AVOID_RECORD_STREAMS=1
    has NVTE_FWD_LAYERNORM_SM_MARGIN=20
    has 'ep-overlap: set TORCH_NCCL_HIGH_PRIORITY=1 '
    has 'warning OVL-016: your value is kept'
    has_not 'host engine'
    cluster -g 2 -- 'srun --ep-overlap=on env'
    ended 0
    has_not NVTE_
    has 'no GPUs: host engine'
}

# Steps of every kind, whose user and node hear of the plugin once.
listed_twice() { # how: a line that makes plugstack.conf from $f; what slurmd's log says
    cluster -- "f=\$EPO_CLUSTER_DIR/etc/plugstack.conf
$1"'
t srun -N2 -n2 --ep-overlap=on --ep-dispatcher=flex printenv EP_OVERLAP_DECISION EP_OVERLAP_REASON
t srun printenv EP_OVERLAP_DECISION
SLURM_EP_OVERLAP=on t srun --ep-overlap=off printenv LD_PRELOAD
printf "#!/bin/sh\n#SBATCH --ep-overlap=on\nsrun printenv EP_OVERLAP_DECISION\n" >$work/job
sbatch -Q -o $work/out $work/job
for i in $(seq 100); do [ -z "$(squeue -h)" ] && break; sleep 0.1; done
cat $work/out
srun --help | grep -c -e --ep-overlap='
    has_not 'provided by both'
    times 3 '^on$'
    times 2 '^--ep-overlap=on, the command line; no GPUs: host engine$'
    times 2 '^ep-overlap: on, dispatcher'
    times 1 '^ep-overlap: off ('
    times 2 '^rc 1: srun' # no variable
    times 1 '^1$'
    [ "$(grep -c 'ep-overlap: step [0-9.]*: ' "$work/slurmd.log")" = 5 ]
    grep -q "$2" "$work/slurmd.log"
}

@test "listed twice in plugstack.conf, by hand and by the drop-in, the plugin works once" {
    # shellcheck disable=SC2016
    listed_twice 'mkdir $f.d && cp $f $f.d/zz.conf && { sed "s|conf=.*|conf=/gone|" $f; echo "include $f.d/*.conf"; } >$f.new && mv $f.new $f' \
        'error: ep-overlap: plugstack.conf lists ep_overlap.so 2 times: the last line counts, take the others out'
}

@test "two files of the plugin in plugstack.conf: the last one works" {
    # shellcheck disable=SC2016
    listed_twice 'mkdir $f.d && cp $EPO_PLUGIN $f.d/ && { sed "s|conf=.*|conf=/gone|" $f; sed "s|^optional [^ ]*|optional $f.d/ep_overlap.so|" $f; } >$f.new && mv $f.new $f' \
        'error: ep-overlap: plugstack.conf lists 2 files ep_overlap.so: the last one works, take the others out'
}
