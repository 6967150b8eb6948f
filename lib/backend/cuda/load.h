/* SPDX-License-Identifier: Apache-2.0
 *
 * load.h - any kernel of each file of kernels, by which load.c finds the others.
 */
#ifndef EPO_BACKEND_CUDA_LOAD_H
#define EPO_BACKEND_CUDA_LOAD_H

#ifdef __cplusplus
extern "C" {
#endif

const void *gpu_any_kernels(void);
const void *gpu_any_routes(void);
const void *gpu_any_flex_plan(void);
const void *gpu_any_flex_segments(void);
const void *gpu_any_flex_fp8(void);
const void *gpu_any_flex_home(void);

#ifdef __cplusplus
}
#endif
#endif
