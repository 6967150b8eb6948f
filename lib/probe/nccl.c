/* SPDX-License-Identifier: Apache-2.0
 *
 * The libnccl.so.2 that the task will map, in the loader's order: LD_PRELOAD, the
 * DT_RPATH of the library that needs it, LD_LIBRARY_PATH, its DT_RUNPATH, the
 * system's cache.  PyTorch's wheels need it from libtorch_cuda.so and bring it with
 * a DT_RPATH, so that LD_LIBRARY_PATH does not count for them.
 */
#define _GNU_SOURCE /* memmem */
#include "probe/elf.h"
#include "probe/files.h"
#include "probe/packages.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libnccl.so.2"
#define CACHE "/etc/ld.so.cache"
#define CACHE_BYTES ((size_t)8 << 20)

struct found {
    char path[PROBE_PATH];
    char how[64];
};

static bool try_folders(const char *list, const char *how, struct found *found) {
    while (list != NULL && *list != '\0') {
        char folder[PROBE_PATH];
        size_t length = strcspn(list, ":;");
        if (length > 0 && length < sizeof folder) {
            snprintf(folder, sizeof folder, "%.*s", (int)length, list);
            if (probe_join(found->path, folder, LIBRARY) && probe_is_file(found->path)) {
                snprintf(found->how, sizeof found->how, "%s", how);
                return true;
            }
        }
        list += length;
        list += *list != '\0';
    }
    return false;
}

static bool try_preload(const epo_probe_task *task, struct found *found) {
    const char *list = epo_probe_variable(task, "LD_PRELOAD");
    while (list != NULL && *list != '\0') {
        size_t length = strcspn(list, ": ");
        if (length > 0 && length < sizeof found->path) {
            snprintf(found->path, sizeof found->path, "%.*s", (int)length, list);
            if (strncmp(probe_base(found->path), "libnccl.so", 10) == 0 &&
                probe_is_file(found->path)) {
                snprintf(found->how, sizeof found->how, "LD_PRELOAD");
                return true;
            }
        }
        list += length;
        list += *list != '\0';
    }
    return false;
}

/* The loader's cache: a header, entries of five words, and their strings. */
static bool try_cache(epo_probe_task *task, struct found *found) {
    static const char magic[] = "glibc-ld.so.cache1.1";
    char *text = NULL;
    uint64_t before = task->bytes_left;
    FILE *file = fopen(CACHE, "re");
    size_t bytes = 0;
    if (file != NULL && before >= CACHE_BYTES && (text = malloc(CACHE_BYTES)) != NULL)
        bytes = fread(text, 1, CACHE_BYTES, file);
    if (file != NULL)
        fclose(file);
    task->bytes_left -= bytes;
    /* an old cache has another table first */
    char *table = bytes > 48 ? memmem(text, bytes, magic, sizeof magic - 1) : NULL;
    size_t left = table == NULL ? 0 : bytes - (size_t)(table - text);
    uint32_t count = 0;
    if (left > 48)
        memcpy(&count, table + 20, sizeof count);
    bool good = false;
    for (uint32_t i = 0; i < count && !good && 48 + ((size_t)i + 1) * 24 <= left; i++) {
        uint32_t key, value;
        memcpy(&key, table + 48 + (size_t)i * 24 + 4, sizeof key);
        memcpy(&value, table + 48 + (size_t)i * 24 + 8, sizeof value);
        if (key >= left || value >= left || memchr(table + key, '\0', left - key) == NULL ||
            memchr(table + value, '\0', left - value) == NULL || strcmp(table + key, LIBRARY) != 0)
            continue;
        snprintf(found->path, sizeof found->path, "%s", table + value);
        snprintf(found->how, sizeof found->how, "the system's " CACHE);
        good = probe_is_file(found->path);
    }
    free(text);
    return good;
}

/* The file whose search path counts: libtorch_cuda.so, or the program. */
static bool find_needing(const epo_probe_task *task, const epo_facts *facts, char *path) {
    const epo_fact *torch = epo_facts_find(facts, "python.torch_folder");
    const epo_fact *kind = epo_facts_find(facts, "task.program");
    if (torch != NULL && torch->kind == EPO_FACT_TEXT)
        return probe_join(path, torch->text, "lib/libtorch_cuda.so") && probe_is_file(path);
    return kind != NULL && strcmp(kind->text, "compiled") == 0 && task->argument_count > 0 &&
           probe_find_in_path(task, task->arguments[0], path);
}

static bool find_library(epo_probe_task *task, const epo_facts *facts, struct found *found) {
    char needing[PROBE_PATH], folders[8192] = "";
    bool before = false;
    bool has = find_needing(task, facts, needing) &&
               probe_elf_search(task, needing, folders, sizeof folders, &before);
    const epo_fact *wheel = epo_facts_find(facts, "python.nccl_library");
    if (try_preload(task, found) || (has && before && try_folders(folders, "DT_RPATH", found)) ||
        try_folders(epo_probe_variable(task, "LD_LIBRARY_PATH"), "LD_LIBRARY_PATH", found) ||
        (has && !before && try_folders(folders, "DT_RUNPATH", found)))
        return true;
    if (wheel != NULL && wheel->kind == EPO_FACT_TEXT) { /* torch loads it by this path itself */
        snprintf(found->path, sizeof found->path, "%s", wheel->text);
        snprintf(found->how, sizeof found->how, "the Python environment");
        return true;
    }
    return try_cache(task, found);
}

/* libnccl.so.2.27.5 names its version; else its wheel's metadata, else its text. */
static void put_version(epo_probe_task *task, const struct found *found, epo_facts *facts) {
    char real[PROBE_PATH], version[64], source[256];
    const epo_fact *wheel = epo_facts_find(facts, "python.nccl_version");
    snprintf(source, sizeof source, "%.180s (%s)", found->path, found->how);
    const char *base = realpath(found->path, real) != NULL ? probe_base(real) : "";
    const char *digits = strncmp(base, "libnccl.so.", 11) == 0 ? base + 11 : "";
    if (strchr(digits, '.') != NULL && strspn(digits, "0123456789.") == strlen(digits))
        probe_put_text(facts, "nccl_version", source, digits);
    else if (strstr(real, "/nvidia/nccl/lib/") != NULL && wheel != NULL &&
             wheel->kind == EPO_FACT_TEXT)
        probe_put_text(facts, "nccl_version", source, wheel->text);
    else if (probe_elf_text(task, found->path, "NCCL version ", version, sizeof version))
        probe_put_text(facts, "nccl_version", source, version);
    else
        probe_put_unknown(facts, "nccl_version", source, "the file does not tell its version");
}

void epo_probe_nccl(epo_probe_task *task, epo_facts *facts) {
    struct found found = {.path = ""};
    const epo_fact *kind = epo_facts_find(facts, "task.program");
    if (kind != NULL && strcmp(kind->text, "container") == 0) {
        probe_put_unknown(facts, "nccl_version", "the task's words",
                          "the program runs in a container, whose folders are not seen here");
        return;
    }
    if (!find_library(task, facts, &found)) {
        probe_put_unset(facts, "nccl_version", "no " LIBRARY " where a loader looks for it");
        return;
    }
    probe_put_text(facts, "node.nccl_library", found.how, found.path);
    put_version(task, &found, facts);
    const epo_fact *torch = epo_facts_find(facts, "torch_version");
    if (kind != NULL && strcmp(kind->text, "shell") == 0 &&
        (torch == NULL || torch->kind == EPO_FACT_UNKNOWN) && strcmp(found.how, "LD_PRELOAD") != 0)
        probe_put_unknown(facts, "nccl_version", found.how,
                          "a Python that the script starts may bring another NCCL than %.200s",
                          found.path);
}
