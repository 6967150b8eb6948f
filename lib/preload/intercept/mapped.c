/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/intercept/mapped.h"

#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/facts.h"
#include "core/names.h"
#include "core/status.h"
#include "preload/environment.h"
#include "preload/intercept/driver.h"
#include "preload/intercept/intercept.h"
#include "preload/record/recorder.h"
#include "rules/rules.h"

static struct {
    pthread_mutex_t lock;
    bool done;
    mapped found;
    int rank, ranks;
} context = {.lock = PTHREAD_MUTEX_INITIALIZER};

typedef struct objects {
    char nccl[2][MAPPED_PATH], torch[MAPPED_PATH], te[MAPPED_PATH], cudart[MAPPED_PATH];
    int nccls;
} objects;

static void keep(char to[MAPPED_PATH], const char *path) {
    if (to[0] == '\0')
        snprintf(to, MAPPED_PATH, "%s", path);
}

static int see_object(struct dl_phdr_info *info, size_t size, void *argument) {
    objects *o = argument;
    const char *path = info->dlpi_name != NULL ? info->dlpi_name : "";
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path;
    (void)size;
    if (strncmp(base, "libnccl", 7) == 0 && (base[7] == '.' || base[7] == '-')) {
        if (o->nccls < 2)
            keep(o->nccl[o->nccls], path);
        o->nccls++;
    } else if (strncmp(base, "libtorch_cuda", 13) == 0 || strncmp(base, "libtorch_cpu", 12) == 0) {
        keep(o->torch, path);
    } else if (strstr(path, "/transformer_engine") != NULL) {
        keep(o->te, path);
    } else if (strncmp(base, "libcudart", 9) == 0) {
        keep(o->cudart, path);
    }
    return 0;
}

void mapped_nccl_version(int number, char text[MAPPED_TEXT]) {
    if (number <= 0)
        text[0] = '\0';
    else if (number < 10000) /* until 2.8 */
        snprintf(text, MAPPED_TEXT, "%d.%d.%d", number / 1000, number / 100 % 10, number % 100);
    else
        snprintf(text, MAPPED_TEXT, "%d.%d.%d", number / 10000, number / 100 % 100, number % 100);
}

/* The number that `symbol` of the mapped file writes; 0: none. */
static int ask(const char *path, const char *symbol) {
    void *handle = path[0] != '\0' ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    int (*function)(int *) = NULL;
    int number = 0;
    if (handle == NULL)
        return 0;
    void *f = dlsym(handle, symbol);
    memcpy(&function, &f, sizeof f);
    if (function != NULL && function(&number) != 0)
        number = 0;
    dlclose(handle);
    return number;
}

static void cuda_version(int number, char text[MAPPED_TEXT]) {
    if (number > 0)
        snprintf(text, MAPPED_TEXT, "%d.%d", number / 1000, number % 1000 / 10);
}

/* ".../torch/lib/libtorch_cuda.so" -> the text in quotes behind __version__ in
 * ".../torch/version.py". */
static void torch_version(const char *library, char text[MAPPED_TEXT]) {
    char path[MAPPED_PATH + 32], line[256];
    const char *end = strstr(library, "/lib/libtorch");
    if (end == NULL)
        return;
    snprintf(path, sizeof path, "%.*s/version.py", (int)(end - library), library);
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        const char *quote = strpbrk(line, "'\"");
        if (strncmp(line, "__version__", 11) != 0 || quote == NULL)
            continue;
        const size_t length = strcspn(quote + 1, "'\"");
        snprintf(text, MAPPED_TEXT, "%.*s", (int)length, quote + 1);
        break;
    }
    if (f != NULL)
        fclose(f);
}

/* ".../site-packages/transformer_engine/..." -> "transformer_engine-2.9.0.dist-info". */
static void te_version(const char *library, char text[MAPPED_TEXT]) {
    static const char mark[] = "transformer_engine-";
    char folder[MAPPED_PATH];
    const char *end = strstr(library, "/transformer_engine");
    if (end == NULL)
        return;
    snprintf(folder, sizeof folder, "%.*s", (int)(end - library), library);
    DIR *d = opendir(folder);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        const char *tail = strstr(e->d_name, ".dist-info");
        if (strncmp(e->d_name, mark, sizeof mark - 1) != 0 || tail == NULL)
            continue;
        const char *version = e->d_name + sizeof mark - 1;
        snprintf(text, MAPPED_TEXT, "%.*s", (int)(tail - version), version);
        break;
    }
    if (d != NULL)
        closedir(d);
}

/* Unknown ones are "". */
static void mapped_find(mapped *m) {
    objects o;
    memset(&o, 0, sizeof o);
    memset(m, 0, sizeof *m);
    dl_iterate_phdr(see_object, &o);
    m->nccls = o.nccls;
    memcpy(m->nccl_path, o.nccl[0], sizeof m->nccl_path);
    memcpy(m->other_nccl_path, o.nccl[1], sizeof m->other_nccl_path);
    mapped_nccl_version(ask(o.nccl[0], "ncclGetVersion"), m->nccl);
    mapped_nccl_version(ask(o.nccl[1], "ncclGetVersion"), m->other_nccl);
    torch_version(o.torch, m->torch);
    te_version(o.te, m->te);
    cuda_version(ask(o.cudart, "cudaRuntimeGetVersion"), m->cuda);
    const cuda_driver *cu = driver_find(NULL);
    int number = 0;
    if (cu != NULL && cu->version(&number) == 0)
        cuda_version(number, m->driver);
}

/* ---- an NCCL that nobody can stand in front of ---- */

typedef struct inside {
    bool cuda, nccl;
    char path[MAPPED_PATH]; /* of an object that holds one; "" for none */
} inside;

/* A name that every release reads from the environment, in the read-only data alone. */
static bool holds_nccl(const struct dl_phdr_info *info) {
    static const char mark[] = {
        'N', 'C', 'C', 'L', '_', 'D', 'E', 'B', 'U',
        'G', '_', 'S', 'U', 'B', 'S', 'Y', 'S', '\0'}; /* (not as a text of ours) */
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && (p->p_flags & PF_W) == 0 && (p->p_flags & PF_R) != 0 &&
            memmem((const char *)info->dlpi_addr + p->p_vaddr, p->p_memsz, mark, sizeof mark) !=
                NULL)
            return true;
    }
    return false;
}

static int see_inside(struct dl_phdr_info *info, size_t size, void *argument) {
    inside *in = argument;
    const char *path = info->dlpi_name != NULL ? info->dlpi_name : "";
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path;
    (void)size;
    in->cuda = in->cuda || strncmp(base, "libcuda.so", 10) == 0;
    in->nccl = in->nccl || strncmp(base, "libnccl", 7) == 0;
    return in->nccl;
}

static int see_static(struct dl_phdr_info *info, size_t size, void *argument) {
    inside *in = argument;
    const char *path = info->dlpi_name != NULL ? info->dlpi_name : "";
    (void)size;
    if (strstr(path, "ep_overlap") != NULL || strncmp(path, "linux-vdso", 10) == 0 ||
        !holds_nccl(info))
        return 0;
    snprintf(in->path, sizeof in->path, "%s", path[0] != '\0' ? path : "the program itself");
    return 1;
}

/* At the end of a program that used CUDA and never called NCCL through us. */
__attribute__((destructor)) static void tell_static(void) {
    inside in = {false, false, ""};
    if (real_count() > 0 || (mode_now() != MODE_ACCELERATE && mode_record() == NULL))
        return;
    dl_iterate_phdr(see_inside, &in);
    if (!in.cuda || in.nccl)
        return;
    dl_iterate_phdr(see_static, &in);
    if (in.path[0] != '\0')
        fprintf(stderr,
                "ep-overlap: NCCL is linked into %s: not intercepted; a shared libnccl is needed\n",
                in.path);
}

/* ---- judgement ---- */

static void put(epo_facts *facts, const char *key, const char *text, const char *source) {
    if (text != NULL && text[0] != '\0')
        (void)epo_facts_set(facts, key, text, source);
}

static void put_job(epo_facts *facts) {
    const char *decision = getenv(EPO_OUT_DECISION), *delay = getenv(EPO_OUT_DELAY_WGRAD);
    const char *dispatcher = getenv(EPO_OUT_DISPATCHER);
    if (decision != NULL)
        put(facts, "overlap_moe_expert_parallel_comm",
            strcmp(decision, "on") == 0 ? "true" : "false", EPO_OUT_DECISION);
    if (delay != NULL)
        put(facts, "delay_wgrad_compute", strcmp(delay, "1") == 0 ? "true" : "false",
            EPO_OUT_DELAY_WGRAD);
    put(facts, "moe_token_dispatcher_type", dispatcher, EPO_OUT_DISPATCHER);
    put(facts, "flex_backend", getenv(EPO_OUT_FLEX_BACKEND), EPO_OUT_FLEX_BACKEND);
}

static void warn_of(const mapped *m) {
    if (m->nccls > 1)
        fprintf(stderr,
                "ep-overlap: warning: %d NCCL libraries are in this process: %s (%s) and %s (%s); "
                "keep one of them\n",
                m->nccls, m->nccl_path, m->nccl[0] ? m->nccl : "version unknown",
                m->other_nccl_path, m->other_nccl[0] ? m->other_nccl : "version unknown");
    epo_facts *facts = epo_facts_create();
    if (facts == NULL)
        return;
    put(facts, "torch_version", m->torch, "mapped");
    put(facts, "te_version", m->te, "mapped");
    put(facts, "nccl_version", m->nccl, "mapped");
    put_job(facts);
    for (size_t i = 0; i < epo_rules_count(); i++) {
        const epo_rule *rule = epo_rules_at(i);
        epo_rule_verdict verdict;
        if (strstr(rule->condition, "_version") == NULL ||
            epo_rules_evaluate(rule, facts, &verdict) != EPO_OK ||
            verdict.outcome != EPO_RULE_VIOLATED)
            continue;
        fprintf(stderr,
                "ep-overlap: warning: %s: needs %s (torch %s, TransformerEngine %s, NCCL %s); %s\n",
                rule->id, rule->needed, m->torch[0] ? m->torch : "-", m->te[0] ? m->te : "-",
                m->nccl[0] ? m->nccl : "-", rule->remedy);
    }
    epo_facts_destroy(facts);
}

static void find_rank(int rank, int ranks) {
    const char *source;
    if (epo_ranks_find(&context.rank, &context.ranks, &source) == EPO_OK && context.ranks >= ranks)
        return;
    context.rank = rank;
    context.ranks = ranks;
}

int mapped_rank(int *ranks) {
    *ranks = context.ranks;
    return context.rank;
}

/* Who merely observes hears nothing that he did not ask for. */
void mapped_look(int rank, int ranks) {
    pthread_mutex_lock(&context.lock);
    const bool first = !context.done;
    if (first) {
        find_rank(rank, ranks);
        mapped_find(&context.found);
        context.done = true;
    }
    pthread_mutex_unlock(&context.lock);
    if (!first)
        return;
    if (mode_record() != NULL) {
        figures_at_exit();
        recorder_begin(context.rank, context.ranks);
    }
    if (mode_now() == MODE_ACCELERATE || mode_record() != NULL)
        warn_of(&context.found);
}

const mapped *mapped_known(void) { return context.done ? &context.found : NULL; }
