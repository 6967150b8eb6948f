/* SPDX-License-Identifier: Apache-2.0
 *
 * lt.c - one expert's product over cuBLASLt, found at run time as it is mapped.  What
 * is chosen for a shape (no split-K) depends on the shape alone, so an expert's result
 * does not depend on chunks.  Choosing takes the CPU ten times as long as a launch, and
 * experts' rows are other ones in each step: choices are made for a few sizes and kept.
 */
#include "backend/cuda/blas.h"

#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LT_CHOICES 512 /* kept, by a hash of their shape */

typedef struct lt_api {
    cublasStatus_t (*create)(cublasLtHandle_t *);
    cublasStatus_t (*destroy)(cublasLtHandle_t);
    cublasStatus_t (*property)(libraryPropertyType, int *);
    const char *(*name)(cublasStatus_t);
    cublasStatus_t (*desc_create)(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType);
    cublasStatus_t (*desc_destroy)(cublasLtMatmulDesc_t);
    cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *,
                               size_t);
    cublasStatus_t (*layout_create)(cublasLtMatrixLayout_t *, cudaDataType, uint64_t, uint64_t,
                                    int64_t);
    cublasStatus_t (*layout_destroy)(cublasLtMatrixLayout_t);
    cublasStatus_t (*layout_set)(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
                                 const void *, size_t);
    cublasStatus_t (*pref_create)(cublasLtMatmulPreference_t *);
    cublasStatus_t (*pref_destroy)(cublasLtMatmulPreference_t);
    cublasStatus_t (*pref_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                               const void *, size_t);
    cublasStatus_t (*choose)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                             cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                             cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t *,
                             int *);
    cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                             cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t,
                             const void *, const void *, cublasLtMatrixLayout_t, void *,
                             cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
                             cudaStream_t);
    int number;
} lt_api;

static lt_api api;
static const char *api_missing;
static char api_text[640];

static void api_functions(void *lib, const char **missing) {
    *(void **)&api.create = gpu_library_symbol(lib, "cublasLtCreate", missing);
    *(void **)&api.destroy = gpu_library_symbol(lib, "cublasLtDestroy", missing);
    *(void **)&api.property = gpu_library_symbol(lib, "cublasLtGetProperty", missing);
    *(void **)&api.name = gpu_library_symbol(lib, "cublasLtGetStatusName", missing);
    *(void **)&api.desc_create = gpu_library_symbol(lib, "cublasLtMatmulDescCreate", missing);
    *(void **)&api.desc_destroy = gpu_library_symbol(lib, "cublasLtMatmulDescDestroy", missing);
    *(void **)&api.desc_set = gpu_library_symbol(lib, "cublasLtMatmulDescSetAttribute", missing);
    *(void **)&api.layout_create = gpu_library_symbol(lib, "cublasLtMatrixLayoutCreate", missing);
    *(void **)&api.layout_destroy = gpu_library_symbol(lib, "cublasLtMatrixLayoutDestroy", missing);
    *(void **)&api.layout_set =
        gpu_library_symbol(lib, "cublasLtMatrixLayoutSetAttribute", missing);
    *(void **)&api.pref_create = gpu_library_symbol(lib, "cublasLtMatmulPreferenceCreate", missing);
    *(void **)&api.pref_destroy =
        gpu_library_symbol(lib, "cublasLtMatmulPreferenceDestroy", missing);
    *(void **)&api.pref_set =
        gpu_library_symbol(lib, "cublasLtMatmulPreferenceSetAttribute", missing);
    *(void **)&api.choose = gpu_library_symbol(lib, "cublasLtMatmulAlgoGetHeuristic", missing);
    *(void **)&api.matmul = gpu_library_symbol(lib, "cublasLtMatmul", missing);
}

/* In a sentence, what keeps the library at `path` from serving; NULL: nothing. */
static const char *api_judge(void *lib, const char *path) {
    const char *missing = NULL;
    int major = 0, minor = 0;
    api_functions(lib, &missing);
    if (missing != NULL) {
        snprintf(api_text, sizeof api_text, "%s lacks %s", path, missing);
        return api_text;
    }
    if (api.property(MAJOR_VERSION, &major) != CUBLAS_STATUS_SUCCESS ||
        api.property(MINOR_VERSION, &minor) != CUBLAS_STATUS_SUCCESS)
        return "cublasLtGetProperty failed";
    api.number = major * 100 + minor;
    /* What was compiled knows the structs of these. */
    if (major < 12 || major > 13) {
        snprintf(api_text, sizeof api_text, "%s is cuBLASLt %d.%d, needed is 12 or 13", path, major,
                 minor);
        return api_text;
    }
    return NULL;
}

static void api_load(void) {
    static const char *const sonames[] = {"libcublasLt.so.13", "libcublasLt.so.12", NULL};
    char path[512];
    void *lib = gpu_library_find("libcublasLt", sonames, path, sizeof path);
    api_missing = lib != NULL
                      ? api_judge(lib, path)
                      : "libcublasLt.so.13 or .12 was not found; set LD_LIBRARY_PATH to the "
                        "CUDA Toolkit's or the framework's copy";
}

bool gpu_lt_find(int *version, const char **why) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, api_load);
    *version = api.number;
    *why = api_missing;
    return api_missing == NULL;
}

/* What decides about a choice; n or k, where that is the rows' number, rounded up.
 * Compared as bytes: no padding. */
typedef struct lt_shape {
    int32_t op_a, op_b, m, n, k, type, c_type, aligned;
} lt_shape;
typedef struct lt_choice {
    lt_shape shape;
    cublasLtMatmulDesc_t desc; /* NULL: an empty place */
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
} lt_choice;

/* Eight sizes an octave. */
static int32_t rows_rounded(int rows) {
    int32_t step = 2;
    while (step <= rows / 16)
        step *= 2;
    return rows > INT32_MAX - step ? rows : (rows + step - 1) / step * step;
}

static lt_shape shape_of(const blas_product *p, bool rounded) {
    return (lt_shape){.op_a = (int32_t)p->op_a,
                      .op_b = (int32_t)p->op_b,
                      .m = p->m,
                      .n = rounded && !p->rows_k ? rows_rounded(p->n) : p->n,
                      .k = rounded && p->rows_k ? rows_rounded(p->k) : p->k,
                      .type = (int32_t)p->type,
                      .c_type = (int32_t)p->c_type,
                      .aligned = blas_aligned(p)};
}

struct gpu_lt {
    epo_backend *be;
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t pref;
    lt_choice choice[LT_CHOICES];
};

static epo_status lt_fail(const epo_backend *be, const char *call, const char *phase,
                          cublasStatus_t s) {
    return epo_fail(EPO_E_SYSTEM, "rank %d: %s (%s): %s", be->rank, call, phase, api.name(s));
}
#define LT_TRY(be, phase, name, call)                                                              \
    do {                                                                                           \
        cublasStatus_t s_ = (call);                                                                \
        if (s_ != CUBLAS_STATUS_SUCCESS)                                                           \
            return lt_fail((be), (name), (phase), s_);                                             \
    } while (0)

epo_status gpu_lt_open(epo_backend *be, gpu_lt **out) {
    const char *why = NULL;
    int version = 0;
    if (!gpu_lt_find(&version, &why))
        return epo_fail(EPO_E_UNSUPPORTED, "rank %d: no cuBLASLt: %s", be->rank, why);
    gpu_lt *lt = calloc(1, sizeof *lt);
    if (lt == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for cuBLASLt's choices", be->rank);
    const uint64_t workspace = BLAS_WORKSPACE;
    const uint32_t whole = CUBLASLT_REDUCTION_SCHEME_NONE;
    const char *call = "cublasLtCreate";
    lt->be = be;
    cublasStatus_t s = api.create(&lt->handle);
    if (s == CUBLAS_STATUS_SUCCESS) {
        call = "cublasLtMatmulPreferenceCreate";
        s = api.pref_create(&lt->pref);
    }
    if (s == CUBLAS_STATUS_SUCCESS) {
        call = "cublasLtMatmulPreferenceSetAttribute";
        s = api.pref_set(lt->pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                         sizeof workspace);
    }
    if (s == CUBLAS_STATUS_SUCCESS)
        s = api.pref_set(lt->pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &whole,
                         sizeof whole);
    if (s != CUBLAS_STATUS_SUCCESS) {
        gpu_lt_destroy(lt);
        return lt_fail(be, call, "open", s);
    }
    *out = lt;
    return EPO_OK;
}

static void choice_clear(lt_choice *c) {
    if (c->a != NULL)
        (void)api.layout_destroy(c->a);
    if (c->b != NULL)
        (void)api.layout_destroy(c->b);
    if (c->c != NULL)
        (void)api.layout_destroy(c->c);
    if (c->desc != NULL)
        (void)api.desc_destroy(c->desc);
    memset(c, 0, sizeof *c);
}

void gpu_lt_destroy(gpu_lt *lt) {
    if (lt == NULL)
        return;
    for (int i = 0; i < LT_CHOICES; i++)
        choice_clear(&lt->choice[i]);
    if (lt->pref != NULL)
        (void)api.pref_destroy(lt->pref);
    if (lt->handle != NULL)
        (void)api.destroy(lt->handle);
    free(lt);
}

static lt_choice *choice_place(gpu_lt *lt, const lt_shape *shape) {
    const unsigned char *byte = (const unsigned char *)shape;
    uint32_t hash = 2166136261U; /* FNV-1a */
    for (size_t i = 0; i < sizeof *shape; i++)
        hash = (hash ^ byte[i]) * 16777619U;
    return &lt->choice[hash % LT_CHOICES];
}

static epo_status choice_describe(gpu_lt *lt, lt_choice *c, const lt_shape *shape,
                                  const blas_product *p, const char *phase) {
    const epo_backend *be = lt->be;
    const uint64_t m = (uint64_t)shape->m, n = (uint64_t)shape->n, k = (uint64_t)shape->k;
    const bool ta = p->op_a == CUBLAS_OP_T, tb = p->op_b == CUBLAS_OP_T;
    const int32_t op_a = p->op_a, op_b = p->op_b;
    LT_TRY(be, phase, "cublasLtMatmulDescCreate",
           api.desc_create(&c->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_TRY(be, phase, "cublasLtMatmulDescSetAttribute",
           api.desc_set(c->desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    LT_TRY(be, phase, "cublasLtMatmulDescSetAttribute",
           api.desc_set(c->desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    LT_TRY(be, phase, "cublasLtMatrixLayoutCreate",
           api.layout_create(&c->a, p->type, ta ? k : m, ta ? m : k, p->lda));
    LT_TRY(be, phase, "cublasLtMatrixLayoutCreate",
           api.layout_create(&c->b, p->type, tb ? n : k, tb ? k : n, p->ldb));
    LT_TRY(be, phase, "cublasLtMatrixLayoutCreate",
           api.layout_create(&c->c, p->c_type, m, n, p->ldc));
    return EPO_OK;
}

static epo_status choice_make(gpu_lt *lt, lt_choice *c, const lt_shape *shape,
                              const blas_product *p, const char *phase) {
    static const cublasLtMatmulPreferenceAttributes_t sides[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint32_t aligned = (uint32_t)shape->aligned;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    epo_status status = choice_describe(lt, c, shape, p, phase);
    if (status != EPO_OK)
        return status;
    for (int i = 0; i < 4; i++)
        LT_TRY(lt->be, phase, "cublasLtMatmulPreferenceSetAttribute",
               api.pref_set(lt->pref, sides[i], &aligned, sizeof aligned));
    cublasStatus_t s =
        api.choose(lt->handle, c->desc, c->a, c->b, c->c, c->c, lt->pref, 1, &found, &count);
    if (s != CUBLAS_STATUS_SUCCESS || count < 1)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "rank %d: %s: cuBLASLt %d.%d has no way for a product of %d x %d x %d, "
                        "types %d and %d, %d-byte aligned (%s); EP_OVERLAP_CUDA_GEMM=grouped has",
                        lt->be->rank, phase, api.number / 100, api.number % 100, shape->m, shape->n,
                        shape->k, (int)p->type, (int)p->c_type, (int)shape->aligned,
                        s != CUBLAS_STATUS_SUCCESS ? api.name(s) : "none found");
    c->algo = found.algo;
    c->shape = *shape;
    return EPO_OK;
}

/* The choice for this product, made if need be. */
static epo_status choice_find(gpu_lt *lt, const blas_product *p, bool rounded, const char *phase,
                              lt_choice **out) {
    const lt_shape shape = shape_of(p, rounded);
    lt_choice *c = choice_place(lt, &shape);
    *out = c;
    if (c->desc != NULL && memcmp(&c->shape, &shape, sizeof shape) == 0)
        return EPO_OK;
    choice_clear(c);
    epo_status status = choice_make(lt, c, &shape, p, phase);
    if (status != EPO_OK)
        choice_clear(c);
    return status;
}

static cublasStatus_t choice_run(const gpu_lt *lt, lt_choice *c, const blas_product *p,
                                 void *workspace, cudaStream_t stream) {
    const float one = 1.0F, old = p->add ? 1.0F : 0.0F;
    const uint64_t rows = (uint64_t)(p->rows_k ? p->k : p->n);
    cublasLtMatrixLayout_t vary[] = {p->rows_k ? c->a : c->c, c->b};
    for (int i = 0; i < 2; i++) {
        cublasStatus_t s = api.layout_set(vary[i], CUBLASLT_MATRIX_LAYOUT_COLS, &rows, sizeof rows);
        if (s != CUBLAS_STATUS_SUCCESS)
            return s;
    }
    return api.matmul(lt->handle, c->desc, &one, p->a, c->a, p->b, c->b, &old, p->c, c->c, p->c,
                      c->c, &c->algo, workspace, BLAS_WORKSPACE, stream);
}

/* Its algorithm and the rest together are its kernel. */
static epo_status choice_first(epo_queue *q, const lt_choice *c, const blas_product *p,
                               const char *phase) {
    const struct {
        blas_kind kind;
        cublasLtMatmulAlgo_t algo;
    } kernel = {blas_kind_of(p), c->algo};
    return gpu_library_first(q, &kernel, sizeof kernel, phase);
}

epo_status gpu_lt_run(gpu_lt *lt, epo_queue *q, cudaStream_t stream, void *workspace,
                      const blas_product *p, const char *phase) {
    cublasStatus_t s = CUBLAS_STATUS_NOT_SUPPORTED;
    /* What serves the rounded size may not serve the size itself. */
    for (int i = 0; i < 2 && s == CUBLAS_STATUS_NOT_SUPPORTED; i++) {
        lt_choice *c = NULL;
        epo_status status = choice_find(lt, p, i == 0, phase, &c);
        if (status == EPO_OK)
            status = choice_first(q, c, p, phase);
        if (status != EPO_OK)
            return status;
        s = choice_run(lt, c, p, workspace, stream);
    }
    return s == CUBLAS_STATUS_SUCCESS ? EPO_OK : lt_fail(lt->be, "cublasLtMatmul", phase, s);
}
