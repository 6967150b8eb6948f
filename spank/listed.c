/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* dl_iterate_phdr */
#include "listed.h"

#include <link.h>
#include <string.h>

#define PLUGIN_FILE "ep_overlap.so"

struct search {
    const char *name;
    uintptr_t own;
    bool passed;
    int before, behind;
};

static bool holds(const struct dl_phdr_info *object, uintptr_t address) {
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_LOAD &&
            address - (object->dlpi_addr + part->p_vaddr) < part->p_memsz)
            return true;
    }
    return false;
}

static int look(struct dl_phdr_info *object, size_t size, void *data) {
    struct search *search = data;
    const char *file = strrchr(object->dlpi_name, '/');
    (void)size;
    if (holds(object, search->own))
        search->passed = true;
    else if (strcmp(file != NULL ? file + 1 : object->dlpi_name, search->name) == 0)
        *(search->passed ? &search->behind : &search->before) += 1;
    return 0;
}

void ep_listed_files(const char *name, const void *own, int *before, int *behind) {
    struct search search = {.name = name, .own = (uintptr_t)own};
    dl_iterate_phdr(look, &search); /* in the order of loading */
    *before = search.before;
    *behind = search.behind;
}

bool ep_listed_line(struct ep_listed *listed) {
    static const char own = 0;
    int behind = 0;
    if (listed->begun) /* Slurm begins anew */
        memset(listed, 0, sizeof *listed);
    /* Slurm loads all that plugstack.conf lists before it calls the first of them. */
    ep_listed_files(PLUGIN_FILE, &own, &listed->files, &behind);
    if (behind > 0)
        return false;
    listed->lines++;
    return true;
}

bool ep_listed_turn(struct ep_listed *listed, enum ep_hook hook) {
    listed->begun = true;
    return listed->lines > 0 && ++listed->calls[hook] % listed->lines == 0;
}

void ep_listed_tell(const struct ep_listed *listed, const struct wrap_spank *api) {
    if (listed->lines > 1)
        wrap_format(api->log_error,
                    "ep-overlap: plugstack.conf lists " PLUGIN_FILE " %d times: the last line "
                    "counts, take the others out",
                    listed->lines);
    if (listed->files > 0)
        wrap_format(api->log_error,
                    "ep-overlap: plugstack.conf lists %d files " PLUGIN_FILE ": the last one "
                    "works, take the others out",
                    listed->files + 1);
}
