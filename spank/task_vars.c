/* SPDX-License-Identifier: Apache-2.0
 *
 * task_vars.c - the variables of an overlap run, for steps that hold GPUs.  A
 * value of the user's is never replaced, except by the site's "always".
 */
#include "task.h"

#include "core/names.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ALLOCATOR "PYTORCH_CUDA_ALLOC_CONF"
#define EXPANDABLE "expandable_segments:True"

static bool is_set(struct ep_plugin *plugin, spank_t spank, const char *name) {
    char *value = plugin->api->task_getenv(spank, name);
    bool set = value != NULL && value[0] != '\0' && strcmp(value, "NoDevFiles") != 0;
    free(value);
    return set;
}

bool ep_task_has_gpus(struct ep_plugin *plugin, spank_t spank) {
    return is_set(plugin, spank, "SLURM_STEP_GPUS") ||
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

/* The value of an argument "NAME VALUE" or "NAME=VALUE" of the task; NULL: none. */
static const char *argument_of(struct ep_writer *writer, const char *name) {
    char **arguments = NULL;
    int count = 0;
    size_t length = strlen(name);
    if (writer->plugin->api->get_arguments(writer->spank, &count, &arguments) != 0)
        return NULL;
    for (int i = 0; i < count; i++) {
        if (strncmp(arguments[i], name, length) != 0)
            continue;
        if (arguments[i][length] == '=')
            return arguments[i] + length + 1;
        if (arguments[i][length] == '\0')
            return i + 1 < count ? arguments[i + 1] : "";
    }
    return NULL;
}

/* PyTorch's expandable segments cannot be registered as NCCL user buffers. */
static void set_allocator(struct ep_writer *writer) {
    if (argument_of(writer, "--use-nccl-ub") == NULL && argument_of(writer, "--nccl-ub") == NULL)
        ep_writer_preset(writer, ALLOCATOR, EXPANDABLE);
    if (has(writer, ALLOCATOR, EXPANDABLE))
        ep_writer_preset(writer, "NCCL_GRAPH_REGISTER", "0");
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

static void set_hybridep(struct ep_writer *writer) {
    const char *class = writer->plugin->gpu_class;
    const char *size = argument_of(writer, "--expert-model-parallel-size");
    bool rack = class != NULL && (strcmp(class, "gb200") == 0 || strcmp(class, "gb300") == 0);
    char text[64], cache[512];
    long ranks = size != NULL ? strtol(size, NULL, 10) : 0;
    if (class != NULL && ranks > 0 && ranks <= 1024) {
        snprintf(text, sizeof text, "%ld", !rack && ranks > 8 ? 8 : ranks);
        ep_writer_preset(writer, "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", text);
    }
    if (class != NULL) {
        ep_writer_preset(writer, "NVLINK_DOMAIN_SIZE", rack ? "72" : "8");
        ep_writer_preset(writer, "USE_MNNVL", rack ? "1" : "0");
    }
    ep_writer_preset(writer, "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API", "64");
    if (make_cache(writer, cache, sizeof cache))
        ep_writer_preset(writer, "HYBRID_EP_CACHE_DIR", cache);
}

void ep_task_variables(struct ep_writer *writer) {
    set_site(writer);
    if (!ep_task_has_gpus(writer->plugin, writer->spank))
        return;
    int dispatcher = writer->plugin->decision.choice[EPO_OPT_DISPATCHER].value;
    const char *margin = dispatcher == EPO_CHOICE_ALLTOALL ? "16" : "20";
    ep_writer_preset(writer, "CUDA_DEVICE_MAX_CONNECTIONS", "32");
    ep_writer_preset(writer, "TORCH_NCCL_HIGH_PRIORITY", "1");
    ep_writer_preset(writer, "TORCH_NCCL_AVOID_RECORD_STREAMS", "1");
    ep_writer_preset(writer, "NVTE_FWD_LAYERNORM_SM_MARGIN", margin);
    ep_writer_preset(writer, "NVTE_BWD_LAYERNORM_SM_MARGIN", margin);
    set_allocator(writer);
    if (dispatcher == EPO_CHOICE_HYBRIDEP)
        set_hybridep(writer);
}

void ep_task_arguments(struct ep_writer *writer) {
    const struct epo_choice *choice = writer->plugin->decision.choice;
    int dispatcher = choice[EPO_OPT_DISPATCHER].value;
    bool delayed = choice[EPO_OPT_DELAY_WGRAD].value == EPO_WGRAD_DELAYED;
    const char *class = writer->plugin->gpu_class;
    bool rack = class != NULL && (strcmp(class, "gb200") == 0 || strcmp(class, "gb300") == 0);
    const char *backend = epo_dispatcher_backend(dispatcher);
    char megatron[256], bridge[384];
    if (backend == NULL)
        backend = rack ? "hybridep" : "deepep";
    snprintf(megatron, sizeof megatron,
             "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type %s%s%s%s",
             epo_dispatcher_kind(dispatcher),
             dispatcher == EPO_CHOICE_ALLTOALL ? "" : " --moe-flex-dispatcher-backend ",
             dispatcher == EPO_CHOICE_ALLTOALL ? "" : backend,
             delayed ? " --delay-wgrad-compute" : "");
    snprintf(bridge, sizeof bridge,
             "comm_overlap.overlap_moe_expert_parallel_comm=true "
             "comm_overlap.delay_wgrad_compute=%s model.moe_shared_expert_overlap=false "
             "model.moe_token_dispatcher_type=%s%s%s",
             delayed ? "true" : "false", epo_dispatcher_kind(dispatcher),
             dispatcher == EPO_CHOICE_ALLTOALL ? "" : " model.moe_flex_dispatcher_backend=",
             dispatcher == EPO_CHOICE_ALLTOALL ? "" : backend);
    ep_writer_set(writer, EPO_OUT_MEGATRON_ARGS, megatron);
    ep_writer_set(writer, EPO_OUT_BRIDGE_OVERRIDES, bridge);
}
