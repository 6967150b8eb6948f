#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The built libep_overlap_intercept.so in front of a stand-in NCCL and a stand-in libcuda
# (tests/fake): what it exports, that it changes nothing where it is not to, and that what
# it carries arrives.
# shellcheck disable=SC2317 # functions called by name
set -u
top=${top_builddir:-.}
src=${srcdir:-.}
library=$(cd "$top" && pwd)/.libs/libep_overlap_intercept.so
failed=0
work=$(mktemp -d) || exit 99
trap 'rm -rf "$work"' EXIT

# shellcheck source=tests/fake/intercept.sh
. "$src/tests/fake/intercept.sh"

nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort >"$work/exported"
sed -n 's/^ *X(\([A-Z][A-Za-z]*\), *\\\{0,1\}.*/nccl\1/p; s/^ *X(\([A-Z][A-Za-z]*\),$/nccl\1/p' \
    "$src/lib/preload/intercept/nccl_abi.h" | grep -vE 'GetVersion|CommCount|CommUserRank|GetAsyncError' >"$work/declared"
sed -n 's/^cupti_result \(cupti[A-Za-z0-9_]*\)(.*) {$/\1/p; s/^cupti_result \(cupti[A-Za-z0-9_]*\)(.*,$/\1/p' \
    "$src/lib/preload/record/entry.c" >>"$work/declared"
sort -u -o "$work/declared" "$work/declared"
check "exports what nccl_abi.h and entry.c of the recorder list, nothing else" diff "$work/declared" "$work/exported"
check "exports something" test "$(wc -l <"$work/exported")" -gt 15
if is_sanitized "$library"; then
    echo "left out in a sanitized build: everything that preloads"
    exit $failed
fi
readelf -d "$library" | grep NEEDED | grep -Ev '\[(libc\.so\.6|libm\.so\.6|ld-linux[-a-z0-9_]*\.so\.[0-9])\]' >"$work/needed"
check "needs libc and libm alone" test ! -s "$work/needed"
init=$(readelf -dW "$library" | sed -n 's/.*INIT_ARRAYSZ) *\([0-9]*\) .*/\1/p')
check "has no constructor" test "${init:-0}" -le 8

# ---- programs that have nothing to do with NCCL ----
quiet() { # COMMAND...: the same output and status with and without, in every mode
    local plain with status mode
    plain=$("$@" 2>&1)
    status=$?
    for mode in off observe accelerate nonsense; do
        with=$(LD_PRELOAD=$library EP_OVERLAP_INTERPOSE=$mode EP_OVERLAP_RECORD=1 "$@" 2>&1)
        if [ $? != "$status" ] || [ "$plain" != "$with" ]; then
            echo "$mode: status $status, said '$with' for '$plain'"
            return 1
        fi
    done
}
check "preload of /bin/true" quiet /bin/true
check "preload of bash" quiet bash -c 'echo $((6 * 7)); (echo sub); exit 3'
if command -v python3 >/dev/null; then
    check "preload of python" quiet python3 -c 'import os, sys; p = os.fork(); p or os._exit(0); os.waitpid(p, 0); print(1); sys.exit(4)'
fi
printf '#include <unistd.h>\nint main(void) { return write(1, "s", 1) != 1; }\n' >"$work/static.c"
if ${CC:-cc} -static -o "$work/static" "$work/static.c" 2>/dev/null; then
    check "preload of a static program" quiet "$work/static"
else
    echo "left out: a static program (no static libc)"
fi

# ---- stand-ins ----
fakes_build "$work" "$src" || exit 99
# (on a busy machine a millisecond for the other's CPU is not much)
least=(EP_OVERLAP_INTERPOSE_LEAST=64k EP_OVERLAP_INTERPOSE_WAIT=100000)

# dlopen, dlsym and dlclose: NCCL's own functions, and it goes away when the program says so
cat >"$work/open.c" <<'C'
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    for (int i = 0; i < 3; i++) {
        void *h = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
        int (*start)(void), (*end)(void);
        *(void **)&start = dlsym(h, "ncclGroupStart");
        *(void **)&end = dlsym(h, "ncclGroupEnd");
        Dl_info info;
        dladdr(*(void **)&start, &info);
        printf("%s %d %d %d\n", info.dli_sname, start(), end(), end());
        dlclose(h);
        printf("%d\n", dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD) != NULL);
    }
    return 0;
}
C
${CC:-cc} -D_GNU_SOURCE -o "$work/open" "$work/open.c" -ldl || exit 99
export LD_LIBRARY_PATH=$work
check "dlopen and dlclose of NCCL" quiet "$work/open"
unset LD_LIBRARY_PATH

# Each place that calls NCCL is looked up once, also where many fall on one place of our table: they
# lie 4096 bytes apart here.
cat >"$work/sites.c" <<'C'
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
extern int ncclGroupStart(void), ncclGroupEnd(void);
static int looked;
__attribute__((visibility("default"))) int dladdr1(const void *at, Dl_info *info, void **extra, int flags) {
    int (*real)(const void *, Dl_info *, void **, int);
    *(void **)&real = dlsym(RTLD_NEXT, "dladdr1");
    looked++;
    return real(at, info, extra, flags);
}
#define SITE(n) __attribute__((noinline, aligned(4096))) int site##n(void) { return ncclGroupStart() + n; }
SITE(0) SITE(1) SITE(2) SITE(3) SITE(4) SITE(5) SITE(6) SITE(7)
int main(void) {
    int (*const site[])(void) = {site0, site1, site2, site3, site4, site5, site6, site7};
    for (int turn = 0; turn < 20; turn++)
        for (int i = 0; i < 8; i++)
            if (site[i]() != i || ncclGroupEnd() != 0)
                return 1;
    printf("looked up %d\n", looked);
    return 0;
}
C
${CC:-cc} -D_GNU_SOURCE -O1 -rdynamic -o "$work/sites" "$work/sites.c" -L"$work" -l:libnccl.so.2 -ldl || exit 99
sites() { LD_LIBRARY_PATH=$work LD_PRELOAD=$library EP_OVERLAP_INTERPOSE=observe "$work/sites"; }
check "call sites are looked up once" test "$(sites)" = "looked up 9"

same_calls() { # MODE N WHAT COUNT [NAME=VALUE...]: the calls that reach NCCL, their results, the output
    local mode=$1 r
    shift
    rm -f "$work"/log.*
    ranks plain "$@" FAKE_NCCL_LOG="$work/log.plain"
    for ((r = 0; r < $1; r++)); do mv "$work/out.$r" "$work/plain.$r"; done
    ranks "$mode" "$@" FAKE_NCCL_LOG="$work/log.with" || :
    sort "$work/log.plain" >"$work/a"
    sort "$work/log.with" >"$work/b"
    test -s "$work/a" || return 1
    diff "$work/a" "$work/b" || return 1
    for ((r = 0; r < $1; r++)); do diff "$work/plain.$r" "$work/out.$r" || return 1; done
}
none=(EP_OVERLAP_INTERPOSE_LEAST=1g)
check "off: every call and result as without" same_calls off 2 random 20
check "observe: every call and result as without" same_calls observe 2 random 20
check "observe: wrong calls, nested groups, non-blocking" same_calls observe 2 codes 1
check "accelerate: wrong calls, nested groups, non-blocking" same_calls accelerate 2 codes 1 "${least[@]}"
check "accelerate, nothing large enough: every call as without" same_calls accelerate 2 random 20 "${none[@]}"
check "observe: the other collectives and ends" same_calls observe 3 others 1
check "accelerate, nothing large enough: the same" same_calls accelerate 3 others 1 "${none[@]}"
check "an error of ncclGroupStart" same_calls observe 1 random 1 FAKE_NCCL_FAIL=ncclGroupStart:3
check "an error of ncclSend" same_calls accelerate 1 random 1 FAKE_NCCL_FAIL=ncclSend:2 "${none[@]}"
check "an error of ncclGroupEnd" same_calls accelerate 1 random 1 FAKE_NCCL_FAIL=ncclGroupEnd:6 "${none[@]}"
check "an error of the initialisation" same_calls accelerate 1 random 1 FAKE_NCCL_FAIL=ncclCommInitRank:2

arrives() { # N WHAT COUNT [NAME=VALUE...]: accelerate, all bytes right, and something was carried
    ranks accelerate "$@" EP_OVERLAP_RECORD="$work" || {
        cat "$work"/out.*
        return 1
    }
    cat "$work"/out.*
    grep -q 'carried by copy engines' "$work/out.0" || return 1
    ! grep -q ' 0.0 MB carried' "$work/out.0"
}
ends_well() { ranks accelerate "$@" || { cat "$work"/out.*; return 1; }; }
check "2 ranks, random sizes" arrives 2 random 60 "${least[@]}"
check "4 ranks, random sizes" arrives 4 random 40 "${least[@]}"
check "everything carried" arrives 3 random 30 "${least[@]}" EP_OVERLAP_INTERPOSE_LEAST=1
check "a driver that takes words one by one" arrives 3 random 30 "${least[@]}" FAKE_CUDA_BATCH=no
# (a late rank would leave one word alone)
check "what stands in a row is one call" arrives 2 random 30 "${least[@]}" FAKE_CUDA_BATCH=only EP_OVERLAP_INTERPOSE_LEAST=1 EP_OVERLAP_INTERPOSE_WAIT=10000000
# A kernel beside the library copies what is a rank's own, where its file is one and the driver takes it.
mkdir "$work/beside"
cp "$library" "$work/beside/"
with_kernel() { # TEXT [NAME=VALUE...]
    printf '%s' "$1" >"$work/beside/intercept_copy.fatbin"
    library=$work/beside/${library##*/} arrives 2 self 16 "${least[@]}" "${@:2}"
}
no_kernel() { # a driver that refuses it: its own copies
    local fault
    for fault in cuModuleLoadData:1 cuModuleGetFunction:1 cuLaunchKernel:1 cuCtxGetDevice:1 cuDeviceGetAttribute:1; do
        with_kernel "fake module" FAKE_CUDA_FAIL="$fault" || return 1
    done
}
check "messages to oneself, without a kernel" arrives 2 self 8 "${least[@]}"
check "messages to oneself by a kernel" with_kernel "fake module"
check "a kernel's file that is none" with_kernel "nonsense"
check "an empty file of a kernel" with_kernel ""
check "a driver that refuses the kernel" no_kernel
kernel_fails() { # later: the call hears it
    printf 'fake module' >"$work/beside/intercept_copy.fatbin"
    ! library=$work/beside/${library##*/} RANK_LIMIT=5 ranks accelerate 2 self 8 "${least[@]}" FAKE_CUDA_FAIL=cuLaunchKernel:3 &&
        grep -q 'ep-overlap: rank 0 of 2: .*CUDA_ERROR_FAKE' "$work/out.0"
}
check "a kernel that cannot be launched any more" kernel_fails
no_folder() { # figures that cannot be written change nothing else
    ranks accelerate 2 random 10 "${least[@]}" EP_OVERLAP_RECORD=/proc/no-such-folder || return 1
    cat "$work"/out.*
    grep -q 'ep-overlap: /proc/no-such-folder.*; no figures written' "$work/out.1" && grep -q 'ok 10' "$work/out.1"
}
check "figures that cannot be written" no_folder
no_number() { # it is told once, whatever the number of communicators, and counts as unset
    local value
    for value in 64kB 1e6 -1 ' 64k' 0x10000 99999999999999999999 1099511627776g k; do
        ranks accelerate 2 random 10 EP_OVERLAP_INTERPOSE_WAIT=100000 EP_OVERLAP_INTERPOSE_LEAST="$value" EP_OVERLAP_RECORD=1 || return 1
        cat "$work/out.0"
        [ "$(grep -cF "warning: EP_OVERLAP_INTERPOSE_LEAST=$value is no number" "$work/out.0")" = 1 ] &&
            grep -q '; 0.0 MB carried by copy engines.*small message' "$work/out.0" || return 1
    done
}
check "sizes that are no numbers" no_number
check "the default stream" arrives 2 default 20 "${least[@]}"
# (a late rank's exchange would go to the stand-in NCCL, whose calls wait for the stream that is held up)
two=("${least[@]}" EP_OVERLAP_INTERPOSE_LEAST=1 EP_OVERLAP_INTERPOSE_WAIT=10000000)
check "a communicator on two streams, of which one is held up" arrives 2 streams 60 "${two[@]}"
check "a driver that does not tell streams apart" arrives 2 streams 20 "${two[@]}" FAKE_CUDA_STREAM_ID=no
check "graphs captured at different calls" arrives 3 graph 12 "${least[@]}"
check "splits" arrives 3 split 8 "${least[@]}"
check "forks" ends_well 2 fork 6 "${least[@]}"
check "data loaders' workers, and children that come and go" arrives 2 loaders 40 "${least[@]}"
check "children that end their parent's communicator" arrives 2 heirs 30 "${two[@]}"
check "communicators that come and go leave nothing" arrives 2 cycles 24 "${least[@]}"
no_rooms() { # none that stays: other tests have some while they make communicators
    local try
    list_rooms() { find /dev/shm -user "$(id -u)" -name 'ep-overlap-*' -newer "$work/exported" 2>/dev/null | sort; }
    list_rooms >"$work/rooms"
    for try in {1..40}; do
        [ -s "$work/rooms" ] || return 0
        sleep 0.25
        comm -12 "$work/rooms" <(list_rooms) >"$work/rooms.$try" && mv "$work/rooms.$try" "$work/rooms"
    done
    cat "$work/rooms"
    return 1
}
crashes() { # COUNT: rank 0 ends by its signal, says nothing, and leaves nothing; the other goes on
    ulimit -c 0
    ranks accelerate 2 crash "$1" "${two[@]}"
    cat "$work"/out.*
    # (the shell says that a job of its own has ended so)
    ! grep -qv 'Segmentation fault' "$work/out.0" && [ "$(cat "$work/out.1")" = "rank 1: ok $1" ] && no_rooms
}
same_crash() { # ... as without
    ulimit -c 0
    ranks plain 2 crash 1
    local status=$? with
    cp "$work/out.1" "$work/plain.1"
    ranks accelerate 2 crash 1 "${least[@]}"
    with=$?
    [ "$status" = "$with" ] && [ "$status" -gt 128 ] && cmp "$work/plain.1" "$work/out.1"
}
check "a crash, with its status" same_crash
check "a crash leaves nothing" crashes 1
check "a crash in an exchange that others wait for" crashes 2
check "an abort ends the waits" arrives 2 abort 1 "${least[@]}"
check "an abort inside a group: closed when it ends" arrives 2 abort 2 "${least[@]}"
check "memory freed and allocated again" arrives 2 renew 40 "${least[@]}"
check "memory that cannot be opened, on one side" arrives 2 random 20 "${least[@]}" FAKE_CUDA_NO_IPC=0
check "sends ahead of their receives" ends_well 3 ahead 20 "${least[@]}"
check "ends that differ in the size" arrives 2 mismatch 40 "${least[@]}"
mixed_up() { # some of these are NCCL's, whose pieces come mixed up, the others are not
    arrives "$@" && ! grep -q "messages 0 were NCCL's" "$work/out.0" && grep -q "of 40 messages [12]\?[0-9] were NCCL's" "$work/out.0"
}
check "... and one rank takes long to open the other's memory" mixed_up 2 mismatch 40 "${least[@]}" EP_OVERLAP_INTERPOSE_WAIT=1000 FAKE_CUDA_SLOW=1
check "ends of which one finds the message too small" ends_well 2 mismatch 40 "${least[@]}" EP_OVERLAP_INTERPOSE_LEAST=250000
check "a rank that comes late" ends_well 2 late 12 EP_OVERLAP_INTERPOSE_LEAST=64k
nobody_late() { # on a busy machine a rank may take longer than it is waited for
    for _ in 1 2 3 4 5; do
        arrives 2 "$@" EP_OVERLAP_INTERPOSE_LEAST=1 || return 1
        grep -q "late peer" "$work"/ep-overlap-nccl-[01].json || return 0
    done
    return 1
}
check "... while there is work before the exchange: it is waited for" nobody_late busy 12
late_told() { ! nobody_late late 12 && grep -q "late peer" "$work"/ep-overlap-nccl-1.json; }
check "... and if there is none: that is told" late_told
check "one rank without P2P: the others go on" arrives 3 random 30 "${least[@]}" FAKE_CUDA_NO_P2P=1
check "ncclAlltoAll is left to NCCL where it is told to" arrives 2 random 30 "${least[@]}" EP_OVERLAP_INTERPOSE_ALLTOALL=0
check "its bytes are told" python3 -c "
import json
c = json.load(open('$work/ep-overlap-nccl-0.json'))['communicators'][0]
assert c['left_to_nccl']['ncclAlltoAll'] == c['alltoall'] and c['carried']['bytes'] > 0, c"
check "one rank without P2P, again" arrives 3 random 30 "${least[@]}" FAKE_CUDA_NO_P2P=1
check "the first exchange is NCCL's, once for each peer" python3 -c "
import json
c = json.load(open('$work/ep-overlap-nccl-2.json'))['communicators'][0]
assert 1 <= c['left_to_nccl']['first message between two ranks']['calls'] <= 3, c"
check "figures are JSON" python3 -c "
import json
f = json.load(open('$work/ep-overlap-nccl-1.json'))
c = f['communicators'][0]
assert f['mapped']['nccl'] == '2.28.9' and f['mode'] == 'accelerate', f
assert c['carried']['bytes'] == 0 and 'peer\'s memory cannot be mapped' in c['left_to_nccl'], c"
left_alone() { # WORDS N WHAT COUNT [NAME=VALUE...]: nothing is carried, the figures say why
    local reason=$1
    shift
    ranks accelerate "$@" EP_OVERLAP_RECORD=1 && cat "$work"/out.* && grep -q ' 0.0 MB carried' "$work/out.0" &&
        grep -qF "$reason" "$work/out.0"
}
check "CUDA_DEVICE_MAX_CONNECTIONS=1" left_alone "CUDA_DEVICE_MAX_CONNECTIONS=1" 2 random 10 "${least[@]}" CUDA_DEVICE_MAX_CONNECTIONS=1
# ---- memory in pieces, as of PyTorch's expandable segments ----
pieces=("${least[@]}" FAKE_CUDA_PIECES=196608)
check "memory in pieces, 2 ranks" arrives 2 random 60 "${pieces[@]}"
check "memory in pieces, 4 ranks, any size" arrives 4 random 30 "${pieces[@]}" EP_OVERLAP_INTERPOSE_LEAST=1
check "memory in pieces as large as all" arrives 3 random 20 "${pieces[@]}" FAKE_CUDA_PIECES=16777216
check "memory in pieces, freed and allocated again" arrives 2 renew 40 "${pieces[@]}"
check "memory in pieces: communicators that come and go leave nothing" arrives 2 cycles 24 "${pieces[@]}"
check "memory in pieces: graphs, splits" eval 'arrives 3 graph 12 "${pieces[@]}" && arrives 3 split 8 "${pieces[@]}"'
check "memory in pieces: one rank takes long to map them" arrives 2 random 30 "${pieces[@]}" FAKE_CUDA_SLOW=1
inherited() {
    local slow
    for slow in none 0 1; do
        arrives 2 inherited 24 "${pieces[@]}" EP_OVERLAP_INTERPOSE_WAIT=10000000 FAKE_CUDA_SLOW="$slow" || return 1
    done
}
check "memory in pieces: children of a fork have nothing of what is handed over" inherited
check "memory in pieces: one rank asked for no handles, the other's is used" arrives 2 random 20 "${pieces[@]}" FAKE_CUDA_NO_IPC=0
check "memory in pieces without handles is told" left_alone "memory that cannot be exported" 2 random 20 "${pieces[@]}" FAKE_CUDA_NO_IPC=1 FAKE_CUDA_NO_P2P=1
check "memory in pieces: one rank without P2P is told" left_alone "peer's memory cannot be mapped" 2 random 20 "${pieces[@]}" FAKE_CUDA_NO_P2P=0
check "memory in pieces: no descriptors left at either end is told" eval \
    'left_alone "limit of open files" 2 random 20 "${pieces[@]}" EXHAUST=0 && left_alone "limit of open files" 2 random 20 "${pieces[@]}" EXHAUST=1'
check "memory in pieces of a GPU that a rank does not see is told" left_alone "GPUs visible to each rank" 2 random 20 "${pieces[@]}" FAKE_CUDA_UNSEEN=0
mixed() { # one rank has the interposer off: nobody carries, nothing hangs
    local unique=m$BASHPID-$RANDOM r status=0 pids=() modes=(accelerate off)
    for r in 0 1; do
        rank_job "${modes[r]}" "$r" 2 "$unique" random 20 "${least[@]}" >"$work/out.$r" 2>&1 &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || status=$?; done
    rm -f /dev/shm/ep-fake-comm-"$unique"* /dev/shm/ep-fake-"$unique"*
    cat "$work"/out.*
    return "$status"
}
check "one rank alone has it on" mixed

cat >"$work/layout.c" <<'C'
#include <stddef.h>
#include <stdio.h>
#include "preload/intercept/agree.h"
int main(void) {
    return printf("%zu %zu %zu %zu %zu %zu %zu %zu %zu\n", offsetof(agree_room, pair), sizeof(agree_pair),
                  sizeof(agree_room), offsetof(agree_pair, taken), offsetof(agree_pair, arrived),
                  offsetof(agree_pair, written), offsetof(agree_pair, message), sizeof(agree_message),
                  offsetof(agree_message, offer) + offsetof(agree_offer, ticket)) < 0;
}
C
layout() { ${CC:-cc} -std=gnu11 -I "$src/lib" -o "$work/layout" "$work/layout.c" && diff <("$work/layout") <(python3 "$src/tests/gpu/intercept_room.py"); }
check "a room as intercept_room.py reads it" layout

# ---- a driver that fails ----
# While a communicator is made, and while two ranks agree: NCCL carries, the results are right.
faults() { # NAME:N...
    local fault
    for fault in "$@"; do
        RANK_LIMIT=20 ranks accelerate 2 random 12 "${least[@]}" EP_OVERLAP_INTERPOSE_LEAST=1 FAKE_CUDA_FAIL="$fault" || {
            echo "$fault"
            cat "$work"/out.*
            return 1
        }
    done
}
check "a driver that fails while a communicator is made" faults cuCtxGetCurrent:1 cuCtxGetStreamPriorityRange:1 \
    cuStreamCreateWithPriority:2 cuStreamCreateWithPriority:3 cuEventCreate:1 cuEventCreate:3 cuMemHostRegister_v2:1 \
    cuMemHostGetDevicePointer_v2:1 cuThreadExchangeStreamCaptureMode:1 cuStreamWaitValue32_v2:1 cuStreamBatchMemOp_v2:1
check "a driver that fails while two ranks agree" faults cuPointerGetAttribute:1 cuPointerGetAttribute:4 cuIpcGetMemHandle:1 \
    cuIpcGetMemHandle:2 cuIpcOpenMemHandle_v2:1 cuIpcOpenMemHandle_v2:2 cuCtxPushCurrent_v2:1 cuCtxPushCurrent_v2:4 \
    cuStreamIsCapturing:1
piece_faults() {
    local least=("${pieces[@]}")
    faults cuMemRetainAllocationHandle:1 cuMemRetainAllocationHandle:9 cuMemGetAllocationPropertiesFromHandle:1 \
        cuMemExportToShareableHandle:1 cuMemExportToShareableHandle:5 cuMemImportFromShareableHandle:1 \
        cuMemImportFromShareableHandle:4 cuMemAddressReserve:1 cuMemMap:1 cuMemMap:3 cuMemSetAccess:1 cuMemUnmap:1 \
        cuMemGetAddressRange_v2:1 cuMemGetAddressRange_v2:4 cuMemAddressFree:1 cuPointerGetAttribute:1 cuPointerGetAttribute:7 cuCtxGetDevice:1
}
check "a driver that fails with memory in pieces" piece_faults
check "a driver that fails at the end" faults cuIpcCloseMemHandle:1 cuMemHostUnregister:1 cuEventQuery:1
# On the stream nobody can take it back: the rank that it fails in hears it, from the call that does it.
told() { # NAME:N...
    local fault
    for fault in "$@"; do
        if RANK_LIMIT=3 ranks accelerate 2 random 40 "${least[@]}" EP_OVERLAP_INTERPOSE_LEAST=1 FAKE_CUDA_FAIL="$fault" ||
            ! grep -q 'ncclGroupEnd.*: 1,\|ncclAlltoAll.*: 1,' "$work/out.0" ||
            ! grep -q 'ep-overlap: rank 0 of 2: .*CUDA_ERROR_FAKE' "$work/out.0"; then
            echo "$fault"
            cat "$work"/out.*
            return 1
        fi
    done
}
check "a driver that fails on the stream" told cuStreamBatchMemOp_v2:4 cuMemcpyAsync:5 cuEventRecord:3
check "nothing is left in shared memory" no_rooms

# ---- another NCCL: older than us, private to a library ----
cat >"$work/local.c" <<'C'
#include <dlfcn.h>
int main(int argc, char **argv) {
    void *h = dlopen("libjob.so", RTLD_NOW | RTLD_LOCAL);
    int (*job)(int, char **);
    *(void **)&job = h ? dlsym(h, "job_main") : 0;
    return job ? job(argc, argv) : 9;
}
C
mkdir "$work/old"
old_build() {
    ${CC:-cc} -std=gnu11 -O1 -I "$src/lib" -DFAKE_OLD -DFAKE_VERSION=21803 -shared -fPIC -fvisibility=hidden \
        -Wl,-soname,libnccl.so.2 -o "$work/old/libnccl.so.2" "$src/tests/fake/nccl.c" -ldl &&
        ${CC:-cc} -std=gnu11 -O1 -I "$src/lib" -Dmain=job_main -DNO_ALLTOALL -shared -fPIC -o "$work/old/libjob.so" \
            "$src/tests/fake/intercept_rank.c" -L"$work/old" -l:libnccl.so.2 -ldl &&
        ${CC:-cc} -o "$work/local" "$work/local.c" -ldl
}
check "an old NCCL builds" old_build
PROGRAM=local
export LD_LIBRARY_PATH=$work/old
cp "$work/libcuda.so.1" "$work/old/" && rm "$work/libnccl.so.2"
check "an NCCL private to a library, older than our words" arrives 2 random 30 "${least[@]}"
cat >"$work/again.c" <<'C'
#include <dlfcn.h>
int main(int argc, char **argv) {
    for (int i = 0, r; i < 3; i++) {
        void *h = dlopen("libjob.so", RTLD_NOW | RTLD_LOCAL);
        int (*job)(int, char **);
        *(void **)&job = h ? dlsym(h, "job_main") : 0;
        if (job == 0 || (r = job(argc, argv)) != 0 || dlclose(h) != 0)
            return 9;
    }
    return 0;
}
C
${CC:-cc} -o "$work/again" "$work/again.c" -ldl || exit 99
again() {
    PROGRAM=again arrives 2 random 8 "${least[@]}" && grep -c 'ok 8' "$work/out.0" | grep -qx 3
}
check "a library with NCCL that is opened and closed again and again" again
check "its version is told" grep -q '"nccl": "2.18.3"' "$work/ep-overlap-nccl-0.json"
${CC:-cc} -std=gnu11 -O1 -I "$src/lib" -shared -fPIC -fvisibility=hidden -o "$work/libnccl-2.so" "$src/tests/fake/nccl.c" -ldl
two() {
    ranks accelerate 2 random 10 "${least[@]}" LD_PRELOAD="$library:$work/libnccl-2.so" || return 1
    cat "$work"/out.*
    grep -q 'warning: 2 NCCL libraries are in this process: .*libnccl.* (2.*) and .*; keep one' "$work/out.0"
}
check "two NCCLs: a warning" two
unset LD_LIBRARY_PATH
inside() { # NCCL in the program: plain calls, one line at the end where something was asked for
    ${CC:-cc} -std=gnu11 -O1 -I "$src/lib" -fvisibility=hidden -Wl,--exclude-libs,ALL -o "$work/inside" \
        "$src/tests/fake/intercept_rank.c" "$src/tests/fake/nccl.c" -Wl,--version-script="$work/none.map" -ldl || return 1
    ranks accelerate 2 random 10 "${least[@]}" || return 1
    cat "$work"/out.*
    grep -q 'NCCL is linked into the program itself: not intercepted' "$work/out.0" || return 1
    ranks observe 2 random 10 || return 1
    cat "$work"/out.*
    ! grep -q ep-overlap "$work/out.0"
}
echo '{ local: *; };' >"$work/none.map"
PROGRAM=inside
check "a program with NCCL inside" inside
unset PROGRAM
exit $failed
