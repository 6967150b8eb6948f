/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/moe.h"

#include <inttypes.h>
#include <string.h>

/* Every struct with a version begins with its size. */
static size_t size_of(const void *object) {
    size_t size;
    memcpy(&size, object, sizeof size);
    return size;
}

epo_status moe_input(void *dst, size_t size, const void *src, size_t need, const char *name) {
    if (src == NULL)
        return epo_fail(EPO_E_ARG, "%s is NULL: give one, initialised by its _INIT macro", name);
    size_t given = size_of(src);
    if (given < need)
        return epo_fail(EPO_E_VERSION,
                        "%s.size: found %zu, allowed %zu or more; initialise it by its _INIT macro",
                        name, given, need);
    for (size_t i = size; i < given; i++)
        if (((const char *)src)[i] != 0)
            return epo_fail(EPO_E_VERSION,
                            "%s was made with a newer header: byte %zu is set, this library "
                            "knows %zu bytes; install the matching library",
                            name, i, size);
    memcpy(dst, src, given < size ? given : size);
    memcpy(dst, &size, sizeof size);
    return EPO_OK;
}

epo_status moe_output(void *dst, const void *src, size_t size, const char *name) {
    if (dst == NULL)
        return epo_fail(EPO_E_ARG, "%s is NULL", name);
    size_t given = size_of(dst);
    if (given < 2 * sizeof given)
        return epo_fail(EPO_E_VERSION, "%s.size: found %zu; set it to sizeof(%s)", name, given,
                        name);
    memcpy((char *)dst + sizeof given, (const char *)src + sizeof given,
           (given < size ? given : size) - sizeof given);
    return EPO_OK;
}

epo_status moe_check_range(const char *name, int64_t found, int64_t low, int64_t high) {
    if (found < low || found > high)
        return epo_fail(EPO_E_ARG, "%s: found %" PRId64 ", allowed %" PRId64 "..%" PRId64, name,
                        found, low, high);
    return EPO_OK;
}

size_t moe_type_size(epo_dtype type) {
    switch (type) {
    case EPO_F32: return 4;
    case EPO_BF16:
    case EPO_F16: return 2;
    }
    return 0;
}

epo_status moe_check_type(const epo_backend_info *info, const char *name, epo_dtype type) {
    static const char *const names[] = {"fp32", "bf16", "fp16"};
    if (moe_type_size(type) == 0)
        return epo_fail(EPO_E_ARG, "%s: found %d, allowed EPO_F32, EPO_BF16 or EPO_F16", name,
                        (int)type);
    uint32_t served = info->types != 0 ? info->types : 1u << EPO_F32 | 1u << EPO_BF16;
    if ((served >> type & 1u) == 0)
        return epo_fail(EPO_E_UNSUPPORTED, "%s: the %s engine does not serve %s; use fp32 or bf16",
                        name, info->engine, names[type]);
    return EPO_OK;
}

epo_status moe_check_experts(int experts, int ranks) {
    if (experts < 1 || experts % ranks != 0)
        return epo_fail(EPO_E_ARG,
                        "experts: found %d, which %d ranks cannot share evenly; use a multiple "
                        "of %d",
                        experts, ranks, ranks);
    /* A rank's counts of all of them are one row of an exchange: its bytes have 32 bits. */
    return moe_check_range("experts", experts, 1, 1 << 24);
}
