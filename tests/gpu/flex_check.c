/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_check.c - flex's kernels against maps of the CPU and sums in fp64, 1,000 repeats, a
 * rank that stopped.
 */
#include "flex_side.h"

enum { SHAPES = 3 }; /* of the combine's blocks */

typedef struct host_maps {
    int32_t *copy, *token, *meta_expert, *meta_slot, *sum, *weight;
    uint32_t first_of[2 * RANKS], last_of[2 * RANKS];
    uint64_t rank_first[RANKS + 1];
    uint32_t rank_rows[RANKS], expert_rows[1024];
} host_maps;

static host_maps maps_of(const side *s, const epo_route_shape *rs) {
    const shape *sh = s->sh;
    const size_t t = (size_t)sh->tokens[s->rank], k = (size_t)sh->top_k, r = (size_t)sh->ranks;
    host_maps m;
    uint32_t cursor[3 * RANKS];
    memset(&m, 0, sizeof m);
    m.copy = malloc((t * k + 1) * 4);
    m.token = malloc((t * r + 1) * 4);
    m.meta_expert = malloc((t * r * k + 1) * 4);
    m.meta_slot = malloc((t * r * k + 1) * 4);
    m.sum = malloc((t * r + 1) * 4);
    m.weight = malloc((t * k + 1) * 4);
    epo_route_check(rs, s->routing, sh->tokens[s->rank], m.copy);
    epo_route_count(rs, m.copy, sh->tokens[s->rank], m.expert_rows, m.rank_rows);
    for (size_t d = 0; d < r; d++)
        m.rank_first[d + 1] = m.rank_first[d] + m.rank_rows[d];
    epo_route_flex_send out = {m.rank_first, m.first_of, m.last_of,  m.token, m.meta_expert,
                               m.meta_slot,  m.sum,      s->f.width, m.weight};
    epo_route_flex_make_send(rs, m.copy, sh->tokens[s->rank], cursor, &out);
    return m;
}

static void maps_free(host_maps *m) {
    free(m->copy);
    free(m->token);
    free(m->meta_expert);
    free(m->meta_slot);
    free(m->sum);
    free(m->weight);
}

/* The device's row of the CPU's compact one. */
static int32_t strided(const host_maps *m, const shape *sh, int32_t row) {
    int d = 0;
    if (row < 0)
        return -1;
    while (d + 1 < sh->ranks && m->rank_first[d + 1] <= (uint64_t)row)
        d++;
    return d * sh->most + row - (int32_t)m->rank_first[d];
}

static int sender_wrong(const side *s, const host_maps *m) {
    const shape *sh = s->sh;
    const size_t t = (size_t)sh->tokens[s->rank], w = (size_t)s->f.width, k = (size_t)sh->top_k;
    int32_t *token = fetch(s->plan.token, (size_t)sh->ranks * (size_t)sh->most * 4);
    int32_t *sum = fetch(s->plan.sum, t * w * 4), *sw = fetch(s->plan.slot_weight, t * k * 4);
    int wrong = 0;
    for (uint64_t i = 0; i < m->rank_first[sh->ranks]; i++)
        wrong += token[strided(m, sh, (int32_t)i)] != m->token[i];
    for (size_t i = 0; i < t * w; i++)
        wrong += sum[i] != strided(m, sh, m->sum[i]);
    for (size_t i = 0; i < t * k; i++) {
        const int32_t v = m->weight[i];
        wrong +=
            sw[i] != (v < 0 ? -1 : strided(m, sh, v / (int32_t)k) * (int32_t)k + v % (int32_t)k);
    }
    free(token);
    free(sum);
    free(sw);
    return wrong;
}

/* Every rank's rows for every expert: as its peers count them. */
static uint32_t *counts_of(const host_maps *all, const shape *sh) {
    uint32_t *counts = calloc((size_t)sh->ranks * (size_t)sh->experts, 4);
    for (int q = 0; q < sh->ranks; q++)
        memcpy(counts + q * sh->experts, all[q].expert_rows, (size_t)sh->experts * 4);
    return counts;
}

/* y of this rank in fp64: over ranks, of the sums of their z. */
static double *sums_wanted(const side *s, const host_maps *all, const epo_route_shape *rs) {
    const shape *sh = s->sh;
    const int local = sh->experts / sh->ranks, k = sh->top_k, t = sh->tokens[s->rank];
    const uint64_t h = (uint64_t)sh->hidden;
    uint64_t target[1024];
    uint32_t *counts = counts_of(all, sh);
    double *want = calloc((size_t)t * h + 1, sizeof *want), *part = calloc(h, sizeof *part);
    for (int d = 0; d < sh->ranks; d++) {
        char *z = fetch(sides[d].z, most_rows(sh) * s->f.row_bytes);
        epo_route_targets(rs, counts, s->rank, target);
        for (int i = 0; i < t; i++) {
            int used = 0;
            for (int j = 0; j < k; j++) {
                const int32_t e = all[s->rank].copy[i * k + j];
                if (e < 0 || e / local != d)
                    continue;
                const uint64_t at = target[e]++ * h;
                for (uint64_t c = 0; c < h; c++)
                    part[c] += test_load(z, at + c, sh->type);
                used++;
            }
            for (uint64_t c = 0; c < h && used > 0; c++) {
                want[(uint64_t)i * h + c] += part[c];
                part[c] = 0;
            }
        }
        free(z);
    }
    free(part);
    free(counts);
    return want;
}

/* What came against the senders' tokens; sums against fp64.  Returns wrong rows, and the
 * relative error of y. */
static int receiver_wrong(const side *s, const host_maps *all, const epo_route_shape *rs,
                          double *error) {
    const shape *sh = s->sh;
    const int local = sh->experts / sh->ranks, r = sh->ranks, k = sh->top_k;
    const uint64_t row = s->f.row_bytes;
    uint32_t *counts = counts_of(all, sh);
    uint64_t first[1024], count[1024], target[1024];
    const uint64_t rows = epo_route_layout(rs, counts, s->rank, first, count);
    char *got = fetch(s->rows, rows * row);
    float *weight = fetch(s->f.weight, rows * 4);
    int wrong = 0;
    for (int q = 0; q < r; q++) {
        const int t = sh->tokens[q];
        char *x = fetch(sides[q].x, (uint64_t)t * row);
        epo_route_targets(rs, counts, q, target);
        for (int i = 0; i < t * k; i++) {
            const int32_t e = all[q].copy[i];
            if (e / local != s->rank || e < 0)
                continue;
            const uint64_t at = target[e]++;
            wrong += memcmp(got + at * row, x + (uint64_t)(i / k) * row, row) != 0 ||
                     weight[at] != sides[q].router[i];
        }
        free(x);
    }
    for (int e = 0; e < local; e++)
        for (uint64_t i = first[e] + count[e]; i < (e + 1 < local ? first[e + 1] : rows); i++) {
            wrong += weight[i] != 0.0F;
            for (uint64_t b = 0; b < row; b++)
                wrong += got[i * row + b] != 0;
        }
    free(weight);
    free(got);
    free(counts);
    double *want = sums_wanted(s, all, rs);
    const uint64_t t = (uint64_t)sh->tokens[s->rank];
    void *y = fetch(s->y, t * row);
    *error = test_error(y, want, t * (uint64_t)sh->hidden, sh->type);
    free(y);
    free(want);
    return wrong;
}

/* Rows that came in e4m3: wrong ones, and the largest error over its bound. */
static int wire8_wrong(const side *s, const host_maps *all, const epo_route_shape *rs,
                       double *error) {
    const shape *sh = s->sh;
    const int local = sh->experts / sh->ranks, k = sh->top_k;
    const uint64_t h = (uint64_t)sh->hidden;
    uint32_t *counts = counts_of(all, sh);
    uint64_t first[1024], count[1024], target[1024];
    double square = 0, sum = 0;
    int wrong = 0;
    const uint64_t rows = epo_route_layout(rs, counts, s->rank, first, count);
    void *got = fetch(s->rows, rows * s->f.row_bytes);
    for (int q = 0; q < sh->ranks; q++) {
        void *x = fetch(sides[q].x, (uint64_t)sh->tokens[q] * s->f.row_bytes);
        epo_route_targets(rs, counts, q, target);
        for (int i = 0; i < sh->tokens[q] * k; i++) {
            const int32_t e = all[q].copy[i];
            if (e < 0 || e / local != s->rank)
                continue;
            const uint64_t to = target[e]++ * h, from = (uint64_t)(i / k) * h;
            for (uint64_t c = 0; c < h; c += 128) {
                double most = 0;
                for (uint64_t j = c; j < c + 128; j++)
                    most = fmax(most, fabs(test_load(x, from + j, sh->type)));
                for (uint64_t j = c; j < c + 128; j++) {
                    const double want = test_load(x, from + j, sh->type);
                    const double off = fabs(test_load(got, to + j, sh->type) - want);
                    wrong += !(off <= fabs(want) * (1.0 / 16 + 1.0 / 128) + most / 448 / 512);
                    square += off * off;
                    sum += want * want;
                }
            }
        }
        free(x);
    }
    *error = sum > 0 ? sqrt(square / sum) : 0;
    free(got);
    free(counts);
    return wrong;
}

static void wire8_run(side *s, const host_maps *maps, const epo_route_shape *rs, int n) {
    static int wrong[RANKS];
    static double error[RANKS];
    TEST_CUDA(cudaMemset(s->rows, 0xff, most_rows(s->sh) * s->f.row_bytes));
    TEST_CUDA(cudaDeviceSynchronize());
    s->f.epoch++;
    pthread_barrier_wait(&together);
    issue(s, FP8);
    TEST_CUDA(cudaStreamSynchronize(s->stream));
    pthread_barrier_wait(&together);
    wrong[s->rank] = wire8_wrong(s, maps, rs, &error[s->rank]);
    pthread_barrier_wait(&together);
    if (s->rank == 0) {
        char name[64], text[100];
        int bad = 0;
        for (int r = 0; r < s->sh->ranks; r++)
            bad += wrong[r] + (sides[r].late[0] != 0);
        snprintf(name, sizeof name, "flex %d in e4m3", n);
        snprintf(text, sizeof text, "%s: %d elements beyond the bound, relative error %.2e",
                 test_type(s->sh->type), bad, error[0]);
        test_result(name, bad == 0, text);
    }
    pthread_barrier_wait(&together);
}

/* Some experts' rows have a NaN or an infinity: it is to be seen where it belongs and
 * nowhere else. */
static void strange_make(side *s) {
    const uint64_t n = most_rows(s->sh) * (uint64_t)s->sh->hidden;
    char *z = fetch(s->z, n * test_size(s->sh->type));
    for (uint64_t i = 0; i < n; i += 1 + test_random(s->sh->seed + 300, i) % 4000) {
        const uint64_t kind = test_random(s->sh->seed + 301, i) % 3;
        test_store(z, i, s->sh->type, kind == 0 ? NAN : kind == 1 ? INFINITY : -INFINITY);
    }
    TEST_CUDA(cudaMemcpy(s->z, z, n * test_size(s->sh->type), cudaMemcpyHostToDevice));
    free(z);
}

static void strange_run(side *s, const host_maps *maps, const epo_route_shape *rs, int number) {
    const epo_dtype type = s->sh->type;
    const uint64_t n = (uint64_t)s->sh->tokens[s->rank] * (uint64_t)s->sh->hidden;
    static uint64_t wrong[RANKS], strange[RANKS];
    static double error[RANKS];
    double d = 0, w = 0;
    strange_make(s);
    TEST_CUDA(cudaMemset(s->y, 0xee, n * test_size(type)));
    TEST_CUDA(cudaDeviceSynchronize());
    pthread_barrier_wait(&together);
    s->f.epoch = SHAPES + 1; /* behind shapes_differ's */
    issue(s, COMBINE);
    TEST_CUDA(cudaStreamSynchronize(s->stream));
    pthread_barrier_wait(&together);
    double *want = sums_wanted(s, maps, rs);
    void *y = fetch(s->y, n * test_size(type));
    wrong[s->rank] = strange[s->rank] = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double got = test_load(y, i, type);
        strange[s->rank] += !isfinite(want[i]);
        if (isnan(want[i]) || isnan(got)) {
            wrong[s->rank] += isnan(want[i]) != isnan(got);
        } else if (isinf(want[i]) || isinf(got)) {
            wrong[s->rank] += want[i] != got; /* of the same sign */
        } else {
            d += (got - want[i]) * (got - want[i]);
            w += want[i] * want[i];
        }
    }
    error[s->rank] = w > 0 ? sqrt(d / w) : sqrt(d);
    free(y);
    free(want);
    pthread_barrier_wait(&together);
    if (s->rank == 0) {
        char name[64], text[120];
        uint64_t bad = 0, all = 0;
        double worst = 0;
        for (int r = 0; r < s->sh->ranks; r++) {
            bad += wrong[r] + (sides[r].late[0] != 0);
            all += strange[r];
            worst = fmax(worst, error[r]);
        }
        snprintf(name, sizeof name, "flex %d strange", number);
        snprintf(text, sizeof text, "%s: %llu NaN or infinite, %llu wrong, the others %.2e",
                 test_type(type), (unsigned long long)all, (unsigned long long)bad, worst);
        test_result(name, bad == 0 && worst <= test_limit(type), text);
    }
    pthread_barrier_wait(&together);
}

/* The same sums by blocks of other shapes: bit for bit. */
static int shapes_differ(side *s) {
    const uint64_t bytes = (uint64_t)s->sh->tokens[s->rank] * s->f.row_bytes;
    void *first = fetch(s->y, bytes);
    int differ = 0;
    for (int i = 1; i < SHAPES; i++) {
        TEST_CUDA(cudaMemset(s->y, 0xff, bytes));
        TEST_CUDA(cudaDeviceSynchronize());
        pthread_barrier_wait(&together);
        s->f.epoch = (uint64_t)i + 1;
        s->f.shape = i;
        issue(s, COMBINE);
        s->f.shape = 0;
        s->f.epoch = 1;
        TEST_CUDA(cudaStreamSynchronize(s->stream));
        pthread_barrier_wait(&together);
        void *second = fetch(s->y, bytes);
        differ += memcmp(first, second, bytes) != 0;
        free(second);
    }
    free(first);
    return differ;
}

void case_run(side *s, int number) {
    const shape *sh = s->sh;
    const uint64_t row = s->f.row_bytes, rows = most_rows(sh) * row;
    const epo_route_shape rs = {.ranks = sh->ranks,
                                .experts = sh->experts,
                                .top_k = sh->top_k,
                                .chunks = 1,
                                .align = sh->align};
    static host_maps maps[RANKS];
    static int wrong[RANKS][3];
    static double error[RANKS];
    prepare(s);
    maps[s->rank] = maps_of(s, &rs);
    pthread_barrier_wait(&together);
    wrong[s->rank][0] = sender_wrong(s, &maps[s->rank]);
    TEST_CUDA(cudaMemset(s->y, 0xff, (uint64_t)sh->tokens[s->rank] * row));
    TEST_CUDA(cudaDeviceSynchronize());
    pthread_barrier_wait(&together);
    TEST_CUDA(gpu_flex_combine(s->stream, &s->f, s->z, s->y));
    TEST_CUDA(cudaStreamSynchronize(s->stream));
    pthread_barrier_wait(&together);
    wrong[s->rank][1] = receiver_wrong(s, maps, &rs, &error[s->rank]);
    wrong[s->rank][1] += shapes_differ(s);
    pthread_barrier_wait(&together);
    /* Own rows read from x, then all in one pass. */
    for (int way = 0; way < 2; way++) {
        double e;
        TEST_CUDA(cudaMemset(s->rows, 0xff, rows));
        TEST_CUDA(cudaDeviceSynchronize());
        s->f.epoch++;
        pthread_barrier_wait(&together);
        if (way == 0)
            issue(s, PUSH_EXPAND);
        else
            issue(s, DISPATCH);
        TEST_CUDA(cudaStreamSynchronize(s->stream));
        pthread_barrier_wait(&together);
        if (way == 0)
            wrong[s->rank][2] = 0;
        wrong[s->rank][2] += receiver_wrong(s, maps, &rs, &e);
        pthread_barrier_wait(&together);
    }
    if (s->rank == 0) {
        char name[64], text[200];
        int bad = 0;
        double worst = 0;
        for (int r = 0; r < sh->ranks; r++) {
            bad += wrong[r][0] + wrong[r][1] + wrong[r][2] + (sides[r].late[0] != 0);
            worst = error[r] > worst || !(error[r] == error[r]) ? error[r] : worst;
        }
        snprintf(name, sizeof name, "flex %d", number);
        snprintf(text, sizeof text,
                 "ranks %d T %d.. H %d E %d K %d %s align %d blocks %d: maps %d, rows %d, again "
                 "%d wrong on rank 0, y %.2e, late %u/%u",
                 sh->ranks, sh->tokens[0], sh->hidden, sh->experts, sh->top_k, test_type(sh->type),
                 sh->align, sh->blocks, wrong[0][0], wrong[0][1], wrong[0][2], worst, s->late[0],
                 s->late[1]);
        test_result(name, bad == 0 && worst <= test_limit(sh->type), text);
    }
    pthread_barrier_wait(&together);
    if (sh->hidden % 128 == 0)
        wire8_run(s, maps, &rs, number);
    strange_run(s, maps, &rs, number);
    maps_free(&maps[s->rank]);
}

void repeat_run(side *s) {
    const shape *sh = s->sh;
    const uint64_t bytes = (uint64_t)sh->tokens[s->rank] * s->f.row_bytes;
    static int differ[RANKS];
    void *first = NULL;
    differ[s->rank] = 0;
    prepare(s);
    for (int i = 0; i < 1000; i++) {
        s->f.epoch = (uint64_t)i + 2;
        TEST_CUDA(cudaMemsetAsync(s->y, 0xff, bytes, s->stream));
        issue(s, DISPATCH);
        s->f.epoch = (uint64_t)i + 1;
        TEST_CUDA(gpu_flex_combine(s->stream, &s->f, s->rows, s->y));
        TEST_CUDA(cudaStreamSynchronize(s->stream));
        void *y = fetch(s->y, bytes);
        if (first == NULL)
            first = y;
        else {
            differ[s->rank] += memcmp(first, y, bytes) != 0;
            free(y);
        }
    }
    free(first);
    pthread_barrier_wait(&together);
    if (s->rank == 0) {
        char text[80];
        int all = 0;
        for (int r = 0; r < sh->ranks; r++)
            all += differ[r] + (sides[r].late[0] != 0);
        snprintf(text, sizeof text, "1000 repeats on %d ranks, %d differ", sh->ranks, all);
        test_result("flex repeats", all == 0, text);
    }
}

/* The last rank does not come: the others name it. */
static void late_step(side *s, step what, uint64_t epoch, unsigned phase, const char *name) {
    s->late[0] = s->late[1] = 0;
    s->f.epoch = epoch;
    if (s->rank != s->sh->ranks - 1) {
        issue(s, what);
        TEST_CUDA(cudaStreamSynchronize(s->stream));
    }
    pthread_barrier_wait(&together);
    if (s->rank == 0) {
        char text[80];
        snprintf(text, sizeof text, "rank %d stopped: rank %d named, phase %u", s->sh->ranks - 1,
                 (int)s->late[0] - 1, s->late[1]);
        test_result(name, (int)s->late[0] == s->sh->ranks && s->late[1] == phase, text);
    }
    pthread_barrier_wait(&together);
}

void late_run(side *s) {
    prepare(s);
    s->f.limit_ns = UINT64_C(300000000);
    late_step(s, DISPATCH, 2, GPU_FLEX_LATE_ROWS, "flex late");
    late_step(s, COMBINE, 1, GPU_FLEX_LATE_BACK, "flex late, combine");
}
