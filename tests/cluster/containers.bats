#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# shellcheck disable=SC2154 # work, output: plugin_common.bash and bats
# Containers: Slurm's own --container with a real OCI runtime (runc), and a stand-in for pyxis
# (container_spank.c) that changes the mount namespace in its task_init, as pyxis does.

bats_require_minimum_version 1.5.0
load plugin_common

# image DIR: a root of this machine's /usr
image() {
    mkdir -p "$1"/{usr,proc,dev,tmp,etc,image-of-the-test}
    local name
    for name in bin lib lib64 sbin; do ln -s "usr/$name" "$1/$name"; done
    chmod 755 "$work" "$1"
}

# Slurm reads oci.conf beside slurm.conf; every container of the test lives below $work/oci.
oci() {
    command -v runc >/dev/null || skip "runc is not installed"
    [ "$(id -u)" = 0 ] || skip "this bundle is for root"
    [ -d /sys/fs/cgroup ] || skip "runc needs /sys/fs/cgroup"
    image "$work/bundle/rootfs"
    cat >"$work/bundle/config.json" <<'END'
{ "ociVersion": "1.0.0",
  "process": { "terminal": false, "user": { "uid": 0, "gid": 0 }, "args": [ "sh" ], "env": [ "PATH=/usr/bin" ], "cwd": "/" },
  "root": { "path": "rootfs", "readonly": false },
  "mounts": [ { "destination": "/proc", "type": "proc", "source": "proc" },
              { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": [ "nosuid", "mode=755" ] },
              { "destination": "/usr", "type": "none", "source": "/usr", "options": [ "rbind", "ro" ] } ],
  "linux": { "namespaces": [ { "type": "mount" }, { "type": "pid" } ] } }
END
    {
        echo "RunTimeQuery=\"runc --root=$work/oci state %n.%u.%j.%s.%t\""
        echo "RunTimeKill=\"runc --root=$work/oci kill -a %n.%u.%j.%s.%t\""
        echo "RunTimeDelete=\"runc --root=$work/oci delete --force %n.%u.%j.%s.%t\""
        echo "RunTimeRun=\"runc --root=$work/oci run --bundle %b %n.%u.%j.%s.%t\""
    } >"$work/oci.conf"
}

@test "srun --container (runc): the program runs without the library, and the user is told" {
    oci
    cluster -- 'cp $work/oci.conf $EPO_CLUSTER_DIR/etc/
t srun -n1 --container=$work/bundle ls /
echo == on
t srun -n1 --container=$work/bundle --ep-overlap=on /usr/bin/env
echo == status
t srun -n1 --container=$work/bundle --ep-overlap=on sh -c "exit 7"
t srun -n1 --container=$work/bundle --ep-overlap=off true'
    between '' '== on'
    times 1 '^proc$' # it is a container
    times 0 '^root$'
    between '== on' '== status'
    times 1 'ep-overlap: on, .*not preloaded: the step runs in an OCI container (--container)'
    has 'arguments undecided: the program of an OCI container is not seen'
    has_not 'LD_PRELOAD='
    has_not 'ld.so'
    has 'rc 0'
    between '== status' ''
    times 1 '^rc 7: '
    times 1 '^rc 0: '
}

# Sets $order, for scripts: where the stand-in stands in plugstack.conf, and its options.
pyxis() {
    unshare --user --map-root-user --mount true 2>/dev/null || skip "this kernel grants no user namespaces"
    cp -L "${EPO_BUILD_DIR:-$top/build}/tests/fake/.libs/container_spank.so" "$work/"
    image "$work/image"
    order='stack() {
    local d=$EPO_CLUSTER_DIR/etc
    [ -e $d/ours ] || cp $d/plugstack.conf $d/ours
    case $1 in
    zz) { echo "required $work/container_spank.so"; cat $d/ours; } ;;
    first) { cat $d/ours; echo "required $work/container_spank.so"; } ;;
    esac >$d/plugstack.conf
}
inside="--container-image=$work/image"
lib=$EPO_CLUSTER_DIR/lib
mounts="--container-mounts=$lib"
'
}

@test "pyxis's way (stand-in): behind it in plugstack the library is seen inside, where it is mounted" {
    pyxis
    cluster -- "$order"'stack zz
t srun -n1 $inside sh -c "ls /; id -u"
echo == mounted
t srun -N2 -n4 $inside $mounts --ep-overlap=on --ep-dispatcher=flex env
echo == not mounted
t srun -N2 -n4 $inside --ep-overlap=on env
echo == nobody asked
t srun -n2 $inside sh -c "env | grep -c -e LD_PRELOAD -e EP_OVERLAP"'
    between '' '== mounted'
    times 1 '^image-of-the-test$'
    between '== mounted' '== not mounted'
    times 4 '^EP_OVERLAP_DECISION=on$'
    times 4 '^LD_PRELOAD=/.*libep_overlap.so'
    times 1 '^ep-overlap: on, dispatcher flex'
    has_not 'not preloaded'
    has_not 'ld.so'
    has 'rc 0'
    between '== not mounted' '== nobody asked'
    has 'in a container its folder has to be mounted (--container-mounts=/'
    has_not 'rc 0'
    has_not 'EP_OVERLAP_DECISION'
    between '== nobody asked' ''
    times 2 '^0$'
}

@test "pyxis's way (stand-in): before it in plugstack every exec inside would complain, hence zz-" {
    pyxis
    cluster -- "$order"'stack first
t srun -n1 $inside --ep-overlap=on true
echo == mounted
t srun -n1 $inside $mounts --ep-overlap=on true'
    between '' '== mounted'
    has 'ld.so'
    between '== mounted' ''
    has_not 'ld.so'
}

@test "pyxis's way (stand-in): another file under the library's name is not taken for it" {
    pyxis
    cluster -- "$order"'stack zz
mkdir -p $work/image/$lib && cp $lib/libep_overlap.so $work/image/$lib/
t srun -n2 $inside --ep-overlap=on env'
    has 'is another file for the task than on the node'
    has_not 'rc 0'
}
