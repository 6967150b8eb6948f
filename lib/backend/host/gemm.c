/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c - one GEMM per expert by CBLAS.  An expert's GEMM is never cut, so its
 * bits do not depend on how experts are grouped into operations.
 */
#include "config.h"

#include "backend/host/host.h"
#include "backend/host/convert.h"

#include <cblas.h>
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* OpenBLAS has them; another CBLAS need not. */
extern void openblas_set_num_threads(int threads) __attribute__((weak));
extern int openblas_get_num_threads(void) __attribute__((weak));
extern char *openblas_get_config(void) __attribute__((weak));

#define BLAS_REGION ((size_t)130 << 20) /* OpenBLAS on x86-64; elsewhere less */

/* Elements of a, b and c of one expert. */
typedef struct gemm_sizes {
    uint64_t a, b, c;
} gemm_sizes;

static gemm_sizes gemm_sizes_of(const epo_gemm *g, uint64_t m) {
    uint64_t n = (uint64_t)g->n, k = (uint64_t)g->k;
    switch (g->kind) {
    case EPO_GEMM_FORWARD: return (gemm_sizes){m * k, n * k, m * n};
    case EPO_GEMM_DGRAD: return (gemm_sizes){m * n, n * k, m * k};
    case EPO_GEMM_WGRAD: break;
    }
    return (gemm_sizes){m * n, m * k, n * k};
}

static void sgemm(const epo_gemm *g, int m, const float *a, const float *b, float *c) {
    int n = g->n, k = g->k;
    switch (g->kind) {
    case EPO_GEMM_FORWARD:
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1.0f, a, k, b, k, 0.0f, c, n);
        break;
    case EPO_GEMM_DGRAD:
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, k, n, 1.0f, a, n, b, k, 0.0f, c,
                    k);
        break;
    case EPO_GEMM_WGRAD:
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, k, m, 1.0f, a, n, b, k, 1.0f, c, k);
        break;
    }
}

static bool scratch_reserve(host_worker *w, uint64_t floats) {
    uint64_t bytes = floats * sizeof(float);
    if (bytes <= w->scratch_bytes)
        return true;
    free(w->scratch);
    host_memory_count(w->be, -(int64_t)w->scratch_bytes);
    w->scratch = NULL;
    w->scratch_bytes = 0;
    void *ptr;
    if (host_alloc(w->be, bytes, &ptr) != EPO_OK) {
        host_break(w->be, EPO_E_NOMEM, "GEMM in fp32: %s", epo_fail_text());
        return false;
    }
    w->scratch = ptr;
    w->scratch_bytes = bytes;
    return true;
}

/* Element offsets of expert e in the bases of a, b, c. */
static gemm_sizes gemm_offsets(const epo_gemm *g, int e) {
    uint64_t n = (uint64_t)g->n, k = (uint64_t)g->k, row = g->row_first[e];
    gemm_sizes whole = {0, (uint64_t)e * n * k, 0};
    switch (g->kind) {
    case EPO_GEMM_FORWARD: whole.a = row * k, whole.c = row * n; break;
    case EPO_GEMM_DGRAD: whole.a = row * n, whole.c = row * k; break;
    case EPO_GEMM_WGRAD: whole.a = row * n, whole.b = row * k, whole.c = (uint64_t)e * n * k; break;
    }
    return whole;
}

HOST_WIDE static void load_wide(float *dst, const void *src, uint64_t at, uint64_t n, epo_dtype t) {
    host_load(dst, src, at, n, t);
}
HOST_WIDE static void store_wide(void *dst, uint64_t at, const float *src, uint64_t n,
                                 epo_dtype t) {
    host_store(dst, at, src, n, t);
}

static void gemm_load(const host_worker *w, float *dst, const void *src, uint64_t at, uint64_t n,
                      epo_dtype type) {
    if (w->be->wide)
        load_wide(dst, src, at, n, type);
    else
        host_load(dst, src, at, n, type);
}

static void gemm_store(const host_worker *w, void *dst, uint64_t at, const float *src, uint64_t n,
                       epo_dtype type) {
    if (w->be->wide)
        store_wide(dst, at, src, n, type);
    else
        host_store(dst, at, src, n, type);
}

/* An operand as fp32: in place, or converted to *room, which moves on. */
static const float *operand(const host_worker *w, const void *base, uint64_t at, uint64_t n,
                            epo_dtype type, float **room) {
    if (type == EPO_F32)
        return (const float *)base + at;
    float *to = *room;
    gemm_load(w, to, base, at, n, type);
    *room += n;
    return to;
}

static bool gemm_expert(host_worker *w, const epo_gemm *g, int e) {
    uint64_t m = g->row_count[e];
    const bool fresh = g->kind == EPO_GEMM_WGRAD && g->fresh;
    epo_dtype c_type = g->kind == EPO_GEMM_WGRAD ? g->c_type : g->type;
    gemm_sizes size = gemm_sizes_of(g, m), at = gemm_offsets(g, e);
    if (fresh && (m == 0 || c_type == EPO_F32))
        memset((char *)g->c + at.c * host_type_size(c_type), 0, size.c * host_type_size(c_type));
    if (m == 0)
        return true;
    uint64_t need = (g->type != EPO_F32 ? size.a + size.b : 0) + (c_type != EPO_F32 ? size.c : 0);
    if (!scratch_reserve(w, need))
        return false;
    float *room = w->scratch;
    const float *a = operand(w, g->a, at.a, size.a, g->type, &room);
    const float *b = operand(w, g->b, at.b, size.b, g->type, &room);
    if (c_type == EPO_F32) {
        sgemm(g, (int)m, a, b, (float *)g->c + at.c);
        return true;
    }
    if (fresh)
        memset(room, 0, size.c * sizeof *room);
    else if (g->kind == EPO_GEMM_WGRAD)
        gemm_load(w, room, g->c, at.c, size.c, c_type);
    sgemm(g, (int)m, a, b, room);
    gemm_store(w, g->c, at.c, room, size.c, c_type);
    return true;
}

static void gemm_run(host_worker *w, host_op *op) {
    const epo_gemm *g = &op->u.gemm;
    for (int e = g->first; e < g->first + g->count; e++)
        if (!gemm_expert(w, g, e))
            return;
}

epo_status host_gemm(epo_queue *q, const epo_gemm *g, const epo_deps *deps) {
    if (g->n < 1 || g->k < 1 || g->first < 0 || g->count < 0 || !host_type_known(g->type) ||
        (g->kind == EPO_GEMM_WGRAD && !host_type_known(g->c_type)))
        return epo_fail(EPO_E_ARG,
                        "GEMM: found n %d, k %d, experts %d+%d, type %d; allowed 1.., 1.., "
                        "0.., 0..2",
                        g->n, g->k, g->first, g->count, (int)g->type);
    for (int e = g->first; e < g->first + g->count; e++)
        if (g->row_count[e] > INT_MAX)
            return epo_fail(EPO_E_ARG, "GEMM: expert %d has %llu rows, allowed %d", e,
                            (unsigned long long)g->row_count[e], INT_MAX);
    host_op *op;
    epo_status status = host_op_create(q, deps, gemm_run, &op);
    if (status != EPO_OK)
        return status;
    op->u.gemm = *g;
    return host_op_issue(q, op);
}

/* ---- threads ---------------------------------------------------------------- */

/* This rank's share of the cores: each core it may run on counts one over the
 * number of ranks that may run there. */
static epo_status blas_share(epo_backend *be, int *share) {
    cpu_set_t mine, all[HOST_RANKS_MAX];
    if (sched_getaffinity(0, sizeof mine, &mine) != 0) {
        CPU_ZERO(&mine);
        CPU_SET(0, &mine);
    }
    epo_status status = host_allgather(be, &mine, sizeof mine, all);
    if (status != EPO_OK)
        return status;
    double sum = 0.0;
    for (int c = 0; c < CPU_SETSIZE; c++) {
        int users = 0;
        for (int r = 0; r < be->ranks && CPU_ISSET(c, &mine); r++)
            users += CPU_ISSET(c, &all[r]) ? 1 : 0;
        if (users > 0)
            sum += 1.0 / users;
    }
    *share = sum < 1.0 ? 1 : (int)(sum + 1e-6);
    return EPO_OK;
}

static epo_status blas_wanted(int *threads) {
    const char *text = getenv(EPO_ENV_BLAS_THREADS);
    *threads = 0;
    if (text == NULL || *text == '\0')
        return EPO_OK;
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (errno != 0 || *end != '\0' || v < 1 || v > 1024)
        return epo_fail(EPO_E_ARG, "%s: found \"%.40s\", allowed 1..1024", EPO_ENV_BLAS_THREADS,
                        text);
    *threads = (int)v;
    return EPO_OK;
}

/* The number is the process's: left alone where it is right, since a group of other
 * threads may be inside a GEMM. */
static void blas_set(int threads) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    if (openblas_set_num_threads == NULL || openblas_get_num_threads == NULL)
        return;
    pthread_mutex_lock(&one);
    if (openblas_get_num_threads() != threads)
        openblas_set_num_threads(threads);
    pthread_mutex_unlock(&one);
}

/* OpenBLAS maps a region for its packed operands at a thread's first GEMM, and tries
 * again for ever where that fails: so it is tried here first, and the region then
 * taken by a small GEMM.  Another group's region serves as well, unless ranks are
 * threads, which need one each at a time. */
static epo_status blas_room(const epo_backend *be) {
    static _Atomic bool taken;
    float a[64] = {0}, c[64];
    if (openblas_get_config == NULL || (atomic_load(&taken) && !be->shared->threads))
        return EPO_OK;
    void *at = mmap(NULL, BLAS_REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return epo_fail(EPO_E_NOMEM,
                        "OpenBLAS needs %d MB of address space for its operands, have less (%s); "
                        "raise the limit (ulimit -v; Slurm: VSizeFactor)",
                        (int)(BLAS_REGION >> 20), strerror(errno));
    munmap(at, BLAS_REGION);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, 8, 8, 8, 1.0F, a, 8, a, 8, 0.0F, c, 8);
    atomic_store(&taken, true);
    return EPO_OK;
}

epo_status host_blas_setup(epo_backend *be) {
    int share = 1, wanted = 0;
    epo_status status = host_agree(be, blas_wanted(&wanted));
    if (status == EPO_OK)
        status = blas_share(be, &share);
    if (status != EPO_OK)
        return status;
    int threads = wanted > 0 ? wanted : share;
    blas_set(threads);
    status = host_agree(be, blas_room(be));
    if (status != EPO_OK)
        return status;
    char word[2][48] = {"CBLAS", ""};
    if (openblas_get_config != NULL)
        sscanf(openblas_get_config(), "%47s %47s", word[0], word[1]);
    snprintf(be->versions, sizeof be->versions, "%s%s%s", word[0], word[1][0] != '\0' ? " " : "",
             word[1]);
    /* Cores to spare for this rank: a wait may spin before it sleeps. */
    atomic_store_explicit(&be->spin_ns, share >= 4 ? 20000 : 0, memory_order_relaxed);
    return EPO_OK;
}
