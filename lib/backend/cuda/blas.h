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

/* What a library's kernel may be chosen by: of sizes and addresses, what divides them.  Compared
 * as bytes: no padding. */
typedef struct blas_kind {
    int32_t op_a, op_b, type, c_type, add;
    int32_t m, n, k, lda, ldb, ldc; /* the largest power of two up to 16 */
    int32_t aligned;
} blas_kind;
static inline int32_t blas_divides(uint64_t x) { return (int32_t)((x | 16) & (0 - (x | 16))); }
static inline int32_t blas_aligned(const blas_product *p) {
    return blas_divides((uintptr_t)p->a | (uintptr_t)p->b | (uintptr_t)p->c);
}
static inline blas_kind blas_kind_of(const blas_product *p) {
    return (blas_kind){.op_a = (int32_t)p->op_a,
                       .op_b = (int32_t)p->op_b,
                       .type = (int32_t)p->type,
                       .c_type = (int32_t)p->c_type,
                       .add = p->add,
                       .m = blas_divides((uint64_t)p->m),
                       .n = blas_divides((uint64_t)p->n),
                       .k = blas_divides((uint64_t)p->k),
                       .lda = blas_divides((uint64_t)p->lda),
                       .ldb = blas_divides((uint64_t)p->ldb),
                       .ldc = blas_divides((uint64_t)p->ldc),
                       .aligned = blas_aligned(p)};
}

/* ---- lt.c ---- */
typedef struct gpu_lt gpu_lt;
epo_status gpu_lt_open(epo_backend *be, gpu_lt **out);
void gpu_lt_destroy(gpu_lt *lt);
/* `workspace`: BLAS_WORKSPACE bytes that nothing else of the stream uses meanwhile. */
epo_status gpu_lt_run(gpu_lt *lt, epo_queue *q, cudaStream_t stream, void *workspace,
                      const blas_product *p, const char *phase);

#endif
