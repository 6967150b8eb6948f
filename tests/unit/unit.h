/* SPDX-License-Identifier: Apache-2.0
 *
 * unit.h - what every CUnit program shares: one suite, its status.
 */
#ifndef EPO_TESTS_UNIT_H
#define EPO_TESTS_UNIT_H

#include <CUnit/Basic.h>
#include <CUnit/CUnit.h>

/* Runs one suite; the program's exit status. */
static inline int unit_run(const char *name, const CU_TestInfo *tests) {
    if (CU_initialize_registry() != CUE_SUCCESS)
        return 2;
    CU_pSuite suite = CU_add_suite(name, NULL, NULL);
    for (const CU_TestInfo *t = tests; suite != NULL && t->pName != NULL; t++)
        if (CU_add_test(suite, t->pName, t->pTestFunc) == NULL)
            return 2;
    CU_basic_set_mode(CU_BRM_VERBOSE);
    CU_basic_run_tests();
    int failed = suite == NULL || CU_get_number_of_tests_run() == 0 ||
                 CU_get_number_of_failures() > 0 || CU_get_number_of_tests_failed() > 0;
    CU_cleanup_registry();
    return failed ? 1 : 0;
}

#endif
