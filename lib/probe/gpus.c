/* SPDX-License-Identifier: Apache-2.0
 *
 * The GPUs that a step really has, as facts.
 */
#include "core/text.h"
#include "probe/files.h"
#include "probe/gpu_list.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const gpu_keys[] = {
    "gpu_name", "gpu_major",         "node.compute_capability", "node.gpu_memory_mib",
    "node.mig", "node.all_gpus_p2p", "node.all_gpus_nvlink",    "node.ranks_per_nvlink_domain"};
#define GPU_KEYS (sizeof gpu_keys / sizeof *gpu_keys)

static void nothing_known(epo_facts *facts, const char *source, const char *why) {
    probe_put_unknown(facts, "node.gpu_count", source, "%s", why);
    for (size_t i = 0; i < GPU_KEYS; i++)
        probe_put_unknown(facts, gpu_keys[i], source, "%s", why);
}

static void no_gpus(epo_facts *facts, const char *source) {
    probe_put(facts, "node.gpu_count", source, "0");
    for (size_t i = 0; i < GPU_KEYS; i++)
        probe_put_unset(facts, gpu_keys[i], source);
}

static void put_driver(const nvml *api, epo_facts *facts) {
    char version[NVML_TEXT] = "";
    int cuda = 0;
    if (api->driver_version(version, sizeof version) == NVML_OK)
        probe_put_text(facts, "node.driver_version", "NVML", version);
    if (api->cuda_version(&cuda) == NVML_OK && cuda > 0) {
        snprintf(version, sizeof version, "%d.%d", cuda / 1000, cuda % 1000 / 10);
        probe_put_text(facts, "node.cuda_version", "NVML, newest that the driver serves", version);
    }
}

static void put_list(const gpu_list *list, const gpu_choices *choices, epo_facts *facts,
                     const char *source) {
    char text[1000] = "";
    for (unsigned i = 0; i < choices->count; i++) {
        const gpu *g = &list->gpu[choices->item[i].gpu];
        int slice = choices->item[i].slice;
        size_t used = strlen(text);
        int need =
            snprintf(text + used, sizeof text - used, "%s%u: %s%s%s", i > 0 ? "; " : "", g->index,
                     g->name, slice >= 0 ? " " : "", slice >= 0 ? g->slice[slice].uuid : "");
        if (need < 0 || (size_t)need >= sizeof text - used - 16) {
            snprintf(text + used, sizeof text - used, "; and %u more", choices->count - i);
            break;
        }
    }
    probe_put_text(facts, "node.gpus", source, text);
}

/* Name and capability count only where all GPUs are alike. */
static void put_kind(const gpu_list *list, const gpu_choices *choices, epo_facts *facts) {
    const gpu *first = &list->gpu[choices->item[0].gpu], *other = first;
    uint64_t least = UINT64_MAX;
    bool mig = false;
    for (unsigned i = 0; i < choices->count; i++) {
        const gpu *g = &list->gpu[choices->item[i].gpu];
        int slice = choices->item[i].slice;
        uint64_t memory = slice >= 0 ? g->slice[slice].memory_mib : g->memory_mib;
        least = memory > 0 && memory < least ? memory : least;
        mig = mig || slice >= 0;
        if (strcmp(g->name, first->name) != 0)
            other = g;
    }
    probe_put(facts, "node.mig", "NVML", "%s", mig ? "True" : "False");
    if (least != UINT64_MAX)
        probe_put(facts, "node.gpu_memory_mib", "NVML, the smallest", "%llu",
                  (unsigned long long)least);
    if (other != first) {
        const char *const kinds[] = {"gpu_name", "gpu_major", "node.compute_capability"};
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            probe_put_unknown(facts, kinds[i], "NVML", "different GPUs: %s and %s", first->name,
                              other->name);
        return;
    }
    probe_put_text(facts, "gpu_name", "NVML", first->name);
    probe_put(facts, "gpu_major", "NVML", "%d", first->major);
    char capability[32];
    snprintf(capability, sizeof capability, "%d.%d", first->major, first->small);
    probe_put_text(facts, "node.compute_capability", "NVML", capability);
}

/* 1: all pairs, 0: some pair does not (named in `pair`), -1: not told. */
static int all_pairs(const nvml *api, const gpu_list *list, const gpu_choices *choices, int what,
                     char pair[32]) {
    int answer = 1;
    for (unsigned i = 0; i < choices->count; i++)
        for (unsigned k = 0; k < choices->count; k++) {
            const gpu *one = &list->gpu[choices->item[i].gpu];
            const gpu *two = &list->gpu[choices->item[k].gpu];
            int status = 0;
            if (one == two)
                continue;
            if (api->p2p == NULL || api->p2p(one->device, two->device, what, &status) != NVML_OK) {
                answer = -1;
            } else if (status != 0) {
                snprintf(pair, 32, "%u and %u", one->index, two->index);
                return 0;
            }
        }
    return answer;
}

static void put_pairs(const nvml *api, const gpu_list *list, const gpu_choices *choices,
                      epo_facts *facts) {
    char pair[32], source[96];
    static const struct {
        const char *key;
        int what;
    } kinds[] = {{"node.all_gpus_p2p", NVML_P2P_READ}, {"node.all_gpus_nvlink", NVML_P2P_NVLINK}};
    bool mig = false;
    for (unsigned i = 0; i < choices->count; i++)
        mig = mig || choices->item[i].slice >= 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        bool pairs = choices->count > 1;
        /* MIG devices do not reach each other, not even on one GPU. */
        int answer = mig && pairs ? 0 : all_pairs(api, list, choices, kinds[i].what, pair);
        if (mig && pairs)
            snprintf(source, sizeof source, "MIG devices never do");
        else if (answer == 0)
            snprintf(source, sizeof source, "NVML: GPUs %s", pair);
        else
            snprintf(source, sizeof source, "NVML, %u GPUs", choices->count);
        if (answer < 0)
            probe_put_unknown(facts, kinds[i].key, "NVML", "this driver does not tell");
        else
            probe_put(facts, kinds[i].key, source, "%s", answer ? "True" : "False");
        if (kinds[i].what == NVML_P2P_NVLINK && answer == 1 && pairs)
            probe_put(facts, "node.ranks_per_nvlink_domain", source, "%u", choices->count);
    }
}

/* On an NVL72 machine the domain reaches over nodes, and its size is not told here. */
static void put_fabric(const nvml *api, const gpu *g, epo_facts *facts) {
    nvml_fabric fabric = {{0}, 0, 0, 0};
    bool known = api->fabric != NULL && api->fabric(g->device, &fabric) == NVML_OK;
    bool named = false;
    for (size_t i = 0; i < sizeof fabric.cluster; i++)
        named = named || fabric.cluster[i] != 0;
    if (!known || fabric.state != 3 || !named)
        return;
    probe_put(facts, "node.nvlink_clique", "NVML", "%u", fabric.clique);
    probe_put_unknown(facts, "node.ranks_per_nvlink_domain", "NVML",
                      "the NVLink domain reaches over nodes");
}

/* More than one task on some node: "4(x2),3". */
static bool has_local_peers(const epo_probe_task *task) {
    const char *text = epo_probe_variable(task, "SLURM_STEP_TASKS_PER_NODE");
    while (text != NULL && *text != '\0') {
        if (strtoul(text, NULL, 10) > 1)
            return true;
        text += strcspn(text, ",");
        text += *text == ',';
    }
    return false;
}

/* Slurm gave each task a part of the node's GPUs; its variables name that part only. */
static void put_binding(const epo_probe_task *task, unsigned visible, epo_facts *facts) {
    const char *bind = epo_probe_variable(task, "SLURMD_TRES_BIND");
    const char *total = epo_probe_variable(task, "SLURM_GPUS_ON_NODE");
    char source[96];
    const char *how = epo_text_gpu_bind(bind);
    if (how == NULL || total == NULL || strncmp(how, "none", 4) == 0 || !has_local_peers(task))
        return;
    unsigned long count = strtoul(total, NULL, 10);
    snprintf(source, sizeof source, "SLURMD_TRES_BIND=%.64s", bind);
    probe_put(facts, "task.gpus_on_node", "SLURM_GPUS_ON_NODE", "%lu", count);
    probe_put(facts, "task.sees_all_gpus", source, "%s", visible >= count ? "True" : "False");
}

/* What the task sees; where it sees fewer than the step holds, what the step holds. */
static void find_choices(const epo_probe_task *task, const gpu_list *list, gpu_choices *choices,
                         char *source, size_t room, epo_facts *facts) {
    const char *visible =
        task->variable != NULL ? task->variable(task->context, "CUDA_VISIBLE_DEVICES") : NULL;
    const char *held = epo_probe_variable(task, "SLURM_STEP_GPUS");
    if (task->whole_node)
        visible = held = NULL;
    gpu_choices_read(list, visible, choices);
    snprintf(source, room, "NVML%s", visible != NULL ? ", CUDA_VISIBLE_DEVICES" : "");
    if (choices->problem[0] != '\0')
        probe_put_unknown(facts, "task.visible_gpus", "CUDA_VISIBLE_DEVICES", "%s",
                          choices->problem);
    else
        probe_put(facts, "task.visible_gpus", source, "%u", choices->count);
    if (visible != NULL)
        put_binding(task, choices->count, facts);
    if (held == NULL || visible == NULL)
        return;
    gpu_choices step;
    gpu_choices_by_minor(list, held, &step);
    if (step.count > choices->count || epo_facts_find(facts, "task.sees_all_gpus") == NULL)
        probe_put(facts, "task.sees_all_gpus", source, "%s",
                  choices->count >= step.count ? "True" : "False");
    if (step.count > choices->count) {
        *choices = step;
        snprintf(source, room, "NVML, SLURM_STEP_GPUS");
    }
}

static bool is_left_out(const epo_probe_task *task, const char *name) {
    return task->left_out != NULL && strstr(task->left_out, name) != NULL;
}

static void put_gpus(const nvml *api, const epo_probe_task *task, epo_facts *facts) {
    static gpu_list list; /* 80 KB */
    gpu_choices choices;
    char why[256], source[64];
    if (!gpu_list_read(api, &list, why, sizeof why)) {
        nothing_known(facts, api->path, why);
        return;
    }
    probe_put(facts, "node.gpus_total", "NVML", "%u", list.count + list.hidden);
    if (is_left_out(task, "CUDA_VISIBLE_DEVICES")) {
        nothing_known(facts, "NVML", "CUDA_VISIBLE_DEVICES is too long to be read");
        return;
    }
    find_choices(task, &list, &choices, source, sizeof source, facts);
    if (choices.count == 0) {
        no_gpus(facts, source);
        return;
    }
    probe_put(facts, "node.gpu_count", source, "%u", choices.count);
    put_list(&list, &choices, facts, source);
    put_kind(&list, &choices, facts);
    put_pairs(api, &list, &choices, facts);
    put_fabric(api, &list.gpu[choices.item[0].gpu], facts);
}

void epo_probe_gpus(epo_probe_task *task, epo_facts *facts) {
    char why[512];
    nvml api;
    if (!nvml_open(&api, task->nvml_path, why, sizeof why)) {
        bool told = !task->whole_node && epo_probe_variable(task, "SLURM_STEP_GPUS") != NULL;
        if (task->nvml_path == NULL && access("/dev/nvidiactl", F_OK) != 0 && !told)
            no_gpus(facts, "neither NVML nor /dev/nvidiactl is here");
        else
            nothing_known(facts, "NVML", why);
        return;
    }
    probe_put_text(facts, "node.nvml", "found", api.path);
    int result = api.init();
    if (result == NVML_OK) {
        put_driver(&api, facts);
        put_gpus(&api, task, facts);
        (void)api.shutdown();
    } else {
        snprintf(why, sizeof why, "NVML does not start: %.200s", api.error_string(result));
        nothing_known(facts, api.path, why);
    }
    nvml_close(&api);
}
