/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank_hooks.c - plugin.c and wrap_spank.c as Slurm loads them, over a few
 * functions of Slurm's own that this file stands in for.
 */
#define _GNU_SOURCE /* unshare */
#include "context.h"
#include "listed.h"
#include "unit.h"

#include "core/names.h"

#include <gnu/libc-version.h>
#include <sched.h>
#include <signal.h>
#include <slurm/slurm.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- Slurm --------------------------------------------------------------- */

static spank_context_t context;
static struct spank_option options[8];
static int option_count, refuse_items;
static uint32_t step;
static char logged[8192], variables[64][2][8192];
static int variable_count;

spank_context_t spank_context(void) { return context; }

spank_err_t spank_option_register(spank_t spank, struct spank_option *option) {
    (void)spank;
    options[option_count++] = *option;
    return ESPANK_SUCCESS;
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...) {
    static char *arguments[] = {(char *)(uintptr_t) "/bin/true", NULL};
    static gid_t groups[] = {3, 4};
    va_list args;
    (void)spank;
    if (refuse_items)
        return ESPANK_BAD_ARG;
    va_start(args, item);
    if (item == S_JOB_ARGV) {
        *va_arg(args, int *) = 4; /* as of a step with --container: more than there are */
        *va_arg(args, char ***) = arguments;
    } else if (item == S_JOB_SUPPLEMENTARY_GIDS) {
        *va_arg(args, gid_t **) = groups;
        *va_arg(args, int *) = 2;
    } else {
        uint32_t other = item == S_JOB_TOTAL_TASK_COUNT; /* one task, nobody to cancel */
        *va_arg(args, uint32_t *) = item == S_JOB_STEPID ? step : item == S_JOB_ID ? 9 : other;
    }
    va_end(args);
    return ESPANK_SUCCESS;
}

static int find(const char *name) {
    for (int i = 0; i < variable_count; i++)
        if (strcmp(variables[i][0], name) == 0)
            return i;
    return -1;
}

spank_err_t spank_getenv(spank_t spank, const char *name, char *text, int room) {
    (void)spank;
    int at = find(name);
    if (at < 0)
        return ESPANK_ENV_NOEXIST;
    if (strlen(variables[at][1]) >= (size_t)room)
        return ESPANK_NOSPACE;
    snprintf(text, (size_t)room, "%s", variables[at][1]);
    return ESPANK_SUCCESS;
}

spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite) {
    (void)spank;
    (void)overwrite;
    int at = find(name);
    if (at < 0)
        at = variable_count++;
    snprintf(variables[at][0], sizeof variables[at][0], "%s", name);
    snprintf(variables[at][1], sizeof variables[at][1], "%s", value);
    return ESPANK_SUCCESS;
}

spank_err_t spank_unsetenv(spank_t spank, const char *name) {
    (void)spank;
    int at = find(name);
    if (at >= 0)
        memcpy(variables[at], variables[--variable_count], sizeof variables[at]);
    return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_unsetenv(spank_t spank, const char *name) {
    (void)spank;
    (void)name;
    return ESPANK_SUCCESS;
}

static void note(const char *format, va_list args) {
    size_t used = strlen(logged);
    vsnprintf(logged + used, sizeof logged - used, format, args);
}

void slurm_info(const char *format, ...) {
    va_list args;
    va_start(args, format);
    note(format, args);
    va_end(args);
}

void slurm_error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    note(format, args);
    va_end(args);
}

/* ---- what Slurm does ------------------------------------------------------ */

static int give(const char *name, const char *argument, int remote) {
    for (int i = 0; i < option_count; i++)
        if (strcmp(options[i].name, name) == 0)
            return options[i].cb(options[i].val, argument, remote);
    CU_FAIL("no such option");
    return -1;
}

static void load_line(const char *argument) {
    char *arguments[] = {(char *)(uintptr_t)argument, NULL};
    CU_ASSERT_EQUAL(slurm_spank_init(NULL, argument != NULL, arguments), 0);
}

static void load(spank_context_t where, const char *argument) {
    context = where;
    option_count = variable_count = 0;
    logged[0] = '\0';
    refuse_items = 0;
    step = 0;
    load_line(argument);
}

static void remote_hooks_never_fail_before_the_task(void) {
    static const char *const arguments[] = {NULL, "conf=/nonexistent", "conf=relative",
                                            "what=ever"};
    for (size_t i = 0; i < sizeof arguments / sizeof arguments[0]; i++)
        for (int refuse = 0; refuse < 2; refuse++) {
            load(S_CTX_REMOTE, arguments[i]);
            CU_ASSERT_EQUAL(option_count, EP_FLAG_COUNT);
            CU_ASSERT_EQUAL(give("ep-overlap", "nonsense", 1), 0);
            CU_ASSERT_EQUAL(give("delay-wgrad", NULL, 1), 0);
            refuse_items = refuse;
            CU_ASSERT_EQUAL(slurm_spank_init_post_opt(NULL, 0, NULL), 0);
            CU_ASSERT_EQUAL(slurm_spank_exit(NULL, 0, NULL), 0);
        }
}

static void a_refused_task_exits_with_one(void) {
    load(S_CTX_REMOTE, "conf=/nonexistent");
    CU_ASSERT_EQUAL(give("ep-overlap", "on", 1), 0);
    CU_ASSERT_EQUAL(slurm_spank_init_post_opt(NULL, 0, NULL), 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(logged, "refused: "));
    int pipes[2], status = 0;
    char said[1024] = "";
    CU_ASSERT_EQUAL_FATAL(pipe(pipes), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], STDERR_FILENO);
        slurm_spank_task_init(NULL, 0, NULL);
        _exit(99); /* not reached: the task has ended */
    }
    close(pipes[1]);
    waitpid(child, &status, 0);
    CU_ASSERT(read(pipes[0], said, sizeof said - 1) > 0);
    close(pipes[0]);
    CU_ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(said, "/nonexistent: No such file"));
    CU_ASSERT_EQUAL(slurm_spank_exit(NULL, 0, NULL), 0);
}

static void other_contexts_do_nothing(void) {
    static const spank_context_t contexts[] = {S_CTX_SLURMD, S_CTX_JOB_SCRIPT, S_CTX_ERROR};
    for (size_t i = 0; i < sizeof contexts / sizeof contexts[0]; i++) {
        load(contexts[i], NULL);
        CU_ASSERT_EQUAL(option_count, 0);
        CU_ASSERT_EQUAL(slurm_spank_init_post_opt(NULL, 0, NULL), 0);
        CU_ASSERT_EQUAL(slurm_spank_exit(NULL, 0, NULL), 0);
        CU_ASSERT_STRING_EQUAL(logged, "");
    }
}

static void srun_leaves_its_record(void) {
    unsetenv(EPO_STEP_RECORD);
    load(S_CTX_LOCAL, NULL);
    CU_ASSERT_EQUAL(give("ep-overlap", "on", 0), 0);
    CU_ASSERT_EQUAL(give("ep-overlap", "never", 0), -1);
    CU_ASSERT_EQUAL(slurm_spank_init_post_opt(NULL, 0, NULL), 0);
    CU_ASSERT_EQUAL(slurm_spank_local_user_init(NULL, 0, NULL), 0);
    const char *record = getenv(EPO_STEP_RECORD);
    CU_ASSERT_PTR_NOT_NULL_FATAL(record);
    CU_ASSERT_EQUAL(strncmp(record, "1 9 0 1 ", 8), 0);
    CU_ASSERT_EQUAL(slurm_spank_exit(NULL, 0, NULL), 0);
    step = 0xfffffffa; /* salloc's interactive step */
    CU_ASSERT_EQUAL(slurm_spank_local_user_init(NULL, 0, NULL), 0);
    CU_ASSERT_PTR_NULL(getenv(EPO_STEP_RECORD));
}

static int count(const char *text, const char *part) {
    int found = 0;
    while ((text = strstr(text, part)) != NULL)
        found++, text += strlen(part);
    return found;
}

/* Two lines of plugstack.conf, in a process of srun's and in one of a node's. */
static void listed_twice_works_once(void) {
    load(S_CTX_LOCAL, "conf=relative");
    load_line("conf=/nonexistent");
    CU_ASSERT_EQUAL(option_count, EP_FLAG_COUNT); /* Slurm complains of others */
    CU_ASSERT_EQUAL(give("ep-overlap", "off", 0), 0);
    unsetenv(EPO_STEP_RECORD);
    CU_ASSERT_EQUAL(slurm_spank_init_post_opt(NULL, 0, NULL), 0);
    CU_ASSERT_PTR_NULL(getenv(EPO_STEP_RECORD));
    CU_ASSERT_EQUAL(slurm_spank_init_post_opt(NULL, 0, NULL), 0);
    CU_ASSERT_PTR_NOT_NULL(getenv(EPO_STEP_RECORD));
    CU_ASSERT_EQUAL(slurm_spank_exit(NULL, 0, NULL) + slurm_spank_exit(NULL, 0, NULL), 0);
    CU_ASSERT_STRING_EQUAL(logged, ""); /* a user cannot mend it */
    unsetenv(EPO_STEP_RECORD);

    load(S_CTX_REMOTE, "conf=relative");
    load_line("conf=/nonexistent");
    load_line("conf=/absent");
    for (int i = 0; i < 3; i++)
        CU_ASSERT_EQUAL(slurm_spank_init_post_opt(NULL, 0, NULL), 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(logged, "lists ep_overlap.so 3 times: the last line counts"));
    CU_ASSERT_EQUAL(count(logged, "times: "), 1);
    CU_ASSERT_EQUAL(count(logged, "ep-overlap: step "), 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(logged, "/absent: "));
    for (int i = 0; i < 3; i++)
        CU_ASSERT_EQUAL(slurm_spank_exit(NULL, 0, NULL), 0);
    load(S_CTX_REMOTE, NULL); /* one line again */
    CU_ASSERT_EQUAL(option_count, EP_FLAG_COUNT);
    CU_ASSERT_EQUAL(slurm_spank_init_post_opt(NULL, 0, NULL), 0);
    CU_ASSERT_EQUAL(count(logged, "times: "), 0);
    CU_ASSERT_EQUAL(count(logged, "ep-overlap: step "), 1);
    CU_ASSERT_EQUAL(slurm_spank_exit(NULL, 0, NULL), 0);
}

/* (Real copies: tests/cluster/plugin.bats.) */
static void files_before_and_behind(void) {
    static const char own = 0;
    int before = -1, behind = -1;
    ep_listed_files("ep_overlap.so", &own, &before, &behind);
    CU_ASSERT(before == 0 && behind == 0);
    ep_listed_files("libc.so.6", &own, &before, &behind); /* the program is loaded first */
    CU_ASSERT(before == 0 && behind == 1);
    /* (No function that a sanitizer's library has, too.) */
    ep_listed_files("libc.so.6", (const void *)(uintptr_t)&gnu_get_libc_version, &before, &behind);
    CU_ASSERT(before == 0 && behind == 0);
    ep_listed_files("libc.so.6", NULL, &before, &behind);
    CU_ASSERT(before == 1 && behind == 0);
    struct ep_listed listed = {.files = 1, .lines = 1};
    logged[0] = '\0';
    ep_listed_tell(&listed, &wrap_spank_real);
    CU_ASSERT_PTR_NOT_NULL(strstr(logged, "lists 2 files ep_overlap.so: the last one works"));
    listed = (struct ep_listed){.lines = 0}; /* this file stands back */
    CU_ASSERT_FALSE(ep_listed_turn(&listed, EP_HOOK_TASK));
}

static void long_values_are_read_whole(void) {
    char value[8000];
    memset(value, 'v', sizeof value - 1);
    value[sizeof value - 1] = '\0';
    variable_count = 0;
    spank_setenv(NULL, "LONG", value, 1);
    char *got = wrap_spank_real.task_getenv(NULL, "LONG");
    CU_ASSERT_PTR_NOT_NULL_FATAL(got);
    CU_ASSERT_STRING_EQUAL(got, value);
    free(got);
    CU_ASSERT_PTR_NULL(wrap_spank_real.task_getenv(NULL, "NONE"));
}

static void arguments_end_where_they_end(void) {
    char **arguments = NULL;
    int count = 0;
    refuse_items = 0;
    CU_ASSERT_EQUAL(wrap_spank_real.get_arguments(NULL, &count, &arguments), 0);
    CU_ASSERT_EQUAL(count, 1);
    CU_ASSERT_STRING_EQUAL(arguments[0], "/bin/true");
    refuse_items = 1;
    CU_ASSERT_EQUAL(wrap_spank_real.get_arguments(NULL, &count, &arguments), -1);
    refuse_items = 0;
}

static void groups_include_the_primary_one(void) {
    gid_t groups[3];
    refuse_items = 0;
    CU_ASSERT_EQUAL(wrap_spank_real.get_groups(NULL, 3, groups), 3);
    CU_ASSERT_EQUAL(groups[0], 0);
    CU_ASSERT_EQUAL(groups[2], 4);
    CU_ASSERT_EQUAL(wrap_spank_real.get_groups(NULL, 2, groups), 2);
    CU_ASSERT(wrap_spank_real.own_groups(3, groups) >= 1);
}

static void programs_run_within_their_limit(void) {
    char said[64];
    char *none[] = {NULL}, *gone[] = {(char *)(uintptr_t) "/nonexistent", NULL};
    char *failing[] = {(char *)(uintptr_t) "/bin/sh", (char *)(uintptr_t) "-c",
                       (char *)(uintptr_t) "echo told >&2; echo not; exit 3", NULL};
    char *hanging[] = {(char *)(uintptr_t) "/bin/sleep", (char *)(uintptr_t) "600", NULL};
    char *talking[] = {(char *)(uintptr_t) "/bin/sh", (char *)(uintptr_t) "-c",
                       (char *)(uintptr_t) "while :; do echo x >&2; done", NULL};
    CU_ASSERT_EQUAL(wrap_spank_real.run(failing, none, 5000, said, sizeof said), 3);
    CU_ASSERT_STRING_EQUAL(said, "told\n");
    CU_ASSERT_EQUAL(wrap_spank_real.run(failing, none, 5000, NULL, 0), 3);
    CU_ASSERT_EQUAL(wrap_spank_real.run(gone, none, 5000, said, sizeof said), -1);
    CU_ASSERT_EQUAL(wrap_spank_real.run(hanging, none, 50, said, sizeof said), -1);
    CU_ASSERT_EQUAL(wrap_spank_real.run(talking, none, 200, said, sizeof said), -1);
    CU_ASSERT_EQUAL(strlen(said), sizeof said - 1);
    CU_ASSERT_EQUAL(waitpid(-1, NULL, WNOHANG), -1); /* nobody is left */
}

/* One more process of the namespace, whose parent does not ask for its end. */
static void add_orphan(int number) {
    (void)number;
    if (syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) == 0)
        for (;;)
            pause();
}

/* The program is the first of its own process namespace: killed, it lasts until nobody is left
 * there.  So does one that waits for a file system. */
static void run_what_outlives_its_kill(void) {
    char *none[] = {NULL};
    char *hanging[] = {(char *)(uintptr_t) "/bin/sleep", (char *)(uintptr_t) "600", NULL};
    const struct sigaction act = {.sa_handler = add_orphan};
    const struct itimerval soon = {.it_value = {0, 50000}};
    if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0)
        _exit(77);
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &soon, NULL);
    int status = wrap_spank_real.run(hanging, none, 300, NULL, 0);
    _exit(status == -1 && waitpid(-1, NULL, WNOHANG) >= 0 ? 0 : 1);
}

static void a_program_that_outlives_its_kill_is_left_behind(void) {
    const struct timespec moment = {0, 10000000};
    int status = 0;
    pid_t child = fork(), got = 0;
    if (child == 0)
        run_what_outlives_its_kill();
    for (int i = 0; i < 1000 && (got = waitpid(child, &status, WNOHANG)) == 0; i++)
        nanosleep(&moment, NULL);
    if (got == 0) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        CU_FAIL("the wait for a killed program has no end");
        return;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        puts("\n    left out: no process namespaces here");
    else
        CU_ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(remote_hooks_never_fail_before_the_task),
                                 TEST(a_refused_task_exits_with_one),
                                 TEST(other_contexts_do_nothing),
                                 TEST(srun_leaves_its_record),
                                 TEST(listed_twice_works_once),
                                 TEST(files_before_and_behind),
                                 TEST(long_values_are_read_whole),
                                 TEST(arguments_end_where_they_end),
                                 TEST(groups_include_the_primary_one),
                                 TEST(programs_run_within_their_limit),
                                 TEST(a_program_that_outlives_its_kill_is_left_behind),
                                 CU_TEST_INFO_NULL};
    return unit_run("spank hooks", tests);
}
