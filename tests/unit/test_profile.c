/* SPDX-License-Identifier: Apache-2.0
 *
 * Unions against brute force, and profiles of every form.
 */
#include "core/status.h"
#include "trace/profile.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TIME_END 600 /* ns of the brute-force world */

/* ---- unions -------------------------------------------------------------- */

/* Random spans: nested, touching, empty, unsorted. */
static epo_span random_span(unsigned *seed) {
    int64_t start = rand_r(seed) % TIME_END;
    int64_t length = rand_r(seed) % 5 == 0 ? 0 : rand_r(seed) % 12;
    return (epo_span){start, start + length > TIME_END ? TIME_END : start + length};
}

static void check_union(epo_span_set *set, const bool *covered) {
    epo_span_reader *reader = NULL;
    epo_span span, before = {-2, -1};
    bool more = true, seen[TIME_END] = {false};
    CU_ASSERT_EQUAL_FATAL(epo_span_reader_open(set, &reader), EPO_OK);
    for (;;) {
        CU_ASSERT_EQUAL_FATAL(epo_span_reader_next(reader, &span, &more), EPO_OK);
        if (!more)
            break;
        CU_ASSERT(span.start > before.end && span.end > span.start); /* disjoint, not touching */
        for (int64_t t = span.start; t < span.end; t++)
            seen[t] = true;
        before = span;
    }
    epo_span_reader_close(reader);
    CU_ASSERT_EQUAL(memcmp(seen, covered, sizeof seen), 0);
}

static void unions_are_exact_in_any_memory(void) {
    unsigned seed = 11;
    size_t runs = 0;
    for (int round = 0; round < 300; round++) {
        epo_span_pool *pool = NULL;
        epo_span_set *set[3];
        bool covered[3][TIME_END] = {{false}};
        CU_ASSERT_EQUAL_FATAL(epo_span_pool_create(64, &pool), EPO_OK);
        for (int i = 0; i < 3; i++)
            CU_ASSERT_EQUAL_FATAL(epo_span_set_create(pool, &set[i]), EPO_OK);
        int count = rand_r(&seed) % 900;
        for (int i = 0; i < count; i++) {
            int which = rand_r(&seed) % 3;
            epo_span s = random_span(&seed);
            CU_ASSERT_EQUAL_FATAL(epo_span_set_add(set[which], s.start, s.end), EPO_OK);
            for (int64_t t = s.start; t < s.end; t++)
                covered[which][t] = true;
        }
        for (int i = 0; i < 3; i++) {
            check_union(set[i], covered[i]);
            check_union(set[i], covered[i]); /* reading changes nothing */
        }
        runs += epo_span_pool_runs(pool);
        epo_span_pool_destroy(pool);
    }
    CU_ASSERT(runs > 100); /* the temporary file was used */
}

static void many_runs_become_one(void) {
    epo_span_pool *pool = NULL;
    epo_span_set *set = NULL;
    CU_ASSERT_EQUAL_FATAL(epo_span_pool_create(64, &pool), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_span_set_create(pool, &set), EPO_OK);
    for (int64_t i = 0; i < 20000; i++) /* far apart, downwards: every run is disjoint */
        CU_ASSERT_EQUAL_FATAL(epo_span_set_add(set, 40000 - 2 * i, 40000 - 2 * i + 1), EPO_OK);
    CU_ASSERT(epo_span_pool_runs(pool) > 200);
    epo_span_reader *reader = NULL;
    epo_span span;
    bool more = true;
    int64_t count = 0;
    CU_ASSERT_EQUAL_FATAL(epo_span_reader_open(set, &reader), EPO_OK);
    while (epo_span_reader_next(reader, &span, &more) == EPO_OK && more) {
        CU_ASSERT(span.start == 2 * count + 2 && span.end == span.start + 1);
        count++;
    }
    CU_ASSERT_EQUAL(count, 20000);
    CU_ASSERT_EQUAL(epo_span_set_add(set, 5, 4), EPO_E_ARG);
    CU_ASSERT_EQUAL(epo_span_set_count(set), 20000);
    epo_span_reader_close(reader);
    epo_span_pool_destroy(pool);
    epo_span_pool_destroy(NULL);
}

/* ---- the sweep against a clock that ticks every nanosecond --------------- */

static const char *const class_name[] = {"deep_ep::dispatch", "ncclDevKernel_AllReduce",
                                         "nvjet_tst",         "flash_fwd",
                                         "permute_rows",      "elementwise"};

static epo_profile_times brute_force(const bool (*runs)[TIME_END], int64_t from, int64_t to) {
    epo_profile_times t = {0};
    for (int64_t now = from < 0 ? 0 : from; now < to && now < TIME_END; now++) {
        const bool comm = runs[EPO_KERNEL_EP_COMM][now];
        const bool dense = runs[EPO_KERNEL_GEMM][now] || runs[EPO_KERNEL_ATTENTION][now];
        const bool compute = dense || runs[EPO_KERNEL_PERMUTE][now] || runs[EPO_KERNEL_OTHER][now];
        bool any = false;
        for (int c = 0; c < EPO_KERNEL_CLASSES; c++) {
            t.of[c] += runs[c][now];
            any = any || runs[c][now];
        }
        t.busy += any;
        t.comm += comm;
        t.gemm_attention += dense;
        t.compute += compute;
        t.overlapped += comm && dense;
        t.overlapped_any += comm && compute;
        t.exposed += comm && !dense;
    }
    return t;
}

static void check_times(epo_profile *p, size_t unit, const bool (*runs)[TIME_END], int64_t from,
                        int64_t to) {
    epo_profile_times found, wanted = brute_force(runs, from, to);
    CU_ASSERT_EQUAL_FATAL(epo_profile_measure(p, unit, from, to, &found, NULL), EPO_OK);
    CU_ASSERT_EQUAL(memcmp(&found, &wanted, sizeof found), 0);
}

static void times_are_exact_on_random_kernels(void) {
    unsigned seed = 5;
    for (int round = 0; round < 200; round++) {
        const epo_profile_options options = {.budget = 64};
        bool runs[2][EPO_KERNEL_CLASSES][TIME_END] = {{{false}}};
        uint32_t name[6];
        epo_profile *p = NULL;
        CU_ASSERT_EQUAL_FATAL(epo_profile_create(&options, EPO_PROFILE_CHROME, &p), EPO_OK);
        for (int c = 0; c < 6; c++)
            CU_ASSERT_EQUAL_FATAL(epo_profile_intern(p, class_name[c], &name[c]), EPO_OK);
        bool used[2] = {false};
        for (int i = rand_r(&seed) % 400; i >= 0; i--) {
            int device = rand_r(&seed) % 2, c = rand_r(&seed) % 7;
            epo_span s = random_span(&seed);
            used[device] = true;
            epo_status status =
                c == EPO_KERNEL_COPY
                    ? epo_profile_copy(p, 9, device, 1, true, EPO_COPY_HOST, s.start, s.end)
                    : epo_profile_kernel(p, 9, device, rand_r(&seed) % 3, name[c], s.start, s.end);
            CU_ASSERT_EQUAL_FATAL(status, EPO_OK);
            for (int64_t t = s.start; t < s.end; t++)
                runs[device][c][t] = true;
        }
        CU_ASSERT_EQUAL_FATAL(epo_profile_finish(p), EPO_OK);
        CU_ASSERT_EQUAL(epo_profile_tell(p).units, (size_t)used[0] + used[1]);
        for (size_t u = 0; u < epo_profile_tell(p).units; u++) {
            int device = (int)epo_profile_unit_at(p, u)->device;
            const bool(*of)[TIME_END] = (const bool(*)[TIME_END])runs[device];
            check_times(p, u, of, INT64_MIN, INT64_MAX);
            int64_t from = rand_r(&seed) % TIME_END;
            check_times(p, u, of, from, from + rand_r(&seed) % TIME_END);
        }
        epo_profile_destroy(p);
    }
}

static void timelines_add_up_to_the_unions(void) {
    const epo_profile_options options = {0};
    static epo_profile_timeline t;
    epo_profile *p = NULL;
    epo_profile_times times;
    uint32_t name;
    unsigned seed = 9;
    CU_ASSERT_EQUAL_FATAL(epo_profile_create(&options, EPO_PROFILE_CHROME, &p), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_profile_intern(p, "nvjet", &name), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_profile_intern(p, "deep_ep::combine", &name), EPO_OK);
    for (int i = 0; i < 500; i++) {
        int64_t start = rand_r(&seed) % 1000000;
        epo_profile_kernel(p, 0, 0, 0, name, start, start + rand_r(&seed) % 5000);
    }
    CU_ASSERT_EQUAL_FATAL(epo_profile_finish(p), EPO_OK);
    CU_ASSERT_TRUE(epo_profile_extent(p, &t.first, &t.last));
    CU_ASSERT_EQUAL(epo_profile_measure(p, 0, INT64_MIN, INT64_MAX, &times, &t), EPO_OK);
    double sum = 0, width = (double)(t.last - t.first) / EPO_PROFILE_BINS;
    for (int i = 0; i < EPO_PROFILE_BINS; i++) {
        CU_ASSERT(t.covered[i][EPO_KERNEL_EP_COMM] <= 1.0001f);
        sum += t.covered[i][EPO_KERNEL_EP_COMM] * width;
    }
    CU_ASSERT_DOUBLE_EQUAL(sum, (double)times.comm, 1e-3 * (double)times.comm);
    epo_profile_destroy(p);
}

/* ---- classes ------------------------------------------------------------- */

static void names_have_their_class(void) {
    static const struct {
        const char *name;
        epo_kernel_class kind;
    } cases[] = {
        {"void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", EPO_KERNEL_EP_COMM},
        {"void deep_ep::internode::combine<true, nv_bfloat16>", EPO_KERNEL_EP_COMM},
        {"void deep_ep::intranode::notify_dispatch<8>(int const*)", EPO_KERNEL_EP_COMM},
        {"void hybrid_ep::dispatch_kernel<...>", EPO_KERNEL_EP_COMM},
        {"void hybrid_ep::permute_kernel<...>", EPO_KERNEL_PERMUTE},
        {"ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", EPO_KERNEL_EP_COMM},
        {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL", EPO_KERNEL_OTHER_COMM},
        {"ncclDevKernel_AllGather_RING_LL", EPO_KERNEL_OTHER_COMM},
        {"ncclDevKernel_ReduceScatter_Sum_f32", EPO_KERNEL_OTHER_COMM},
        {"ncclDevKernel_Broadcast_RING_LL", EPO_KERNEL_OTHER_COMM},
        {"ncclSymkDevKernel_AlltoAll", EPO_KERNEL_EP_COMM},
        {"nvshmemi_transfer", EPO_KERNEL_EP_COMM},
        {"flex_push(gpu_flex, int)", EPO_KERNEL_EP_COMM},
        {"void flex_combine<__nv_bfloat16>(gpu_flex)", EPO_KERNEL_EP_COMM},
        {"flex_expand8(gpu_flex)", EPO_KERNEL_PERMUTE},
        {"epo_copy", EPO_KERNEL_EP_COMM},
        {"triton_tem_fused_flex_attention_0", EPO_KERNEL_OTHER},
        {"_permute_kernel", EPO_KERNEL_PERMUTE},
        {"_sort_chunks_by_map_kernel", EPO_KERNEL_PERMUTE},
        {"nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", EPO_KERNEL_GEMM},
        {"void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", EPO_KERNEL_GEMM},
        {"void cutlass3x_grouped_gemm", EPO_KERNEL_GEMM},
        {"void gg::sm90_kernel<...>(gg_params)", EPO_KERNEL_GEMM},
        {"void flash_fwd_kernel<...>", EPO_KERNEL_ATTENTION},
        {"cudnn_generated_fort_native_sdpa_sm90_flash_fprop", EPO_KERNEL_ATTENTION},
        {"fmha_cutlassF_bf16_aligned", EPO_KERNEL_ATTENTION},
        {"void at::native::vectorized_elementwise_kernel<4>", EPO_KERNEL_OTHER},
        {"", EPO_KERNEL_OTHER}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_kernel_class found = epo_kernel_classify(NULL, cases[i].name);
        if (found != cases[i].kind)
            fprintf(stderr, "%s is %s\n", cases[i].name, epo_kernel_class_name(found));
        CU_ASSERT_EQUAL(found, cases[i].kind);
    }
    epo_kernel_patterns mine = {
        .pattern = {{"*mine*", EPO_KERNEL_EP_COMM}, {"*nvjet*", EPO_KERNEL_OTHER}}, .count = 2};
    CU_ASSERT_EQUAL(epo_kernel_classify(&mine, "void MINE_gemm()"), EPO_KERNEL_EP_COMM);
    CU_ASSERT_EQUAL(epo_kernel_classify(&mine, "nvjet_x"), EPO_KERNEL_OTHER);
    CU_ASSERT_EQUAL(epo_kernel_classify(&mine, "flash_x"), EPO_KERNEL_ATTENTION);
}

static void pipeline_streams_are_set_apart(void) {
    static const int64_t streams[] = {21};
    const epo_profile_options options = {.pipeline_streams = streams, .pipeline_stream_count = 1};
    epo_profile *p = NULL;
    uint32_t send, other;
    CU_ASSERT_EQUAL_FATAL(epo_profile_create(&options, EPO_PROFILE_NSIGHT, &p), EPO_OK);
    epo_profile_intern(p, "ncclDevKernel_SendRecv(x)", &send);
    epo_profile_intern(p, "nvjet_x", &other);
    epo_profile_kernel(p, 1, 0, 21, send, 0, 10);
    epo_profile_kernel(p, 1, 0, 22, send, 20, 30);
    epo_profile_kernel(p, 1, 0, 21, other, 40, 50);
    CU_ASSERT_EQUAL_FATAL(epo_profile_finish(p), EPO_OK);
    const epo_profile_unit *u = epo_profile_unit_at(p, 0);
    CU_ASSERT(u->count[EPO_KERNEL_OTHER_COMM] == 1 && u->count[EPO_KERNEL_EP_COMM] == 1);
    CU_ASSERT(u->count[EPO_KERNEL_GEMM] == 1 && u->send_recv_streams == 1);
    epo_profile_destroy(p);
}

static void copies_are_told_apart(void) {
    const epo_profile_options options = {0};
    epo_profile *p = NULL;
    uint32_t comm;
    CU_ASSERT_EQUAL_FATAL(epo_profile_create(&options, EPO_PROFILE_NSIGHT, &p), EPO_OK);
    epo_profile_intern(p, "deep_ep::dispatch", &comm);
    epo_profile_copy(p, 1, 0, 5, true, EPO_COPY_LOCAL, 0, 10);  /* stream 5 communicates later */
    epo_profile_copy(p, 1, 0, 6, true, EPO_COPY_LOCAL, 20, 30); /* stream 6 never does */
    epo_profile_copy(p, 1, 0, 7, true, EPO_COPY_PEER, 40, 50);
    epo_profile_copy(p, 1, 0, 7, true, EPO_COPY_HOST, 60, 70);
    epo_profile_kernel(p, 1, 0, 5, comm, 80, 90);
    CU_ASSERT_FALSE(epo_profile_tell(p).copies_unclassified);
    CU_ASSERT_EQUAL_FATAL(epo_profile_finish(p), EPO_OK);
    const epo_profile_unit *u = epo_profile_unit_at(p, 0);
    CU_ASSERT(u->count[EPO_KERNEL_EP_COMM] == 3 && u->count[EPO_KERNEL_COPY] == 2);
    epo_profile_times t;
    CU_ASSERT_EQUAL(epo_profile_measure(p, 0, INT64_MIN, INT64_MAX, &t, NULL), EPO_OK);
    CU_ASSERT(t.comm == 30 && t.of[EPO_KERNEL_COPY] == 20);
    epo_profile_copy(p, 1, 0, 5, false, EPO_COPY_LOCAL, 0, 10);
    CU_ASSERT_TRUE(epo_profile_tell(p).copies_unclassified);
    epo_profile_destroy(p);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"unions are exact in any memory", unions_are_exact_in_any_memory},
        {"many runs become one", many_runs_become_one},
        {"times are exact on random kernels", times_are_exact_on_random_kernels},
        {"timelines add up to the unions", timelines_add_up_to_the_unions},
        {"names have their class", names_have_their_class},
        {"pipeline streams are set apart", pipeline_streams_are_set_apart},
        {"copies are told apart", copies_are_told_apart},
        CU_TEST_INFO_NULL,
    };
    return unit_run("profile", tests);
}
