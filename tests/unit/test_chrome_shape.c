/* SPDX-License-Identifier: Apache-2.0
 *
 * The fast way through Chrome traces against the JSON parser alone: random traces of
 * several writers, whole, cut, damaged, in one piece and through a pipe.
 */
#include "core/status.h"
#include "profile_same.h"
#include "trace/chrome_shape.h"
#include "unit.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOM (8u << 20)

static char path[64];
static unsigned seed = 1;
static unsigned any(unsigned below) { return (unsigned)rand_r(&seed) % below; }

typedef struct text {
    char *bytes;
    size_t length;
} text;

static void put(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    t->length += (size_t)vsnprintf(t->bytes + t->length, ROOM - t->length, format, args);
    va_end(args);
    CU_ASSERT_FATAL(t->length < ROOM);
}

/* How one profiler writes: its blanks, its order, its extra members. */
typedef struct writer {
    const char *before, *colon, *comma;
    unsigned order, extras;
} writer;

static writer any_writer(void) {
    static const char *const before[] = {"", " ", "\n  ", "\n\t", "\r\n    ", " \v\f "};
    static const char *const colon[] = {":", ": ", " : ", "\t:\n"};
    static const char *const comma[] = {",", ", ", " ,", ",\n"};
    return (writer){before[any(6)], colon[any(4)], comma[any(4)], any(1000), any(64)};
}

/* A value of the kind that now and then is not what one expects. */
static const char *odd_value(void) {
    static const char *const values[] = {
        "-5",           "\"12.5\"", "\"\"",      "1e3",    "-0.0",        "true",
        "null",         "[1, [2]]", "{\"a\":1}", "1E+2",   "99999999999", "\"\\u0041\\\"x\"",
        "\"\xc3\xa9\"", "[]",       "{}",        "0.1234", "\"-\"",       "123456789012345678901"};
    return values[any(sizeof values / sizeof *values)];
}

static void put_member(text *t, const writer *w, const char *name, const char *value) {
    put(t, "%s\"%s\"%s%s%s", w->before, name, w->colon, value, w->before);
}

static void put_args(text *t, const writer *w) {
    static const char *const extra[] = {
        "\"grid\": [24, 1, 1]",        "\"External id\": 17",      "\"device\": 1",
        "\"nested\": {\"stream\": 9}", "\"warps per SM\": 2.9e-1", "\"stack\": \"a;b\""};
    put(t, "{%s\"device\"%s%u%s\"stream\"%s%u", w->before, w->colon, any(3), w->comma, w->colon,
        any(4));
    for (unsigned i = 0; i < 6; i++)
        if (w->extras >> i & 1)
            put(t, "%s%s", w->comma, extra[i]);
    put(t, "%s}", w->before);
}

static void put_event(text *t, const writer *w, bool odd) {
    static const char *const kinds[] = {"kernel", "kernel",  "gpu_memcpy",
                                        "cpu_op", "ep_comm", "gemm"};
    static const char *const kernels[] = {"void deep_ep::dispatch<8>()",
                                          "nvjet_tst_128",
                                          "flash_fwd",
                                          "Memcpy PtoP (Device -> Device)",
                                          "Memcpy DtoD (Device -> Device)",
                                          "_permute_kernel"};
    char values[6][64];
    static const char *const names[] = {"ph", "cat", "name", "pid", "ts", "dur"};
    snprintf(values[0], 64, "\"%s\"", any(20) == 0 ? "i" : "X");
    snprintf(values[1], 64, "\"%s\"", kinds[any(6)]);
    snprintf(values[2], 64, "\"%s\"", kernels[any(6)]);
    snprintf(values[3], 64, "%u", any(3));
    snprintf(values[4], 64, "17000000%u.%03u", 10000000 + any(100000), any(1000));
    snprintf(values[5], 64, "%u.%u", any(50), any(1000));
    unsigned strange = odd ? any(7) : 7;
    put(t, "{");
    for (unsigned i = 0; i < 7; i++) {
        unsigned which = (i + w->order) % 7;
        if (i > 0)
            put(t, "%s", w->comma);
        if (which == strange)
            put_member(t, w, any(2) == 0 ? "odd" : which < 6 ? names[which] : "args", odd_value());
        else if (which < 6)
            put_member(t, w, names[which], values[which]);
        else {
            put(t, "\"args\"%s", w->colon);
            put_args(t, w);
        }
    }
    put(t, "}");
}

static void put_trace(text *t, unsigned events, unsigned writers, bool odd) {
    writer w[12];
    bool array = any(3) == 0;
    for (unsigned i = 0; i < writers; i++)
        w[i] = any_writer();
    t->length = 0;
    put(t, array ? "[" : "{\"schemaVersion\": 1, \"x\": [{\"ph\": \"X\"}], \"traceEvents\": [");
    for (unsigned i = 0; i < events; i++) {
        if (i > 0)
            put(t, "%s,%s", any(9) == 0 ? " " : "", any(2) == 0 ? "\n  " : "");
        if (odd && any(30) == 0)
            put(t, "%s", odd_value()); /* no event at all */
        else
            put_event(t, &w[any(writers)], odd && any(5) == 0);
    }
    put(t, array ? "]" : "], \"traceName\": \"t}\"}");
}

static epo_status read_by(bool plain, const char *from, epo_profile **out) {
    const epo_profile_options options = {.budget = 4096, .plain = plain};
    return epo_profile_read_chrome(from, &options, out);
}

/* 1: both fine and alike, 0: both refused alike, -1: they differ. */
static int compare(const char *bytes, size_t length) {
    epo_profile *fast = NULL, *plain = NULL;
    char message[512];
    FILE *f = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    fwrite(bytes, 1, length, f);
    fclose(f);
    epo_status a = read_by(true, path, &plain);
    snprintf(message, sizeof message, "%s", a == EPO_OK ? "" : epo_fail_text());
    epo_status b = read_by(false, path, &fast);
    int result = a == EPO_OK ? 1 : 0;
    if (a != b || (a == EPO_OK && !profile_same(plain, fast)) ||
        (a != EPO_OK && strcmp(message, epo_fail_text()) != 0)) {
        fprintf(stderr, "plain: %d %s, fast: %d %s\n%.*s\n", a, message, b,
                b == EPO_OK ? "" : epo_fail_text(), length < 3000 ? (int)length : 3000, bytes);
        result = -1;
    }
    epo_profile_destroy(fast);
    epo_profile_destroy(plain);
    return result;
}

static text new_text(void) {
    text t = {.bytes = malloc(ROOM)};
    CU_ASSERT_PTR_NOT_NULL_FATAL(t.bytes);
    return t;
}

static void random_traces_read_alike(void) {
    text t = new_text();
    unsigned fine = 0;
    for (int round = 0; round < 300; round++) {
        put_trace(&t, 1 + any(80), 1 + any(12), any(2) == 0);
        int result = compare(t.bytes, t.length);
        CU_ASSERT_FATAL(result >= 0);
        fine += result == 1;
    }
    CU_ASSERT(fine > 250); /* odd ones may be without events */
    free(t.bytes);
}

static void cut_and_damaged_ones_too(void) {
    static const char put_in[] = "\"\\{}[],:0-.eX \n\x01";
    text t = new_text();
    unsigned fine = 0, refused = 0;
    for (int round = 0; round < 1500; round++) {
        put_trace(&t, 2 + any(12), 1 + any(3), any(2) == 0);
        if (any(4) == 0)
            t.length = 1 + any((unsigned)t.length - 1);
        else
            t.bytes[any((unsigned)t.length)] = put_in[any(sizeof put_in - 1)];
        int result = compare(t.bytes, t.length);
        CU_ASSERT_FATAL(result >= 0);
        fine += result == 1;
        refused += result == 0;
    }
    CU_ASSERT(fine > 100 && refused > 100);
    free(t.bytes);
}

static void events_across_blocks_are_whole(void) {
    text t = new_text();
    for (int round = 0; round < 4; round++) {
        put_trace(&t, 12000, 3, round > 1);
        CU_ASSERT(t.length > 1000000);
        CU_ASSERT_EQUAL_FATAL(compare(t.bytes, t.length), 1);
    }
    t.length = 0; /* an event longer than what the fast way takes at once, and than a block */
    put(&t, "[{\"ph\":\"X\"}");
    for (unsigned length = 1000; length < 3000000; length *= 7) {
        put(&t, ",{\"ph\":\"X\",\"cat\":\"kernel\",\"ts\":%u,\"dur\":1,\"name\":\"", length);
        memset(t.bytes + t.length, 'n', length);
        t.length += length;
        put(&t, "\"}");
    }
    put(&t, "]");
    CU_ASSERT_EQUAL(compare(t.bytes, t.length), 1);
    free(t.bytes);
}

typedef struct sender {
    const text *text;
    int fd;
} sender;

static void *send_pieces(void *context) {
    const sender *s = context;
    unsigned own = 5;
    for (size_t done = 0; done < s->text->length;) {
        size_t n = 1 + (size_t)rand_r(&own) % 70000;
        n = n > s->text->length - done ? s->text->length - done : n;
        ssize_t sent = write(s->fd, s->text->bytes + done, n);
        if (sent <= 0)
            break;
        done += (size_t)sent;
    }
    close(s->fd);
    return NULL;
}

static void a_pipe_gives_the_same(void) {
    text t = new_text();
    int ends[2];
    char pipe_path[64];
    pthread_t thread;
    epo_profile *piped = NULL, *plain = NULL;
    put_trace(&t, 6000, 4, false);
    CU_ASSERT_EQUAL_FATAL(compare(t.bytes, t.length), 1);
    CU_ASSERT_EQUAL_FATAL(read_by(true, path, &plain), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(pipe(ends), 0);
    sender s = {&t, ends[1]};
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, send_pieces, &s), 0);
    snprintf(pipe_path, sizeof pipe_path, "/proc/self/fd/%d", ends[0]);
    CU_ASSERT_EQUAL_FATAL(read_by(false, pipe_path, &piped), EPO_OK);
    pthread_join(thread, NULL);
    close(ends[0]);
    CU_ASSERT(profile_same(plain, piped));
    epo_profile_destroy(plain);
    epo_profile_destroy(piped);
    free(t.bytes);
}

/* The fast way must be taken, or nothing above tests it. */
static void ordinary_events_take_the_fast_way(void) {
    static const char two[] = ",\n {\"ph\": \"X\", \"ts\": 1.5, \"args\": {\"stream\": 7}},"
                              "\n {\"ph\": \"i\", \"ts\": 23, \"args\": {\"stream\": -1}}]";
    static const char *const not_ordinary[] = {
        ",{\"a\":\"\\n\"}", ",{\"a\":01}", ",{\"a\":1", ",[1]", "{\"a\":1}",   ",{\"a\":1,}",
        ",{\"a\" 1}",       ",{}",         "]",         "",     ",{\"a\":tru}"};
    epo_chrome_shapes *shapes = epo_chrome_shapes_create();
    static epo_chrome_event event;
    const char *end = two + sizeof two - 1;
    CU_ASSERT_PTR_NOT_NULL_FATAL(shapes);
    size_t first = epo_chrome_shapes_read(shapes, two, end, &event);
    CU_ASSERT_FATAL(first > 0 && two[first] == ',');
    CU_ASSERT(event.complete && event.start == 1500 && event.stream == 7 && !event.has_length);
    size_t second = epo_chrome_shapes_read(shapes, two + first, end, &event);
    CU_ASSERT(two[first + second] == ']' && second > 0);
    CU_ASSERT(!event.complete && event.start == 23000 && event.stream == -1);
    for (size_t i = 0; i < sizeof not_ordinary / sizeof *not_ordinary; i++)
        CU_ASSERT_EQUAL(epo_chrome_shapes_read(shapes, not_ordinary[i],
                                               not_ordinary[i] + strlen(not_ordinary[i]), &event),
                        0);
    epo_chrome_shapes_destroy(shapes);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"random traces read alike", random_traces_read_alike},
        {"cut and damaged ones too", cut_and_damaged_ones_too},
        {"events across blocks are whole", events_across_blocks_are_whole},
        {"a pipe gives the same", a_pipe_gives_the_same},
        {"ordinary events take the fast way", ordinary_events_take_the_fast_way},
        CU_TEST_INFO_NULL,
    };
    snprintf(path, sizeof path, "test_chrome_shape.%d.tmp", (int)getpid());
    int status = unit_run("chrome_shape", tests);
    unlink(path);
    return status;
}
