#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fetch-slurm.sh [FOLDER]: downloads the packages that unpack-slurm.sh unpacks where there is
# no network: Slurm, munge, libconfig and what they need beside a minimal system, 6 MB, by apt on a Debian or Ubuntu
# machine. FOLDER: build-debs, which git ignores.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-build-debs}
command -v apt-get >/dev/null || { echo "fetch-slurm.sh: no apt-get here; fetch on a Debian or Ubuntu machine" >&2 && exit 69; }
# The names end in numbers that change from release to release: as slurmctld's own dependencies say.
needs() { # package...: the libraries that these depend on, by pattern
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$@" |
        grep -E '^(libslurm[0-9]|libmunge|libconfig[0-9]|libhwloc[0-9]|libnuma|libpmix|libevent-(core|pthreads)|libdbus-1|libjson-c|libhttp-parser|libjwt|libyaml-0|liblua5|libgcrypt|libgpg-error0)' |
        sort -u
}
mkdir -p "$folder"
cd "$folder"
main="slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libconfig-dev libslurm-dev"
# shellcheck disable=SC2046,SC2086
apt-get -q download $main $(needs $main) >apt.log 2>&1 || {
    tail -5 apt.log >&2
    echo "fetch-slurm.sh: apt-get download failed (apt-get update first?)" >&2
    exit 70
}
rm -f apt.log
du -sh .
