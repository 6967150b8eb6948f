/* SPDX-License-Identifier: Apache-2.0
 *
 * test_train - ep-train's parts that need no ranks: options, text, batches,
 * optimizer, random numbers, the launcher.
 */
#include "core/status.h"
#include "data.h"
#include "optim.h"
#include "options.h"
#include "measure/launch.h"
#include "measure/rng.h"
#include "measure/spread.h"
#include "unit.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The library's version is all that the options need of it. */
const char *epo_version(void) { return "1.2.3"; }

/* ---- options ---------------------------------------------------------- */

static options parsed;
static char printed[8192];

static options_result parse(const char *line) {
    static char words[512]; /* options point into it */
    char *argv[32] = {(char *)"ep-train"}, *save = NULL;
    int argc = 1;
    FILE *out = fmemopen(printed, sizeof printed, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(out);
    printed[0] = '\0';
    snprintf(words, sizeof words, "%s", line);
    for (char *w = strtok_r(words, " ", &save); w != NULL && argc < 31;
         w = strtok_r(NULL, " ", &save))
        argv[argc++] = w;
    options_result result = options_read(argc, argv, &parsed, out);
    fclose(out);
    return result;
}

static void options_as_given(void) {
    CU_ASSERT_EQUAL(parse(""), OPTIONS_RUN);
    CU_ASSERT(parsed.steps == 50 && parsed.overlap == EPO_DEFAULT && parsed.lr == 0.003);
    CU_ASSERT_EQUAL(parse("--steps 7 --dispatcher=flex --overlap on --delay-wgrad --lr 1e-2 "
                          "--seed 18446744073709551615 --dtype bf16 text.txt"),
                    OPTIONS_RUN);
    CU_ASSERT(parsed.steps == 7 && parsed.dispatcher == EPO_DISPATCH_FLEX &&
              parsed.overlap == EPO_ON && parsed.delay_wgrad == EPO_ON && parsed.lr == 1e-2 &&
              parsed.seed == UINT64_MAX && parsed.dtype == EPO_BF16);
    CU_ASSERT_STRING_EQUAL(parsed.file, "text.txt");
    CU_ASSERT_EQUAL(parse("--delay-wgrad --no-delay-wgrad --optimizer sgd --no-measure"),
                    OPTIONS_RUN);
    CU_ASSERT(parsed.delay_wgrad == EPO_OFF && parsed.lr == 0.3 && parsed.measure == 0);
    CU_ASSERT_EQUAL(parse("-- --odd-name"), OPTIONS_RUN);
    CU_ASSERT_STRING_EQUAL(parsed.file, "--odd-name");
    CU_ASSERT_EQUAL(parse("--help"), OPTIONS_DONE);
    CU_ASSERT_PTR_NOT_NULL(strstr(printed, "--top-k N"));
    CU_ASSERT_EQUAL(parse("--version"), OPTIONS_DONE);
    CU_ASSERT_STRING_EQUAL(printed, "ep-train 1.2.3\n");
}

static void options_refused(void) {
    static const char *const bad[][2] = {
        {"--steps 0", "--steps: found \"0\", allowed is 1 to"},
        {"--steps ten", "--steps: found \"ten\""},
        {"--steps 1.5", "--steps: found \"1.5\""},
        {"--steps 99999999999999", "--steps"},
        {"--steps", "--steps needs a value"},
        {"--steps=", "--steps: found \"\""},
        {"--lr 0", "more than 0"},
        {"--lr nan", "--lr"},
        {"--seed -1", "--seed"},
        {"--dispatcher fast", "alltoall|flex"},
        {"--overlap auto", "on|off"},
        {"--delay-wgrad=1", "takes no value"},
        {"--frobnicate", "no such option"},
        {"-x", "no such option"},
        {"--top-k 9", "at most --experts (8)"},
        {"--top-k 33 --experts 64", "1 to 32"},
        {"--batch 1048576 --seq 1024", "tokens"},
        {"a b", "two text files"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CU_ASSERT_EQUAL(parse(bad[i][0]), OPTIONS_WRONG);
        if (strstr(epo_fail_text(), bad[i][1]) == NULL)
            fprintf(stderr, "%s: %s\n", bad[i][0], epo_fail_text());
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), bad[i][1]));
        CU_ASSERT_EQUAL(printed[0], '\0');
    }
}

/* ---- data ------------------------------------------------------------- */

static char folder[] = "/tmp/test_train.XXXXXX";

static const char *write_text(const char *name, size_t bytes) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(f);
    for (size_t i = 0; i < bytes; i++)
        fputc((int)(i % 251), f);
    fclose(f);
    return path;
}

static void texts_refused(void) {
    data_text text = {NULL, 0};
    char fifo[128];
    CU_ASSERT_EQUAL(data_read("/nonexistent/text", 8, 2, &text), EPO_E_SYSTEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "/nonexistent/text cannot be read"));
    CU_ASSERT_EQUAL(data_read(folder, 8, 2, &text), EPO_E_SYSTEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "is a folder"));
    CU_ASSERT_EQUAL(data_read(write_text("empty", 0), 8, 2, &text), EPO_E_SYSTEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "is empty"));
    CU_ASSERT_EQUAL(data_read(write_text("short", 9), 8, 2, &text), EPO_E_SYSTEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "has 9 bytes, this batch needs at least 10"));
    snprintf(fifo, sizeof fifo, "%s/fifo", folder);
    CU_ASSERT_EQUAL(mkfifo(fifo, 0600), 0);
    CU_ASSERT_EQUAL(data_read(fifo, 8, 2, &text), EPO_E_SYSTEM); /* and does not wait */
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "not a regular file"));
    CU_ASSERT_PTR_NULL(text.byte);
    CU_ASSERT_EQUAL(data_read(write_text("just", 10), 8, 2, &text), EPO_OK);
    CU_ASSERT_EQUAL(text.count, 10);
    data_free(&text);
}

/* However many ranks share a batch, its sequences are the same ones, each once. */
static void batches_do_not_depend_on_ranks(void) {
    enum { BATCH = 7, SEQ = 5 };
    data_text text = {NULL, 0};
    uint8_t whole[2][BATCH * SEQ], part[2][BATCH * SEQ];
    CU_ASSERT_EQUAL(data_read(write_text("text", 1000), SEQ, BATCH, &text), EPO_OK);
    data_batch(&text, 3, 9, BATCH, 0, BATCH, SEQ, whole[0], whole[1]);
    for (int i = 0; i < BATCH * SEQ; i++)
        CU_ASSERT_EQUAL(whole[1][i], (whole[0][i] + 1) % 251);
    for (int ranks = 1; ranks <= 9; ranks++) {
        int next = 0;
        for (int r = 0; r < ranks; r++) {
            int first, count;
            data_slice(BATCH, r, ranks, &first, &count);
            CU_ASSERT_EQUAL(first, next);
            CU_ASSERT(count >= 0 && count <= (BATCH + ranks - 1) / ranks);
            data_batch(&text, 3, 9, BATCH, first, count, SEQ, part[0], part[1]);
            CU_ASSERT_EQUAL(memcmp(part[0], whole[0] + first * SEQ, (size_t)count * SEQ), 0);
            next = first + count;
        }
        CU_ASSERT_EQUAL(next, BATCH);
    }
    data_batch(&text, 4, 9, BATCH, 0, BATCH, SEQ, part[0], part[1]);
    CU_ASSERT_NOT_EQUAL(memcmp(part[0], whole[0], sizeof part[0]), 0);
    data_free(&text);
}

/* ---- numbers ---------------------------------------------------------- */

static void random_numbers(void) {
    double sum = 0, square = 0;
    for (uint64_t i = 0; i < 100000; i++) {
        double x = rng_symmetric(5, 1, i);
        CU_ASSERT(x >= -1 && x < 1);
        sum += x;
        square += x * x;
    }
    CU_ASSERT(fabs(sum / 100000) < 0.01 && fabs(square / 100000 - 1.0 / 3) < 0.01);
    CU_ASSERT_EQUAL(rng_at(5, 1, 7), rng_at(5, 1, 7));
    CU_ASSERT_NOT_EQUAL(rng_at(5, 1, 7), rng_at(5, 2, 7));
    CU_ASSERT_NOT_EQUAL(rng_at(5, 1, 7), rng_at(6, 1, 7));
}

/* Against the formulas in double. */
static void optimizers(void) {
    float w[3] = {1, -2, 0}, g[3] = {0.5f, 0.25f, 0};
    double ref[3] = {1, -2, 0}, mean[3] = {0}, square[3] = {0};
    optim *o = NULL;
    CU_ASSERT_EQUAL_FATAL(optim_create(OPTIM_SGD, 3, &o), EPO_OK);
    optim_step(o, w, g, 0.1, 1);
    CU_ASSERT_EQUAL(w[0], 1 - 0.1f * 0.5f);
    optim_destroy(o);
    w[0] = 1;
    w[1] = -2;
    CU_ASSERT_EQUAL_FATAL(optim_create(OPTIM_ADAMW, 3, &o), EPO_OK);
    for (int step = 1; step <= 20; step++) {
        g[1] = (float)sin(step);
        optim_step(o, w, g, 0.01, step);
        for (int i = 0; i < 3; i++) {
            mean[i] = 0.9 * mean[i] + 0.1 * g[i];
            square[i] = 0.95 * square[i] + 0.05 * g[i] * g[i];
            ref[i] =
                ref[i] * (1 - 0.01 * 0.01) - 0.01 * mean[i] / (1 - pow(0.9, step)) /
                                                 (sqrt(square[i] / (1 - pow(0.95, step))) + 1e-8);
            CU_ASSERT(fabs(w[i] - ref[i]) < 1e-5);
        }
    }
    optim_destroy(o);
    optim_destroy(NULL);
}

static void medians(void) {
    double v[5] = {5, 1, 4, 2, 9};
    spread s = spread_of(v, 5);
    CU_ASSERT(s.median == 4 && s.least == 1 && s.most == 9);
    s = spread_of(v, 4); /* sorted now: 1 2 4 5 */
    CU_ASSERT(s.median == 3);
    s = spread_of(v, 0);
    CU_ASSERT(s.median == 0 && s.most == 0);
    samples last = {v, 0, 3, 0};
    for (int i = 1; i <= 8; i++)
        samples_put(&last, i);
    s = spread_of(last.value, last.count);
    CU_ASSERT(last.count == 3 && s.least == 6 && s.most == 8);
}

/* ---- launcher --------------------------------------------------------- */

static int has_torchrun_variables(void *ctx) {
    const char *rank = getenv("RANK"), *local = getenv("LOCAL_RANK"), *size = getenv("WORLD_SIZE");
    (void)ctx;
    if (rank == NULL || local == NULL || size == NULL || getenv("MASTER_ADDR") == NULL ||
        getenv("MASTER_PORT") == NULL)
        return 3;
    return strcmp(rank, local) == 0 && strcmp(size, "3") == 0 ? 0 : 4;
}

static int second_fails_others_hang(void *ctx) {
    (void)ctx;
    if (strcmp(getenv("RANK"), "1") == 0)
        return 7;
    for (;;)
        pause();
}

static int second_is_killed(void *ctx) {
    (void)ctx;
    if (strcmp(getenv("RANK"), "1") == 0)
        raise(SIGKILL);
    return 0;
}

static void launcher(void) {
    CU_ASSERT_EQUAL(launch_ranks("test", 3, has_torchrun_variables, NULL), 0);
    CU_ASSERT_EQUAL(launch_ranks("test", 2, has_torchrun_variables, NULL), 4);
    CU_ASSERT_EQUAL(launch_ranks("test", 3, second_fails_others_hang, NULL), 7);
    CU_ASSERT_EQUAL(launch_ranks("test", 2, second_is_killed, NULL), 128 + SIGKILL);
}

static void who_speaks(void) {
    clearenv();
    CU_ASSERT_EQUAL(launch_is_other(), 0);
    setenv("SLURM_PROCID", "2", 1);
    CU_ASSERT_EQUAL(launch_is_other(), 1);
    setenv("RANK", "0", 1);
    CU_ASSERT_EQUAL(launch_is_other(), 0);
    setenv("RANK", "two", 1); /* cannot tell: better twice than never */
    CU_ASSERT_EQUAL(launch_is_other(), 0);
    CU_ASSERT_EQUAL(launch_names_rank("WORLD_SIZE: found \"x\""), 1);
    CU_ASSERT_EQUAL(launch_names_rank("RANK is \"1\" but"), 1);
    CU_ASSERT_EQUAL(launch_names_rank("RANKS: found"), 0);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"options", options_as_given},
        {"options that are refused", options_refused},
        {"texts that are refused", texts_refused},
        {"batches do not depend on the ranks", batches_do_not_depend_on_ranks},
        {"random numbers", random_numbers},
        {"SGD and AdamW", optimizers},
        {"medians", medians},
        {"launcher: variables, failures, signals", launcher},
        {"who prints a line that all would print", who_speaks},
        CU_TEST_INFO_NULL,
    };
    if (mkdtemp(folder) == NULL)
        return 99;
    int failed = unit_run("train", tests);
    static const char *const names[] = {"empty", "short", "fifo", "just", "text"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
    return failed;
}
