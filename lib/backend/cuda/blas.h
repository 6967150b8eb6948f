/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.h - one expert's product as BLAS libraries take it, shared by blas.c and lt.c.
 */
#ifndef EPO_BACKEND_CUDA_BLAS_H
#define EPO_BACKEND_CUDA_BLAS_H

#include <cublas_v2.h>

#include "backend/cuda/gpu.h"

#define BLAS_WORKSPACE (UINT64_C(32) << 20)

/* Column-major, c [m][n] of op(a) [m][k] and op(b) [k][n], c added to if `add`. */
typedef struct blas_product {
    cublasOperation_t op_a, op_b;
    int m, n, k, lda, ldb, ldc;
    const void *a, *b;
    void *c;
    cudaDataType type, c_type;
    bool add;
    bool rows_k; /* the rows' number is k; else it is n */
} blas_product;

/* ---- lt.c ---- */
typedef struct gpu_lt gpu_lt;
epo_status gpu_lt_open(epo_backend *be, gpu_lt **out);
void gpu_lt_destroy(gpu_lt *lt);
/* `workspace`: BLAS_WORKSPACE bytes that nothing else of the stream uses meanwhile. */
epo_status gpu_lt_run(gpu_lt *lt, cudaStream_t stream, void *workspace, const blas_product *p,
                      const char *phase);

#endif
