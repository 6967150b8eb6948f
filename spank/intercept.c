/* SPDX-License-Identifier: Apache-2.0
 *
 * intercept.c - the interceptor, for programs that call NCCL themselves: whether the step
 * gets it, and in which mode.  It accelerates only where overlap was asked for, or where
 * the site says so beside a default; `auto` observes at most; a user's "off" wins.  What
 * overlaps by itself (a framework, ep-train) is observed where somebody wants it recorded.
 */
#include "task.h"

#include "core/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "libep_overlap_intercept.so"

static bool find_at(struct ep_plugin *plugin, const char *folder, int length, const char *below) {
    char path[EP_PATH_MAX];
    int need = snprintf(path, sizeof path, "%.*s%s" NAME, length, folder, below);
    if (need < 0 || (size_t)need >= sizeof path)
        return false;
    return ep_preload_find(path, &plugin->trust, &plugin->intercept) == EPO_OK;
}

void ep_intercept_find(struct ep_plugin *plugin, const char *library) {
    const char *slash = strrchr(library, '/');
    int folder = slash != NULL ? (int)(slash - library) + 1 : 0;
    if (folder == 0 || find_at(plugin, library, folder, "ep-overlap/"))
        return;
    if (!find_at(plugin, library, folder, ""))
        snprintf(plugin->intercept_error, sizeof plugin->intercept_error, "%s", epo_fail_text());
}

/* The user's own word, "" for none. */
static void user_word(struct ep_plugin *plugin, spank_t spank, const char *name, char word[16]) {
    char *value = plugin->api->task_getenv(spank, name);
    snprintf(word, 16, "%s", value != NULL ? value : "");
    free(value);
}

/* What decision and site call for; "" for nothing. */
static const char *mode_of(const struct ep_plugin *plugin) {
    const struct epo_decision *decision = &plugin->decision;
    bool site = plugin->config != NULL && plugin->config->interpose;
    if (decision->explicit_on)
        return EPO_INTERPOSE_ACCELERATE;
    if (!site)
        return "";
    return decision->automatic ? EPO_INTERPOSE_OBSERVE : EPO_INTERPOSE_ACCELERATE;
}

void ep_intercept_judge(struct ep_plugin *plugin, spank_t spank, bool own_nccl,
                        struct ep_intercept *wanted) {
    char interpose[16], record[16];
    memset(wanted, 0, sizeof *wanted);
    user_word(plugin, spank, EPO_OUT_INTERPOSE, interpose);
    user_word(plugin, spank, EPO_OUT_RECORD, record);
    if (strcmp(interpose, EPO_INTERPOSE_OFF) == 0)
        return;
    bool records = record[0] != '\0' ? strcmp(record, "0") != 0
                                     : plugin->config != NULL && plugin->config->record;
    const char *mode = interpose[0] != '\0' ? interpose : own_nccl ? mode_of(plugin) : "";
    if (mode[0] == '\0' && records)
        mode = EPO_INTERPOSE_OBSERVE;
    if (mode[0] == '\0')
        return;
    if (plugin->intercept.path[0] == '\0' ||
        ep_preload_check_visible(&plugin->intercept) != EPO_OK) {
        snprintf(wanted->why, sizeof wanted->why, "NCCL is not intercepted: %.400s",
                 plugin->intercept_error[0] != '\0' ? plugin->intercept_error : epo_fail_text());
        return;
    }
    wanted->library = plugin->intercept.path;
    snprintf(wanted->mode, sizeof wanted->mode, "%s", mode);
    wanted->record = records;
}
