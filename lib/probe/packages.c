/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/packages.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define METADATA_BYTES 65536
#define MODULE_BYTES ((size_t)1 << 20)
#define PTH_FILES 32

/* The better name first: transformer_engine counts before its parts. */
static const struct wanted {
    const char *distribution, *key;
} wanted[] = {{"torch", "torch_version"},
              {"transformer-engine", "te_version"},
              {"transformer-engine-torch", "te_version"},
              {"transformer-engine-cu12", "te_version"},
              {"transformer-engine-cu13", "te_version"},
              {"triton", "triton_version"},
              {"pytorch-triton", "triton_version"},
              {"megatron-bridge", "bridge_version"},
              {"megatron-core", "python.megatron_core_version"},
              {"deep-ep", "python.deep_ep_version"},
              {"nvidia-nccl-cu13", "python.nccl_version"},
              {"nvidia-nccl-cu12", "python.nccl_version"},
              {"nvidia-nccl-cu11", "python.nccl_version"}};
#define WANTED (sizeof wanted / sizeof *wanted)

/* Facts about the module deep_ep: the file that says so, and the word in it. */
static const struct mark {
    const char *key, *word;
    const char *files[3];
} marks[] = {
    {"deep_ep.has_event_overlap", "EventOverlap", {"utils.py", "utils/__init__.py", NULL}},
    {"deep_ep.has_hybrid_buffer", "HybridEPBuffer", {"__init__.py", "hybrid_ep_buffer.py", NULL}},
    {"deep_ep.has_fused_permute", "fuse_permute_dispatch", {"hybrid_ep_buffer.py", NULL, NULL}}};
#define MARKS (sizeof marks / sizeof *marks)

void probe_sites_add(probe_sites *sites, const char *folder) {
    if (folder[0] != '/' || !probe_is_folder(folder))
        return;
    for (int i = 0; i < sites->count; i++)
        if (strcmp(sites->folder[i], folder) == 0)
            return;
    char *copy = sites->count < SITE_FOLDERS_MAX ? strdup(folder) : NULL;
    if (copy != NULL) {
        sites->folder[sites->count++] = copy;
        return;
    }
    sites->open = true;
    snprintf(sites->why_open, sizeof sites->why_open, "more than %d folders", SITE_FOLDERS_MAX);
}

void probe_sites_free(probe_sites *sites) {
    for (int i = 0; i < sites->count; i++)
        free(sites->folder[i]);
    memset(sites, 0, sizeof *sites);
}

struct visit {
    const char *folder;
    char *info[WANTED]; /* NAME-VERSION.dist-info */
    char *pth[PTH_FILES];
    int pths;
    bool pth_cut, customized, deep_ep, deep_ep_package, torch, nvidia;
};

/* "Transformer_Engine-2.7.0.dist-info" and "transformer-engine": the same name. */
static bool is_distribution(const char *name, size_t length, const char *distribution) {
    for (size_t i = 0; i < length; i++) {
        char c = name[i] == '_' || name[i] == '.' ? '-' : (char)tolower((unsigned char)name[i]);
        if (c != distribution[i]) /* its NUL ends a longer name */
            return false;
    }
    return distribution[length] == '\0';
}

static bool note(void *context, const char *name) {
    struct visit *v = context;
    const char *dot = strrchr(name, '.');
    if (strcmp(name, "deep_ep") == 0 || strcmp(name, "deep_ep.py") == 0) {
        v->deep_ep = true;
        v->deep_ep_package = name[7] == '\0';
    } else if (strcmp(name, "sitecustomize.py") == 0 || strcmp(name, "usercustomize.py") == 0) {
        v->customized = true;
    } else if (strcmp(name, "torch") == 0) {
        v->torch = true;
    } else if (strcmp(name, "nvidia") == 0) {
        v->nvidia = true;
    } else if (dot != NULL && (strcmp(dot, ".dist-info") == 0 || strcmp(dot, ".egg-info") == 0)) {
        size_t length = strcspn(name, "-");
        if (name + length > dot)
            length = (size_t)(dot - name);
        for (size_t i = 0; i < WANTED; i++)
            if (v->info[i] == NULL && is_distribution(name, length, wanted[i].distribution))
                v->info[i] = strdup(name);
    } else if (dot != NULL && strcmp(dot, ".pth") == 0) {
        if (v->pths < PTH_FILES)
            v->pth[v->pths++] = strdup(name);
        else
            v->pth_cut = true;
    }
    return true;
}

static void free_visit(struct visit *v) {
    for (size_t i = 0; i < WANTED; i++)
        free(v->info[i]);
    for (int i = 0; i < v->pths; i++)
        free(v->pth[i]);
}

/* The value behind "Version:" in the head of the metadata. */
static bool read_version(char *text, char *version, size_t room) {
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest)) {
        if (strncasecmp(line, "Version:", 8) != 0)
            continue;
        line += 8;
        line += strspn(line, " \t");
        line[strcspn(line, " \t\r")] = '\0';
        return line[0] != '\0' && snprintf(version, room, "%s", line) < (int)room;
    }
    return false;
}

static void put_version(epo_probe_task *task, const char *folder, const char *info, const char *key,
                        epo_facts *facts) {
    static const char *const files[] = {"METADATA", "PKG-INFO", NULL};
    char path[PROBE_PATH], file[PROBE_PATH], version[128] = "";
    if (!probe_join(path, folder, info))
        return;
    for (const char *const *name = files; *name != NULL && version[0] == '\0'; name++) {
        char *text = probe_join(file, path, *name) ? probe_read(task, file, METADATA_BYTES) : NULL;
        if (text != NULL)
            (void)read_version(text, version, sizeof version);
        free(text);
    }
    if (version[0] == '\0') { /* NAME-VERSION.dist-info, NAME-VERSION-py3.12.egg-info */
        const char *at = strchr(info, '-');
        size_t length = at == NULL ? 0 : strcspn(at + 1, "-");
        const char *end = at == NULL ? NULL : strstr(at + 1, ".dist-info");
        end = end == NULL && at != NULL ? strstr(at + 1, ".egg-info") : end;
        if (end != NULL && length > (size_t)(end - at - 1))
            length = (size_t)(end - at - 1);
        if (length > 0 && length < sizeof version)
            snprintf(version, sizeof version, "%.*s", (int)length, at + 1);
    }
    if (version[0] != '\0')
        probe_put_text(facts, key, path, version);
    else
        probe_put_unknown(facts, key, path, "its metadata has no version");
}

/* A build without metadata says so in torch/version.py: __version__ = '2.8.0' */
static void put_torch(epo_probe_task *task, const char *folder, epo_facts *facts) {
    char path[PROBE_PATH], file[PROBE_PATH], version[128];
    if (!probe_join(path, folder, "torch") || !probe_is_folder(path))
        return;
    if (epo_facts_find(facts, "python.torch_folder") == NULL)
        probe_put_text(facts, "python.torch_folder", "found", path);
    if (epo_facts_find(facts, "torch_version") != NULL || !probe_join(file, path, "version.py"))
        return;
    char *text = probe_read(task, file, METADATA_BYTES);
    char *at = text == NULL ? NULL : strstr(text, "__version__");
    at = at == NULL ? NULL : strpbrk(at, "'\"");
    if (at != NULL) {
        size_t length = strcspn(at + 1, "'\"\n");
        if (length > 0 && length < sizeof version) {
            snprintf(version, sizeof version, "%.*s", (int)length, at + 1);
            probe_put_text(facts, "torch_version", file, version);
        }
    }
    free(text);
}

static void put_deep_ep(epo_probe_task *task, const char *folder, bool package, epo_facts *facts) {
    char module[PROBE_PATH], file[PROBE_PATH];
    if (epo_facts_find(facts, "deep_ep.imports") != NULL)
        return;
    if (!probe_join(module, folder, package ? "deep_ep" : "deep_ep.py"))
        return;
    probe_put(facts, "deep_ep.imports", module, "True");
    for (size_t i = 0; i < MARKS; i++) {
        bool found = false, cut = false;
        for (int k = 0; k < 3 && marks[i].files[k] != NULL && package && !found; k++) {
            char *text = probe_join(file, module, marks[i].files[k])
                             ? probe_read(task, file, MODULE_BYTES)
                             : NULL;
            found = text != NULL && strstr(text, marks[i].word) != NULL;
            cut = cut || (text != NULL && strlen(text) == MODULE_BYTES) || task->bytes_left == 0;
            free(text);
        }
        if (!package || (!found && cut))
            probe_put_unknown(facts, marks[i].key, module, "it cannot be told from its files");
        else
            probe_put(facts, marks[i].key, module, "%s", found ? "True" : "False");
    }
}

/* Import hooks of setuptools and virtualenv, which add no package. */
static bool is_harmless(const char *name) {
    static const char namespace[] = "-nspkg.pth";
    size_t length = strlen(name), end = sizeof namespace - 1;
    return strcmp(name, "distutils-precedence.pth") == 0 || strcmp(name, "_virtualenv.pth") == 0 ||
           (length > end && strcmp(name + length - end, namespace) == 0);
}

/* Lines of a .pth file are further folders, or Python code, which we do not run. */
static void read_pth(epo_probe_task *task, const char *folder, const char *name,
                     probe_sites *sites) {
    char path[PROBE_PATH], further[PROBE_PATH], *rest = NULL;
    char *text = probe_join(path, folder, name) ? probe_read(task, path, METADATA_BYTES) : NULL;
    for (char *line = text == NULL ? NULL : strtok_r(text, "\r\n", &rest); line != NULL;
         line = strtok_r(NULL, "\r\n", &rest)) {
        if (line[0] == '#')
            continue;
        if (strncmp(line, "import ", 7) == 0 || strncmp(line, "import\t", 7) == 0) {
            if (is_harmless(name))
                continue;
            sites->open = true;
            snprintf(sites->why_open, sizeof sites->why_open, "%.100s runs code at import", name);
        } else if (line[0] == '/' ? snprintf(further, sizeof further, "%s", line) < PROBE_PATH
                                  : probe_join(further, folder, line)) {
            probe_sites_add(sites, further);
        }
    }
    free(text);
}

static void visit_folder(epo_probe_task *task, probe_sites *sites, const char *folder,
                         epo_facts *facts) {
    struct visit v = {.folder = folder};
    char path[PROBE_PATH];
    probe_scan_end end = probe_scan(task, folder, note, &v);
    if (end == PROBE_SCAN_CUT || v.pth_cut) {
        sites->open = true;
        snprintf(sites->why_open, sizeof sites->why_open, "%.100s was not read to its end", folder);
    }
    if (v.customized) {
        sites->open = true;
        snprintf(sites->why_open, sizeof sites->why_open, "%.80s has a sitecustomize.py", folder);
    }
    for (size_t i = 0; i < WANTED; i++)
        if (v.info[i] != NULL && epo_facts_find(facts, wanted[i].key) == NULL)
            put_version(task, folder, v.info[i], wanted[i].key, facts);
    if (v.torch)
        put_torch(task, folder, facts);
    if (v.deep_ep)
        put_deep_ep(task, folder, v.deep_ep_package, facts);
    if (v.nvidia && probe_join(path, folder, "nvidia/nccl/lib/libnccl.so.2") &&
        probe_is_file(path) && epo_facts_find(facts, "python.nccl_library") == NULL)
        probe_put_text(facts, "python.nccl_library", "found", path);
    for (int i = 0; i < v.pths; i++)
        if (v.pth[i] != NULL)
            read_pth(task, folder, v.pth[i], sites);
    free_visit(&v);
}

static const char *const keys[] = {"torch_version",
                                   "te_version",
                                   "triton_version",
                                   "bridge_version",
                                   "deep_ep.imports",
                                   "deep_ep.has_event_overlap",
                                   "deep_ep.has_hybrid_buffer",
                                   "deep_ep.has_fused_permute"};
#define KEYS (sizeof keys / sizeof *keys)

void probe_packages(epo_probe_task *task, probe_sites *sites, epo_facts *facts) {
    /* .pth files add folders behind the last */
    for (int i = 0; i < sites->count; i++)
        visit_folder(task, sites, sites->folder[i], facts);
    char source[256];
    const epo_fact *python = epo_facts_find(facts, "python.path");
    snprintf(source, sizeof source, "the packages of %.200s",
             python != NULL ? python->text : "Python");
    for (size_t i = 0; i < KEYS; i++) {
        if (epo_facts_find(facts, keys[i]) != NULL)
            continue;
        if (sites->open)
            probe_put_unknown(facts, keys[i], source, "not found, but %s", sites->why_open);
        else if (strcmp(keys[i], "deep_ep.imports") == 0)
            probe_put(facts, keys[i], source, "False");
        else
            probe_put_unset(facts, keys[i], source);
    }
}

void probe_packages_unknown(epo_facts *facts, const char *source, const char *why) {
    for (size_t i = 0; i < KEYS; i++)
        probe_put_unknown(facts, keys[i], source, "%s", why);
}

void probe_packages_unset(epo_facts *facts, const char *source) {
    for (size_t i = 0; i < KEYS; i++)
        probe_put_unset(facts, keys[i], source);
}
