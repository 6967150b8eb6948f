/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/intercept/agree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Of a pair's word. */
enum { PAIR_LOWER = 1, PAIR_HIGHER = 2, PAIR_AGREED = 3, PAIR_REFUSED = 4 };
#define PATIENCE_LEAST_S 1e-3
#define ROOM_FOLDER "/dev/shm"
#define ROOM_NAME "ep-overlap-%016llx%016llx-3"
#define SWEEP_AGE_S 3600.0
#define FILL_TRIES 100
#define WHOLE_REFUSED 0x80000000u

double agree_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void nap(void) {
    const struct timespec t = {0, 50000};
    nanosleep(&t, NULL);
}

/* A timer of the program's (a profiler's) may interrupt it. */
static bool room_fill(int fd) {
    int error = EINTR;
    for (int i = 0; i < FILL_TRIES && error == EINTR; i++)
        error = posix_fallocate(fd, 0, (off_t)sizeof(agree_room));
    return error == 0;
}

/* Zeros are a valid empty room, so whoever comes first makes it.  Anybody else's file
 * of that name is refused. */
static agree_room *room_open(const char *path) {
    const int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    struct stat st;
    void *p = MAP_FAILED;
    if (fd < 0)
        return NULL;
    const bool ours = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
                      (st.st_mode & 077) == 0 && st.st_nlink == 1;
    if (ours && flock(fd, LOCK_SH | LOCK_NB) == 0 && room_fill(fd))
        p = mmap(NULL, sizeof(agree_room), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ours && p == MAP_FAILED)
        (void)unlink(path); /* no room for it: whoever has it goes on, and sees nobody else */
    close(fd);
    return p == MAP_FAILED ? NULL : p; /* (the lock is held as long as the memory is mapped) */
}

static bool sweep_one(int folder, const char *name, double age_s) {
    const int fd = openat(folder, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;
    bool gone = false;
    if (fd < 0)
        return false;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
        difftime(time(NULL), st.st_ctime) >= age_s && flock(fd, LOCK_EX | LOCK_NB) == 0)
        gone = unlinkat(folder, name, 0) == 0;
    close(fd);
    return gone;
}

int agree_sweep(const char *folder, double age_s) {
    DIR *d = opendir(folder);
    int gone = 0;
    for (const struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        unsigned long long word[2];
        int end = 0;
        if (sscanf(e->d_name, ROOM_NAME "%n", &word[0], &word[1], &end) == 2 && end > 0 &&
            e->d_name[end] == '\0')
            gone += sweep_one(dirfd(d), e->d_name, age_s);
    }
    if (d != NULL)
        closedir(d);
    return gone;
}

static void sweep_once(void) { (void)agree_sweep(ROOM_FOLDER, SWEEP_AGE_S); }

bool agree_enter(agree *a, const comm_key *key) {
    static pthread_once_t swept = PTHREAD_ONCE_INIT;
    pthread_once(&swept, sweep_once);
    snprintf(a->path, sizeof a->path, ROOM_FOLDER "/" ROOM_NAME, (unsigned long long)key->word[0],
             (unsigned long long)key->word[1]);
    a->room = room_open(a->path);
    if (a->room == NULL)
        return false;
    a->me = (int)atomic_fetch_add(&a->room->entered, 1);
    if (a->me >= AGREE_RANKS) {
        agree_leave(a);
        return false;
    }
    atomic_store(&a->room->card[a->me].state, AGREE_ENTERED);
    return true;
}

int agree_count(const agree *a) {
    const unsigned n = atomic_load(&a->room->entered);
    return n > AGREE_RANKS ? AGREE_RANKS : (int)n;
}

void agree_show(agree *a, const epo_terms_card *terms) {
    agree_card *card = &a->room->card[a->me];
    card->terms = *terms;
    atomic_store(&card->state, terms->usable ? AGREE_READY : AGREE_WITHDRAWN);
}

bool agree_wait_card(agree *a, int i, double limit_s) {
    const double until = agree_now() + limit_s;
    unsigned state;
    while ((state = atomic_load(&a->room->card[i].state)) < AGREE_READY) {
        if (agree_now() > until)
            return false;
        nap();
    }
    return state == AGREE_READY;
}

static atomic_uint *pair_of(agree *a, int i, unsigned *bit) {
    *bit = a->me < i ? PAIR_LOWER : PAIR_HIGHER;
    return a->me < i ? &a->room->vote[a->me][i] : &a->room->vote[i][a->me];
}

/* What is agreed or refused stays so. */
void agree_vote(agree *a, int i, bool yes) {
    unsigned bit;
    atomic_uint *word = pair_of(a, i, &bit);
    unsigned now = atomic_load(word);
    do {
        if ((now & PAIR_REFUSED) != 0 || now == PAIR_AGREED)
            return;
    } while (!atomic_compare_exchange_weak(word, &now, yes ? now | bit : PAIR_REFUSED));
}

bool agree_verdict(agree *a, int i, double limit_s) {
    const double until = agree_now() + limit_s;
    unsigned bit, now;
    atomic_uint *word = pair_of(a, i, &bit);
    while ((now = atomic_load(word)) != PAIR_AGREED && (now & PAIR_REFUSED) == 0) {
        if (agree_now() > until)
            agree_vote(a, i, false); /* unless the peer has just agreed */
        else
            nap();
    }
    return now == PAIR_AGREED;
}

static bool all_pairs(const agree *a, int ranks, bool *decided) {
    bool agreed = true;
    *decided = true;
    for (int i = 0; i < ranks; i++)
        for (int k = i + 1; k < ranks; k++) {
            const unsigned now = atomic_load(&a->room->vote[i][k]);
            agreed = agreed && now == PAIR_AGREED;
            *decided = *decided && (now == PAIR_AGREED || (now & PAIR_REFUSED) != 0);
        }
    return agreed;
}

/* Counts the ranks that saw all pairs agree: complete or refused, whichever is first. */
bool agree_whole(agree *a, int ranks, double limit_s) {
    const double until = agree_now() + limit_s;
    atomic_uint *word = &a->room->whole;
    bool decided = false, yes = false;
    while (agree_count(a) == ranks && !decided && agree_now() < until) {
        yes = all_pairs(a, ranks, &decided);
        if (!decided)
            nap();
    }
    unsigned now = atomic_load(word);
    while (!(decided && yes) && now != (unsigned)ranks && (now & WHOLE_REFUSED) == 0 &&
           !atomic_compare_exchange_weak(word, &now, now | WHOLE_REFUSED))
        ;
    if (decided && yes)
        atomic_fetch_add(word, 1);
    while ((now = atomic_load(word)) != (unsigned)ranks && (now & WHOLE_REFUSED) == 0) {
        if (agree_now() > until)
            (void)atomic_compare_exchange_strong(word, &now, now | WHOLE_REFUSED);
        else
            nap();
    }
    return now == (unsigned)ranks;
}

/* ---- one message ---- */

/* The other end has gone ahead and used the place again.  A receiver offers one message after
 * the other, so only the last offer that was taken can be meant. */
static unsigned message_past(agree_pair *p, uint32_t number) {
    return atomic_load(&p->taken) == number ? AGREE_TAKEN : AGREE_REFUSED;
}

/* From what is there of an earlier message, or of this one in state `from`, to `to`.  The
 * state after that. */
static unsigned message_set(agree_pair *p, uint32_t number, unsigned from, unsigned to) {
    atomic_uint *word = &p->message[number % AGREE_RING].word;
    unsigned now = atomic_load(word);
    for (;;) {
        const int32_t ahead = (int32_t)(((now >> 2) - number) << 2);
        if (ahead > 0)
            return message_past(p, number);
        if (ahead == 0 && now != 0 && (now & 3) != from)
            return now & 3;
        if (atomic_compare_exchange_weak(word, &now, number << 2 | to))
            return to;
    }
}

static unsigned message_state(agree_pair *p, uint32_t number) {
    const unsigned now = atomic_load(&p->message[number % AGREE_RING].word);
    const int32_t ahead = (int32_t)(((now >> 2) - number) << 2);
    return ahead > 0 ? message_past(p, number) : ahead < 0 ? 0 : now & 3;
}

/* A sender that was late may read while the receiver's next offer is written over it, and looks
 * at the message's state afterwards: whoever saw one of the new words sees that the old message
 * had been decided before. */
static void offer_write(agree_message *m, const agree_offer *offer) {
    uint64_t words[AGREE_OFFER_WORDS] = {0};
    memcpy(words, offer, sizeof *offer);
    for (size_t i = 0; i < AGREE_OFFER_WORDS; i++)
        atomic_store_explicit(&m->offer[i], words[i], memory_order_release);
}

static void offer_read(agree_message *m, agree_offer *offer) {
    uint64_t words[AGREE_OFFER_WORDS] = {0};
    for (size_t i = 0; i < AGREE_OFFER_WORDS; i++)
        words[i] = atomic_load_explicit(&m->offer[i], memory_order_acquire);
    memcpy(offer, words, sizeof *offer);
}

void agree_refuse(agree_pair *p, uint32_t number, unsigned why) {
    atomic_store(&p->message[number % AGREE_RING].why, number << 6 | why);
    (void)message_set(p, number, AGREE_OFFERED, AGREE_REFUSED);
}

unsigned agree_why(agree_pair *p, uint32_t number) {
    const unsigned why = atomic_load(&p->message[number % AGREE_RING].why);
    return (why ^ number << 6) < 64 ? why & 63 : 0;
}

bool agree_give(agree_pair *p, uint32_t number, const agree_offer *offer) {
    if (message_state(p, number) == AGREE_REFUSED)
        return false;
    offer_write(&p->message[number % AGREE_RING], offer);
    return message_set(p, number, 0, AGREE_OFFERED) == AGREE_OFFERED;
}

static void look_again(unsigned turn) {
    if (turn % 64 == 63)
        sched_yield();
}

static bool is_over(const agree_limit *limit) {
    const struct timespec nap = {0, 20000};
    const double now = agree_now();
    if (now > limit->until)
        return true;
    if (limit->busy == NULL || now <= limit->idle)
        return false;
    if (!limit->busy(limit->of))
        return true;
    (void)nanosleep(&nap, NULL);
    return false;
}

bool agree_get(agree_pair *p, uint32_t number, const agree_limit *limit, agree_offer *offer) {
    unsigned state;
    for (unsigned turn = 0; (state = message_state(p, number)) == 0; turn++) {
        if (turn % 64 == 63 && is_over(limit)) {
            state = message_set(p, number, 0, AGREE_REFUSED);
            break;
        }
        look_again(turn);
    }
    if (state != AGREE_OFFERED)
        return false;
    offer_read(&p->message[number % AGREE_RING], offer);
    return message_state(p, number) ==
           AGREE_OFFERED; /* (else it may have changed under our eyes) */
}

bool agree_take(agree_pair *p, uint32_t number) {
    if (message_set(p, number, AGREE_OFFERED, AGREE_TAKEN) != AGREE_TAKEN)
        return false;
    atomic_store(&p->taken, number);
    return true;
}

bool agree_taken(agree_pair *p, uint32_t number, const agree_limit *limit) {
    unsigned state;
    for (unsigned turn = 0; (state = message_state(p, number)) == AGREE_OFFERED; turn++) {
        if (turn % 64 == 63 && is_over(limit)) {
            state = message_set(p, number, AGREE_OFFERED, AGREE_REFUSED);
            break;
        }
        look_again(turn);
    }
    return state == AGREE_TAKEN;
}

double agree_patience(double now, double most, bool late) {
    const double next = late ? now / 2 : 2 * now;
    const double least = most < PATIENCE_LEAST_S ? most : PATIENCE_LEAST_S;
    return next < least ? least : next > most ? most : next;
}

void agree_unlink(agree *a) {
    if (a->room != NULL)
        (void)unlink(a->path);
}

bool agree_closed(agree *a) {
    bool all = true;
    atomic_store(&a->room->card[a->me].closed, 1);
    for (int i = 0; i < agree_count(a); i++)
        all = all && (atomic_load(&a->room->card[i].closed) != 0 ||
                      atomic_load(&a->room->card[i].state) == AGREE_WITHDRAWN);
    return all;
}

void agree_leave(agree *a) {
    if (a->room != NULL)
        munmap(a->room, sizeof *a->room);
    a->room = NULL;
}
