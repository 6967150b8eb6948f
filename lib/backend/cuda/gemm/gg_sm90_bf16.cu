/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_sm90_bf16.cu - the sm_90a kernels for bf16.
 */
#include "gg_sm90.cuh"

extern "C" gg_kernel gg_sm90_kernel_bf16(int kind, int fuse, int tile_n) {
    return gg::sm90_find<__nv_bfloat16>(kind, fuse, tile_n);
}
