#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# places.sh BUILD: what is around the job is full, missing or leaps: /dev/shm, the disk that
# reports go to, the wall clock. One line a case, in the fields of fault.c; status 1 if one is
# not as it has to be. Mounts are of a namespace of its own (left out where that is not allowed).
set -u
build=$(cd "${1:?a build folder}" && pwd) || exit 2
if [ "${2:-}" != inside ]; then
    if unshare -m true 2>/dev/null; then
        exec unshare -m --propagation private "$0" "$build" inside
    fi
    echo "# left out: mounts of one's own are not allowed here (unshare -m)"
    exit 0
fi
program=$build/tests/fault/fault
work=$(mktemp -d) || exit 2
trap 'umount "$work/full" 2>/dev/null; rm -rf "$work"' EXIT
failed=0

# The place, whether the status has to be "runs" or "told", and the command; its line goes last.
place() { # NAME runs|told COMMAND...
    local name=$1 want=$2 begin end status verdict=ok line
    shift 2
    begin=$(date +%s%N)
    timeout 60 "$@" >"$work/out" 2>"$work/err"
    status=$?
    end=$(date +%s%N)
    line=$(head -n 1 "$work/err")
    case $want in
    runs) [ "$status" = 0 ] || verdict=FAIL ;;
    told) { [ "$status" -gt 0 ] && [ "$status" -lt 124 ] && [[ $line =~ "No space left"|"could not be written" ]]; } || verdict=FAIL ;;
    esac
    [ -z "$(find "$work/full" -type f ! -name filled ! -name chunks)" ] || verdict=FAIL
    [ "$verdict" = ok ] || failed=1
    printf 'host\tplace\t%s\t%s\t%s\t%s\tstatus %s\t%s\n' "$name" "$verdict" $(((end - begin) / 1000000)) \
        nothing "$status" "$line"
}

mkdir "$work/full" "$work/dev"
mount -t tmpfs -o size=64k full "$work/full" || exit 2
head -c 1m /dev/zero >"$work/full/filled" 2>/dev/null
export EP_OVERLAP_TIMEOUT=20 EP_OVERLAP_BLAS_THREADS=1 FAULT_SHM=1
bench=("$build/ep-overlap" bench --engine host --tokens 8 --hidden 8 --ffn 8 --experts 4 --repeat 1)
train=("$build/tools/ep-train/ep-train" --steps 3 --no-measure)

# /dev/shm of 64 MB, full, missing: ranks share memory that has no name.
mount -t tmpfs -o size=64m small /dev/shm
place "/dev/shm of 64 MB" runs "$program" nothing
head -c 64m /dev/zero >/dev/shm/.filled 2>/dev/null
place "/dev/shm full" runs "$program" nothing
place "/dev/shm full: bench" runs "${bench[@]}"
umount /dev/shm
for node in null zero random urandom full; do cp -a "/dev/$node" "$work/dev/"; done
mount --bind "$work/dev" /dev
place "/dev/shm missing" runs "$program" nothing
place "/dev/shm missing: bench" runs "${bench[@]}"
umount /dev

# The disk that reports go to.
printf '{"traceEvents":[{"ph":"X","cat":"kernel","name":"a","ts":1,"dur":2,"pid":0,"tid":7,"args":{"stream":7}}]}' >"$work/a.json"
place "disk full: bench" told bash -c '"$@" --json >/dev/full' bench "${bench[@]}"
place "disk full: ep-train" told bash -c '"$@" >/dev/full' train "${train[@]}"
place "disk full: profile's picture" told "$build/ep-overlap" profile "$work/a.json" --svg "$work/full/a.svg"
place "disk full: measured chunks" runs env EP_OVERLAP_CHUNKS_FILE="$work/full/chunks" "${bench[@]}"

# The wall clock leaps by an hour every 50 ms.
clock=$build/tests/fault/.libs/clock.so
unset FAULT_SHM
place "wall clock leaps" runs env LD_PRELOAD="$clock" "$program" nothing
place "wall clock leaps: ep-train" runs env LD_PRELOAD="$clock" "${train[@]}"
exit "$failed"
