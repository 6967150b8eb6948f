/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c - which way the experts' GEMMs go: one persistent launch for all experts
 * where the device has our kernels (sm_90), else one cuBLASLt call per expert, else our
 * portable kernels.  The way depends on the user's wish, device, type and shape alone,
 * so it is the same for every chunk.
 */
#include "backend/cuda/gpu.h"

#include "backend/cuda/gemm/grouped_gemm.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const gemm_words[] = {[GPU_GEMM_AUTO] = "auto",
                                         [GPU_GEMM_OWN] = "grouped",
                                         [GPU_GEMM_PORTABLE] = "portable",
                                         [GPU_GEMM_LT] = "cublaslt",
                                         [GPU_GEMM_CUBLAS] = "cublas"};

epo_status gpu_gemm_choose(epo_backend *be) {
    const char *wish = getenv("EP_OVERLAP_CUDA_GEMM"), *why = NULL;
    const int ways = sizeof gemm_words / sizeof *gemm_words;
    int way = 0, version = 0;
    while (wish != NULL && wish[0] != '\0' && way < ways && strcmp(wish, gemm_words[way]) != 0)
        way++;
    if (way == ways)
        return epo_fail(EPO_E_ARG,
                        "EP_OVERLAP_CUDA_GEMM: found '%s', allowed auto, grouped, portable, "
                        "cublaslt, cublas",
                        wish);
    if ((way == GPU_GEMM_LT && !gpu_lt_find(&version, &why)) ||
        (way == GPU_GEMM_CUBLAS && !gpu_blas_find(&version, &why)))
        return epo_fail(EPO_E_UNSUPPORTED, "EP_OVERLAP_CUDA_GEMM=%s: %s", wish, why);
    be->gemm_way = (gpu_gemm_way)way;
    be->grouped = way == GPU_GEMM_AUTO || way == GPU_GEMM_OWN;
    return EPO_OK;
}

void gpu_gemm_version(const epo_backend *be, char *text, size_t size) {
    const char *why = NULL;
    int version = 0;
    const bool cublas = be->gemm_way == GPU_GEMM_CUBLAS;
    const bool found = cublas ? gpu_blas_find(&version, &why) : gpu_lt_find(&version, &why);
    char library[48] = "no cuBLASLt";
    if (found)
        snprintf(library, sizeof library, "cuBLAS%s %d.%d", cublas ? "" : "Lt", version / 100,
                 version % 100);
    if (be->gemm_way == GPU_GEMM_AUTO)
        snprintf(text, size, "%s", library);
    else
        snprintf(text, size, "%s, GEMMs %s", library, gemm_words[be->gemm_way]);
}

/* Our kernels for this one?  `path` says which. */
static bool gemm_own(const epo_backend *be, const epo_gg *gg, epo_gg_path *path) {
    const char *why = NULL;
    int version = 0;
    *path = EPO_GG_AUTO;
    if (be->grouped && epo_gg_path_of(gg) == EPO_GG_SM90)
        return true;
    *path = EPO_GG_PORTABLE;
    return be->gemm_way == GPU_GEMM_OWN || be->gemm_way == GPU_GEMM_PORTABLE ||
           (be->gemm_way == GPU_GEMM_AUTO && !gpu_lt_find(&version, &why));
}

epo_gg gpu_gemm_shape(const epo_gemm *g) {
    const uint64_t *first = g->cpu_first != NULL ? g->cpu_first : g->row_first;
    const uint64_t *count = g->cpu_count != NULL ? g->cpu_count : g->row_count;
    epo_gg gg = {.size = sizeof gg};
    static const epo_gg_kind kinds[] = {[EPO_GEMM_FORWARD] = EPO_GG_FORWARD,
                                        [EPO_GEMM_DGRAD] = EPO_GG_DGRAD,
                                        [EPO_GEMM_WGRAD] = EPO_GG_WGRAD};
    const int last = g->first + g->count;
    gg.kind = kinds[g->kind];
    gg.type = g->type;
    gg.c_type = g->c_type;
    gg.accumulate = !g->fresh;
    gg.n = g->n;
    gg.k = g->k;
    gg.experts = last;
    gg.first = g->first;
    gg.count = g->count;
    gg.rows = first[last - 1] + count[last - 1];
    gg.row_first = g->row_first;
    gg.row_count = g->row_count;
    gg.a = g->a;
    gg.b = g->b;
    gg.c = g->c;
    gg.keep = g->keep;
    return gg;
}

epo_status gpu_workspace_hold(epo_queue *q, uint64_t bytes) {
    if (bytes <= q->workspace_bytes)
        return EPO_OK;
    void *ptr = NULL;
    if (q->be->board != NULL) { /* a graph may use it, and a captured stream cannot be waited for */
        gpu_retire(q->be, q->workspace, q->workspace_bytes);
    } else {
        epo_status status = gpu_rest_stream(q->be, q->stream, "workspace");
        if (status != EPO_OK)
            return status;
        gpu_free(q->be, q->workspace, q->workspace_bytes);
    }
    q->workspace = NULL;
    q->workspace_bytes = 0;
    const uint64_t size = (2 * bytes + 4095) / 4096 * 4096;
    epo_status status = gpu_alloc(q->be, size, &ptr);
    if (status == EPO_OK) {
        q->workspace = ptr;
        q->workspace_bytes = size;
    }
    return status;
}

void gpu_workspace_free(epo_queue *q) {
    gpu_free(q->be, q->workspace, q->workspace_bytes);
    q->workspace = NULL;
    q->workspace_bytes = 0;
}

static epo_status grouped_run(epo_queue *q, epo_gg *gg, int lent, epo_event *until,
                              const char *phase) {
    const uint64_t need = epo_gg_workspace(gg);
    epo_status status = gpu_workspace_hold(q, need);
    gg->workspace = q->workspace;
    gg->workspace_bytes = q->workspace_bytes;
    gg->sms = q->be->gemm_sms;
    if (gg->sms == 0 && lent > 0 && q->be->sms > 2 * lent)
        gg->sms = q->be->sms - lent;
    if (status == EPO_OK && until != NULL && gg->sms > 0 && q->be->gemm_sms == 0)
        status = gpu_side_run(q, gg, until, phase);
    else if (status == EPO_OK)
        status = epo_gg_launch(gg, q->stream);
    if (status != EPO_OK) {
        char text[EPO_ERROR_MAX / 2];
        snprintf(text, sizeof text, "%s", epo_fail_text());
        return epo_fail(status, "rank %d: %s: %s", q->be->rank, phase, text);
    }
    return EPO_OK;
}

/* The grouped kernel makes the activation too. */
void gpu_gemm_act(epo_gg *gg, const epo_swiglu *act) {
    gg->fuse = EPO_GG_SWIGLU;
    gg->row_weight = act->w;
    gg->h = gg->c;
    gg->c = act->a;
}

/* Rows of these experts, alignment included: the others' stay untouched. */
static epo_status act_after(epo_queue *q, const epo_gemm *g, const uint64_t *first,
                            const uint64_t *count, const char *phase) {
    epo_swiglu s = *g->act;
    const int last = g->first + g->count - 1;
    s.row = first[g->first];
    s.rows = first[last] + count[last] - s.row;
    if (g->kind == EPO_GEMM_DGRAD)
        s.da = g->c;
    GPU_TRY(q->be, phase, gpu_kernel_swiglu(q->stream, &s));
    return EPO_OK;
}

/* The kernel that makes the activation on its way stores h only where it is asked to. */
bool gpu_gemm_drops_h(epo_backend *be, const epo_gemm *g) {
    epo_gg gg = gpu_gemm_shape(g);
    gpu_gemm_act(&gg, g->act);
    return be->grouped && epo_gg_path_of(&gg) == EPO_GG_SM90;
}

/* So does that for rows that it loads.  Forward it makes the activation, too, which wants more:
 * gate and up, n columns together, are whole units each. */
bool gpu_gemm_keeps(epo_backend *be, const epo_gemm *g) {
    epo_gg gg = gpu_gemm_shape(g);
    if (g->act != NULL && g->kind == EPO_GEMM_FORWARD)
        gpu_gemm_act(&gg, g->act);
    return be->grouped && be->keeps && epo_gg_path_of(&gg) == EPO_GG_SM90 &&
           (g->kind != EPO_GEMM_FORWARD || g->n % 16 == 0);
}

epo_status gpu_gemm(epo_queue *q, const epo_gemm *g, const epo_deps *deps) {
    const uint64_t *first = g->cpu_first != NULL ? g->cpu_first : g->row_first;
    const uint64_t *count = g->cpu_count != NULL ? g->cpu_count : g->row_count;
    epo_status status;
    for (int e = g->first; e < g->first + g->count; e++)
        if (count[e] > INT32_MAX)
            return epo_fail(EPO_E_ARG, "rank %d: %s: expert %d has %" PRIu64 " rows, allowed %d",
                            q->be->rank, deps->name, e, count[e], INT32_MAX);
    if (!gpu_op_begin(q, deps, &status))
        return status;
    if (g->count > 0) {
        /* Backward, the two apart are faster than the fused kernel. */
        const bool fuse = g->act != NULL && g->kind == EPO_GEMM_FORWARD;
        epo_gg gg = gpu_gemm_shape(g);
        if (fuse)
            gpu_gemm_act(&gg, g->act);
        const int lent = g->lends ? GPU_BESIDE_SMS : g->beside ? q->be->lend_sms : 0;
        const bool own = gemm_own(q->be, &gg, &gg.path);
        if (g->keep != NULL && gg.path != EPO_GG_AUTO)
            return epo_fail(EPO_E_STATE,
                            "rank %d: %s: rows are to be kept, which our sm_90 products alone do",
                            q->be->rank, deps->name);
        if (fuse && !own && g->c == NULL)
            return epo_fail(EPO_E_STATE,
                            "rank %d: %s: no room for h, which a library's products make",
                            q->be->rank, deps->name);
        status = own ? grouped_run(q, &gg, lent, g->lent, deps->name)
                     : gpu_blas_gemm(q, g, first, count, deps->name);
        if (status == EPO_OK && g->act != NULL && !(own && fuse))
            status = act_after(q, g, first, count, deps->name);
    }
    return status == EPO_OK ? gpu_op_end(q, deps) : status;
}
