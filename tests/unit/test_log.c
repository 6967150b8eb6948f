/* SPDX-License-Identifier: Apache-2.0
 *
 * Training logs: every framework's line, fields in any order, absent or odd.
 */
#include "core/status.h"
#include "trace/log.h"
#include "trace/log_stats.h"
#include "unit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static epo_log *read_lines(const char *const *lines) {
    epo_log *log = epo_log_create();
    for (uint64_t i = 0; lines[i] != NULL; i++)
        CU_ASSERT_EQUAL(epo_log_feed(log, lines[i], i + 1, NULL, NULL), EPO_OK);
    epo_log_finish(log);
    return log;
}

static bool same(double a, double b) { return (isnan(a) && isnan(b)) || fabs(a - b) < 1e-9; }

static void each_framework_is_read(void) {
    static const char *const lines[] = {
        " [2026-09-24 09:43:42] iteration        2/      20 | consumed samples:           32 | "
        "elapsed time per iteration (ms): 658.3 | mem usages: 0.5462 | throughput per GPU "
        "(TFLOP/s/GPU): 1441.4 | learning rate: 1.000000E-04 | global batch size:    16 | lm loss: "
        "1.250274E+01 | loss scale: 1.0 | grad norm: 2.772 | number of skipped iterations:   0 | "
        "number of nan iterations:   1 |",
        "iteration 4/ 20 | elapsed time per iteration (ms): 654.5/735.1 | lm loss: 1.2E+01 |",
        NULL};
    epo_log *log = read_lines(lines);
    CU_ASSERT_EQUAL(log->kind, EPO_LOG_MEGATRON_LM);
    CU_ASSERT_EQUAL_FATAL(log->count, 2);
    const epo_iteration *it = &log->iteration[0];
    CU_ASSERT(it->number == 2 && log->planned == 20 && it->line == 1 && log->interval == 2);
    CU_ASSERT(same(it->time_ms, 658.3) && same(it->tflops, 1441.4) && same(it->loss, 12.50274));
    CU_ASSERT(same(it->grad_norm, 2.772) && same(it->batch, 16));
    CU_ASSERT(same(it->skipped, 0) && same(it->nans, 1));
    CU_ASSERT(same(log->iteration[1].time_ms, 654.5) && isnan(log->iteration[1].tflops));
    epo_log_destroy(log);
}

static void torchtitan_is_read(void) {
    static const char *const lines[] = {
        "[titan] 2026-07-17 12:05:18,271 - root - INFO - Training starts at step 1, with local "
        "batch size 8, global batch size 16, sequence length 2048, total steps 30 (warmup 2)",
        "[rank0]:[titan] 2026-07-17 12:05:19,271 - root - INFO - step:  1  loss:  7.98741  "
        "grad_norm:  3.7610  memory:  3.87GiB(2.17%)  tps: 589  tflops: 0.32  mfu: N/A",
        "[rank1]:[titan] 2026-07-17 12:05:19,275 - root - INFO - step:  1  loss:  7.98741  "
        "grad_norm:  3.7610  memory:  3.90GiB(2.17%)  tps: 588  tflops: 0.32  mfu: N/A",
        "[titan] 2026-07-17 23:59:59,900 - root - INFO - step: 10  loss:  "
        "6.09081  grad_norm:  4.2098  memory:  4.26GiB(2.39%)  "
        "tps: 72,915  tflops: 1,239.59  mfu: 13.99%",
        "[titan] 2026-07-18 00:00:04,900 - root - INFO - step: 20  loss:      nan  grad_norm:  "
        "3.2568  memory:  4.20GiB(2.40%)  tps: 75,562  tflops: 41.03  mfu: N/A",
        "[titan] 2026-07-18 00:00:09,900 - root - INFO - a word of the step: nothing",
        NULL};
    epo_log *log = read_lines(lines);
    CU_ASSERT_EQUAL(log->kind, EPO_LOG_TORCHTITAN);
    CU_ASSERT_EQUAL_FATAL(log->count, 3);
    CU_ASSERT(log->planned == 30 && log->duplicates == 1);
    CU_ASSERT(isnan(log->iteration[0].time_ms) && same(log->iteration[0].tokens, 589));
    const epo_iteration *it = &log->iteration[1];
    CU_ASSERT(it->number == 10 && same(it->tokens, 72915) && same(it->tflops, 1239.59));
    CU_ASSERT(same(it->loss, 6.09081) && same(it->grad_norm, 4.2098));
    CU_ASSERT(fabs(it->time_ms - 42880629.0 / 9) < 1e-3); /* 11:54:40.629 for nine steps */
    CU_ASSERT(fabs(log->iteration[2].time_ms - 500) < 1e-3 && log->iteration[2].no_loss);
    CU_ASSERT(same(log->peak_reserved, 4.26 * 1073741824.0));
    epo_log_destroy(log);
}

static void nemo_is_read(void) {
    static const char *const lines[] = {
        "[2025-10-17T11:32:59+08:00] Training epoch 0, iteration 45/99 | lr: 6.897e-06 | "
        "global_batch_size: 128 | global_step: 45 | max_memory_reserved: 127785762816 | "
        "max_memory_allocated: 115792977920 | reduced_train_loss: 11.96 | train_step_timing in s: "
        "6.08 | TFLOPS_per_GPU: 1.249e+03 | consumed_samples: 5888",
        " 0: Training epoch 0, iteration 46/99 | train_step_timing in s: 6.061 | "
        "reduced_train_loss: 11.9 | tokens_per_sec_per_gpu: 6.859e+03 | val_loss: 2.861",
        NULL};
    epo_log *log = read_lines(lines);
    CU_ASSERT_EQUAL(log->kind, EPO_LOG_NEMO);
    CU_ASSERT_EQUAL_FATAL(log->count, 2);
    CU_ASSERT(same(log->iteration[0].time_ms, 6080) && same(log->iteration[0].tflops, 1249));
    CU_ASSERT(same(log->iteration[0].loss, 11.96) && same(log->iteration[0].batch, 128));
    CU_ASSERT(same(log->peak_allocated, 115792977920.0) &&
              same(log->peak_reserved, 127785762816.0));
    CU_ASSERT(same(log->iteration[1].tokens, 6859) && same(log->iteration[1].time_ms, 6061));
    epo_log_destroy(log);
}

static void bridge_times_may_come_from_another_rank(void) {
    static const char *const lines[] = {
        "Step Time : 41.25s GPU utilization: 146.2MODEL_TFLOP/s/GPU",
        "15:  iteration 1/ 2 | consumed samples: 512 | lm loss: 1.2E+01 | grad norm: 1.0 |",
        "0: Step Time : 31.31s GPU utilization: 192.6MODEL_TFLOP/s/GPU",
        "15:  iteration 2/ 2 | consumed samples: 1024 | lm loss: 1.1E+01 | grad norm: 1.0 |", NULL};
    epo_log *log = read_lines(lines);
    CU_ASSERT_EQUAL(log->kind, EPO_LOG_BRIDGE);
    CU_ASSERT_EQUAL_FATAL(log->count, 2);
    CU_ASSERT(same(log->iteration[0].time_ms, 41250) && same(log->iteration[1].tflops, 192.6));
    epo_log_destroy(log);
    const char *const times_only[] = {lines[0], lines[2], NULL};
    log = read_lines(times_only);
    CU_ASSERT_EQUAL_FATAL(log->count, 2);
    CU_ASSERT(log->iteration[1].number == 2 && same(log->iteration[1].time_ms, 31310));
    epo_log_destroy(log);
}

/* Megatron-Core's own lines stand in the logs of those that are built on it. */
static void a_framework_is_known_by_its_own_lines(void) {
    static const char *const lines[] = {
        "iteration 1/ 9 | elapsed time per iteration (ms): 650.0 | lm loss: 1.2E+01 |",
        "Step Time : 41.25s GPU utilization: 146.2MODEL_TFLOP/s/GPU", /* Bridge's */
        "iteration 2/ 9 | elapsed time per iteration (ms): 650.0 | lm loss: 1.2E+01 |",
        "ep-train: overlap off, dispatcher flex, weight gradients at once, 1 chunk", /* quoted */
        NULL};
    epo_log *log = read_lines(lines);
    CU_ASSERT_EQUAL(log->kind, EPO_LOG_BRIDGE);
    epo_log_destroy(log);
    log = read_lines((const char *const[]){lines[0], lines[3], NULL});
    CU_ASSERT_EQUAL(log->kind, EPO_LOG_EP_TRAIN);
    epo_log_destroy(log);
}

static void ep_train_tells_its_settings(void);

static void memory_units_are_told_apart(void) {
    static const char *const bridge[] = {
        "[Rank 1] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 63.66 | "
        "mem-max-allocated-gigabytes: 62.1 | mem-max-reserved-gigabytes: 70.5 | mem-alloc-retires: "
        "0[Rank 3] (after 2 iterations) memory (GB) | mem-max-allocated-gigabytes: 62.166 |",
        "iteration 1/ 1 | elapsed time per iteration (ms): 1 |", NULL};
    epo_log *log = read_lines(bridge);
    CU_ASSERT(same(log->peak_allocated, 62.166e9) && same(log->peak_reserved, 70.5e9));
    epo_log_destroy(log);
    static const char *const falling[] = {
        "mem-max-allocated-gigabytes: 3 |", "mem-max-allocated-gigabytes: 2 |",
        "mem-max-allocated-gigabytes: inf |", "mem-max-reserved-gigabytes: none |", NULL};
    log = read_lines(falling);
    CU_ASSERT(same(log->peak_allocated, 3e9) && isnan(log->peak_reserved));
    epo_log_destroy(log);
    static const char *const megatron[] = {
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 70974.689453125 | max allocated: "
        "1024.5 | reserved: 137672.0 | max reserved: 2048.0",
        NULL};
    log = read_lines(megatron);
    CU_ASSERT(same(log->peak_allocated, 1024.5 * 1048576) &&
              same(log->peak_reserved, 2147483648.0));
    epo_log_destroy(log);
    static const char *const host[] = {
        "ep-train: overlap off, dispatcher flex, weight gradients at once, 1 chunk, host engine, 4 "
        "ranks",
        "  memory                6.46 MB  of the library at most; the process 26.5 MB", NULL};
    log = read_lines(host);
    CU_ASSERT(same(log->peak_allocated, 6.46e6) && same(log->peak_reserved, 26.5e6));
    epo_log_destroy(log);
    static const char *const gpu[] = {
        "ep-train: overlap off, dispatcher flex, weight gradients at once, 1 chunk, cuda engine, 2 "
        "ranks",
        "  memory             6460.00 MB  of the library at most; the process 1083.5 MB; 17070 MB "
        "in use on its GPU, by all",
        NULL};
    log = read_lines(gpu);
    CU_ASSERT(same(log->peak_allocated, 6.46e9) && same(log->peak_reserved, 17.07e9));
    epo_log_destroy(log);
}

static void a_missing_loss_is_nan(void) {
    static const char *const lines[] = {
        "iteration 1/ 3 | elapsed time per iteration (ms): 1 | lm loss: 1.0E+00 |",
        "iteration 2/ 3 | elapsed time per iteration (ms): 1 | grad norm: 1.0 |",
        "iteration 3/ 3 | elapsed time per iteration (ms): 1 | lm loss: nan |", NULL};
    epo_log *log = read_lines(lines);
    epo_window_stats stats;
    CU_ASSERT_TRUE(log->has_loss);
    CU_ASSERT_EQUAL(epo_log_stats(log, (epo_window){1, 3}, &stats), EPO_OK);
    CU_ASSERT_EQUAL(stats.lossless, 2);
    epo_log_destroy(log);
    static const char *const none[] = {"iteration 1/ 1 | elapsed time per iteration (ms): 1 |",
                                       NULL};
    log = read_lines(none);
    CU_ASSERT_FALSE(log->has_loss);
    CU_ASSERT_EQUAL(epo_log_stats(log, (epo_window){1, 1}, &stats), EPO_OK);
    CU_ASSERT_EQUAL(stats.lossless, 0);
    epo_log_destroy(log);
}

static void repeats_and_restarts(void) {
    static const char *const lines[] = {
        "0: iteration 1/ 4 | elapsed time per iteration (ms): 10 |",
        "1: iteration 1/ 4 | elapsed time per iteration (ms): 99 | lm loss: 1.0 |",
        "iteration 2/ 4 | elapsed time per iteration (ms): 20 |",
        "iteration 3/ 4 | elapsed time per iteration (ms): 30 |",
        "iteration 2/ 4 | elapsed time per iteration (ms): 21 |",
        "iteration 3/ 4 | elapsed time per iteration (ms): 31 |",
        NULL};
    epo_log *log = read_lines(lines);
    CU_ASSERT_EQUAL_FATAL(log->count, 3);
    CU_ASSERT(log->duplicates == 1 && log->restarts == 1);
    CU_ASSERT(same(log->iteration[0].time_ms, 10) && same(log->iteration[0].loss, 1));
    CU_ASSERT(same(log->iteration[1].time_ms, 21) && same(log->iteration[2].time_ms, 31));
    /* the first one behind a restart starts up */
    epo_window_stats stats;
    CU_ASSERT_EQUAL(epo_log_stats(log, (epo_window){1, 3}, &stats), EPO_OK);
    CU_ASSERT(stats.restarts == 1 && stats.iterations == 3 && stats.time_ms.count == 2);
    CU_ASSERT(same(stats.time_ms.most, 31));
    epo_log_destroy(log);
}

/* Ranks that print late are no restart; the crash before one is overcome, the one behind is not. */
static void ranks_and_restarts_are_told_apart(void) {
    static const char *const ranks[] = {
        "[rank0]: iteration 1/ 3 | elapsed time per iteration (ms): 10 |",
        "[rank0]: iteration 2/ 3 | elapsed time per iteration (ms): 20 |",
        "[rank1]: iteration 1/ 3 | elapsed time per iteration (ms): 11 | lm loss: 1.0 |",
        "[rank1]: iteration 2/ 3 | elapsed time per iteration (ms): 21 | lm loss: 0.9 |",
        "[rank0]: iteration 3/ 3 | elapsed time per iteration (ms): 30 |",
        NULL};
    epo_log *log = read_lines(ranks);
    CU_ASSERT_EQUAL_FATAL(log->count, 3);
    CU_ASSERT(log->restarts == 0 && log->duplicates == 2);
    CU_ASSERT(same(log->iteration[0].time_ms, 10) && same(log->iteration[0].loss, 1));
    epo_log_destroy(log);
    static const char *const dates[] = {
        "03:04:05 [2026-01-02 03:04:05] iteration 1/ 3 | elapsed time per iteration (ms): 10 |",
        "03:04:06 [2026-01-02 03:04:06] iteration 2/ 3 | elapsed time per iteration (ms): 20 |",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "04:04:05 [2026-01-02 04:04:05] iteration 1/ 3 | elapsed time per iteration (ms): 90 |",
        "04:04:05 [2026-01-02 04:04:06] iteration 2/ 3 | elapsed time per iteration (ms): 20 |",
        "CUDA error: an illegal memory access",
        NULL};
    log = read_lines(dates);
    CU_ASSERT(log->count == 2 && log->restarts == 1 && log->failure_line == 6);
    epo_log_destroy(log);
}

static void other_lines_are_no_iterations(void) {
    static const char *const lines[] = {
        "",
        "|",
        "iteration",
        "iteration 3",
        "iteration 3/",
        "iteration 3/ x | lm loss: 1 |",
        "saving checkpoint at iteration      10 to /ckpt in torch_dist format",
        "validation loss at iteration 10 | lm loss value: 1.0E+00 | lm loss PPL: 2.7E+00 |",
        "loaded checkpoint at iteration 5/ 10",
        "iteration -3/ 10 | lm loss: 1 |",
        "iteration 99999999999999999999/ 10 |",
        ": | : | iteration 3/ 4 | : |",
        NULL};
    epo_log *log = read_lines(lines);
    CU_ASSERT_EQUAL(log->count, 0);
    CU_ASSERT_EQUAL(log->events, 2);
    epo_log_destroy(log);
}

static void failures_are_seen(void) {
    static const char *const lines[] = {"iteration 1/ 4 | elapsed time per iteration (ms): 10 |",
                                        "3: [rank3]: Traceback (most recent call last):",
                                        "srun: error: node1: task 3: Exited", NULL};
    epo_log *log = read_lines(lines);
    CU_ASSERT_EQUAL(log->failure_line, 2);
    CU_ASSERT_STRING_EQUAL(log->failure, "Traceback (most recent call last):");
    epo_log_destroy(log);
}

/* The same iteration in every order of its fields, with every subset left out,
 * behind every prefix. */
static void order_absence_and_prefix_do_not_matter(void) {
    static const char *const fields[] = {"elapsed time per iteration (ms): 123.5",
                                         "throughput per GPU (TFLOP/s/GPU): 77.5",
                                         "lm loss: 2.5E+00",
                                         "grad norm: 1.25",
                                         "global batch size:   32",
                                         "learning rate: 1.0E-05"};
    static const char *const prefixes[] = {"",
                                           " ",
                                           "12: ",
                                           "[rank3]: ",
                                           "[default0]:",
                                           " [2026-01-02 03:04:05] ",
                                           "0: [2026-01-02 03:04:05.123] ",
                                           "job/0 ",
                                           "\t"};
    unsigned seed = 7;
    for (int round = 0; round < 2000; round++) {
        char line[1024];
        int order[6] = {0, 1, 2, 3, 4, 5};
        unsigned present = (unsigned)rand_r(&seed) % 64;
        for (int i = 5; i > 0; i--) {
            int k = rand_r(&seed) % (i + 1), t = order[i];
            order[i] = order[k];
            order[k] = t;
        }
        int n = snprintf(line, sizeof line, "%s iteration %8d/ 999 |", prefixes[round % 9],
                         round % 999 + 1);
        for (int i = 0; i < 6; i++)
            if (present >> order[i] & 1)
                n += snprintf(line + n, sizeof line - (size_t)n, " %s |", fields[order[i]]);
        const char *const lines[] = {line, NULL};
        epo_log *log = read_lines(lines);
        bool any = (present & 31) != 0; /* the learning rate alone is no field of ours */
        CU_ASSERT_EQUAL_FATAL(log->count, any ? 1 : 0);
        if (any) {
            const epo_iteration *it = &log->iteration[0];
            CU_ASSERT(same(it->time_ms, present & 1 ? 123.5 : NAN));
            CU_ASSERT(same(it->tflops, present & 2 ? 77.5 : NAN));
            CU_ASSERT(same(it->loss, present & 4 ? 2.5 : NAN));
            CU_ASSERT(same(it->grad_norm, present & 8 ? 1.25 : NAN));
            CU_ASSERT(same(it->batch, present & 16 ? 32 : NAN));
        }
        epo_log_destroy(log);
    }
}

static epo_log *log_of(size_t count, const double *time, const double *loss) {
    epo_log *log = epo_log_create();
    char line[256];
    for (size_t i = 0; i < count; i++) {
        snprintf(line, sizeof line, "iteration %zu/ %zu | elapsed time per iteration (ms): %.17g |",
                 i + 1, count, time[i]);
        if (loss != NULL)
            snprintf(line + strlen(line), sizeof line - strlen(line), " lm loss: %.17g |", loss[i]);
        epo_log_feed(log, line, i + 1, NULL, NULL);
    }
    epo_log_finish(log);
    return log;
}

static void the_window_skips_the_first_tenth(void) {
    double time[40] = {0};
    static const size_t counts[] = {1, 2, 8, 10, 11, 40};
    static const int64_t first[] = {1, 2, 2, 2, 3, 5};
    for (size_t i = 0; i < 6; i++) {
        epo_log *log = log_of(counts[i], time, NULL);
        epo_window w = epo_log_steady_window(log);
        CU_ASSERT(w.first == first[i] && w.last == (int64_t)counts[i]);
        epo_log_destroy(log);
    }
    epo_log *empty = epo_log_create();
    epo_window w = epo_log_steady_window(empty);
    CU_ASSERT(w.last < w.first);
    epo_log_destroy(empty);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void statistics_match_a_plain_computation(void) {
    unsigned seed = 3;
    for (int round = 0; round < 50; round++) {
        double time[64], sorted[64], sum = 0, squares = 0;
        size_t count = 1 + (size_t)rand_r(&seed) % 64;
        for (size_t i = 0; i < count; i++)
            sum += sorted[i] = time[i] = 1000 + rand_r(&seed) % 1000 / 7.0;
        for (size_t i = 0; i < count; i++)
            squares += pow(time[i] - sum / (double)count, 2);
        qsort(sorted, count, sizeof *sorted, ascending);
        epo_log *log = log_of(count, time, NULL);
        epo_window_stats s;
        CU_ASSERT_EQUAL(epo_log_stats(log, (epo_window){1, 64}, &s), EPO_OK);
        CU_ASSERT(s.iterations == count && s.time_ms.count == count);
        CU_ASSERT_DOUBLE_EQUAL(s.time_ms.mean, sum / (double)count, 1e-9);
        CU_ASSERT_DOUBLE_EQUAL(s.time_ms.median, (sorted[count / 2] + sorted[(count - 1) / 2]) / 2,
                               1e-9);
        CU_ASSERT(s.time_ms.least == sorted[0] && s.time_ms.most == sorted[count - 1]);
        if (count > 1)
            CU_ASSERT_DOUBLE_EQUAL(s.time_ms.deviation, sqrt(squares / (double)(count - 1)), 1e-9);
        epo_log_destroy(log);
    }
}

static void windows_without_iterations_are_refused(void) {
    const double time[] = {1, 2, 3};
    epo_log *log = log_of(3, time, NULL);
    epo_window_stats s = {.iterations = 77};
    CU_ASSERT_EQUAL(epo_log_stats(log, (epo_window){5, 9}, &s), EPO_E_ARG);
    CU_ASSERT_EQUAL(s.iterations, 77);
    CU_ASSERT(strstr(epo_fail_text(), "5-9") != NULL && strstr(epo_fail_text(), "1-3") != NULL);
    epo_log_destroy(log);
}

static void warmup_is_seen_by_its_slowness(void) {
    const double slow[] = {100, 10, 10, 10, 10, 10}, even[] = {10, 10, 10, 10, 10, 10};
    epo_window_stats s;
    epo_log *log = log_of(6, slow, NULL);
    CU_ASSERT_EQUAL(epo_log_stats(log, (epo_window){1, 6}, &s), EPO_OK);
    CU_ASSERT_TRUE(s.has_warmup);
    CU_ASSERT_EQUAL(epo_log_stats(log, (epo_window){2, 6}, &s), EPO_OK);
    CU_ASSERT_FALSE(s.has_warmup);
    epo_log_destroy(log);
    log = log_of(6, even, NULL);
    CU_ASSERT_EQUAL(epo_log_stats(log, (epo_window){1, 6}, &s), EPO_OK);
    CU_ASSERT_FALSE(s.has_warmup);
    epo_log_destroy(log);
}

static void losses_are_compared(void) {
    const double time[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    const double a[8] = {8, 7, 6, 5, 4, 3, 2, 1}, b[8] = {8, 7, 6, 5, 4, 3, 2, 1.1};
    const double c[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    epo_log *x = log_of(8, time, a), *y = log_of(8, time, b), *z = log_of(8, time, c);
    epo_loss_comparison r;
    epo_log_compare_losses(x, x, &r);
    CU_ASSERT(r.common == 8 && r.identical == 8 && same(r.correlation, 1) && r.largest == 0);
    epo_log_compare_losses(x, y, &r);
    CU_ASSERT(r.identical == 7 && r.correlation > 0.999 && r.largest_at == 8);
    CU_ASSERT(same(r.largest, 0.1 / 1.1) && same(r.final_a, 1) && same(r.final_b, 1.1));
    epo_log_compare_losses(x, z, &r);
    CU_ASSERT(same(r.correlation, -1));
    epo_log *shorter = log_of(3, time, a), *flat = log_of(8, time, time);
    epo_log_compare_losses(x, shorter, &r);
    CU_ASSERT(r.common == 3 && same(r.final_a, 6));
    epo_log_compare_losses(flat, flat, &r);
    CU_ASSERT(isnan(r.correlation) && r.identical == 8);
    epo_log *const all[] = {x, y, z, shorter, flat};
    for (size_t i = 0; i < 5; i++)
        epo_log_destroy(all[i]);
}

typedef struct seen {
    char text[2048];
} seen;

static epo_status collect(void *context, const char *path, const char *value, uint64_t line) {
    seen *s = context;
    size_t used = strlen(s->text);
    snprintf(s->text + used, sizeof s->text - used, "%s=%s@%llu;", path, value,
             (unsigned long long)line);
    return EPO_OK;
}

static void check_settings(const char *const *lines, const char *wanted) {
    seen s = {""};
    epo_log *log = epo_log_create();
    for (uint64_t i = 0; lines[i] != NULL; i++)
        CU_ASSERT_EQUAL(epo_log_feed(log, lines[i], i + 1, collect, &s), EPO_OK);
    if (strcmp(s.text, wanted) != 0)
        fprintf(stderr, "found  %s\nwanted %s\n", s.text, wanted);
    CU_ASSERT_STRING_EQUAL(s.text, wanted);
    epo_log_destroy(log);
}

static void dumps_give_their_settings(void) {
    static const char *const megatron[] = {
        "0: ------------------------ arguments ------------------------",
        "0:   bf16 ............................................ True",
        "0:   data_path ....................................... ['a b', 'c']",
        "0:   empty ........................................... ",
        "0:   a_name_of_forty_eight_letters_and_more_has_no_dots  7",
        "0:   not a setting",
        "0: -------------------- end of arguments ---------------------",
        "0:   after ........................................... 1",
        NULL};
    check_settings(megatron, "bf16=True@2;data_path=['a b', 'c']@3;empty=@4;"
                             "a_name_of_forty_eight_letters_and_more_has_no_dots=7@5;");
    static const char *const bridge[] = {
        "=====",
        "Configuration Summary (Non-Default Values vs Megatron Core)",
        "======================================================================",
        "",
        "[model] Non-default values (vs Mcore TransformerConfig):",
        "  num_moe_experts: 128  (Mcore default: None)",
        "  moe_token_dispatcher_type: 'flex'  (Mcore default: 'allgather')",
        "----------------------------------------------------------------------",
        "[train]:",
        "  global_batch_size: 512",
        "======================================================================",
        "  after: 1",
        NULL};
    check_settings(bridge, "model.num_moe_experts=128@6;model.moe_token_dispatcher_type='flex'@7;"
                           "train.global_batch_size=512@10;");
}

static void ep_train_tells_its_settings(void) {
    static const char *const lines[] = {
        "ep-train: overlap on, dispatcher flex, weight gradients delayed, 4 chunks, host engine, 4 "
        "ranks, emulated link 1 GB/s + 5 us",
        "ep-train: overlap is on because of --ep-overlap", "ep-train: 2 steps are left",
        "ep-train: 2 layers, hidden 64, 8 experts of 128, top 2, fp32; step of 1 x 4 sequences of "
        "64 "
        "bytes from GPL (35149 bytes); seed 1",
        NULL};
    check_settings(
        lines,
        "overlap_moe_expert_parallel_comm=true@1;moe_token_dispatcher_type=flex@1;"
        "delay_wgrad_compute=true@1;ep_train_ranks=host engine, 4 ranks, emulated link 1 GB/s + "
        "5 us@1;ep_train_model=2 layers, hidden 64, 8 experts of 128, top 2, fp32; "
        "step of 1 x 4 sequences of 64 bytes from GPL (35149 bytes); seed 1@4;");
    static const char *const chosen[] = {
        "ep-train: overlap on, dispatcher alltoall, weight gradients at once, chunks chosen by the "
        "engine, host engine, 4 ranks",
        NULL};
    check_settings(chosen, "overlap_moe_expert_parallel_comm=true@1;"
                           "moe_token_dispatcher_type=alltoall@1;delay_wgrad_compute=false@1;"
                           "ep_train_ranks=host engine, 4 ranks@1;");
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"Megatron-LM is read", each_framework_is_read},
        {"torchtitan is read", torchtitan_is_read},
        {"NeMo is read", nemo_is_read},
        {"Bridge's times may come from another rank", bridge_times_may_come_from_another_rank},
        {"ep-train tells its settings", ep_train_tells_its_settings},
        {"a framework is known by its own lines", a_framework_is_known_by_its_own_lines},
        {"units of memory are told apart", memory_units_are_told_apart},
        {"a missing loss is NaN", a_missing_loss_is_nan},
        {"repeats and restarts", repeats_and_restarts},
        {"ranks and restarts are told apart", ranks_and_restarts_are_told_apart},
        {"other lines are no iterations", other_lines_are_no_iterations},
        {"failures are seen", failures_are_seen},
        {"order, absence and prefix do not matter", order_absence_and_prefix_do_not_matter},
        {"the window skips the first tenth", the_window_skips_the_first_tenth},
        {"statistics match a plain computation", statistics_match_a_plain_computation},
        {"windows without iterations are refused", windows_without_iterations_are_refused},
        {"warm-up is seen by its slowness", warmup_is_seen_by_its_slowness},
        {"losses are compared", losses_are_compared},
        {"dumps give their settings", dumps_give_their_settings},
        CU_TEST_INFO_NULL,
    };
    return unit_run("log", tests);
}
