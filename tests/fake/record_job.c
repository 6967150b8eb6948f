/* SPDX-License-Identifier: Apache-2.0
 *
 * record_job.c - a program with a training loop, on the stand-ins of NCCL and CUPTI:
 *     record_job WHAT STEPS
 * A step is 20 ms: a GEMM from 0 to 8, an exchange from 4 to 12, another kernel from 12 to
 * 16, a copy to a peer from 14 to 15.  So 9 ms of communication, 4 of them beside a GEMM.
 * WHAT is a list of letters: what else it does, see main().  Prints what it saw itself,
 * and how late the machine let its steps begin.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "preload/intercept/nccl_abi.h"
#include "preload/record/cupti_abi.h"

ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
cupti_result cuptiSubscribe(cupti_subscriber *out, cupti_callback *callback, void *user);
cupti_result cuptiUnsubscribe(cupti_subscriber s);
cupti_result cuptiActivityRegisterCallbacks(cupti_buffer_requested *, cupti_buffer_completed *);
cupti_result cuptiActivityEnable(cupti_kind kind);
cupti_result cuptiActivityDisable(cupti_kind kind);
cupti_result cuptiActivityEnableContext(void *cuda, cupti_kind kind);
cupti_result cuptiActivityDisableContext(void *cuda, cupti_kind kind);
cupti_result cuptiActivityFlushAll(uint32_t flag);
cupti_result cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, cupti_record **r);
cupti_result cuptiActivityRegisterTimestampCallback(cupti_clock *clock);
int fake_cupti_ran(cupti_kind kind, const char *name, uint32_t device, uint32_t stream,
                   uint64_t ago, uint64_t length, int copy);

int fake_cupti_call(void);

#define MS UINT64_C(1000000)
#define STEP_MS 20

static ncclComm_t comm;
static int devices = 1, extra;
static long seen;     /* kernels in the profiler's own trace */
static long recorded; /* kernels that anybody recorded */
static int profiled;
static pthread_t main_thread;
static uint64_t due;        /* when the next step begins; 0: whenever */
static uint64_t late, lost; /* a step at most, and what they did not catch up with */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void sleep_until(uint64_t when) {
    const struct timespec t = {(time_t)(when / 1000000000u), (long)(when % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static void run_kernels(uint64_t begin) {
    const uint64_t now = now_ns();
#define RAN(kind, name, stream, from, to, copy)                                                    \
    (void)fake_cupti_ran(kind, name, (uint32_t)d, stream, now - (begin + (from)*MS),               \
                         ((to) - (from)) * MS, copy)
    for (int d = 0; d < devices; d++) {
        RAN(CUPTI_KIND_CONCURRENT_KERNEL, "nvjet_hsh_128x256_NNT", 7, 0, 8, 0);
        RAN(CUPTI_KIND_CONCURRENT_KERNEL,
            "_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE", 20, 4, 12, 0);
        RAN(CUPTI_KIND_CONCURRENT_KERNEL, "_ZN2at6native4siluIfEEvPT_i", 7, 12, 16, 0);
        RAN(CUPTI_KIND_MEMCPY, NULL, 33, 14, 15, CUPTI_COPY_PEER);
        recorded += fake_cupti_ran(CUPTI_KIND_MEMSET, NULL, (uint32_t)d, 7, 3 * MS, MS, 0);
    }
    for (int i = 0; i < extra; i++)
        (void)fake_cupti_ran(CUPTI_KIND_CONCURRENT_KERNEL, "tiny", 0, 7, now - begin - 16 * MS, 1,
                             0);
}

static void step(void) {
    const uint64_t now = now_ns(), behind = due != 0 && now > due ? now - due : 0;
    /* a step that was late makes the next ones none */
    const uint64_t begin = due != 0 && behind < STEP_MS * MS ? due : now;
    float x = 0;
    late = behind > late ? behind : late;
    lost += behind < STEP_MS * MS ? 0 : behind;
    due = begin + STEP_MS * MS;
    (void)fake_cupti_call();
    (void)ncclAllGather(&x, &x, 1, 7, comm, NULL);
    (void)ncclAllReduce(&x, &x, 100, 7, 0, comm, NULL);
    (void)ncclAllGather(&x, &x, 1, 7, comm, NULL);
    sleep_until(begin + STEP_MS * MS);
    run_kernels(begin);
}

/* ---- a profiler in the program, as PyTorch's ---- */

static uint8_t *theirs[64];
static int given;

static void requested(uint8_t **buffer, size_t *size, size_t *most) {
    *size = 65536;
    *most = 0;
    *buffer = given < 64 ? aligned_alloc(4096, *size) : NULL;
    if (*buffer != NULL)
        theirs[given++] = *buffer;
}

static void completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    cupti_record *r = NULL;
    (void)context;
    (void)stream;
    (void)size;
    int known = 0;
    for (int i = 0; i < given; i++)
        known |= theirs[i] == buffer;
    if (!known)
        printf("a buffer that is not the profiler's\n");
    while (known && cuptiActivityGetNextRecord(buffer, valid, &r) == CUPTI_OK)
        seen += r->kind == CUPTI_KIND_CONCURRENT_KERNEL;
}

/* Not nanoseconds: a counter of 2.5 GHz. */
static uint64_t ticks(void) { return now_ns() * 5 / 2; }

static void callback(void *user, int domain, uint32_t id, const void *data) {
    (void)user, (void)domain, (void)id, (void)data;
}

static cupti_subscriber subscriber;

static void profile(int steps) {
    static int subscribed;
    profiled = 1;
    if (!subscribed && cuptiSubscribe(&subscriber, callback, NULL) != CUPTI_OK)
        printf("the profiler cannot subscribe\n");
    subscribed = 1;
    (void)cuptiActivityRegisterTimestampCallback(ticks);
    (void)cuptiActivityRegisterCallbacks(requested, completed);
    (void)cuptiActivityEnable(CUPTI_KIND_CONCURRENT_KERNEL);
    (void)cuptiActivityEnable(CUPTI_KIND_MEMCPY);
    seen = 0;
    for (int i = 0; i < steps; i++)
        step();
    (void)cuptiActivityDisable(CUPTI_KIND_CONCURRENT_KERNEL);
    (void)cuptiActivityDisable(CUPTI_KIND_MEMCPY);
    (void)cuptiActivityFlushAll(1);
    printf("profiled %d steps: %ld kernels\n", steps, seen);
}

static int unseen;

/* The same by dlsym() on the library, which nobody stands in front of. */
static void profile_unseen(int begin) {
    void *h = dlopen("libcupti.so.13", RTLD_NOW | RTLD_NOLOAD);
    cupti_result (*subscribe)(cupti_subscriber *, cupti_callback *, void *);
    cupti_result (*enable)(cupti_kind), (*disable)(cupti_kind), (*flush)(uint32_t);
    cupti_result (*callbacks)(cupti_buffer_requested *, cupti_buffer_completed *);
    *(void **)&subscribe = dlsym(h, "cuptiSubscribe");
    *(void **)&enable = dlsym(h, "cuptiActivityEnable");
    *(void **)&disable = dlsym(h, "cuptiActivityDisable");
    *(void **)&flush = dlsym(h, "cuptiActivityFlushAll");
    *(void **)&callbacks = dlsym(h, "cuptiActivityRegisterCallbacks");
    if (begin) {
        seen = 0;
        if (subscribe(&subscriber, callback, NULL) != CUPTI_OK) {
            printf("the unseen profiler cannot subscribe\n");
            return;
        }
        unseen = 1;
        (void)callbacks(requested, completed);
        (void)enable(CUPTI_KIND_CONCURRENT_KERNEL);
    } else if (unseen) {
        (void)disable(CUPTI_KIND_CONCURRENT_KERNEL);
        (void)flush(1);
        printf("profiled unseen: %ld kernels\n", seen);
    }
}

/* Kinds switched for one CUDA context. */
static void switch_contexts(int globally) {
    int one, other;
    if (globally)
        (void)cuptiActivityEnable(CUPTI_KIND_MEMSET);
    else
        (void)cuptiActivityEnableContext(&other, CUPTI_KIND_MEMSET);
    (void)cuptiActivityEnableContext(&one, CUPTI_KIND_MEMSET);
    (void)cuptiActivityDisableContext(&one, CUPTI_KIND_MEMSET);
    if (!globally)
        (void)cuptiActivityDisableContext(&other, CUPTI_KIND_MEMSET);
}

static void forked(void) {
    const pid_t child = fork();
    if (child == 0) {
        step();
        exit(0); /* its handlers run, too */
    }
    int status = 0;
    (void)waitpid(child, &status, 0);
    due = 0;
    printf("child: %d\n", status);
}

/* As torch.multiprocessing.spawn has it: ranks are numbers that the program gives.  It waits for
 * them. */
static int spawned(ncclUniqueId id) {
    ncclComm_t world;
    int status = 0, bad = 0;
    for (int rank = 0; rank < 2; rank++) {
        id.internal[sizeof id.internal - 2] = 's';
        const pid_t child = fork();
        if (child == 0)
            return ncclCommInitRank(&world, 2, id, rank) != ncclSuccess;
        bad |= child < 0;
    }
    while (wait(&status) > 0)
        bad |= status != 0;
    exit(bad);
}

static atomic_int strikes; /* soon: a signal, in the middle of a call */

static void end_it(int signal) {
    (void)signal;
    exit(9);
}

/* Also the library's: recorder_call() asks for the time of a call with its lock held. */
int clock_gettime(clockid_t clock, struct timespec *t) {
    Dl_info info;
    int one = 1;
    if (atomic_load(&strikes) != 0 && pthread_equal(pthread_self(), main_thread) &&
        dladdr(__builtin_return_address(0), &info) != 0 &&
        strstr(info.dli_fname, "libep_overlap") != NULL &&
        atomic_compare_exchange_strong(&strikes, &one, 0))
        (void)raise(SIGTERM);
    return (int)syscall(SYS_clock_gettime, clock, t);
}

/* Nobody reads what is written to standard error. */
static void lose_reader(void) {
    int ends[2];
    if (pipe(ends) != 0 || dup2(ends[1], 2) != 2)
        abort();
    close(ends[0]);
    close(ends[1]);
}

static void limit_files(void) {
    const struct rlimit small = {700, 700};
    if (setrlimit(RLIMIT_FSIZE, &small) != 0)
        abort();
}

/* The recorder's thread may not read what the program may be changing. */
char *getenv(const char *name) {
    char thread[16] = "";
    Dl_info info;
    const size_t n = strlen(name);
    if (pthread_getname_np(pthread_self(), thread, sizeof thread) == 0 &&
        strcmp(thread, "ep-overlap") == 0 && dladdr(__builtin_return_address(0), &info) != 0 &&
        strstr(info.dli_fname, "libep_overlap") != NULL)
        fprintf(stderr, "the recorder's thread asked for %s\n", name);
    for (char **e = environ; e != NULL && *e != NULL; e++)
        if (strncmp(*e, name, n) == 0 && (*e)[n] == '=')
            return *e + n + 1;
    return NULL;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    const int steps = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 10;
    ncclUniqueId id;
    const char *unique = getenv("UNIQUE");
    memset(&id, 0, sizeof id);
    snprintf(id.internal, sizeof id.internal, "%.40s-%d", unique != NULL ? unique : "",
             (int)getpid());
    main_thread = pthread_self();
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strchr(what, 'E') != NULL) /* small kernels by the thousand */
        extra = 2000;
    if (strchr(what, 'G') != NULL)
        devices = 2;
    if (strchr(what, 'b') != NULL) {
        profile(5); /* before there is a communicator */
    }
    if (strchr(what, 's') != NULL && spawned(id) != 0) /* two ranks, of which no variable tells */
        return 3;
    if (ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess)
        return 3;
    if (strchr(what, 'd') != NULL && chdir("/") != 0)
        return 3;
    due = 0;
    float x = 0;
    (void)ncclBroadcast(&x, &x, 1, 7, 0, comm, NULL);
    if (strchr(what, 'B') != NULL)
        profile(20);
    if (strpbrk(what, "cC") != NULL)
        switch_contexts(strchr(what, 'C') != NULL);
    if (strchr(what, 'u') != NULL)
        profile_unseen(1);
    for (int i = 0; i < steps; i++) {
        if (i == 10 && strchr(what, 'i') != NULL) { /* nothing runs, then there is a profiler */
            late += recorded > 0 ? 1000 * MS : 0;   /* something ran in the window */
            sleep_until(now_ns() + 700 * MS);
            due = 0;
            profile(20);
        }
        if (i == steps / 2 && strchr(what, 'h') != NULL) {
            (void)signal(SIGTERM, end_it);
            strikes = 1;
        }
        if (i == steps / 2 && strchr(what, 'm') != NULL)
            profile(20); /* in the middle */
        if (recorded > 0 && !profiled && strchr(what, 'w') != NULL)
            profile(20); /* as soon as somebody records */
        if (i == steps / 2 && strchr(what, 'U') != NULL)
            profile_unseen(1);
        if (i == steps / 2 && strchr(what, 'f') != NULL)
            forked();
        if (i % 10 == 5 && strchr(what, 'l') != NULL)
            (void)ncclReduce(&x, &x, 1, 7, 0, 0, comm, NULL); /* what a log line costs */
        step();
    }
    if (strpbrk(what, "uU") != NULL)
        profile_unseen(0);
    if (strchr(what, 'r') != NULL)
        fake_cupti_ran(CUPTI_KIND_CONCURRENT_KERNEL, "endless", 0, 7, 0, 0, 0);
    if (strchr(what, 'a') != NULL)
        abort();
    if (strchr(what, 'x') != NULL)
        _exit(7);
    printf("late %.3f ms, lost %.3f ms\n", (double)late / MS, (double)lost / MS);
    printf("ended\n");
    if (strchr(what, 'p') != NULL)
        lose_reader();
    if (strchr(what, 'z') != NULL)
        limit_files();
    return 0;
}
