/* SPDX-License-Identifier: Apache-2.0 */
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

int main(void) {
    const CU_TestInfo tests[] = {
        {"epo_fail returns its status and keeps one line", fail_returns_status_and_keeps_one_line},
        {"epo_fail cuts a long line", fail_cuts_a_long_line},
        {"every status has its name", every_status_has_its_name},
        CU_TEST_INFO_NULL,
    };
    return unit_run("core", tests);
}
