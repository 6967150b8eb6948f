/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for libnvidia-ml.so.1, for tests alone: no GPU is behind it.  Which
 * GPUs it shows stands in the file nvml.table beside it, a line per node:
 *
 *     NODE KIND COUNT [WORD]...
 *
 * NODE is SLURMD_NODENAME, or * for all others.  KIND is one of the table below or
 * none, hang (init never returns), stuck (the same, deaf to signals), crash (a
 * segmentation fault), broken (init fails), hostile (names with escape codes).
 * Words: nop2p, nonvlink (some pair has none), mig (two slices each), mixed (the
 * last GPU is an L40S), closed (the first GPU may not be opened), fabric.
 */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* NVML's header, which has the prototypes, need not be here. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

#define EXPORT __attribute__((visibility("default")))
#define OK 0
#define INVALID 2
#define NO_PERMISSION 4
#define NOT_FOUND 6
#define UNKNOWN 999
#define GPUS 16

struct device {
    unsigned index;
    int slice; /* -1: the GPU itself */
};

static const struct kind {
    const char *word, *name;
    int major, minor;
    unsigned gib;
    bool nvlink;
} kinds[] = {{"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 80, true},
             {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 80, true},
             {"h200", "NVIDIA H200", 9, 0, 141, true},
             {"b200", "NVIDIA B200", 10, 0, 180, true},
             {"b300", "NVIDIA B300", 10, 3, 270, true},
             {"gb200", "NVIDIA GB200", 10, 0, 186, true},
             {"gb300", "NVIDIA GB300", 10, 3, 279, true},
             {"l40s", "NVIDIA L40S", 8, 9, 48, false},
             {"v100", "Tesla V100-SXM2-32GB", 7, 0, 32, true},
             {"t4", "Tesla T4", 7, 5, 16, false},
             {"rtx5090", "NVIDIA GeForce RTX 5090", 12, 0, 32, false},
             {"hostile", "NVIDIA\n\033[2J\"$(id)\\H100", 9, 0, 80, true}};

static struct {
    const struct kind *kind;
    unsigned count;
    bool nop2p, nonvlink, mig, mixed, closed, fabric;
    char special[16];
    struct device gpu[GPUS], slice[GPUS][2];
} table;

static bool open_table(FILE **file) {
    Dl_info info;
    char path[4096];
    if (dladdr((void *)(uintptr_t)&table, &info) == 0 || strrchr(info.dli_fname, '/') == NULL)
        return false;
    int folder = (int)(strrchr(info.dli_fname, '/') - info.dli_fname);
    snprintf(path, sizeof path, "%.*s/nvml.table", folder, info.dli_fname);
    *file = fopen(path, "re");
    return *file != NULL;
}

static void read_words(char *line, char **rest) {
    for (char *w = strtok_r(line, " \t\n", rest); w != NULL; w = strtok_r(NULL, " \t\n", rest)) {
        table.nop2p |= strcmp(w, "nop2p") == 0;
        table.nonvlink |= strcmp(w, "nonvlink") == 0;
        table.mig |= strcmp(w, "mig") == 0;
        table.mixed |= strcmp(w, "mixed") == 0;
        table.closed |= strcmp(w, "closed") == 0;
        table.fabric |= strcmp(w, "fabric") == 0;
    }
}

static void read_table(void) {
    const char *node = getenv("SLURMD_NODENAME");
    char line[256];
    FILE *file;
    if (!open_table(&file))
        return;
    while (fgets(line, sizeof line, file) != NULL) {
        char *rest = NULL;
        const char *name = strtok_r(line, " \t\n", &rest);
        const char *kind = strtok_r(NULL, " \t\n", &rest);
        const char *count = strtok_r(NULL, " \t\n", &rest);
        if (name == NULL || kind == NULL || name[0] == '#' ||
            (strcmp(name, "*") != 0 && (node == NULL || strcmp(name, node) != 0)))
            continue;
        snprintf(table.special, sizeof table.special, "%s", kind);
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            if (strcmp(kinds[i].word, kind) == 0)
                table.kind = &kinds[i];
        unsigned long n = count != NULL ? strtoul(count, NULL, 10) : 0;
        table.count = table.kind == NULL ? 0 : n < GPUS ? (unsigned)n : GPUS;
        read_words(NULL, &rest);
        break;
    }
    fclose(file);
    for (unsigned i = 0; i < GPUS; i++) {
        table.gpu[i] = (struct device){i, -1};
        table.slice[i][0] = (struct device){i, 0};
        table.slice[i][1] = (struct device){i, 1};
    }
}

static const struct kind *kind_of(const struct device *d) {
    return table.mixed && d->index + 1 == table.count ? &kinds[7] : table.kind;
}

EXPORT const char *nvmlErrorString(int result) {
    return result == NO_PERMISSION ? "Insufficient Permissions"
           : result == UNKNOWN     ? "Driver/library version mismatch"
                                   : "Stand-in's error";
}

EXPORT int nvmlInit_v2(void) {
    read_table();
    if (strcmp(table.special, "stuck") == 0) {
        sigset_t all;
        sigfillset(&all);
        sigprocmask(SIG_BLOCK, &all, NULL);
    }
    while (strcmp(table.special, "hang") == 0 || strcmp(table.special, "stuck") == 0)
        pause();
    if (strcmp(table.special, "crash") == 0)
        raise(SIGSEGV);
    return strcmp(table.special, "broken") == 0 ? UNKNOWN : OK;
}

EXPORT int nvmlShutdown(void) { return OK; }

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "570.86.15");
    return OK;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 12080;
    return OK;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = table.count;
    return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
    if (index >= table.count)
        return INVALID;
    if (table.closed && index == 0)
        return NO_PERMISSION;
    *device = &table.gpu[index];
    return OK;
}

EXPORT int nvmlDeviceGetName(const struct device *device, char *name, unsigned length) {
    snprintf(name, length, "%s", kind_of(device)->name);
    return OK;
}

EXPORT int nvmlDeviceGetUUID(const struct device *device, char *uuid, unsigned length) {
    if (device->slice < 0)
        snprintf(uuid, length, "GPU-%08x-0000-0000-0000-000000000000", device->index + 0xa0);
    else
        snprintf(uuid, length, "MIG-%08x-0000-0000-0000-00000000000%d", device->index + 0xa0,
                 device->slice);
    return OK;
}

EXPORT int nvmlDeviceGetMinorNumber(const struct device *device, unsigned *minor) {
    *minor = device->index;
    return OK;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(const struct device *device, int *major, int *minor) {
    *major = kind_of(device)->major;
    *minor = kind_of(device)->minor;
    return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo(const struct device *device, unsigned long long memory[3]) {
    memory[0] = (unsigned long long)kind_of(device)->gib << (device->slice < 0 ? 30 : 29);
    memory[1] = memory[0];
    memory[2] = 0;
    return OK;
}

EXPORT int nvmlDeviceGetMigMode(const struct device *device, unsigned *current, unsigned *pending) {
    (void)device;
    *current = *pending = table.mig;
    return OK;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(const struct device *device, unsigned *count) {
    (void)device;
    *count = 7;
    return OK;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(const struct device *device, unsigned index,
                                               struct device **mig) {
    if (!table.mig || index >= 2)
        return NOT_FOUND;
    *mig = &table.slice[device->index][index];
    return OK;
}

EXPORT int nvmlDeviceGetP2PStatus(const struct device *one, const struct device *other, int what,
                                  int *status) {
    bool last = one->index + 1 == table.count || other->index + 1 == table.count;
    bool works = !table.nop2p && (what != 2 || kind_of(one)->nvlink);
    if (what == 2 && table.nonvlink && last)
        works = false;
    *status = works ? 0 : 5;
    return OK;
}

EXPORT int nvmlDeviceGetGpuFabricInfo(const struct device *device, unsigned char info[28]) {
    (void)device;
    memset(info, 0, 28);
    if (!table.fabric)
        return OK;
    info[0] = 0x5a;
    info[24] = 3; /* completed */
    return OK;
}
