/* SPDX-License-Identifier: Apache-2.0
 *
 * intercept_around.c - what the interposer's own sources find around them in a test that is linked
 * of them: the driver of cuda_streams.c, the NCCL of nccl_streams.c, no recorder.
 */
#include "config.h"

#include "nccl_streams.h"

#include <string.h>

#include "core/names.h"
#include "preload/intercept/driver.h"
#include "preload/intercept/mapped.h"
#include "preload/record/recorder.h"

/* Of cuda_streams.c, by their own names. */
#define STAND_DECLARE(member, symbol, parameters)                                                  \
    extern cu_result stand_##member parameters __asm__(symbol);
EPO_DRIVER_FUNCTIONS(STAND_DECLARE)
EPO_DRIVER_PIECES(STAND_DECLARE)
STAND_DECLARE(batch, "cuStreamBatchMemOp_v2", (cu_stream, unsigned, cu_word_operation *, unsigned))
STAND_DECLARE(stream_id, "cuStreamGetId", (cu_stream, unsigned long long *))

#define STAND_MEMBER(member, symbol, parameters) .member = stand_##member,
static const cuda_driver table = {
    EPO_DRIVER_FUNCTIONS(STAND_MEMBER) EPO_DRIVER_PIECES(STAND_MEMBER).batch = stand_batch,
    .stream_id = stand_stream_id};

const cuda_driver *driver_find(const char **missing) {
    if (missing != NULL)
        *missing = NULL;
    return &table;
}
const char *driver_error(const cuda_driver *cu, cu_result r) {
    (void)cu, (void)r;
    return "CUDA_ERROR_TEST";
}

_Thread_local fake_settings_of fake_settings = {1, 100000};
uint64_t mode_bytes(const char *name, uint64_t otherwise) {
    return strcmp(name, EPO_ENV_INTERPOSE_LEAST) == 0  ? fake_settings.least
           : strcmp(name, EPO_ENV_INTERPOSE_WAIT) == 0 ? fake_settings.wait_us
                                                       : otherwise;
}
intercept_mode mode_now(void) { return MODE_ACCELERATE; }
void mode_tell(void) {}
void mode_off_in_children(void) {}
const real_nccl *real_of(const void *caller) {
    (void)caller;
    return &fake_nccl;
}
void mapped_look(int rank, int ranks) { (void)rank, (void)ranks; }
void recorder_call(uint64_t what, uint64_t kind) { (void)what, (void)kind; }
bool recorder_wants_marks(void) { return false; }
