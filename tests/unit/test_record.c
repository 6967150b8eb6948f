/* SPDX-License-Identifier: Apache-2.0
 *
 * The recorder's parts that need no GPU: windows, the rhythm of a loop, records of every
 * release's size, what is measured and what is said and written.
 */
#include "config.h"

#include "unit.h"

#include "core/status.h"
#include "preload/record/events.h"
#include "preload/record/recorder.h"
#include "preload/record/report.h"
#include "preload/record/rhythm.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t state = 7;

static uint64_t any(uint64_t below) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % below;
}

/* ---- windows ---- */

static void test_windows(void) {
    static const struct {
        const char *text;
        bool good, seconds;
        uint32_t from, to;
    } cases[] = {
        {"10-14", true, false, 10, 14},
        {"1-1", true, false, 1, 1},
        {"60s-70s", true, true, 60000, 70000},
        {"2.5-3s", true, true, 2500, 3000},
        {"0-0.5s", true, true, 0, 500},
        {"1000000-1000000", true, false, 1000000, 1000000},
        {"0-4", false, false, 0, 0},       /* steps count from 1 */
        {"14-10", false, false, 0, 0},     /* backwards */
        {"5s-5s", false, false, 0, 0},     /* empty */
        {"0s-61s", false, false, 0, 0},    /* longer than a window may be */
        {"1.5-3", false, false, 0, 0},     /* half a step */
        {"5s-9", false, false, 0, 0},      /* seconds to steps */
        {"1-1000001", false, false, 0, 0}, /* beyond any run */
        {"-5", false, false, 0, 0},
        {"5-", false, false, 0, 0},
        {"5", false, false, 0, 0},
        {"", false, false, 0, 0},
        {"a-b", false, false, 0, 0},
        {"1-2-3", false, false, 0, 0},
        {" 1-2", false, false, 0, 0},
        {"1e3-2e3", false, false, 0, 0},
        {"/tmp/run-5", false, false, 0, 0},
        {"99999999999999999999-1", false, false, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        record_window w = {true, 77, 77};
        CU_ASSERT_EQUAL_FATAL(record_window_parse(cases[i].text, &w), cases[i].good);
        const record_window kept = {true, 77, 77},
                            wanted = {cases[i].seconds, cases[i].from, cases[i].to};
        const record_window *right = cases[i].good ? &wanted : &kept;
        CU_ASSERT_TRUE(w.seconds == right->seconds && w.from == right->from && w.to == right->to);
    }
}

/* ---- the rhythm ---- */

#define MANY 400

/* Straight from the definition, cubic. */
static rhythm_found reference(const rhythm_call *call, size_t count) {
    rhythm_found best = {0, 0};
    for (size_t length = 1; length <= count; length++) {
        const rhythm_call *at = call + count - length;
        size_t period = 1;
        for (; period <= length; period++) {
            size_t i = period;
            while (i < length && at[i].what == at[i - period].what)
                i++;
            if (i >= length)
                break;
        }
        if (length / RHYTHM_REPEATS >= period && length >= count / 2)
            best = (rhythm_found){period, length};
    }
    return best;
}

static void test_rhythm_is_the_definition(void) {
    rhythm_call call[MANY];
    size_t room[MANY];
    int found = 0;
    for (int round = 0; round < 3000; round++) {
        const size_t count = any(40), period = 1 + any(8), noise = any(12);
        const uint64_t letters = 1 + any(4);
        for (size_t i = 0; i < count; i++)
            call[i].what =
                i >= period && i >= noise + period ? call[i - period].what : any(letters);
        if (any(4) == 0 && count > 0)
            call[any(count)].what = any(letters);
        const rhythm_found a = rhythm_find(call, count, room), b = reference(call, count);
        CU_ASSERT_TRUE_FATAL(a.period == b.period && (a.period == 0 || a.stretch == b.stretch));
        found += a.period > 0;
    }
    CU_ASSERT_TRUE(found > 500);
    CU_ASSERT_EQUAL(rhythm_find(call, 0, room).period, 0);
}

/* Forward through layers, backward through them, gradients: not the layer but the step. */
static size_t put_step(rhythm_call *call, size_t at, int layers) {
    for (int l = 0; l < layers; l++) {
        call[at++].what = 1;
        call[at++].what = 2;
    }
    for (int l = 0; l < layers; l++) {
        call[at++].what = 2;
        call[at++].what = 1;
    }
    call[at++].what = 9;
    return at;
}

static void test_rhythm_of_a_model(void) {
    rhythm_call call[MANY];
    size_t room[MANY], count = 0;
    for (; count < 6; count++)
        call[count].what = 100 + count; /* set-up */
    for (int s = 0; s < 3; s++)
        count = put_step(call, count, 8);
    const rhythm_found whole = rhythm_find(call, count, room);
    CU_ASSERT_EQUAL(whole.period, 33);
    CU_ASSERT_EQUAL(whole.stretch, 99);
    /* in the middle of a forward pass as well */
    CU_ASSERT_EQUAL(rhythm_find(call, count - 20, room).period, 0);
    for (int i = 0; i < 10; i++)
        call[count++].what = 1 + i % 2;
    CU_ASSERT_EQUAL(rhythm_find(call, count, room).period, 33);
}

static void test_rhythm_without_rare_calls(void) {
    rhythm_call call[MANY];
    uint64_t room[MANY];
    size_t count = 0;
    for (int s = 0; s < 5; s++) {
        count = put_step(call, count, 3);
        if (s == 2)
            call[count++].what = 77; /* a log line's */
    }
    CU_ASSERT_EQUAL(rhythm_find(call, count, (size_t *)room).period, 0);
    rhythm_call all[MANY];
    memcpy(all, call, sizeof all);
    const size_t kept = rhythm_without_rare(call, count, room);
    CU_ASSERT_EQUAL(kept, count - 1);
    CU_ASSERT_EQUAL(rhythm_only(all, count, call, kept, 13, room), count - 1);
    CU_ASSERT_EQUAL(rhythm_only(all, count - 1, call, kept, 1, room), 5); /* of one kind */
    CU_ASSERT_EQUAL(rhythm_find(call, kept, (size_t *)room).period, 13);
}

static void test_length_of_steps(void) {
    rhythm_call call[60];
    size_t steps;
    for (int i = 0; i < 60; i++)
        call[i] = (rhythm_call){(uint64_t)i % 3, 0, 1000 * i};
    CU_ASSERT_EQUAL(rhythm_step(call, 60, 3, 0, 59000, &steps), 3000);
    CU_ASSERT_EQUAL(steps, 19);
    CU_ASSERT_EQUAL(rhythm_step(call, 60, 3, 10000, 20000, &steps), 3000);
    CU_ASSERT_EQUAL(steps, 3);
    CU_ASSERT_EQUAL(rhythm_step(call, 60, 3, 10000, 12999, &steps), 0);
    CU_ASSERT_EQUAL(steps, 0);
    CU_ASSERT_EQUAL(rhythm_step(call, 60, 0, 0, 59000, &steps), 0);
    CU_ASSERT_EQUAL(rhythm_step(call, 60, 3, 70000, 80000, &steps), 0);
    CU_ASSERT_EQUAL(rhythm_step(call, 0, 3, 0, 59000, &steps), 0);
}

/* ---- records ---- */

static size_t kernel_bytes, copy_bytes;

static size_t bytes_of(cupti_kind kind) {
    return kind == CUPTI_KIND_CONCURRENT_KERNEL ? kernel_bytes : kind == 99 ? 32 : copy_bytes;
}

static cupti_result next_record(uint8_t *buffer, size_t valid, cupti_record **r) {
    uint8_t *at = *r == NULL ? buffer : (uint8_t *)*r + bytes_of((*r)->kind);
    if (at >= buffer + valid)
        return 12;
    *r = (cupti_record *)(void *)at;
    return CUPTI_OK;
}

static size_t put_record(uint8_t *buffer, size_t at, cupti_kind kind, const char *name, int copy,
                         uint64_t start, uint64_t end, uint32_t device, uint32_t stream) {
    uint8_t *r = buffer + at;
    const bool kernel = kind == CUPTI_KIND_CONCURRENT_KERNEL;
    const uint32_t value = (uint32_t)copy;
    memset(r, 0xcc, bytes_of(kind));
    memcpy(r, &kind, sizeof kind);
    if (kind != 99) {
        memcpy(r + (kernel ? CUPTI_KERNEL_START : CUPTI_COPY_START), &start, 8);
        memcpy(r + (kernel ? CUPTI_KERNEL_END : CUPTI_COPY_END), &end, 8);
        memcpy(r + (kernel ? CUPTI_KERNEL_DEVICE : CUPTI_COPY_DEVICE), &device, 4);
        memcpy(r + (kernel ? CUPTI_KERNEL_STREAM : CUPTI_COPY_STREAM), &stream, 4);
        if (kernel)
            memcpy(r + CUPTI_KERNEL_NAME, &name, sizeof name);
        else if (kind == CUPTI_KIND_MEMSET)
            memcpy(r + CUPTI_SET_VALUE, &value, sizeof value);
        else
            r[CUPTI_COPY_KIND] = (uint8_t)copy;
    }
    return at + bytes_of(kind);
}

static void test_records(void) {
    static const size_t kernels[] = {144, 160, 168, 176, 200, 208, 216, 240},
                        copies[] = {64, 72, 80, 88, 96, 112};
    static uint8_t buffer[8192] __attribute__((aligned(8)));
    for (int round = 0; round < 48; round++) {
        kernel_bytes = kernels[round % 8];
        copy_bytes = copies[round / 8];
        events *e = NULL;
        size_t at = 0;
        CU_ASSERT_EQUAL_FATAL(events_create(0, &e), EPO_OK);
        at = put_record(buffer, at, CUPTI_KIND_CONCURRENT_KERNEL, "one", 0, 100, 200, 3, 7);
        at = put_record(buffer, at, CUPTI_KIND_MEMCPY, NULL, 8, 110, 120, 1, 9);
        at = put_record(buffer, at, 99, NULL, 0, 0, 0, 0, 0);
        at = put_record(buffer, at, CUPTI_KIND_MEMCPY_PEER, NULL, 8, 130, 140, 0, 2);
        at = put_record(buffer, at, CUPTI_KIND_MEMSET, NULL, 0, 150, 150, 0, 2);
        at = put_record(buffer, at, CUPTI_KIND_CONCURRENT_KERNEL, "one", 0, 300, 0, 0, 0);
        at = put_record(buffer, at, CUPTI_KIND_CONCURRENT_KERNEL, "two", 0, 300, 299, 0, 0);
        at = put_record(buffer, at, CUPTI_KIND_CONCURRENT_KERNEL, NULL, 0, 400, 401, 0, 0);
        CU_ASSERT_TRUE(events_take(e, next_record, buffer, at));
        CU_ASSERT_EQUAL_FATAL(events_count(e), 5);
        const event *v = events_at(e, 0);
        CU_ASSERT_TRUE(v->start == 100 && v->end == 200 && v->device == 3 && v->stream == 7);
        CU_ASSERT_STRING_EQUAL(events_name(e, v->name), "one");
        v = events_at(e, 1);
        CU_ASSERT_TRUE(v->kind == EVENT_COPY && v->copy == 8 && v->stream == 9 && v->device == 1);
        CU_ASSERT_EQUAL(events_at(e, 2)->copy, CUPTI_COPY_PEER);
        CU_ASSERT_EQUAL(events_at(e, 3)->kind, EVENT_SET);
        CU_ASSERT_STRING_EQUAL(events_name(e, events_at(e, 4)->name), "(no name)");
        CU_ASSERT_EQUAL(events_lost_of(e).strange, 2);
        CU_ASSERT_EQUAL(events_lost_of(e).unfinished, 1);
        events_destroy(e);
    }
    events_destroy(NULL);
}

static void test_memory_is_bounded(void) {
    static uint8_t buffer[216 * 64] __attribute__((aligned(8)));
    events *e = NULL;
    kernel_bytes = 216;
    CU_ASSERT_EQUAL_FATAL(events_create(100, &e), EPO_OK);
    for (int round = 0; round < 3; round++) {
        size_t at = 0;
        for (int i = 0; i < 64; i++)
            at = put_record(buffer, at, CUPTI_KIND_CONCURRENT_KERNEL, "k", 0, 1, 2, 0, 0);
        CU_ASSERT_EQUAL(events_take(e, next_record, buffer, at), round == 0);
    }
    CU_ASSERT_EQUAL(events_count(e), 100);
    CU_ASSERT_EQUAL(events_lost_of(e).full, 92);
    CU_ASSERT_TRUE(events_full(e));
    events_clear(e);
    CU_ASSERT_TRUE(events_count(e) == 0 && !events_full(e));
    events_destroy(e);
}

/* A name's text counts, not its place: modules come and go. */
static void test_names(void) {
    static uint8_t buffer[216 * 64] __attribute__((aligned(8)));
    char text[32], out[EVENTS_NAME_BYTES];
    events *e = NULL;
    kernel_bytes = 216;
    CU_ASSERT_EQUAL_FATAL(events_create(0, &e), EPO_OK);
    for (int i = 0; i < 2000; i++) {
        snprintf(text, sizeof text, "kernel_%d", i % 500);
        const size_t n =
            put_record(buffer, 0, CUPTI_KIND_CONCURRENT_KERNEL, text, 0, 1, 2, 0, (uint32_t)i);
        CU_ASSERT_TRUE_FATAL(events_take(e, next_record, buffer, n));
    }
    for (int i = 0; i < 2000; i++) {
        snprintf(text, sizeof text, "kernel_%d", i % 500);
        CU_ASSERT_STRING_EQUAL(events_name(e, events_at(e, (size_t)i)->name), text);
        CU_ASSERT_EQUAL(events_at(e, (size_t)i)->name, events_at(e, (size_t)i % 500)->name);
    }
    events_destroy(e);
    events_readable("nvjet_hsh_256x128", out, sizeof out);
    CU_ASSERT_STRING_EQUAL(out, "nvjet_hsh_256x128");
    /* classes are told from what names become, with a C++ run-time library or without */
    events_readable("_ZN7deep_ep9intranode8dispatchILi4ELi768EEEvPv", out, sizeof out);
    CU_ASSERT_PTR_NOT_NULL(strstr(out, "deep_ep::intranode::dispatch"));
    CU_ASSERT_EQUAL(epo_kernel_classify(NULL, out), EPO_KERNEL_EP_COMM);
    events_readable("_Z22ncclDevKernel_SendRecv24ncclDevKernelArgsStorageILm4096EE", out,
                    sizeof out);
    CU_ASSERT_EQUAL(epo_kernel_classify(NULL, out), EPO_KERNEL_EP_COMM);
    events_readable("_ZN12_GLOBAL__N_113copy_segmentsEv", out, sizeof out);
    CU_ASSERT_PTR_NOT_NULL(strstr(out, "copy_segments"));
    static const char *const broken[] = {"_Z", "_ZN", "_ZN9", "_ZN99999999999999a", "_ZN0", "_Z3a"};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        events_readable(broken[i], out, sizeof out);
        CU_ASSERT_PTR_NOT_NULL(strstr(out, broken[i]));
    }
}

/* ---- what is measured and said ---- */

static void test_cuts(void) {
    int64_t from, to;
    size_t steps;
    report_cut(1000, 11000, 2000, 0, &from, &to, &steps);
    CU_ASSERT_TRUE(steps == 4 && to == 11000 && from == 3000); /* five fit, the first is left out */
    report_cut(1000, 11000, 2000, 3, &from, &to, &steps);
    CU_ASSERT_TRUE(steps == 3 && to == 11000 && from == 5000);
    report_cut(1000, 10999, 2000, 0, &from, &to, &steps);
    CU_ASSERT_TRUE(steps == 3 && to == 10999 && from == 4999);
    report_cut(1000, 3500, 2000, 0, &from, &to, &steps);
    CU_ASSERT_TRUE(steps == 1 && to == 3500 && from == 1500);
    report_cut(1000, 2500, 2000, 0, &from, &to, &steps);
    CU_ASSERT_TRUE(steps == 0 && to == 2500 && from == 1000);
    report_cut(1000, 9000, 0, 0, &from, &to, &steps);
    CU_ASSERT_TRUE(steps == 0 && to == 9000 && from == 1000);
    report_cut(1000, 500, 100, 0, &from, &to, &steps);
    CU_ASSERT_EQUAL(steps, 0);
}

#define MS INT64_C(1000000)
#define KERNEL_ON(device, name, stream, a, b)                                                      \
    at = put_record(work, at, CUPTI_KIND_CONCURRENT_KERNEL, name, 0, t + (a)*MS, t + (b)*MS,       \
                    device, stream)
static uint8_t work[1 << 20] __attribute__((aligned(8)));

/* 60 steps of 20 ms on two GPUs as tests/fake/record_job.c has them, in any order. */
static events *sixty_steps(int devices) {
    events *e = NULL;
    size_t at = 0;
    kernel_bytes = 216;
    copy_bytes = 96;
    CU_ASSERT_EQUAL_FATAL(events_create(0, &e), EPO_OK);
    for (int s = 59; s >= 0; s--)
        for (uint32_t d = 0; d < (uint32_t)devices; d++) {
            const uint64_t t = (uint64_t)(1000 + 20 * s) * MS;
#define KERNEL(name, stream, a, b) KERNEL_ON(d, name, stream, a, b)
            KERNEL("nvjet_x", 7, 0, 8);
            KERNEL("ncclDevKernel_SendRecv(...)", 20, 4, 12 + d);
            KERNEL("silu", 7, 12, 16);
            at = put_record(work, at, CUPTI_KIND_MEMCPY, NULL, 10, t + 14 * MS, t + 15 * MS, d, 33);
            at = put_record(work, at, CUPTI_KIND_MEMCPY, NULL, 8, t + 16 * MS, t + 17 * MS, d, 33);
            at = put_record(work, at, CUPTI_KIND_MEMCPY, NULL, 8, t + 18 * MS, t + 19 * MS, d, 7);
        }
    CU_ASSERT_TRUE_FATAL(at <= sizeof work && events_take(e, next_record, work, at));
    return e;
}

static void test_measures(void) {
    char line[REPORT_LINE];
    report *r = calloc(1, sizeof *r);
    events *e = sixty_steps(2);
    CU_ASSERT_PTR_NOT_NULL_FATAL(r);
    r->step = 20 * MS;
    CU_ASSERT_EQUAL_FATAL(report_measure(r, e, 900 * MS, 3000 * MS), EPO_OK);
    CU_ASSERT_EQUAL(r->steps, 58);
    CU_ASSERT_EQUAL_FATAL(r->devices, 2);
    const epo_profile_times *t = &r->device[0].times, *u = &r->device[1].times;
    /* a copy inside a device counts where the stream communicates */
    CU_ASSERT_EQUAL(t->comm, 58u * 10 * MS);
    CU_ASSERT_EQUAL(t->overlapped, 58u * 4 * MS);
    CU_ASSERT_EQUAL(t->exposed, 58u * 6 * MS);
    CU_ASSERT_EQUAL(t->of[EPO_KERNEL_COPY], 58u * MS);
    CU_ASSERT_EQUAL(u->exposed, 58u * 7 * MS);
    report_line(r, line);
    CU_ASSERT_STRING_EQUAL(
        line,
        "exposed communication 7.00 ms/step of 20.0, 36 % hidden (58 steps of rank 0, GPU 1 of 2)");
    events_destroy(e);
    free(r);
}

/* An exchange by copy engines is communication from where its stream came to it, and the
 * file says the same. */
static void test_exchanges(void) {
    char path[] = "/tmp/epo-record-XXXXXX";
    const int fd = mkstemp(path);
    report *r = calloc(1, sizeof *r);
    events *e = NULL;
    epo_profile *p = NULL;
    const epo_profile_options options = {0};
    epo_profile_times again;
    size_t at = 0;
    CU_ASSERT_TRUE_FATAL(r != NULL && fd >= 0);
    close(fd);
    CU_ASSERT_EQUAL_FATAL(events_create(0, &e), EPO_OK);
    for (uint64_t s = 0; s < 10; s++) {
        const uint64_t t = (1000 + 20 * s) * MS;
        KERNEL_ON(3, "nvjet_x", 7, 0, 5);
        at = put_record(work, at, CUPTI_KIND_MEMCPY, NULL, 10, t + 7 * MS, t + 8 * MS, 3, 33);
        at = put_record(work, at, CUPTI_KIND_MEMSET, NULL, 0, t + 12 * MS, t + 13 * MS, 3, 7);
#define SET(what, stream, a, b)                                                                    \
    at = put_record(work, at, CUPTI_KIND_MEMSET, NULL, (int)(what), t + (a)*MS, t + (b)*MS, 3,     \
                    stream)
        SET(RECORDER_MARK_END, 33, 8, 9); /* in any order */
        SET(RECORDER_MARK_BEGIN, 33, 2, 3);
        SET(RECORDER_MARK_END, 34, 4, 5); /* without a begin */
        SET(RECORDER_MARK_BEGIN, 35, 4, 5);
        SET(RECORDER_MARK_BEGIN, 35, 14, 15); /* without an end */
    }
    CU_ASSERT_TRUE_FATAL(events_take(e, next_record, work, at));
    CU_ASSERT_EQUAL(events_pair_marks(e), EPO_OK);
    r->step = 20 * MS;
    CU_ASSERT_EQUAL_FATAL(report_measure(r, e, 900 * MS, 3000 * MS), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(r->devices, 1);
    const epo_profile_times *t = &r->device[0].times;
    CU_ASSERT_EQUAL(t->comm, r->steps * 7u * MS);
    CU_ASSERT_EQUAL(t->overlapped, r->steps * 3u * MS);
    CU_ASSERT_EQUAL(t->of[EPO_KERNEL_COPY], r->steps * 1u * MS);
    CU_ASSERT_EQUAL_FATAL(report_write(r, e, path), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_profile_read(path, &options, &p), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_profile_tell(p).units, 1);
    CU_ASSERT_EQUAL(epo_profile_measure(p, 0, INT64_MIN, INT64_MAX, &again, NULL), EPO_OK);
    CU_ASSERT_EQUAL(memcmp(&again, t, sizeof again), 0);
    epo_profile_destroy(p);
    unlink(path);
    events_destroy(e);
    free(r);
}

static void test_lines(void) {
    char line[REPORT_LINE];
    report *r = calloc(1, sizeof *r);
    CU_ASSERT_PTR_NOT_NULL_FATAL(r);
    *r = (report){.rank = 3, .steps = 5, .from = 0, .to = 4100 * MS, .devices = 1};
    r->device[0].times.comm = 2050 * (uint64_t)MS;
    r->device[0].times.overlapped = 1455 * (uint64_t)MS;
    r->device[0].times.exposed = 595 * (uint64_t)MS;
    report_line(r, line);
    CU_ASSERT_STRING_EQUAL(
        line, "exposed communication 119 ms/step of 820, 71 % hidden (5 steps of rank 3)");
    r->steps = 0;
    r->dropped = 1;
    r->lost.full = 1;
    r->lost.strange = 1;
    r->full = true;
    snprintf(r->by, sizeof r->by, "cuptiSubscribe");
    report_line(r, line);
    CU_ASSERT_STRING_EQUAL(line,
                           "exposed communication 595 ms of 4100 ms, 71 % hidden (rank 3; its "
                           "steps were not recognised); a profiler ended it "
                           "(cuptiSubscribe); memory ended it; 3 records were lost");
    r->device[0].times.comm = 0;
    r->steps = 1;
    r->dropped = r->lost.full = r->lost.strange = 0;
    r->full = false;
    r->by[0] = '\0';
    report_line(r, line);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(line, "no expert communication; other communication 0.00 ms/step"));
    snprintf(r->why, sizeof r->why, "no libcupti");
    report_line(r, line);
    CU_ASSERT_STRING_EQUAL(line, "communication was not recorded: no libcupti");
    free(r);
}

static void test_nothing_ran(void) {
    report *r = calloc(1, sizeof *r);
    events *e = NULL;
    CU_ASSERT_PTR_NOT_NULL_FATAL(r);
    CU_ASSERT_EQUAL_FATAL(events_create(0, &e), EPO_OK);
    CU_ASSERT_EQUAL(report_measure(r, e, 0, 1000 * MS), EPO_E_ARG);
    events_destroy(e);
    e = sixty_steps(1);
    CU_ASSERT_EQUAL(report_measure(r, e, 0, 1010 * MS), EPO_E_ARG); /* closed at once */
    events_destroy(e);
    free(r);
}

/* What profile reads from the file is what the report says, to the nanosecond. */
static void test_file_is_read_alike(void) {
    char path[] = "/tmp/epo-record-XXXXXX";
    const int fd = mkstemp(path);
    report *r = calloc(1, sizeof *r);
    events *e = sixty_steps(2);
    epo_profile *p = NULL;
    const epo_profile_options options = {0};
    epo_profile_times t;
    char line[REPORT_LINE];
    CU_ASSERT_TRUE_FATAL(r != NULL && fd >= 0);
    close(fd);
    r->step = 20 * MS + 12345; /* so that intervals are cut */
    snprintf(r->cupti, sizeof r->cupti, "/a \"b\"\\c\n");
    CU_ASSERT_EQUAL_FATAL(report_measure(r, e, 900 * MS, 3000 * MS), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(report_write(r, e, path), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_profile_read(path, &options, &p), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_profile_tell(p).units, 2);
    CU_ASSERT_EQUAL(epo_profile_tell(p).skipped, 0);
    report_line(r, line);
    CU_ASSERT_STRING_EQUAL(epo_profile_tell(p).line, line);
    for (size_t i = 0; i < 2; i++) {
        CU_ASSERT_EQUAL(epo_profile_measure(p, i, INT64_MIN, INT64_MAX, &t, NULL), EPO_OK);
        CU_ASSERT_EQUAL(memcmp(&t, &r->device[i].times, sizeof t), 0);
        CU_ASSERT_EQUAL(epo_profile_unit_at(p, i)->kernels, r->device[i].kernels);
        CU_ASSERT_EQUAL(epo_profile_unit_at(p, i)->copies, r->device[i].copies);
    }
    epo_profile_destroy(p);
    CU_ASSERT_EQUAL(report_write(r, e, "/nowhere/at/all.json"), EPO_E_SYSTEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "/nowhere/at/all.json"));
    unlink(path);
    events_destroy(e);
    free(r);
}

static char *contents(const char *path, char *room, size_t most) {
    FILE *f = fopen(path, "r");
    const size_t n = f != NULL ? fread(room, 1, most - 1, f) : 0;
    if (f != NULL)
        fclose(f);
    room[n] = '\0';
    return room;
}

/* Bytes that are no UTF-8 would make it no JSON. */
static void test_file_is_utf8(void) {
    char path[] = "/tmp/epo-record-XXXXXX", room[4096];
    const int fd = mkstemp(path);
    report *r = calloc(1, sizeof *r);
    events *e = NULL;
    CU_ASSERT_TRUE_FATAL(r != NULL && fd >= 0 && events_create(0, &e) == EPO_OK);
    close(fd);
    snprintf(r->why, sizeof r->why, "nothing ran");
    snprintf(r->cupti, sizeof r->cupti,
             "\xff/\xc3(\xe2\x82\xac\xed\xa0\x80\xf0\x9f\x98\x80\xc0\xaf\xf5\xe2\x82");
    CU_ASSERT_EQUAL(report_write(r, e, path), EPO_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(contents(path, room, sizeof room),
                                  "\"cupti\": \"?/?(\xe2\x82\xac???\xf0\x9f\x98\x80?????\""));
    unlink(path);
    events_destroy(e);
    free(r);
}

/* A file that cannot be written to its end does not stand where a whole one stood, nor anywhere. */
static void test_file_is_whole(void) {
    char folder[] = "/tmp/epo-record-XXXXXX", path[64], before[4096], after[4096];
    report *r = calloc(1, sizeof *r);
    events *e = sixty_steps(1);
    struct rlimit limit;
    CU_ASSERT_TRUE_FATAL(r != NULL && mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/trace.json", folder);
    CU_ASSERT_EQUAL_FATAL(report_measure(r, e, 900 * MS, 3000 * MS), EPO_OK);
    CU_ASSERT_EQUAL(report_write(r, e, path), EPO_OK);
    contents(path, before, sizeof before);
    CU_ASSERT_EQUAL_FATAL(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const struct rlimit small = {2000, limit.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    CU_ASSERT_EQUAL(setrlimit(RLIMIT_FSIZE, &small), 0);
    r->rank = 5;
    CU_ASSERT_EQUAL(report_write(r, e, path), EPO_E_SYSTEM);
    CU_ASSERT_EQUAL(setrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, SIG_DFL);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "trace.json: File too large"));
    CU_ASSERT_STRING_EQUAL(contents(path, after, sizeof after), before);
    CU_ASSERT_EQUAL(unlink(path), 0);
    CU_ASSERT_EQUAL(mkdir(path, 0700), 0); /* what it cannot take the place of */
    CU_ASSERT_EQUAL(report_write(r, e, path), EPO_E_SYSTEM);
    CU_ASSERT_EQUAL(rmdir(path), 0);
    CU_ASSERT_EQUAL(rmdir(folder), 0); /* (nothing else is in it) */
    events_destroy(e);
    free(r);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"windows", test_windows},
        {"the rhythm is what its definition says", test_rhythm_is_the_definition},
        {"a model's steps, not its layers", test_rhythm_of_a_model},
        {"calls that are made now and then", test_rhythm_without_rare_calls},
        {"the length of steps", test_length_of_steps},
        {"records of every release", test_records},
        {"memory is bounded", test_memory_is_bounded},
        {"names of kernels", test_names},
        {"whole steps are cut out", test_cuts},
        {"what is measured", test_measures},
        {"exchanges without kernels", test_exchanges},
        {"what is said", test_lines},
        {"nothing ran", test_nothing_ran},
        {"profile reads the file alike", test_file_is_read_alike},
        {"the file is UTF-8", test_file_is_utf8},
        {"the file is whole or not there", test_file_is_whole},
        CU_TEST_INFO_NULL,
    };
    return unit_run("recorder", tests);
}
