/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_sm90_chain_bf16.cu - the sm_90a kernels of chains for bf16.
 */
#include "gg_chain.cuh"

extern "C" gg_kernel gg_sm90_chain_bf16(int back, int tile_n) {
    return back ? gg::chain_find<true, __nv_bfloat16>(tile_n)
                : gg::chain_find<false, __nv_bfloat16>(tile_n);
}
