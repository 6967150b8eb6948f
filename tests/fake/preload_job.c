/* SPDX-License-Identifier: Apache-2.0
 *
 * preload_job.c - what jobs do that a preloaded library must bear:
 *     preload_job churn N     N communicators, split, used, destroyed or aborted; prints
 *                             what the process holds after a tenth of them and at the end
 *     preload_job loaders N   N workers by fork at a time, as data loaders are: with threads
 *                             of the parent's going on, ending by exit, _exit and signals
 *     preload_job crash N     a crash, after N exchanges
 * On the stand-ins of this folder; RANK, WORLD_SIZE and UNIQUE set.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "preload/intercept/nccl_abi.h"

#define BYTES 300000

static int (*mem_alloc)(uintptr_t *, size_t), (*stream_create)(cudaStream_t *, unsigned, int);
static int (*sync_stream)(cudaStream_t);
static int rank, ranks;
static uintptr_t out, in;
static cudaStream_t stream;

#define MUST(call)                                                                                 \
    do {                                                                                           \
        const int r_ = (call);                                                                     \
        if (r_ != 0) {                                                                             \
            printf("rank %d: %s: %d\n", rank, #call, r_);                                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void open_cuda(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (cuda == NULL)
        exit(2);
    *(void **)&mem_alloc = dlsym(cuda, "cuMemAlloc_v2");
    *(void **)&stream_create = dlsym(cuda, "cuStreamCreateWithPriority");
    *(void **)&sync_stream = dlsym(cuda, "cuStreamSynchronize");
    MUST(mem_alloc(&out, BYTES * 8));
    MUST(mem_alloc(&in, BYTES * 8));
    MUST(stream_create(&stream, 1, 0));
}

static ncclComm_t make(int number) {
    ncclUniqueId id;
    ncclComm_t c;
    memset(&id, 0, sizeof id);
    snprintf(id.internal, sizeof id.internal, "%.80s-%d", getenv("UNIQUE"), number);
    MUST(ncclCommInitRank(&c, ranks, id, rank));
    return c;
}

static void exchange(ncclComm_t c) {
    MUST(ncclGroupStart());
    for (int p = 0; p < ranks; p++) {
        MUST(ncclSend((void *)(out + (uintptr_t)p * BYTES), BYTES, 0, p, c, stream));
        MUST(ncclRecv((void *)(in + (uintptr_t)p * BYTES), BYTES, 0, p, c, stream));
    }
    MUST(ncclGroupEnd());
    MUST(sync_stream(stream));
}

static int entries(const char *folder) {
    DIR *d = opendir(folder);
    int n = 0;
    while (d != NULL && readdir(d) != NULL)
        n++;
    if (d != NULL)
        closedir(d);
    return n;
}

static long resident_pages(void) {
    FILE *f = fopen("/proc/self/statm", "re");
    long all = 0, resident = 0;
    if (f == NULL || fscanf(f, "%ld %ld", &all, &resident) != 2)
        exit(2);
    fclose(f);
    return resident;
}

static int maps(void) {
    FILE *f = fopen("/proc/self/maps", "re");
    int lines = 0;
    for (int c; f != NULL && (c = getc(f)) != EOF;)
        lines += c == '\n';
    if (f != NULL)
        fclose(f);
    return lines;
}

static void tell(const char *when) {
    printf("%s: files %d threads %d maps %d pages %ld\n", when, entries("/proc/self/fd"),
           entries("/proc/self/task"), maps(), resident_pages());
}

static void churn(int count) {
    for (int i = 0; i < count; i++) {
        ncclComm_t c = make(i), half = NULL;
        exchange(c);
        MUST(ncclCommSplit(c, 0, rank, &half, NULL));
        exchange(half);
        MUST(i % 3 == 0 ? ncclCommAbort(half) : ncclCommDestroy(half));
        MUST(i % 3 == 1 ? ncclCommAbort(c) : ncclCommDestroy(c));
        if (i == count / 10)
            tell("early");
    }
    tell("late");
}

/* ---- data loaders ---- */

static atomic_int stop;

static void *allocate(void *nothing) {
    (void)nothing;
    while (!atomic_load(&stop)) {
        void *p[64];
        for (int i = 0; i < 64; i++)
            p[i] = malloc((size_t)1 << (i % 16));
        for (int i = 0; i < 64; i++)
            free(p[i]);
    }
    return NULL;
}

static void worker(int i) {
    char *work = malloc(1 << 20);
    memset(work, i, 1 << 20);
    if (i % 4 == 0 && fork() == 0) /* one that starts another */
        exit(0);
    if (i % 4 == 1)
        _exit(3);
    if (i % 4 == 2)
        raise(SIGKILL);
    free(work);
    exit(4);
}

static void loaders(int count) {
    ncclComm_t c = make(0);
    pthread_t thread[2];
    for (int i = 0; i < 2; i++)
        MUST(pthread_create(&thread[i], NULL, allocate, NULL));
    int sums[3] = {0, 0, 0};
    for (int round = 0; round < 3; round++) {
        pid_t child[256];
        for (int i = 0; i < count && i < 256; i++) {
            child[i] = fork();
            if (child[i] == 0)
                worker(i);
            if (i % 8 == 0)
                exchange(c);
        }
        for (int i = 0; i < count && i < 256; i++) {
            int status = 0;
            if (waitpid(child[i], &status, 0) != child[i])
                exit(5);
            sums[0] += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
            sums[1] += WIFEXITED(status) && WEXITSTATUS(status) == 3;
            sums[2] += WIFEXITED(status) && WEXITSTATUS(status) == 4;
        }
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++)
        MUST(pthread_join(thread[i], NULL));
    exchange(c);
    MUST(ncclCommDestroy(c));
    printf("killed %d, left %d, ended %d\n", sums[0], sums[1], sums[2]);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    const int count = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 1;
    rank = (int)strtol(getenv("RANK"), NULL, 10);
    ranks = (int)strtol(getenv("WORLD_SIZE"), NULL, 10);
    setvbuf(stdout, NULL, _IOLBF, 0);
    open_cuda();
    if (strcmp(what, "churn") == 0) {
        churn(count);
    } else if (strcmp(what, "loaders") == 0) {
        loaders(count);
    } else if (strcmp(what, "crash") == 0) {
        ncclComm_t c = make(0);
        for (int i = 0; i < count; i++)
            exchange(c);
        printf("now\n");
        raise(SIGSEGV);
    }
    printf("rank %d: ok\n", rank);
    return 0;
}
