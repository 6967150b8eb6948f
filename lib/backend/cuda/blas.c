/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.c - one GEMM per expert over cuBLASLt (lt.c) or cuBLAS.  Each GEMM is the same
 * call with the same workspace whatever chunk it belongs to, so its result does not
 * depend on chunks.  Small GEMMs do not fill a GPU: several streams run side by side.
 */
#include "backend/cuda/blas.h"

#include <stdlib.h>

typedef struct blas_api {
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*destroy)(cublasHandle_t);
    cublasStatus_t (*version)(cublasHandle_t, int *);
    cublasStatus_t (*property)(libraryPropertyType, int *);
    cublasStatus_t (*stream)(cublasHandle_t, cudaStream_t);
    cublasStatus_t (*workspace)(cublasHandle_t, void *, size_t);
    cublasStatus_t (*mode)(cublasHandle_t, cublasMath_t);
    cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                           const void *, const void *, cudaDataType, int, const void *,
                           cudaDataType, int, const void *, void *, cudaDataType, int,
                           cublasComputeType_t, cublasGemmAlgo_t);
    const char *(*name)(cublasStatus_t);
    int number;
} blas_api;

static blas_api api;
static const char *api_missing;

static void api_load(void) {
    static const char *const sonames[] = {"libcublas.so.13", "libcublas.so.12", NULL};
    char path[512];
    void *lib = gpu_library_find("libcublas", sonames, path, sizeof path);
    if (lib == NULL) {
        api_missing = "libcublas.so.13 or .12 was not found; set LD_LIBRARY_PATH to the CUDA "
                      "Toolkit's or the framework's copy";
        return;
    }
    *(void **)&api.create = gpu_library_symbol(lib, "cublasCreate_v2", &api_missing);
    *(void **)&api.destroy = gpu_library_symbol(lib, "cublasDestroy_v2", &api_missing);
    *(void **)&api.property = gpu_library_symbol(lib, "cublasGetProperty", &api_missing);
    *(void **)&api.stream = gpu_library_symbol(lib, "cublasSetStream_v2", &api_missing);
    *(void **)&api.workspace = gpu_library_symbol(lib, "cublasSetWorkspace_v2", &api_missing);
    *(void **)&api.mode = gpu_library_symbol(lib, "cublasSetMathMode", &api_missing);
    *(void **)&api.gemm = gpu_library_symbol(lib, "cublasGemmEx", &api_missing);
    *(void **)&api.name = gpu_library_symbol(lib, "cublasGetStatusName", &api_missing);
    int major = 0, minor = 0;
    if (api_missing == NULL && (api.property(MAJOR_VERSION, &major) != CUBLAS_STATUS_SUCCESS ||
                                api.property(MINOR_VERSION, &minor) != CUBLAS_STATUS_SUCCESS))
        api_missing = "cublasGetProperty failed";
    api.number = major * 100 + minor;
    if (api_missing == NULL && major < 12)
        api_missing = "cuBLAS is older than 12";
}

bool gpu_blas_find(int *version, const char **why) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, api_load);
    *version = api.number;
    *why = api_missing;
    return api_missing == NULL;
}

/* Lane 0 is the queue's own stream. */
typedef struct blas_lane {
    cublasHandle_t handle;
    cudaStream_t stream;
    cudaEvent_t done;
    void *workspace;
} blas_lane;

struct gpu_blas {
    epo_backend *be;
    gpu_lt *lt; /* NULL: cuBLAS */
    int lanes;
    blas_lane lane[1 + GPU_SIDE];
    cudaEvent_t fork;
};

static epo_status blas_fail(const epo_backend *be, const char *call, const char *phase,
                            cublasStatus_t s) {
    return epo_fail(EPO_E_SYSTEM, "rank %d: %s (%s): %s", be->rank, call, phase, api.name(s));
}
#define BLAS_TRY(be, phase, name, call)                                                            \
    do {                                                                                           \
        cublasStatus_t s_ = (call);                                                                \
        if (s_ != CUBLAS_STATUS_SUCCESS)                                                           \
            return blas_fail((be), (name), (phase), s_);                                           \
    } while (0)

static epo_status lane_cublas(epo_backend *be, blas_lane *lane) {
    BLAS_TRY(be, "open", "cublasCreate", api.create(&lane->handle));
    BLAS_TRY(be, "open", "cublasSetStream", api.stream(lane->handle, lane->stream));
    BLAS_TRY(be, "open", "cublasSetWorkspace",
             api.workspace(lane->handle, lane->workspace, BLAS_WORKSPACE));
    BLAS_TRY(be, "open", "cublasSetMathMode",
             api.mode(lane->handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
    return EPO_OK;
}

static epo_status lane_open(gpu_blas *b, epo_queue *q, blas_lane *lane, bool own) {
    epo_backend *be = b->be;
    lane->stream = q->stream;
    if (!own) {
        GPU_TRY(be, "cuBLAS",
                cudaStreamCreateWithPriority(&lane->stream, cudaStreamNonBlocking, q->priority));
        GPU_TRY(be, "cuBLAS", cudaEventCreateWithFlags(&lane->done, cudaEventDisableTiming));
    }
    epo_status status = gpu_alloc(be, BLAS_WORKSPACE, &lane->workspace);
    return status == EPO_OK && b->lt == NULL ? lane_cublas(be, lane) : status;
}

static epo_status blas_open(epo_queue *q) {
    static const char handle[] = "a handle";
    epo_backend *be = q->be;
    epo_status status = gpu_library_first(q, handle, sizeof handle, "cuBLAS");
    if (status != EPO_OK)
        return status;
    gpu_blas *b = calloc(1, sizeof *b);
    if (b == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for cuBLAS's handles", be->rank);
    b->be = be;
    b->lanes = be->shared_device ? 1 : 1 + GPU_SIDE;
    if (be->gemm_way != GPU_GEMM_CUBLAS)
        status = gpu_lt_open(be, &b->lt);
    cudaError_t e = cudaEventCreateWithFlags(&b->fork, cudaEventDisableTiming);
    if (status == EPO_OK && e != cudaSuccess)
        status = gpu_fail(be, "cudaEventCreateWithFlags", "cuBLAS", e);
    for (int i = 0; i < b->lanes && status == EPO_OK; i++)
        status = lane_open(b, q, &b->lane[i], i == 0);
    if (status != EPO_OK) {
        gpu_blas_destroy(b);
        return status;
    }
    q->blas = b;
    return EPO_OK;
}

/* It waits for the device. */
static void handle_destroy(void *handle) { (void)api.destroy(handle); }

void gpu_blas_destroy(gpu_blas *b) {
    if (b == NULL)
        return;
    for (int i = 0; i < b->lanes; i++) {
        if (b->lane[i].handle != NULL)
            (void)gpu_release(b->be, "cuBLAS", handle_destroy, b->lane[i].handle);
        if (i > 0 && b->lane[i].stream != NULL)
            (void)cudaStreamDestroy(b->lane[i].stream);
        if (b->lane[i].done != NULL)
            (void)cudaEventDestroy(b->lane[i].done);
        gpu_free(b->be, b->lane[i].workspace, BLAS_WORKSPACE);
    }
    if (b->fork != NULL)
        (void)cudaEventDestroy(b->fork);
    gpu_lt_destroy(b->lt);
    free(b);
}

static cudaDataType blas_type(epo_dtype type) {
    switch (type) {
    case EPO_BF16: return CUDA_R_16BF;
    case EPO_F16: return CUDA_R_16F;
    default: return CUDA_R_32F;
    }
}

static uint64_t type_bytes(epo_dtype type) { return type == EPO_F32 ? 4 : 2; }

/* BLAS is column-major: a row-major c[r][s] is its c^T[s][r], so operands swap. */
static blas_product expert_product(const epo_gemm *g, int e, uint64_t row, int rows) {
    const uint64_t size = type_bytes(g->type), n = (uint64_t)g->n, k = (uint64_t)g->k;
    const uint64_t weights = (uint64_t)e * n * k;
    const char *a = g->a, *b = g->b;
    char *c = g->c;
    blas_product p = {.op_a = CUBLAS_OP_N,
                      .op_b = CUBLAS_OP_N,
                      .m = g->k,
                      .n = rows,
                      .k = g->n,
                      .a = b + weights * size,
                      .b = a + row * n * size,
                      .c = c + row * k * size,
                      .type = blas_type(g->type),
                      .c_type = blas_type(g->type)};
    switch (g->kind) {
    case EPO_GEMM_FORWARD: /* c[rows][n] = a[rows][k] b[n][k]^T */
        p.op_a = CUBLAS_OP_T;
        p.m = g->n;
        p.k = g->k;
        p.b = a + row * k * size;
        p.c = c + row * n * size;
        break;
    case EPO_GEMM_DGRAD: /* c[rows][k] = a[rows][n] b[n][k] */ break;
    case EPO_GEMM_WGRAD: /* c[n][k] += a[rows][n]^T b[rows][k] */
        p.op_b = CUBLAS_OP_T;
        p.n = g->n;
        p.k = rows;
        p.a = b + row * k * size;
        p.c = c + weights * type_bytes(g->c_type);
        p.c_type = blas_type(g->c_type);
        p.add = p.rows_k = true;
        break;
    }
    p.lda = g->k;
    p.ldb = g->kind == EPO_GEMM_FORWARD ? g->k : g->n;
    p.ldc = p.m;
    return p;
}

/* cuBLAS chooses by itself, whatever it looks at. */
static epo_status product_first(epo_queue *q, const blas_product *p, const char *phase) {
    const struct {
        blas_kind kind;
        int32_t m, n, k;
    } kernel = {blas_kind_of(p), p->m, p->n, p->k};
    return gpu_library_first(q, &kernel, sizeof kernel, phase);
}

static epo_status expert_run(epo_queue *q, blas_lane *lane, const blas_product *p,
                             const char *phase) {
    const float one = 1.0F, old = p->add ? 1.0F : 0.0F;
    const gpu_blas *b = q->blas;
    if (b->lt != NULL)
        return gpu_lt_run(b->lt, q, lane->stream, lane->workspace, p, phase);
    epo_status status = product_first(q, p, phase);
    if (status != EPO_OK)
        return status;
    BLAS_TRY(b->be, phase, "cublasGemmEx",
             api.gemm(lane->handle, p->op_a, p->op_b, p->m, p->n, p->k, &one, p->a, p->type, p->lda,
                      p->b, p->type, p->ldb, &old, p->c, p->c_type, p->ldc, CUBLAS_COMPUTE_32F,
                      CUBLAS_GEMM_DEFAULT));
    return EPO_OK;
}

static epo_status blas_fork(epo_queue *q, const char *phase) {
    gpu_blas *b = q->blas;
    if (b->lanes > 1)
        GPU_TRY(q->be, phase, cudaEventRecord(b->fork, q->stream));
    for (int i = 1; i < b->lanes; i++)
        GPU_TRY(q->be, phase, cudaStreamWaitEvent(b->lane[i].stream, b->fork, 0));
    return EPO_OK;
}

static epo_status blas_join(epo_queue *q, const char *phase) {
    gpu_blas *b = q->blas;
    for (int i = 1; i < b->lanes; i++) {
        GPU_TRY(q->be, phase, cudaEventRecord(b->lane[i].done, b->lane[i].stream));
        GPU_TRY(q->be, phase, cudaStreamWaitEvent(q->stream, b->lane[i].done, 0));
    }
    return EPO_OK;
}

epo_status gpu_blas_gemm(epo_queue *q, const epo_gemm *g, const uint64_t *first,
                         const uint64_t *count, const char *phase) {
    epo_status status = q->blas == NULL ? blas_open(q) : EPO_OK;
    if (status == EPO_OK && g->kind == EPO_GEMM_WGRAD && g->fresh) {
        const uint64_t one = (uint64_t)g->n * (uint64_t)g->k * type_bytes(g->c_type);
        GPU_TRY(q->be, phase,
                cudaMemsetAsync((char *)g->c + (uint64_t)g->first * one, 0,
                                (uint64_t)g->count * one, q->stream));
    }
    if (status == EPO_OK)
        status = blas_fork(q, phase);
    for (int e = g->first, lane = 0; e < g->first + g->count && status == EPO_OK; e++) {
        if (count[e] == 0)
            continue;
        const blas_product p = expert_product(g, e, first[e], (int)count[e]);
        status = expert_run(q, &q->blas->lane[lane], &p, phase);
        lane = (lane + 1) % q->blas->lanes;
    }
    return status == EPO_OK ? blas_join(q, phase) : status;
}
