/* SPDX-License-Identifier: Apache-2.0
 *
 * Which node a rank is on: what Slurm says, and what EP_OVERLAP_NODES plays.
 */
#include "backend/host/hello.h"
#include "backend/meet.h"
#include "core/names.h"
#include "core/status.h"
#include "unit.h"

#include <stdlib.h>
#include <string.h>

static void node_lists_are_read(void) {
    static const char *const want[] = {"a", "n08", "n09", "n10", "n3", "m1"};
    char node[HOST_NODE_MAX];
    for (int i = 0; i < 6; i++) {
        CU_ASSERT(host_node_nth("a,n[08-10,3],m1", i, node, sizeof node));
        CU_ASSERT_STRING_EQUAL(node, want[i]);
    }
    CU_ASSERT_FALSE(host_node_nth("a,n[08-10,3],m1", 6, node, sizeof node));
    CU_ASSERT_FALSE(host_node_nth("r[1-2]n[1-2]", 0, node, sizeof node));
    CU_ASSERT_FALSE(host_node_nth("n[1-", 0, node, sizeof node));
    CU_ASSERT_FALSE(host_node_nth("n[x]", 0, node, sizeof node));
    CU_ASSERT_FALSE(host_node_nth("", 0, node, sizeof node));
    static const int tasks[] = {2, 2, 2, 1, 5, -1};
    for (int i = 0; i < 6; i++)
        CU_ASSERT_EQUAL(host_tasks_nth("2(x3),1,5", i), tasks[i]);
    CU_ASSERT_EQUAL(host_tasks_nth("2(y3)", 0), 2);
    CU_ASSERT_EQUAL(host_tasks_nth("2(x3", 0), -1);
    CU_ASSERT_EQUAL(host_tasks_nth("", 0), -1);
}

static void check_node(const host_place *place, int rank, const char *want) {
    char node[HOST_NODE_MAX] = "";
    CU_ASSERT_EQUAL(host_node_of_rank(place, rank, node, sizeof node), want != NULL);
    CU_ASSERT_STRING_EQUAL(node, want != NULL ? want : "");
}

/* Nothing is said where the step's tasks are not this world's ranks, block by block. */
static void a_rank_is_on_its_task_s_node(void) {
    static const int members[] = {4, 1};
    const host_place world = {.rank = 0, .ranks = 5, .world_ranks = 5};
    const host_place group = {.rank = 0, .ranks = 2, .world_ranks = 5, .members = members};
    const host_place other = {.rank = 0, .ranks = 4, .world_ranks = 4};
    setenv("SLURM_STEP_NODELIST", "n[1-2],m", 1);
    setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2),1", 1);
    setenv("SLURM_STEP_NUM_TASKS", "5", 1);
    static const char *const want[] = {"n1", "n1", "n2", "n2", "m"};
    for (int r = 0; r < 5; r++)
        check_node(&world, r, want[r]);
    check_node(&group, 0, "m");
    check_node(&group, 1, "n1");
    check_node(&other, 0, NULL);
    setenv("SLURM_DISTRIBUTION", "block:cyclic", 1);
    check_node(&world, 4, "m");
    setenv("SLURM_DISTRIBUTION", "cyclic", 1);
    check_node(&world, 0, NULL);
    unsetenv("SLURM_DISTRIBUTION");
    setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)", 1); /* less than the tasks */
    check_node(&world, 3, "n2");
    check_node(&world, 4, NULL);
    unsetenv("SLURM_STEP_TASKS_PER_NODE");
    check_node(&world, 0, NULL);
    unsetenv("SLURM_STEP_NODELIST");
    unsetenv("SLURM_STEP_NUM_TASKS");
}

/* Blocks of the same length, each of another number: how many; else 0. */
static int blocks(const int *node, int n) {
    for (int each = 1; each <= n; each++) {
        bool good = n % each == 0;
        for (int i = 0; i < n && good; i++)
            for (int k = 0; k < n && good; k++)
                good = (node[i] == node[k]) == (i / each == k / each);
        if (good)
            return n / each;
    }
    return 0;
}

static void nodes_are_counted_as_blocks(void) {
    enum { RANKS = 6, NODES = 4 };
    int all = 1, reversed[RANKS];
    for (int i = 0; i < RANKS; i++) {
        all *= NODES;
        reversed[i] = RANKS - 1 - i;
    }
    for (int code = 0; code < all; code++) {
        int node[RANKS], back[RANKS];
        for (int i = 0, rest = code; i < RANKS; i++, rest /= NODES)
            node[i] = back[RANKS - 1 - i] = rest % NODES;
        for (int n = 1; n <= RANKS; n++)
            CU_ASSERT_EQUAL(epo_nodes_count(node, NULL, n), blocks(node, n));
        CU_ASSERT_EQUAL(epo_nodes_count(node, reversed, RANKS), blocks(back, RANKS));
    }
}

static void played_nodes_are_read(void) {
    static const struct {
        const char *text;
        epo_status status;
        int nodes;
    } cases[] = {
        {"", EPO_OK, 1},
        {"0,0,0,0", EPO_OK, 1},
        {"0,0,1,1", EPO_OK, 2},
        {"3,1,1023,0", EPO_OK, 4},
        {"0,0,0,1", EPO_E_UNSUPPORTED, 0},
        {"0,1,0,1", EPO_E_UNSUPPORTED, 0},
        {"0,0,1", EPO_E_ARG, 0},
        {"0,0,1,1,", EPO_E_ARG, 0},
        {"0,0,1,1,1", EPO_E_ARG, 0},
        {"0,,1,1", EPO_E_ARG, 0},
        {"0,-1,1,1", EPO_E_ARG, 0},
        {"0,0,1,1024", EPO_E_ARG, 0},
        {"a", EPO_E_ARG, 0},
    };
    epo_backend_config config = {.ranks = 4};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int nodes = -1;
        setenv(EPO_ENV_NODES, cases[i].text, 1);
        CU_ASSERT_EQUAL(epo_nodes_read(&config, &nodes), cases[i].status);
        CU_ASSERT(cases[i].status != EPO_OK || nodes == cases[i].nodes);
        CU_ASSERT(cases[i].status == EPO_OK || strstr(epo_fail_text(), cases[i].text) != NULL);
    }
    unsetenv(EPO_ENV_NODES);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"node lists are read", node_lists_are_read},
        {"a rank is on its task's node", a_rank_is_on_its_task_s_node},
        {"nodes are counted as blocks", nodes_are_counted_as_blocks},
        {"played nodes are read", played_nodes_are_read},
        CU_TEST_INFO_NULL,
    };
    return unit_run("host_nodes", tests);
}
