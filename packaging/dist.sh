# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154 # sourced: top is the caller's
# The dist tarball that packages are built from. Sourced.

# Prints the path of a new tarball below the folder $1.
dist_make() {
    (
        set -e
        [ -x "$top/configure" ] || (cd "$top" && ./autogen.sh)
        mkdir "$1/dist" && cd "$1/dist"
        # With maintainer mode: an outdated configure is made anew. A tarball holds everything,
        # whatever can be built here.
        "$top/configure" --disable-tests --disable-tools --disable-host-engine --without-slurm --without-cuda
        make dist
    ) >"$1/dist.log" 2>&1 || { tail -n 20 "$1/dist.log" >&2 && return 1; }
    ls "$1"/dist/ep-overlap-*.tar.xz
}
