# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154 # sourced: here, dir, plugin... are the caller's
# What run.sh, cluster-up.sh and cluster-down.sh share. Sourced.

say() { echo "run.sh: $*" >&2; }

# True for a running process whose name contains NAME; false for zombies, which keep
# their pid where nobody reaps them, and for a pid that went to something else.
process_is() { # pid name
    local command
    { IFS= read -r -d '' command <"/proc/$1/cmdline"; } 2>/dev/null && [[ $command == *$2* ]]
}

# Daemons must not hold the caller's descriptors (pipes, locks) open.
close_descriptors_above() {
    local fd
    for fd in "/proc/$BASHPID/fd"/*; do
        fd=${fd##*/}
        if [ "$fd" -gt "$1" ] && [ "$fd" != 255 ]; then
            eval "exec $fd>&-"
        fi
    done
}

# Sets EPO_STAGE_DIR, EPO_BINDIR, EPO_LIBDIR and EPO_PLUGIN (empty: none) after bringing the
# staged install up to date. Returns 0, or 70 when the build fails.
stage_find() {
    local build top
    export EPO_PLUGIN='' EPO_BINDIR='' EPO_LIBDIR=''
    if [ -z "${EPO_STAGE_DIR:-}" ]; then
        top=$(cd "$here/../.." && pwd)
        build=${EPO_BUILD_DIR:-$top/build}
        if [ ! -f "$build/Makefile" ]; then
            [ "$plugin" = 0 ] || say "no build in $build: plain Slurm, without the plugin (./quickstart.sh builds, or set EPO_BUILD_DIR)"
            return 0
        fi
        build=$(cd "$build" && pwd)
        stage_update "$build" || return 70
        EPO_STAGE_DIR=$build/stage
    fi
    export EPO_STAGE_DIR
    if [ ! -r "$EPO_STAGE_DIR/stage.env" ]; then
        say "$EPO_STAGE_DIR is no staged install (stage.env is missing): make stage"
        return 69
    fi
    # shellcheck source=/dev/null
    . "$EPO_STAGE_DIR/stage.env"
    EPO_BINDIR=$EPO_STAGE_DIR$stage_bindir EPO_LIBDIR=$EPO_STAGE_DIR$stage_libdir
    if [ "$plugin" = 1 ]; then
        EPO_PLUGIN=$EPO_STAGE_DIR$stage_plugindir/ep_overlap.so
        [ -e "$EPO_PLUGIN" ] || {
            EPO_PLUGIN=
            say "the build has no ep_overlap.so: plain Slurm, without the plugin"
        }
    fi
}

# One make at a time in a build folder; nothing to do takes a fraction of a second.
stage_update() { # build folder
    local output
    output=$(
        unset MAKEFLAGS MFLAGS MAKELEVEL GNUMAKEFLAGS
        exec {lock}<"$1/Makefile"
        flock "$lock"
        make -s -C "$1" -j"$(nproc)" stage {lock}<&- 2>&1
    ) && return 0
    say "make stage failed in $1:"
    tail -n 25 <<<"$output" >&2
    return 1
}

# Prints a path of the staged library that the plugin trusts: a private copy, because a
# checkout made with umask 002 is writable by a group. The engines lie beside it.
trusted_library() {
    local name=libep_overlap.so
    if [ -e "$EPO_LIBDIR/$name" ]; then
        (umask 022 && mkdir "$dir/lib" && cp -L "$EPO_LIBDIR/$name" "$dir/lib/" &&
            if [ -d "$EPO_LIBDIR/ep-overlap" ]; then cp -rL "$EPO_LIBDIR/ep-overlap" "$dir/lib/"; fi &&
            chmod -R go-w "$dir/lib") || return 70
        echo "$dir/lib/$name"
    else
        echo "$EPO_LIBDIR/$name"
    fi
}

# The same for the probe's program.
trusted_probe() {
    local staged=$EPO_STAGE_DIR${stage_pkglibexecdir:-}/probe
    [ -e "$staged" ] || return 0
    (umask 022 && mkdir "$dir/libexec" && cp -L "$staged" "$dir/libexec/") || return 70
    echo "$dir/libexec/probe"
}

# Writes plugstack.conf and, unless -C named one, the site's configuration into $dir/etc.
plugstack_write() {
    local site=$dir/etc/ep_overlap.conf
    : >"$dir/etc/plugstack.conf"
    [ -n "$EPO_PLUGIN" ] || return 0
    if [ "$conf_in_place" = 1 ]; then
        site=$conf
    else
        if [ -n "$conf" ]; then
            sed -e "s|@libdir@|$EPO_LIBDIR|g; s|@bindir@|$EPO_BINDIR|g" "$conf" >"$site" || return 70
        else
            echo 'version = 1;' >"$site"
        fi
        grep -q '^ *probe *=' "$site" || echo "probe = { path = \"$(trusted_probe)\"; };" >>"$site"
        grep -q preload "$site" || echo "preload = { path = \"$(trusted_library)\"; };" >>"$site"
        chmod 644 "$site"
    fi
    if [[ $EPO_PLUGIN == *[[:space:]]* ]]; then # a checkout in such a folder: plugstack.conf splits on blanks
        ln -s "$EPO_PLUGIN" "$dir/etc/ep_overlap.so" || return 70
        EPO_PLUGIN=$dir/etc/ep_overlap.so
    fi
    echo "optional $EPO_PLUGIN conf=$site${plugin_args:+ $plugin_args}" >"$dir/etc/plugstack.conf"
}
