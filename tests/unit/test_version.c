/* SPDX-License-Identifier: Apache-2.0
 *
 * PEP 440's own order, spellings and refusals.
 */
#include "core/version.h"
#include "core/status.h"
#include "unit.h"

#include <stdio.h>
#include <string.h>

static int compare(const char *a, const char *b) {
    epo_pep440 x, y;
    CU_ASSERT_EQUAL(epo_pep440_parse(a, &x), EPO_OK);
    CU_ASSERT_EQUAL(epo_pep440_parse(b, &y), EPO_OK);
    int difference = epo_pep440_compare(&x, &y);
    return (difference > 0) - (difference < 0);
}

/* Every pair of the list, in both directions: a total order. */
static void order_is_total(void) {
    static const char *const ascending[] = {"0.9",           "1.0.dev0",
                                            "1.0.dev456",    "1.0a1",
                                            "1.0a2.dev456",  "1.0a12.dev456",
                                            "1.0a12",        "1.0b1.dev456",
                                            "1.0b2",         "1.0b2.post345.dev456",
                                            "1.0b2.post345", "1.0rc1.dev456",
                                            "1.0rc1",        "1.0",
                                            "1.0+abc.5",     "1.0+abc.7",
                                            "1.0+5",         "1.0.post456.dev34",
                                            "1.0.post456",   "1.1.dev1",
                                            "2.2",           "2.6.0a0+df5bbc09d1.nv24.12",
                                            "2.6.0",         "2.6.0+cu124",
                                            "2.7",           "2.10.0",
                                            "2.20.0.dev0",   "1!0.1"};
    size_t count = sizeof ascending / sizeof *ascending;
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < count; k++) {
            int wanted = (i > k) - (i < k), found = compare(ascending[i], ascending[k]);
            if (found != wanted)
                fprintf(stderr, "%s against %s: %d\n", ascending[i], ascending[k], found);
            CU_ASSERT_EQUAL(found, wanted);
        }
}

static void spellings_are_the_same_version(void) {
    static const char *const same[][2] = {{"1.0", "1"},
                                          {"1.0.0", "1.0"},
                                          {"v1.1", "1.1"},
                                          {"1.1RC1", "1.1rc1"},
                                          {"1.1.a1", "1.1a1"},
                                          {"1.1-a1", "1.1a1"},
                                          {"1.1a.1", "1.1a1"},
                                          {"1.1alpha1", "1.1a1"},
                                          {"1.1beta2", "1.1b2"},
                                          {"1.1c3", "1.1rc3"},
                                          {"1.1pre3", "1.1rc3"},
                                          {"1.1preview3", "1.1rc3"},
                                          {"1.2a", "1.2a0"},
                                          {"1.2-post2", "1.2.post2"},
                                          {"1.2post2", "1.2.post2"},
                                          {"1.2.post-2", "1.2.post2"},
                                          {"1.2.post", "1.2.post0"},
                                          {"1.0-1", "1.0.post1"},
                                          {"1.0-r4", "1.0.post4"},
                                          {"1.0-rev4", "1.0.post4"},
                                          {"1.2-dev2", "1.2.dev2"},
                                          {"1.2.dev", "1.2.dev0"},
                                          {"1.0+ubuntu-1", "1.0+ubuntu.1"},
                                          {" 1.0 ", "1.0"},
                                          {"0!1.0", "1.0"},
                                          {"1.0+00007", "1.0+7"},
                                          {"2.6.0dev0", "2.6.0.dev0"}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        if (compare(same[i][0], same[i][1]) != 0)
            fprintf(stderr, "%s is not %s\n", same[i][0], same[i][1]);
        CU_ASSERT_EQUAL(compare(same[i][0], same[i][1]), 0);
    }
}

static void no_version_is_refused(void) {
    static const char *const bad[] = {"",        " ",
                                      "new",     "1.0+",
                                      "1.0+_a",  "1..0",
                                      "1.0.",    "1.0a1b2",
                                      "1.0 2",   "1.0+a..b",
                                      "!1",      "99999999999999999999999",
                                      "1.0-",    "french toast",
                                      "1.0+a+b", "1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        epo_pep440 out = {.epoch = 77};
        if (epo_pep440_parse(bad[i], &out) != EPO_E_ARG)
            fprintf(stderr, "\"%s\" was taken\n", bad[i]);
        CU_ASSERT_EQUAL(epo_pep440_parse(bad[i], &out), EPO_E_ARG);
        CU_ASSERT_EQUAL(out.epoch, 77); /* outputs on success only */
        CU_ASSERT(strstr(epo_fail_text(), "is not a version") != NULL);
    }
    epo_pep440 out;
    CU_ASSERT_EQUAL(epo_pep440_parse(NULL, &out), EPO_E_ARG);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"the order is total", order_is_total},
        {"spellings are the same version", spellings_are_the_same_version},
        {"what is no version is refused", no_version_is_refused},
        CU_TEST_INFO_NULL,
    };
    return unit_run("version", tests);
}
