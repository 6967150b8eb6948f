/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_sm90_f16.cu - the sm_90a kernels for fp16.
 */
#include "gg_sm90.cuh"

extern "C" gg_kernel gg_sm90_kernel_f16(int kind, int fuse, int tile_n) {
    return gg::sm90_find<__half>(kind, fuse, tile_n);
}
