/* SPDX-License-Identifier: Apache-2.0
 *
 * cblas.h - a stand-in, for a machine without CBLAS, of what the host engine asks of it:
 * for scaling.sh, which multiplies nothing.  A product ends the program.
 */
#ifndef EPO_TESTS_BENCH_NO_BLAS_CBLAS_H
#define EPO_TESTS_BENCH_NO_BLAS_CBLAS_H

#include <stdio.h>
#include <stdlib.h>

enum { CblasRowMajor = 101, CblasNoTrans = 111, CblasTrans = 112 };

static inline void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha,
                               const float *a, int lda, const float *b, int ldb, float beta,
                               float *c, int ldc) {
    (void)order, (void)ta, (void)tb, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda;
    (void)b, (void)ldb, (void)beta, (void)c, (void)ldc;
    fprintf(stderr, "cblas_sgemm: this program was built without CBLAS\n");
    abort();
}

#endif
