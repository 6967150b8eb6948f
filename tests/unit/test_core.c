/* SPDX-License-Identifier: Apache-2.0 */
#include "core/hmac.h"
#include "core/status.h"
#include "unit.h"

#include <string.h>

static void fail_returns_status_and_keeps_one_line(void) {
    CU_ASSERT_EQUAL(epo_fail(EPO_E_ARG, "top_k: found %d,\nallowed 1..32\033[1m", 99), EPO_E_ARG);
    CU_ASSERT_STRING_EQUAL(epo_fail_text(), "top_k: found 99,?allowed 1..32?[1m");
    epo_fail_clear();
    CU_ASSERT_STRING_EQUAL(epo_fail_text(), "");
}

static void fail_cuts_a_long_line(void) {
    char big[2 * EPO_ERROR_MAX];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    epo_fail(EPO_E_SYSTEM, "%s", big);
    CU_ASSERT_EQUAL(strlen(epo_fail_text()), EPO_ERROR_MAX - 1);
}

static void every_status_has_its_name(void) {
    for (int s = EPO_OK; s <= EPO_E_VERSION; s++)
        CU_ASSERT_STRING_NOT_EQUAL(epo_fail_name((epo_status)s), "EPO_E_?");
    CU_ASSERT_STRING_EQUAL(epo_fail_name((epo_status)99), "EPO_E_?");
}

static void expect_hmac(const char *key, size_t key_bytes, const char *data, const char *hex) {
    uint8_t got[EPO_HMAC_BYTES];
    char text[2 * EPO_HMAC_BYTES + 1];
    epo_hmac_sha256(key, key_bytes, data, strlen(data), got);
    for (int i = 0; i < EPO_HMAC_BYTES; i++)
        snprintf(text + 2 * i, 3, "%02x", got[i]);
    CU_ASSERT_STRING_EQUAL(text, hex);
}

/* RFC 4231's first two cases, and nothing at all. */
static void hmac_has_the_standards_values(void) {
    expect_hmac("\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b",
                20, "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    expect_hmac("Jefe", 4, "what do ya want for nothing?",
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    expect_hmac("", 0, "", "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

/* Every length from 0 to 1024, chained; the end is what Python's hmac and hashlib make of it. */
static void hmac_of_every_length(void) {
    static const uint8_t end[EPO_HMAC_BYTES] = {0x61, 0x85, 0x62, 0xbf, 0x5b, 0xdc, 0x12, 0x55,
                                                0x6c, 0x16, 0x3b, 0xc5, 0xc9, 0xa1, 0x86, 0x80,
                                                0xd2, 0xf7, 0xdd, 0xa1, 0x79, 0xb5, 0x44, 0x03,
                                                0x20, 0x35, 0xbb, 0xc5, 0x30, 0x7b, 0x5e, 0x61};
    uint8_t key[32], data[1024], one[EPO_HMAC_BYTES], all[EPO_HMAC_BYTES] = {0};
    for (size_t i = 0; i < sizeof key; i++)
        key[i] = (uint8_t)(i * 7 + 3);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 13 + i / 251);
    for (size_t n = 0; n <= sizeof data; n++) {
        epo_hmac_sha256(key, sizeof key, data, n, one);
        epo_hmac_sha256(all, sizeof all, one, sizeof one, all);
    }
    CU_ASSERT(epo_hmac_same(all, end));
    for (int i = 0; i < EPO_HMAC_BYTES; i++) {
        all[i] ^= 1;
        CU_ASSERT_FALSE(epo_hmac_same(all, end));
        all[i] ^= 1;
    }
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"epo_fail returns its status and keeps one line", fail_returns_status_and_keeps_one_line},
        {"epo_fail cuts a long line", fail_cuts_a_long_line},
        {"every status has its name", every_status_has_its_name},
        {"hmac has the standard's values", hmac_has_the_standards_values},
        {"hmac of every length", hmac_of_every_length},
        CU_TEST_INFO_NULL,
    };
    return unit_run("core", tests);
}
