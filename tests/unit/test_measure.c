/* SPDX-License-Identifier: Apache-2.0 */
#include "unit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/sanitized.h"
#include "measure/device.h"
#include "measure/narrow.h"
#include "measure/recorded.h"
#include "measure/rng.h"
#include "measure/rows.h"
#include "measure/spread.h"
#include "measure/trial.h"

/* ---- trials: these stand before the library's --------------------------------- */

static struct {
    int forwards, backwards, flushes;
    bool saves;
    epo_status forward, backward;
} called;

epo_status epo_forward(epo_layer *layer, epo_plan *plan, const void *x, void *y, epo_saved **saved,
                       epo_stream stream) {
    CU_ASSERT(layer == NULL && plan == NULL && x == y && stream == NULL);
    called.forwards++;
    called.saves = saved != NULL;
    if (saved != NULL)
        *saved = (epo_saved *)&called;
    return called.forward;
}
epo_status epo_backward(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                        float *dweights, epo_stream stream) {
    CU_ASSERT(layer == NULL && stream == NULL && dy == dx && dweights != NULL);
    CU_ASSERT(saved == (epo_saved *)&called);
    called.backwards++;
    return called.backward;
}
epo_status epo_group_wgrad_flush(epo_group *group, epo_stream stream) {
    CU_ASSERT(group == NULL && stream == NULL);
    called.flushes++;
    return EPO_OK;
}

/* A GPU's with a backward; what fails ends it. */
static void trials(void) {
    float rows[4], dweights[1];
    const measure_pass pass = {.x = rows, .y = rows, .dy = rows, .dx = rows, .dweights = dweights};
    static const struct {
        bool gpu;
        epo_status forward, backward;
        int backwards, flushes;
    } cases[] = {{false, EPO_OK, EPO_OK, 0, 0},
                 {true, EPO_OK, EPO_OK, 1, 1},
                 {true, EPO_E_PEER, EPO_OK, 0, 0},
                 {true, EPO_OK, EPO_E_TIMEOUT, 1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        measure_device d = {.gpu = cases[i].gpu};
        memset(&called, 0, sizeof called);
        called.forward = cases[i].forward;
        called.backward = cases[i].backward;
        CU_ASSERT_EQUAL(measure_trial(&d, &pass),
                        cases[i].forward != EPO_OK ? cases[i].forward : cases[i].backward);
        CU_ASSERT(called.forwards == 1 && called.saves == cases[i].gpu);
        CU_ASSERT(called.backwards == cases[i].backwards && called.flushes == cases[i].flushes);
    }
}

static void rows_against_counting(void) {
    for (uint64_t seed = 0; seed < 200; seed++) {
        const int ranks = 1 + (int)(rng_at(seed, 1, 0) % 5),
                  local = 1 + (int)(rng_at(seed, 1, 1) % 4);
        const int top_k = 1 + (int)(rng_at(seed, 1, 2) % 6),
                  tokens = (int)(rng_at(seed, 1, 3) % 20);
        const int rank = (int)(rng_at(seed, 1, 4) % (uint64_t)ranks);
        int64_t chosen[20 * 6];
        float rows[5] = {0};
        for (int i = 0; i < tokens * top_k; i++)
            chosen[i] = (int64_t)(rng_at(seed, 2, (uint64_t)i) % (uint64_t)(ranks * local + 1)) - 1;
        measure_rows_to(chosen, tokens, top_k, local, rank, rows);
        for (int p = 0; p < ranks; p++) {
            int want = 0;
            for (int t = 0; t < tokens; t++) {
                int any = 0;
                for (int k = 0; k < top_k; k++)
                    any |= chosen[t * top_k + k] >= p * local &&
                           chosen[t * top_k + k] < (p + 1) * local;
                want += any;
            }
            CU_ASSERT_EQUAL((int)rows[p], p == rank ? 0 : want);
        }
    }
}

static void least_time(void) {
    const float rows[9] = {0, 10, 20, 5, 0, 0, 40, 0, 0}; /* rank 2 sends 40, rank 0 gets 45 */
    epo_group_info info = {.size = sizeof info};
    CU_ASSERT_DOUBLE_EQUAL(measure_rows_least_ms(rows, 3, 1e6, &info, 1.0), 45, 1e-9);
    CU_ASSERT_EQUAL(measure_rows_least_ms(rows, 3, 1e6, &info, 0), 0);
    info.link_gbs = 2;
    info.link_us = 100;
    CU_ASSERT_DOUBLE_EQUAL(measure_rows_least_ms(rows, 3, 1e6, &info, 2.0), 20.1, 1e-9);
    const float none[4] = {0};
    CU_ASSERT_EQUAL(measure_rows_least_ms(none, 2, 1e6, &info, 2.0), 0);
}

static epo_interval interval(int kind, const char *name, int chunk, int64_t from, int64_t to) {
    epo_interval i = {from * 1000000, to * 1000000, kind, chunk, ""};
    snprintf(i.name, sizeof i.name, "%s", name);
    return i;
}

static void recordings(void) {
    const epo_interval first[] = {interval(EPO_INTERVAL_COMM, "dispatch", 0, 0, 4),
                                  interval(EPO_INTERVAL_COMPUTE, "fc1", 0, 2, 5),
                                  interval(EPO_INTERVAL_COMPUTE, "fc1", 1, 5, 7),
                                  interval(EPO_INTERVAL_LOCAL, "expand", -1, 7, 9),
                                  interval(EPO_INTERVAL_COMPUTE, "fc2", -1, 9, 12)};
    const epo_interval second[] = {interval(EPO_INTERVAL_COMPUTE, "fc1", 0, 0, 4),
                                   interval(EPO_INTERVAL_COMPUTE, "fc2", 0, 4, 10)};
    measure_recorded r;
    memset(&r, 0, sizeof r);
    CU_ASSERT_EQUAL(measure_recorded_add(&r, first, 5, 2), EPO_OK);
    CU_ASSERT_EQUAL(r.chunks, 2);
    CU_ASSERT_EQUAL(r.unions.overlapped, 2000000);
    CU_ASSERT_EQUAL(r.unions.exposed, 2000000);
    CU_ASSERT_EQUAL(measure_recorded_add(&r, second, 2, 1), EPO_OK);
    CU_ASSERT_EQUAL(r.passes, 2);
    CU_ASSERT_EQUAL(r.dropped, 3);
    CU_ASSERT_DOUBLE_EQUAL(r.ffn_ms[0], 8, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(r.ffn_ms[1], 10, 1e-9);
    /* the best fc1 is the second's 4 ms, the best fc2 the first's 3 ms */
    CU_ASSERT_DOUBLE_EQUAL(measure_recorded_best(&r), 7, 1e-9);
    for (int i = 0; i < 2 * MEASURE_PASSES; i++)
        CU_ASSERT_EQUAL(measure_recorded_add(&r, second, 2, 0), EPO_OK);
    CU_ASSERT_EQUAL(r.passes, MEASURE_PASSES);
}

static float from_f16(uint16_t h) { /* normal numbers and 0 */
    float value = 0;
    if ((h & 0x7fff) != 0) {
        uint32_t bits =
            ((uint32_t)(h & 0x8000) << 16) | (((uint32_t)(h & 0x7fff) << 13) + 0x38000000u);
        memcpy(&value, &bits, sizeof value);
    }
    return value;
}

/* The nearest of the neighbours; ties go to the even one. */
static void narrowing(void) {
    for (uint64_t i = 0; i < 20000; i++) {
        const float x = (float)(rng_symmetric(1, 2, i) * (i % 2 ? 1000.0 : 1.0));
        const uint16_t h = narrow_f16(x);
        const double error = fabs((double)from_f16(h) - (double)x);
        if (fabs((double)x) < 0x1p-14) {
            CU_ASSERT_EQUAL(h & 0x7fff, 0);
            continue;
        }
        CU_ASSERT(error <= fabs((double)from_f16((uint16_t)(h + 1)) - (double)x));
        CU_ASSERT(error <= fabs((double)from_f16((uint16_t)(h - 1)) - (double)x) ||
                  (h & 0x7fff) <= 0x400);
    }
    CU_ASSERT_EQUAL(narrow_f16(1.0F), 0x3c00);
    CU_ASSERT_EQUAL(narrow_f16(-2.0F), 0xc000);
    CU_ASSERT_EQUAL(narrow_f16(1.0F + 0x1p-11F), 0x3c00); /* a tie: even */
    CU_ASSERT_EQUAL(narrow_f16(1.0F + 3 * 0x1p-11F), 0x3c02);
    CU_ASSERT_EQUAL(narrow_bf16(1.0F + 0x1p-8F), 0x3f80);
    CU_ASSERT_EQUAL(narrow_bf16(1.0F + 3 * 0x1p-8F), 0x3f82);
    CU_ASSERT(narrow_bf16(NAN) & 0x7f);
    float two[2] = {1.5F, -0.25F}, back[2];
    uint16_t half[2];
    narrow(half, two, 2, EPO_BF16);
    widen_bf16(back, half, 2);
    CU_ASSERT_EQUAL(memcmp(two, back, sizeof two), 0);
    narrow(back, two, 2, EPO_F32);
    CU_ASSERT_EQUAL(memcmp(two, back, sizeof two), 0);
}

static void host_device(void) {
    measure_device d;
    measure_mark from, to;
    void *memory = NULL;
    char text[4] = "abc", got[4] = "";
    double ms = -1, gbs = 0;
    CU_ASSERT_EQUAL(measure_device_open(EPO_ENGINE_HOST, 3, &d), EPO_OK);
    CU_ASSERT_FALSE(d.gpu);
    CU_ASSERT_PTR_NULL(d.stream);
    CU_ASSERT_EQUAL(measure_device_alloc(&d, 100, &memory), EPO_OK);
    CU_ASSERT_EQUAL(((char *)memory)[99], 0);
    CU_ASSERT_EQUAL((uintptr_t)memory % 64, 0);
    CU_ASSERT_EQUAL(measure_device_put(&d, memory, text, 4), EPO_OK);
    CU_ASSERT_EQUAL(measure_device_get(&d, got, memory, 4), EPO_OK);
    CU_ASSERT_STRING_EQUAL(got, "abc");
    CU_ASSERT_EQUAL(measure_device_zero(&d, memory, 100), EPO_OK);
    CU_ASSERT_EQUAL(((char *)memory)[0], 0);
    measure_device_free(&d, memory);
    memory = NULL;
    CU_ASSERT_EQUAL(measure_device_alloc(&d, UINT64_MAX - 3, &memory), EPO_E_NOMEM);
    if (EPO_SANITIZED) /* which ends a program that asks for more than it can map */
        printf("left out: 2^60 bytes, which ends a sanitizer's program ");
    else
        CU_ASSERT_EQUAL(measure_device_alloc(&d, UINT64_C(1) << 60, &memory), EPO_E_NOMEM);
    CU_ASSERT_PTR_NULL(memory);
    CU_ASSERT_EQUAL(measure_mark_create(&d, &from), EPO_OK);
    CU_ASSERT_EQUAL(measure_mark_create(&d, &to), EPO_OK);
    CU_ASSERT_EQUAL(measure_mark_set(&d, &from), EPO_OK);
    CU_ASSERT_EQUAL(measure_mark_set(&d, &to), EPO_OK);
    CU_ASSERT_EQUAL(measure_mark_elapsed(&d, &from, &to, &ms), EPO_OK);
    CU_ASSERT(ms >= 0);
    CU_ASSERT_EQUAL(measure_copy_rate(&d, 0, &gbs), EPO_OK);
    CU_ASSERT(gbs > 0);
    measure_device_settle(&d, "host");
    measure_device_close(&d);
}

static void local_rank(void) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "MPI_LOCALRANKID", "SLURM_LOCALID"};
    for (int i = 0; i < 4; i++)
        unsetenv(names[i]);
    CU_ASSERT_EQUAL(measure_local_rank(), -1);
    setenv("SLURM_LOCALID", "3", 1);
    CU_ASSERT_EQUAL(measure_local_rank(), 3);
    setenv("LOCAL_RANK", "1", 1); /* the inner launcher */
    CU_ASSERT_EQUAL(measure_local_rank(), 1);
    setenv("LOCAL_RANK", "x", 1);
    CU_ASSERT_EQUAL(measure_local_rank(), 3);
    setenv("SLURM_LOCALID", "-2", 1);
    CU_ASSERT_EQUAL(measure_local_rank(), -1);
}

static void engine_of_a_step(void) {
    static const char *const held[] = {"CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS",
                                       "SLURM_GPUS_ON_NODE"};
    epo_engine_kind engine = EPO_ENGINE_AUTO;
    unsetenv("SLURM_STEP_ID");
    for (int i = 0; i < 3; i++)
        unsetenv(held[i]);
    CU_ASSERT_PTR_NULL(measure_engine(&engine)); /* no step */
    setenv("SLURM_STEP_ID", "0", 1);
    for (int i = 0; i < 3; i++) {
        setenv(held[i], "0", 1);
        CU_ASSERT_PTR_NULL(measure_engine(&engine));
        CU_ASSERT_EQUAL(engine, EPO_ENGINE_AUTO);
        unsetenv(held[i]);
    }
    CU_ASSERT_PTR_NOT_NULL(strstr(measure_engine(&engine), "the step holds no GPU"));
    CU_ASSERT_EQUAL(engine, EPO_ENGINE_HOST);
    engine = EPO_ENGINE_CUDA; /* asked for */
    CU_ASSERT_PTR_NULL(measure_engine(&engine));
    CU_ASSERT_EQUAL(engine, EPO_ENGINE_CUDA);
    unsetenv("SLURM_STEP_ID");
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"a trial's passes", trials},

        {"least rows: against counting", rows_against_counting},
        {"least time of a dispatch", least_time},
        {"recordings: unions, best of each kind", recordings},
        {"fp16 and bf16: nearest, ties to even", narrowing},
        {"device: ordinary memory", host_device},
        {"local rank by the launcher's variables", local_rank},
        {"a step without GPUs", engine_of_a_step},
        CU_TEST_INFO_NULL,
    };
    return unit_run("measure", tests);
}
