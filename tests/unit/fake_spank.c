/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_spank.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fake fake;

static int find(const struct fake_env *env, const char *name) {
    for (int i = 0; i < env->count; i++)
        if (strcmp(env->names[i], name) == 0)
            return i;
    return -1;
}

static void drop(struct fake_env *env, const char *name) {
    int at = find(env, name);
    if (at < 0)
        return;
    free(env->names[at]);
    free(env->values[at]);
    env->count--;
    memmove(&env->names[at], &env->names[at + 1], (size_t)(env->count - at) * sizeof *env->names);
    memmove(&env->values[at], &env->values[at + 1],
            (size_t)(env->count - at) * sizeof *env->values);
}

void fake_put(struct fake_env *env, const char *name, const char *value) {
    int at = find(env, name);
    if (at >= 0) {
        free(env->values[at]);
        env->values[at] = strdup(value);
        return;
    }
    if (env->count == FAKE_VARIABLES)
        abort();
    env->names[env->count] = strdup(name);
    env->values[env->count++] = strdup(value);
}

const char *fake_get(const struct fake_env *env, const char *name) {
    int at = find(env, name);
    return at >= 0 ? env->values[at] : NULL;
}

void fake_begin(spank_context_t context) {
    memset(&fake, 0, sizeof fake);
    fake.context = context;
    fake.job = 7;
    fake.user = 1000;
    fake.own_user = 0;
    fake.own_program = "srun";
    fake.tasks = 2;
    fake.local_tasks = 2;
    fake.loader_says = "";
    fake.exit_submission = fake.exit_task = -1;
}

void fake_next(spank_context_t context) {
    fake.context = context;
    fake.log[0] = fake.said[0] = fake.ran[0] = fake.unset[0] = '\0';
    fake.exit_submission = fake.exit_task = -1;
    fake.option_count = 0;
}

void fake_end(void) {
    while (fake.task.count > 0)
        drop(&fake.task, fake.task.names[0]);
    while (fake.own.count > 0)
        drop(&fake.own, fake.own.names[0]);
}

static void note(char *text, const char *line) {
    size_t used = strlen(text);
    snprintf(text + used, FAKE_TEXT - used, "%s\n", line);
}

static spank_context_t get_context(void) { return fake.context; }

static spank_err_t option_register(spank_t spank, struct spank_option *option) {
    (void)spank;
    if (fake.refuse_options || fake.option_count == EP_FLAG_COUNT)
        return ESPANK_ERROR;
    fake.options[fake.option_count++] = *option;
    return ESPANK_SUCCESS;
}

static int get_number(spank_t spank, spank_item_t item, uint32_t *value) {
    (void)spank;
    if (fake.no_numbers)
        return -1;
    switch (item) {
    case S_JOB_ID: *value = fake.job; return 0;
    case S_JOB_STEPID: *value = fake.step; return 0;
    case S_JOB_UID: *value = fake.user; return 0;
    case S_TASK_ID: *value = fake.local_task; return 0;
    case S_JOB_LOCAL_TASK_COUNT: *value = fake.local_tasks; return 0;
    case S_TASK_GLOBAL_ID: *value = fake.task_id; return 0;
    case S_JOB_NODEID: *value = fake.node; return 0;
    case S_JOB_NNODES: *value = fake.step_nodes; return 0;
    case S_JOB_TOTAL_TASK_COUNT: *value = fake.tasks; return 0;
    default: return -1;
    }
}

static int get_groups(spank_t spank, int room, gid_t *groups) {
    (void)spank;
    int count = fake.group_count < room ? fake.group_count : room;
    memcpy(groups, fake.groups, (size_t)count * sizeof *groups);
    return count;
}

static int get_arguments(spank_t spank, int *count, char ***arguments) {
    (void)spank;
    *count = fake.argument_count;
    *arguments = fake.arguments;
    return fake.argument_count > 0 ? 0 : -1;
}

static char *task_getenv(spank_t spank, const char *name) {
    (void)spank;
    const char *value = fake_get(&fake.task, name);
    return value != NULL ? strdup(value) : NULL;
}

static int task_setenv(spank_t spank, const char *name, const char *value) {
    (void)spank;
    if (fake.fail_setenv)
        return -1;
    fake_put(&fake.task, name, value);
    return 0;
}

static int task_unsetenv(spank_t spank, const char *name) {
    (void)spank;
    drop(&fake.task, name);
    return 0;
}

static void control_unsetenv(spank_t spank, const char *name) {
    (void)spank;
    note(fake.unset, name);
}

static const char *own_getenv(const char *name) { return fake_get(&fake.own, name); }

static int own_setenv(const char *name, const char *value) {
    fake_put(&fake.own, name, value);
    return 0;
}

static int own_unsetenv(const char *name) {
    drop(&fake.own, name);
    return 0;
}

static const char *own_program(void) { return fake.own_program; }
static uid_t own_user(void) { return fake.own_user; }
static int own_groups(int room, gid_t *groups) { return get_groups(NULL, room, groups); }
static int each_node(void (*visit)(void *context, const char *node, const char *gres),
                     void *context) {
    fake.node_requests++;
    for (int i = 0; i < fake.node_count; i++)
        visit(context, fake.nodes[i], fake.gres[i]);
    return fake.node_count > 0 ? 0 : -1;
}

static void log_info(const char *line) { note(fake.log, line); }
static void log_error(const char *line) { note(fake.log, line); }
static void task_say(const char *line) { note(fake.said, line); }

static int run(char *const arguments[], char *const environment[], int timeout_ms, char *said,
               size_t room) {
    (void)timeout_ms;
    if (said != NULL) {
        fake.tries++;
        snprintf(said, room, "%s", fake.loader_says);
        return fake.loader_says[0] != '\0' ? 127 : 0;
    }
    for (int i = 0; arguments[i] != NULL; i++)
        note(fake.ran, arguments[i]);
    for (int i = 0; environment[i] != NULL; i++)
        note(fake.ran, environment[i]);
    return fake.run_status;
}

static epo_status probe(const struct epo_probe_request *request, epo_facts *facts) {
    fake.probes++;
    return fake.probe != NULL ? fake.probe(request, facts) : EPO_OK;
}

static void pause_ms(int ms) { fake.paused_ms += ms; }
static void exit_submission(int status) { fake.exit_submission = status; }
static void exit_task(int status) { fake.exit_task = status; }

const struct wrap_spank wrap_spank_fake = {
    .context = get_context,
    .option_register = option_register,
    .get_number = get_number,
    .get_groups = get_groups,
    .get_arguments = get_arguments,
    .task_getenv = task_getenv,
    .task_setenv = task_setenv,
    .task_unsetenv = task_unsetenv,
    .control_unsetenv = control_unsetenv,
    .own_getenv = own_getenv,
    .own_setenv = own_setenv,
    .own_unsetenv = own_unsetenv,
    .own_program = own_program,
    .own_user = own_user,
    .own_groups = own_groups,
    .each_node = each_node,
    .log_info = log_info,
    .log_error = log_error,
    .task_say = task_say,
    .run = run,
    .pause = pause_ms,
    .probe = probe,
    .exit_submission = exit_submission,
    .exit_task = exit_task,
};
