/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/gpu_list.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* A driver is no stranger, but its texts end up in logs. */
static void end_text(char text[NVML_TEXT]) { text[NVML_TEXT - 1] = '\0'; }

static void read_slices(const nvml *api, gpu *g) {
    unsigned current = 0, pending = 0, count = 0;
    nvml_memory memory;
    if (api->mig_mode == NULL || api->mig_mode(g->device, &current, &pending) != NVML_OK)
        return;
    g->mig = current == 1;
    if (!g->mig || api->mig_count == NULL || api->mig_by_index == NULL ||
        api->mig_count(g->device, &count) != NVML_OK)
        return;
    for (unsigned i = 0; i < count && g->slices < SLICES_MAX; i++) {
        nvml_device mig;
        gpu_slice *slice = &g->slice[g->slices];
        if (api->mig_by_index(g->device, i, &mig) != NVML_OK ||
            api->uuid(mig, slice->uuid, sizeof slice->uuid) != NVML_OK)
            continue;
        end_text(slice->uuid);
        slice->memory_mib = api->memory(mig, &memory) == NVML_OK ? memory.total >> 20 : 0;
        g->slices++;
    }
}

static int read_gpu(const nvml *api, unsigned index, gpu *g) {
    nvml_memory memory = {0};
    memset(g, 0, sizeof *g);
    int result = api->by_index(index, &g->device);
    if (result != NVML_OK)
        return result;
    g->index = g->minor = index;
    (void)api->minor_number(g->device, &g->minor);
    if ((result = api->name(g->device, g->name, sizeof g->name)) != NVML_OK ||
        (result = api->uuid(g->device, g->uuid, sizeof g->uuid)) != NVML_OK ||
        (result = api->capability(g->device, &g->major, &g->small)) != NVML_OK)
        return result;
    end_text(g->name);
    end_text(g->uuid);
    if (api->memory(g->device, &memory) == NVML_OK)
        g->memory_mib = memory.total >> 20;
    read_slices(api, g);
    return NVML_OK;
}

bool gpu_list_read(const nvml *api, gpu_list *list, char *why, size_t room) {
    unsigned count = 0;
    memset(list, 0, sizeof *list);
    int result = api->count(&count);
    if (result != NVML_OK) {
        snprintf(why, room, "NVML does not count the GPUs: %.200s", api->error_string(result));
        return false;
    }
    for (unsigned i = 0; i < count && i < GPUS_MAX; i++) {
        result = read_gpu(api, i, &list->gpu[list->count]);
        if (result == NVML_OK)
            list->count++;
        else
            list->hidden++; /* kept from this job by its cgroup, or fallen off the bus */
    }
    return true;
}

static void choose(const gpu_list *list, gpu_choices *choices, unsigned place, int slice) {
    if (slice < 0 && list->gpu[place].mig && list->gpu[place].slices > 0)
        slice = 0; /* CUDA shows the first MIG device of such a GPU */
    for (unsigned i = 0; i < choices->count; i++)
        if (choices->item[i].gpu == place && choices->item[i].slice == slice) {
            snprintf(choices->problem, sizeof choices->problem, "a GPU is named twice");
            return;
        }
    if (choices->count < GPUS_MAX)
        choices->item[choices->count++] = (gpu_choice){place, slice};
}

static bool is_number(const char *word, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (!isdigit((unsigned char)word[i]))
            return false;
    return length > 0 && length < 6;
}

/* A UUID may be cut, as long as it names one. */
static bool choose_by_uuid(const gpu_list *list, gpu_choices *choices, const char *word,
                           size_t length) {
    unsigned found = 0, at = 0;
    int at_slice = -1;
    for (unsigned g = 0; g < list->count; g++) {
        const gpu *one = &list->gpu[g];
        if (strncasecmp(one->uuid, word, length) == 0) {
            at = g;
            at_slice = -1;
            found++;
        }
        for (unsigned s = 0; s < one->slices; s++)
            if (strncasecmp(one->slice[s].uuid, word, length) == 0) {
                at = g;
                at_slice = (int)s;
                found++;
            }
    }
    if (found == 1)
        choose(list, choices, at, at_slice);
    return found == 1;
}

void gpu_choices_read(const gpu_list *list, const char *text, gpu_choices *choices) {
    memset(choices, 0, sizeof *choices);
    for (unsigned g = 0; text == NULL && g < list->count; g++)
        choose(list, choices, g, -1);
    while (text != NULL && *text != '\0') {
        size_t length = strcspn(text, ",");
        const char *word = text, *end = text + length;
        while (word < end && isspace((unsigned char)*word))
            word++;
        while (end > word && isspace((unsigned char)end[-1]))
            end--;
        size_t n = (size_t)(end - word);
        unsigned long number = is_number(word, n) ? strtoul(word, NULL, 10) : GPUS_MAX;
        bool good = number < list->count;
        if (good)
            choose(list, choices, (unsigned)number, -1);
        else if (n > 4 && (strncmp(word, "GPU-", 4) == 0 || strncmp(word, "MIG-", 4) == 0))
            good = choose_by_uuid(list, choices, word, n);
        if (!good || choices->problem[0] != '\0') {
            if (choices->problem[0] == '\0' && strncmp(word, "-1", n) != 0 &&
                strncmp(word, "NoDevFiles", n) != 0)
                snprintf(choices->problem, sizeof choices->problem,
                         "\"%.*s\" names no GPU; what follows is hidden", n < 60 ? (int)n : 60,
                         word);
            return;
        }
        text += length;
        text += *text == ',';
    }
}

void gpu_choices_by_minor(const gpu_list *list, const char *text, gpu_choices *choices) {
    memset(choices, 0, sizeof *choices);
    while (*text != '\0') {
        char *end;
        unsigned long first = strtoul(text, &end, 10), last = first;
        if (end == text)
            return;
        if (*end == '-') {
            text = end + 1;
            last = strtoul(text, &end, 10);
            if (end == text)
                return;
        }
        for (unsigned g = 0; g < list->count; g++)
            if (list->gpu[g].minor >= first && list->gpu[g].minor <= last)
                choose(list, choices, g, -1);
        text = end + (*end == ',');
        if (*end != ',' && *end != '\0')
            return;
    }
}
