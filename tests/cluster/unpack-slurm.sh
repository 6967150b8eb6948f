#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# unpack-slurm.sh DEB_DIR [ROOT]: Slurm on a machine without its packages and without network
# (root): unpacks Debian package files carried there and prints the file to source. Then run.sh
# works as usual. DEB_DIR holds what fetch-slurm.sh fetches elsewhere (Debian 12's binaries run on
# Ubuntu 24.04).
set -eu
if [ ! -d "${1:-}" ]; then
    echo "usage: unpack-slurm.sh DEB_DIR [ROOT]" >&2
    exit 2
fi
debs=$1 root=${2:-/opt/debs}
mkdir -p "$root"
for file in "$debs"/*.deb; do dpkg -x "$file" "$root"; done
lib=$root/usr/lib/x86_64-linux-gnu
for name in slurmctld slurmd slurmstepd; do
    [ -e "$root/usr/sbin/$name" ] || ln -sfn "$name-wlm" "$root/usr/sbin/$name"
done
# The two paths compiled into Slurm.
ln -sfn "$lib/slurm-wlm" /usr/lib/x86_64-linux-gnu/slurm-wlm
ln -sfn "$root/usr/sbin/slurmstepd" /usr/sbin/slurmstepd
cat >"$root/env.sh" <<ENV
export PATH=$root/usr/bin:$root/usr/sbin:\$PATH
export LD_LIBRARY_PATH=$root/lib/x86_64-linux-gnu:$lib:$lib/slurm-wlm:\${LD_LIBRARY_PATH:-}
export PKG_CONFIG_PATH=$lib/pkgconfig CPATH=$root/usr/include LIBRARY_PATH=$lib:\${LIBRARY_PATH:-}
ENV
echo "$root/env.sh"
