/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.c - one GEMM per expert over cuBLAS.  Each GEMM is the same call with the
 * same workspace whatever chunk it belongs to, so its result does not depend on
 * chunks.  Small GEMMs do not fill a GPU: several streams run side by side.
 */
#include "backend/cuda/gpu.h"

#include <cublas_v2.h>
#include <stdlib.h>

#define BLAS_WORKSPACE (UINT64_C(32) << 20)

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

static epo_status lane_open(epo_backend *be, epo_queue *q, blas_lane *lane, bool own) {
    lane->stream = q->stream;
    if (!own) {
        GPU_TRY(be, "cuBLAS",
                cudaStreamCreateWithPriority(&lane->stream, cudaStreamNonBlocking, q->priority));
        GPU_TRY(be, "cuBLAS", cudaEventCreateWithFlags(&lane->done, cudaEventDisableTiming));
    }
    BLAS_TRY(be, "open", "cublasCreate", api.create(&lane->handle));
    epo_status status = gpu_alloc(be, BLAS_WORKSPACE, &lane->workspace);
    if (status != EPO_OK)
        return status;
    BLAS_TRY(be, "open", "cublasSetStream", api.stream(lane->handle, lane->stream));
    BLAS_TRY(be, "open", "cublasSetWorkspace",
             api.workspace(lane->handle, lane->workspace, BLAS_WORKSPACE));
    BLAS_TRY(be, "open", "cublasSetMathMode",
             api.mode(lane->handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
    return EPO_OK;
}

static epo_status blas_open(epo_queue *q) {
    epo_backend *be = q->be;
    const char *why = NULL;
    int version = 0;
    if (!gpu_blas_find(&version, &why))
        return epo_fail(EPO_E_UNSUPPORTED, "rank %d: no cuBLAS: %s", be->rank, why);
    gpu_blas *b = calloc(1, sizeof *b);
    if (b == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for cuBLAS's handles", be->rank);
    b->be = be;
    b->lanes = be->shared_device ? 1 : 1 + GPU_SIDE;
    epo_status status = EPO_OK;
    cudaError_t e = cudaEventCreateWithFlags(&b->fork, cudaEventDisableTiming);
    if (e != cudaSuccess)
        status = gpu_fail(be, "cudaEventCreateWithFlags", "cuBLAS", e);
    for (int i = 0; i < b->lanes && status == EPO_OK; i++)
        status = lane_open(be, q, &b->lane[i], i == 0);
    if (status != EPO_OK) {
        gpu_blas_destroy(b);
        return status;
    }
    q->blas = b;
    return EPO_OK;
}

void gpu_blas_destroy(gpu_blas *b) {
    if (b == NULL)
        return;
    for (int i = 0; i < b->lanes; i++) {
        if (b->lane[i].handle != NULL)
            (void)api.destroy(b->lane[i].handle);
        if (i > 0 && b->lane[i].stream != NULL)
            (void)cudaStreamDestroy(b->lane[i].stream);
        if (b->lane[i].done != NULL)
            (void)cudaEventDestroy(b->lane[i].done);
        gpu_free(b->be, b->lane[i].workspace, BLAS_WORKSPACE);
    }
    if (b->fork != NULL)
        (void)cudaEventDestroy(b->fork);
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

/* cuBLAS is column-major: a row-major c[r][s] is its c^T[s][r], so operands swap. */
static epo_status blas_expert(epo_backend *be, cublasHandle_t handle, const epo_gemm *g, int e,
                              uint64_t row, int m, const char *phase) {
    const uint64_t size = type_bytes(g->type), n = (uint64_t)g->n, k = (uint64_t)g->k;
    const uint64_t weights = (uint64_t)e * n * k;
    const char *a = g->a, *b = g->b;
    char *c = g->c;
    const cudaDataType type = blas_type(g->type);
    const float one = 1.0F, zero = 0.0F;
    switch (g->kind) {
    case EPO_GEMM_FORWARD: /* c[m][n] = a[m][k] b[n][k]^T */
        BLAS_TRY(be, phase, "cublasGemmEx",
                 api.gemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, g->n, m, g->k, &one, b + weights * size,
                          type, g->k, a + row * k * size, type, g->k, &zero, c + row * n * size,
                          type, g->n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        break;
    case EPO_GEMM_DGRAD: /* c[m][k] = a[m][n] b[n][k] */
        BLAS_TRY(be, phase, "cublasGemmEx",
                 api.gemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, g->k, m, g->n, &one, b + weights * size,
                          type, g->k, a + row * n * size, type, g->n, &zero, c + row * k * size,
                          type, g->k, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        break;
    case EPO_GEMM_WGRAD: /* c[n][k] += a[m][n]^T b[m][k] */
        BLAS_TRY(be, phase, "cublasGemmEx",
                 api.gemm(handle, CUBLAS_OP_N, CUBLAS_OP_T, g->k, g->n, m, &one, b + row * k * size,
                          type, g->k, a + row * n * size, type, g->n, &one,
                          c + weights * type_bytes(g->c_type), blas_type(g->c_type), g->k,
                          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        break;
    }
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
    if (status == EPO_OK)
        status = blas_fork(q, phase);
    for (int e = g->first, lane = 0; e < g->first + g->count && status == EPO_OK; e++) {
        if (count[e] == 0)
            continue;
        status =
            blas_expert(q->be, q->blas->lane[lane].handle, g, e, first[e], (int)count[e], phase);
        lane = (lane + 1) % q->blas->lanes;
    }
    return status == EPO_OK ? blas_join(q, phase) : status;
}
