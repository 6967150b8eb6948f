/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast profiles are read, on one core: intervals from memory (classes, unions,
 * one sweep), from an SQLite export, from a Chrome trace; and in how much memory.
 *
 *     tests/bench/profile_bench [MILLIONS]...     default 1 2 5 10 20
 *
 * A million events of a Chrome trace are half a gigabyte of the working folder.
 */
#include "core/status.h"
#include "trace/profile.h"

#include <inttypes.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static const char *const names[] = {"void deep_ep::intranode::dispatch<8>()",
                                    "void deep_ep::intranode::combine<8>()",
                                    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
                                    "void flash_fwd_kernel<...>",
                                    "_permute_kernel",
                                    "void at::native::vectorized_elementwise_kernel<4>"};
#define NAMES (sizeof names / sizeof *names)

typedef struct kernel {
    int64_t start, end, device, stream;
    int name;
} kernel;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* of this process: neighbours do not count */
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Kernels of four devices as profilers write them: nearly in order, some far behind. */
static kernel next_kernel(uint64_t i, uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    uint64_t r = *state >> 33;
    kernel k = {.device = (int64_t)(r % 4), .name = (int)(r / 4 % NAMES)};
    k.start = (int64_t)(i * 2000 + r % 20000);
    if (r % 1000 == 0)
        k.start += 50000000;
    k.end = k.start + 1000 + (int64_t)(r / 64 % 20000);
    k.stream = k.name < 2 ? 21 : 7;
    return k;
}

static long peak_mb(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_maxrss / 1024;
}

static void fail(const char *what) {
    fprintf(stderr, "profile_bench: %s: %s\n", what, epo_fail_text());
    exit(1);
}

static double measure_all(epo_profile *p) {
    double share = 0;
    for (size_t i = 0; i < epo_profile_tell(p).units; i++) {
        epo_profile_times t;
        if (epo_profile_measure(p, i, INT64_MIN, INT64_MAX, &t, NULL) != EPO_OK)
            fail("measure");
        share += (double)t.overlapped / (double)t.comm / (double)epo_profile_tell(p).units;
    }
    return share;
}

static void row(const char *what, uint64_t count, double seconds, double share, size_t runs,
                double megabytes) {
    char rate[32] = "";
    if (megabytes > 0)
        snprintf(rate, sizeof rate, ", %.0f MB/s", megabytes / seconds);
    printf("%-14s %4.0f million  %8.3f s  %7.3f million/s  share %.6f  %3zu runs  peak %ld MB%s\n",
           what, (double)count / 1e6, seconds, (double)count / seconds / 1e6, share, runs,
           peak_mb(), rate);
    fflush(stdout);
}

static void from_memory(uint64_t count) {
    const epo_profile_options options = {0};
    epo_profile *p;
    uint32_t handle[NAMES];
    uint64_t state = 1;
    double start = now();
    if (epo_profile_create(&options, EPO_PROFILE_NSIGHT, &p) != EPO_OK)
        fail("create");
    for (size_t i = 0; i < NAMES; i++)
        if (epo_profile_intern(p, names[i], &handle[i]) != EPO_OK)
            fail("name");
    for (uint64_t i = 0; i < count; i++) {
        kernel k = next_kernel(i, &state);
        if (epo_profile_kernel(p, 1, k.device, k.stream, handle[k.name], k.start, k.end) != EPO_OK)
            fail("kernel");
    }
    if (epo_profile_finish(p) != EPO_OK)
        fail("finish");
    double share = measure_all(p);
    row("intervals", count, now() - start, share, epo_profile_tell(p).runs, 0);
    epo_profile_destroy(p);
}

static void read_file(const char *what, const char *path, uint64_t count) {
    const epo_profile_options options = {0};
    epo_profile *p;
    double start = now(), megabytes = 0;
    FILE *f = fopen(path, "r");
    if (f != NULL && fseek(f, 0, SEEK_END) == 0)
        megabytes = (double)ftell(f) / 1e6;
    if (f != NULL)
        fclose(f);
    if (epo_profile_read(path, &options, &p) != EPO_OK)
        fail(path);
    double share = measure_all(p);
    row(what, count, now() - start, share, epo_profile_tell(p).runs, megabytes);
    epo_profile_destroy(p);
}

static void run_sql(sqlite3 *db, const char *sql) {
    if (sqlite3_exec(db, sql, NULL, NULL, NULL) != SQLITE_OK) {
        fprintf(stderr, "profile_bench: %s: %s\n", sql, sqlite3_errmsg(db));
        exit(1);
    }
}

static void write_sqlite(const char *path, uint64_t count) {
    sqlite3 *db;
    sqlite3_stmt *insert;
    uint64_t state = 1;
    char sql[256];
    unlink(path);
    if (sqlite3_open(path, &db) != SQLITE_OK)
        exit(1);
    run_sql(db, "PRAGMA journal_mode = OFF");
    run_sql(db, "PRAGMA synchronous = OFF");
    run_sql(db, "BEGIN");
    run_sql(db, "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)");
    for (size_t i = 0; i < NAMES; i++) {
        snprintf(sql, sizeof sql, "INSERT INTO StringIds VALUES (%zu, '%s')", i + 1, names[i]);
        run_sql(db, sql);
    }
    run_sql(
        db,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, \"end\" INTEGER NOT "
        "NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, "
        "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName "
        "INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, "
        "cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY "
        "INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT "
        "NULL, blockZ INTEGER NOT NULL)");
    sqlite3_prepare_v2(
        db,
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?1, ?2, ?3, 1, NULL, ?4, ?5, "
        "79121344512, ?6, ?6, NULL, NULL, 0, 96, 132, 1, 1, 384, 1, 1)",
        -1, &insert, NULL);
    for (uint64_t i = 0; i < count; i++) {
        kernel k = next_kernel(i, &state);
        const int64_t values[] = {k.start, k.end, k.device, k.stream, (int64_t)i, k.name + 1};
        for (int v = 0; v < 6; v++)
            sqlite3_bind_int64(insert, v + 1, values[v]);
        sqlite3_step(insert);
        sqlite3_reset(insert);
    }
    sqlite3_finalize(insert);
    run_sql(db, "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, \"end\" INTEGER, deviceId "
                "INTEGER, streamId INTEGER, copyKind INTEGER)");
    run_sql(db, "COMMIT");
    sqlite3_close(db);
}

/* As PyTorch's profiler writes them, about 400 bytes each. */
static void write_chrome(const char *path, uint64_t count) {
    FILE *f = fopen(path, "w");
    uint64_t state = 1;
    if (f == NULL)
        exit(1);
    fputs("{\"schemaVersion\": 1, \"traceEvents\": [", f);
    for (uint64_t i = 0; i < count; i++) {
        kernel k = next_kernel(i, &state);
        fprintf(
            f,
            "%s\n  {\n    \"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"%s\", \"pid\": %" PRId64
            ", \"tid\": %" PRId64 ",\n    \"ts\": 17000000%" PRId64 ".%03" PRId64
            ", \"dur\": %" PRId64 ".%03" PRId64
            ",\n    \"args\": {\n      \"External id\": %" PRIu64
            ",\"queued\": 0, \"device\": %" PRId64 ", \"context\": 1,\n      \"stream\": %" PRId64
            ", \"correlation\": %" PRIu64 ",\n      \"registers per thread\": 96,\n      "
            "\"shared memory\": 82256,\n      \"blocks per SM\": 0.18,\n      \"warps per SM\": "
            "2.9,\n"
            "      \"grid\": [24, 1, 1],\n      \"block\": [544, 1, 1],\n      "
            "\"est. achieved occupancy %%\": 5\n    }\n  }",
            i > 0 ? "," : "", names[k.name], k.device, k.stream, 10000000 + k.start / 1000,
            k.start % 1000, (k.end - k.start) / 1000, (k.end - k.start) % 1000, i, k.device,
            k.stream, i);
    }
    fputs("\n], \"traceName\": \"bench\"}\n", f);
    fclose(f);
}

int main(int argc, char **argv) {
    static const char *const usual[] = {"1", "2", "5", "10", "20"};
    const char *const *sizes = argc > 1 ? (const char *const *)argv + 1 : usual;
    int count = argc > 1 ? argc - 1 : 5;
    char path[64];
    snprintf(path, sizeof path, "profile_bench.%d.tmp", (int)getpid());
    for (int i = 0; i < count; i++)
        from_memory((uint64_t)(strtod(sizes[i], NULL) * 1e6));
    for (int i = 0; i < count; i++) {
        uint64_t n = (uint64_t)(strtod(sizes[i], NULL) * 1e6);
        write_sqlite(path, n);
        read_file("SQLite export", path, n);
    }
    for (int i = 0; i < count; i++) {
        uint64_t n = (uint64_t)(strtod(sizes[i], NULL) * 1e6);
        write_chrome(path, n);
        read_file("Chrome trace", path, n);
    }
    unlink(path);
    return 0;
}
