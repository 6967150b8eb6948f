/* SPDX-License-Identifier: Apache-2.0
 *
 * intercept_life.h - of intercept_rank.c, which includes it: processes and communicators that come
 * and go, and such as crash.
 */
#ifndef EPO_TESTS_FAKE_INTERCEPT_LIFE_H
#define EPO_TESTS_FAKE_INTERCEPT_LIFE_H

/* A data loader's worker: answers until its pipe is closed. */
static void work(int in, int out) {
    unsigned char word;
    while (read(in, &word, 1) == 1) {
        word++;
        if (write(out, &word, 1) != 1)
            exit(1);
    }
    exit(0); /* with exit handlers */
}

enum { WORKERS = 4 };

static struct {
    pid_t pid;
    int to, from;
} workers[WORKERS];

static void worker_start(int i) {
    int there[2], back[2];
    MUST(pipe(there));
    MUST(pipe(back));
    workers[i].pid = fork();
    if (workers[i].pid == 0) {
        for (int k = 0; k < i; k++)
            close(workers[k].to);
        close(there[1]);
        work(there[0], back[1]);
    }
    close(there[0]);
    close(back[1]);
    workers[i].to = there[1];
    workers[i].from = back[0];
}

static void must_end(pid_t child) {
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0)
        fail("child", status, 0);
}

static atomic_bool loading;

/* One that is started for each file, by fork alone or by a program, beside the exchanges. */
static void *load(void *argument) {
    (void)argument;
    for (int n = 0; atomic_load(&loading); n++) {
        const pid_t child = fork();
        if (child == 0 && n % 2 == 0)
            execl("/bin/sh", "sh", "-c", "exit 0", NULL);
        if (child == 0)
            exit(n % 2 == 0);
        must_end(child);
    }
    return NULL;
}

/* Workers that live as long as the communicator and longer, and such as come and go. */
static void loaders(ncclComm_t c, cudaStream_t s, uint64_t count) {
    pthread_t thread;
    for (int i = 0; i < WORKERS; i++)
        worker_start(i);
    atomic_store(&loading, true);
    MUST(pthread_create(&thread, NULL, load, NULL));
    for (uint64_t call = 0; call < count; call++) {
        const unsigned char said = (unsigned char)call;
        unsigned char heard = 0;
        const int i = (int)(call % WORKERS);
        if (write(workers[i].to, &said, 1) != 1)
            fail("a worker does not read", i, (long)call);
        exchange(c, s, call);
        if (read(workers[i].from, &heard, 1) != 1 || heard != (unsigned char)(said + 1))
            fail("a worker's answer", i, heard);
    }
    atomic_store(&loading, false);
    pthread_join(thread, NULL);
    MUST(ncclCommDestroy(c));
    for (int i = 0; i < WORKERS; i++) {
        close(workers[i].to);
        close(workers[i].from);
        must_end(workers[i].pid);
    }
}

/* EXHAUST=N: process number N may open a few files more, no longer. */
static void exhaust(void) {
    const char *given = getenv("EXHAUST");
    int last = -1;
    if (given == NULL || strtol(given, NULL, 10) != rank)
        return;
    for (int one; (one = dup(0)) >= 0;)
        last = one;
    for (int i = 0; i < 4; i++)
        close(last - i);
}

/* Descriptors that memory is handed over with, which the stand-in marks so, and sockets.  (It keeps
 * its own from 300 on.) */
static int count_ours(void) {
    struct stat st;
    int n = 0;
    for (int fd = 3; fd < 300; fd++)
        n += fstat(fd, &st) == 0 && (S_ISSOCK(st.st_mode) || (fcntl(fd, F_GETFL) & O_APPEND) != 0);
    return n;
}

static void *inherit(void *argument) {
    (void)argument;
    while (atomic_load(&loading)) {
        const pid_t child = fork();
        if (child == 0)
            _exit(count_ours() != 0);
        must_end(child);
    }
    return NULL;
}

/* Children that do not exec, started while memory is handed over, have nothing of it. */
static void inherited(ncclComm_t c, cudaStream_t s, uint64_t count) {
    pthread_t thread;
    atomic_store(&loading, true);
    MUST(pthread_create(&thread, NULL, inherit, NULL));
    renew(c, s, count);
    atomic_store(&loading, false);
    pthread_join(thread, NULL);
}

/* Children end the communicator that they have of their parent, as a process group's destructor
 * does where one exits; the parent's goes on. */
static void heirs(ncclComm_t c, cudaStream_t s, uint64_t count) {
    for (uint64_t call = 0; call < count; call++) {
        exchange(c, s, 2 * call);
        const pid_t child = fork();
        if (child == 0) {
            const ncclResult_t r = call % 2 == 0 ? ncclCommAbort(c) : ncclCommDestroy(c);
            usleep(5000);
            exit(r == ncclSuccess);
        }
        exchange(c, s, 2 * call + 1);
        must_end(child);
    }
}

/* Rank 0 dies of a wrong address: behind an exchange, or `held`, when its stream never comes to
 * one, and the other ends its waits for it. */
static void crash(ncclComm_t c, cudaStream_t s, bool held) {
    const int other = 1 - rank;
    uintptr_t word;
    exchange(c, s, 0);
    if (held) {
        MUST(mem_alloc(&word, 4096));
        if (rank == 0)
            MUST(wait_value(s, word, 1, 0));
        MUST(ncclGroupStart());
        MUST(ncclSend((void *)send_buffer.device, 500000, 0, other, c, s));
        MUST(ncclRecv((void *)recv_buffer.device, 500000, 0, other, c, s));
        MUST(ncclGroupEnd());
    }
    if (rank == 0)
        kill(getpid(), SIGSEGV);
    usleep(300000);
    if (held)
        MUST(ncclCommAbort(c));
    MUST(sync_stream(s));
}

static int count_lines(const char *path, const char *with) {
    char line[512];
    int n = 0;
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        n += strstr(line, with) != NULL;
    if (f != NULL)
        fclose(f);
    return n;
}

static int count_open(void) {
    int n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Communicators that come and go, ended in every way: nothing is left of them in the process. */
static void cycles(ncclComm_t c, cudaStream_t s, uint64_t count) {
    int maps = 0, files = 0;
    for (uint64_t call = 0; call < count; call++) {
        ncclComm_t one;
        MUST(ncclCommSplit(c, 0, rank, &one, NULL));
        exchange(one, s, call);
        MUST(call % 2 == 0 ? ncclCommDestroy(one) : ncclCommAbort(one));
        exchange(c, s, call); /* (all have ended theirs) */
        if (call == 2) {
            maps = count_lines("/proc/self/maps", "/ep-overlap-");
            files = count_open();
        }
    }
    const int maps_now = count_lines("/proc/self/maps", "/ep-overlap-"), files_now = count_open();
    if (maps_now > maps + 1 || files_now > files) /* (one whose peer has not closed it yet) */
        fail("left behind", maps_now - maps, files_now - files);
}

#endif
