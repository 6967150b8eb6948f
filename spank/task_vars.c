/* SPDX-License-Identifier: Apache-2.0
 *
 * task_vars.c - the variables of an overlap run, for steps that hold GPUs.  A
 * value of the user's is never replaced, except by the site's "always".
 */
#include "core/text.h"
#include "task.h"

#include "core/names.h"
#include "rules/launch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The second goes with expandable segments only, whoever set those. */
#define ALLOCATOR "PYTORCH_CUDA_ALLOC_CONF"
#define REGISTER "NCCL_GRAPH_REGISTER"
#define EXPANDABLE "expandable_segments:True"

static bool is_set(struct ep_plugin *plugin, spank_t spank, const char *name) {
    char *value = plugin->api->task_getenv(spank, name);
    bool set = value != NULL && value[0] != '\0' && strcmp(value, "NoDevFiles") != 0;
    free(value);
    return set;
}

/* With --gpu-bind=none Slurm names no GPUs to the task, which sees all of them. */
static bool is_unbound(struct ep_plugin *plugin, spank_t spank) {
    char *bind = plugin->api->task_getenv(spank, "SLURMD_TRES_BIND");
    char *count = plugin->api->task_getenv(spank, "SLURM_GPUS_ON_NODE");
    const char *how = epo_text_gpu_bind(bind);
    bool unbound = how != NULL && strncmp(how, "none", 4) == 0 && count != NULL &&
                   strtoul(count, NULL, 10) > 0;
    free(bind);
    free(count);
    return unbound;
}

bool ep_task_has_gpus(struct ep_plugin *plugin, spank_t spank) {
    return is_unbound(plugin, spank) || is_set(plugin, spank, "SLURM_STEP_GPUS") ||
           is_set(plugin, spank, "CUDA_VISIBLE_DEVICES");
}

static bool has(struct ep_writer *writer, const char *name, const char *part) {
    char *value = writer->plugin->api->task_getenv(writer->spank, name);
    bool found = value != NULL && strstr(value, part) != NULL;
    free(value);
    return found;
}

static void set_site(struct ep_writer *writer) {
    const struct epo_config *config = writer->plugin->config;
    for (int i = 0; config != NULL && i < config->environment_count; i++) {
        const struct epo_site_env *variable = &config->environment[i];
        if (variable->when == EPO_WHEN_UNSET) {
            ep_writer_preset(writer, variable->name, variable->value);
            continue;
        }
        char *before = writer->plugin->api->task_getenv(writer->spank, variable->name);
        if (before == NULL || strcmp(before, variable->value) != 0) {
            ep_writer_set(writer, variable->name, variable->value);
            epo_text_format(&writer->told, " %s=%s", variable->name, variable->value);
            if (before != NULL)
                epo_text_format(&writer->told, " (by the site, instead of \"%.64s\")", before);
        }
        free(before);
    }
}

/* A folder on this node that belongs to the user alone: what is compiled there is
 * loaded again. */
static bool make_cache(struct ep_writer *writer, char *path, size_t room) {
    struct stat info;
    char *top = writer->plugin->api->task_getenv(writer->spank, "TMPDIR");
    int need = snprintf(path, room, "%s/hybrid_ep.%lu", top != NULL && top[0] == '/' ? top : "/tmp",
                        (unsigned long)geteuid());
    free(top);
    if (need < 0 || (size_t)need >= room || (mkdir(path, 0700) != 0 && errno != EEXIST))
        return false;
    return lstat(path, &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid() &&
           (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/* HybridEP compiles kernels at run time. */
static void set_cache(struct ep_writer *writer, const epo_facts *facts) {
    const epo_fact *backend = epo_facts_find(facts, "flex_backend");
    char cache[512];
    if (backend != NULL && strcmp(backend->text, "hybridep") == 0 &&
        make_cache(writer, cache, sizeof cache))
        ep_writer_preset(writer, "HYBRID_EP_CACHE_DIR", cache);
}

/* One GPU of a node whose step has several tasks. */
static bool sees_its_own(struct ep_writer *writer) {
    struct ep_plugin *plugin = writer->plugin;
    uint32_t tasks = 0;
    if (!is_set(plugin, writer->spank, "CUDA_VISIBLE_DEVICES") ||
        has(writer, "CUDA_VISIBLE_DEVICES", ","))
        return false;
    return plugin->api->get_number(writer->spank, S_JOB_LOCAL_TASK_COUNT, &tasks) == 0 && tasks > 1;
}

/* Of a GPU that a task does not see, the interceptor carries no expandable segments
 * (docs/performance-log.md, 7.9): torch's allocator stays as it was where it is to accelerate. */
static bool is_in_the_way(struct ep_writer *writer, const struct ep_intercept *intercept,
                          const char *name) {
    if (strcmp(name, ALLOCATOR) == 0)
        return intercept->library != NULL &&
               strcmp(intercept->mode, EPO_INTERPOSE_ACCELERATE) == 0 && sees_its_own(writer);
    return strcmp(name, REGISTER) == 0 && !has(writer, ALLOCATOR, EXPANDABLE);
}

void ep_task_variables(struct ep_writer *writer, epo_facts *facts,
                       const struct ep_intercept *intercept) {
    epo_launch_variable variables[EPO_LAUNCH_VARIABLES_MAX];
    size_t count = 0;
    set_site(writer);
    if (!ep_task_has_gpus(writer->plugin, writer->spank))
        return;
    epo_status status = epo_launch_environment(facts, variables, &count);
    if (writer->status == EPO_OK)
        writer->status = status;
    for (size_t i = 0; i < count; i++)
        if (!is_in_the_way(writer, intercept, variables[i].name))
            ep_writer_preset(writer, variables[i].name, variables[i].value);
    set_cache(writer, facts);
}

void ep_task_arguments(struct ep_writer *writer, const epo_facts *facts) {
    char text[1024];
    epo_launch_arguments(facts, EPO_FRAMEWORK_MEGATRON_LM, text, sizeof text);
    ep_writer_set(writer, EPO_OUT_MEGATRON_ARGS, text);
    epo_launch_arguments(facts, EPO_FRAMEWORK_BRIDGE, text, sizeof text);
    ep_writer_set(writer, EPO_OUT_BRIDGE_OVERRIDES, text);
}
