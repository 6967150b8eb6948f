/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_sm90_chain_f16.cu - the sm_90a kernels of chains for f16.
 */
#include "gg_chain.cuh"

extern "C" gg_kernel gg_sm90_chain_f16(int back, int tile_n) {
    return back ? gg::chain_find<true, __half>(tile_n) : gg::chain_find<false, __half>(tile_n);
}
