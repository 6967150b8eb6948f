/* SPDX-License-Identifier: Apache-2.0
 *
 * SQLite exports of Nsight Systems.
 */
#include "fuzz_profile.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_profile(data, size, epo_profile_read_nsight);
    return 0;
}
