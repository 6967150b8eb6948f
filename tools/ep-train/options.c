/* SPDX-License-Identifier: Apache-2.0
 *
 * options.c - one table for parsing, limits and help.
 */
#include "options.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "data.h"
#include "optim.h"

typedef enum kind { INT, SEED, REAL, WORD, TEXT, FLAG, SECTION } kind;

typedef struct option {
    const char *name;
    kind kind;
    size_t offset;
    double least, most;         /* INT, REAL; FLAG: the value that it sets */
    const char *const words[4]; /* WORD: names of 0, 1, ... */
    const char *value, *help;
} option;

#define AT(field) offsetof(options, field)
#define NO_WORDS                                                                                   \
    { NULL, NULL, NULL }

static const option table[] = {
    {NULL, SECTION, 0, 0, 0, NO_WORDS, NULL, "Training"},
    {"steps", INT, AT(steps), 1, 1e9, NO_WORDS, "N", "optimizer steps (50)"},
    {"batch", INT, AT(batch), 1, 1 << 20, NO_WORDS, "N",
     "sequences of a micro-batch, over all ranks (16)"},
    {"seq", INT, AT(seq), 1, 1 << 16, NO_WORDS, "N", "tokens (bytes) of a sequence (64)"},
    {"micro-batches", INT, AT(micro_batches), 1, 1 << 16, NO_WORDS, "N",
     "micro-batches of a step (2)"},
    {"optimizer",
     WORD,
     AT(optimizer),
     0,
     0,
     {"sgd", "adamw", NULL},
     "sgd|adamw",
     "optimizer (adamw)"},
    {"lr", REAL, AT(lr), 0, 1e30, NO_WORDS, "X", "learning rate (0.003; sgd: 0.3)"},
    {"seed", SEED, AT(seed), 0, 0, NO_WORDS, "N", "weights and batches follow from it (1)"},
    {"log-interval", INT, AT(log_interval), 1, 1e9, NO_WORDS, "N",
     "steps between two iteration lines (1)"},
    {NULL, SECTION, 0, 0, 0, NO_WORDS, NULL, "Model"},
    {"layers", INT, AT(layers), 1, 1024, NO_WORDS, "N", "layers, each with its experts (2)"},
    {"hidden", INT, AT(hidden), 1, 1 << 16, NO_WORDS, "N", "elements of a token's row (64)"},
    {"ffn", INT, AT(ffn), 1, 1 << 18, NO_WORDS, "N", "intermediate size of an expert (128)"},
    {"experts", INT, AT(experts), 1, 1 << 14, NO_WORDS, "N",
     "experts of a layer, a multiple of the ranks (8)"},
    {"top-k", INT, AT(top_k), 1, 32, NO_WORDS, "N", "experts of a token (2)"},
    {"dtype",
     WORD,
     AT(dtype),
     0,
     0,
     {"fp32", "bf16", NULL},
     "fp32|bf16",
     "storage of token rows and expert weights (fp32)"},
    {NULL, SECTION, 0, 0, 0, NO_WORDS, NULL, "Overlap (left out: as the job's options say)"},
    {"engine",
     WORD,
     AT(engine),
     0,
     0,
     {"auto", "host", "cuda", NULL},
     "auto|host|cuda",
     "where experts compute (auto: GPU if there is one)"},
    {"overlap",
     WORD,
     AT(overlap),
     0,
     0,
     {"off", "on", NULL},
     "on|off",
     "overlap communication with the experts' work"},
    {"dispatcher",
     WORD,
     AT(dispatcher),
     0,
     0,
     {"alltoall", "flex", NULL},
     "alltoall|flex",
     "a copy per token and expert, or per token and rank"},
    {"delay-wgrad", FLAG, AT(delay_wgrad), 1, 0, NO_WORDS, NULL,
     "do weight gradients while communication is waited for"},
    {"no-delay-wgrad", FLAG, AT(delay_wgrad), 0, 0, NO_WORDS, NULL, "do them at once"},
    {"chunks", INT, AT(chunks), 0, 1024, NO_WORDS, "N",
     "expert groups of a pass (0: chosen by the engine)"},
    {NULL, SECTION, 0, 0, 0, NO_WORDS, NULL, "What comes out"},
    {"json", TEXT, AT(json), 0, 0, NO_WORDS, "FILE", "the closing table, for programs"},
    {"save-weights", TEXT, AT(save_weights), 0, 0, NO_WORDS, "FILE",
     "the final weights; equal runs give equal bytes"},
    {"no-measure", FLAG, AT(measure), 0, 0, NO_WORDS, NULL,
     "no comparison of serial and overlapped afterwards"},
    {"bench", INT, AT(bench), 1, 10000, NO_WORDS, "PAIRS", "no training, only that comparison"},
    {NULL, SECTION, 0, 0, 0, NO_WORDS, NULL, "Without Slurm"},
    {"launch", INT, AT(launch), 1, 1024, NO_WORDS, "N",
     "start N ranks here, with torchrun's variables"},
};
#define OPTIONS (sizeof table / sizeof table[0])

static void print_help(FILE *out) {
    fprintf(out,
            "Usage: ep-train [OPTIONS] [FILE]\n"
            "Trains a small mixture-of-experts language model on the bytes of FILE\n"
            "(%s), its experts spread over the job's ranks.\n\n"
            "  srun -n4 --ep-overlap=on --ep-dispatcher=flex --delay-wgrad ep-train\n"
            "  ep-train --launch 2 --overlap on          the same without Slurm\n",
            DATA_DEFAULT);
    for (const option *o = table; o < table + OPTIONS; o++) {
        char left[64];
        if (o->kind == SECTION) {
            fprintf(out, "\n%s:\n", o->help);
            continue;
        }
        snprintf(left, sizeof left, "--%s%s%s", o->name, o->value != NULL ? " " : "",
                 o->value != NULL ? o->value : "");
        fprintf(out, "  %-26s %s\n", left, o->help);
    }
    fprintf(out, "\n  --help, --version\n\n"
                 "The library's own variables: EP_OVERLAP_CHUNKS, EP_OVERLAP_TIMEOUT (seconds),\n"
                 "EP_OVERLAP_BLAS_THREADS, EP_OVERLAP_HOST_LINK=GB/s,us (an emulated link, to see\n"
                 "on one machine what a network would do).\n"
                 "Exit status: 0; 1 failed while running; 2 wrong options.\n");
}

static epo_status wrong(const option *o, const char *text, const char *allowed) {
    return epo_fail(EPO_E_ARG, "--%s: found \"%.64s\", allowed is %s", o->name, text, allowed);
}

static epo_status read_number(const option *o, const char *text, void *at) {
    char *end, allowed[64];
    errno = 0;
    if (o->kind == SEED) {
        unsigned long long value = strtoull(text, &end, 10);
        if (*text < '0' || *text > '9' || *end != '\0' || errno != 0)
            return wrong(o, text, "0 to 18446744073709551615");
        *(uint64_t *)at = value;
        return EPO_OK;
    }
    double value = strtod(text, &end);
    snprintf(allowed, sizeof allowed, o->kind == INT ? "%.0f to %.0f" : "more than %g, at most %g",
             o->least, o->most);
    if (end == text || *end != '\0' || errno != 0 || !(value >= o->least && value <= o->most) ||
        (o->kind == INT ? value != floor(value) : value == o->least))
        return wrong(o, text, allowed);
    if (o->kind == INT)
        *(int *)at = (int)value;
    else
        *(double *)at = value;
    return EPO_OK;
}

static epo_status read_value(const option *o, const char *text, options *out) {
    void *at = (char *)out + o->offset;
    switch (o->kind) {
    case INT:
    case SEED:
    case REAL: return read_number(o, text, at);
    case WORD:
        for (int i = 0; o->words[i] != NULL; i++)
            if (strcmp(text, o->words[i]) == 0) {
                *(int *)at = i;
                return EPO_OK;
            }
        return wrong(o, text, o->value);
    case TEXT:
        if (*text == '\0')
            return wrong(o, text, "the name of a file");
        *(const char **)at = text;
        return EPO_OK;
    default: return EPO_OK;
    }
}

static const option *find(const char *name, size_t length) {
    for (const option *o = table; o < table + OPTIONS; o++)
        if (o->name != NULL && strlen(o->name) == length && strncmp(o->name, name, length) == 0)
            return o;
    return NULL;
}

/* One option at argv[*i], with its value behind '=' or in the next argument. */
static epo_status read_option(int argc, char **argv, int *i, options *out) {
    const char *name = argv[*i] + 2, *equal = strchr(name, '=');
    const option *o = find(name, equal != NULL ? (size_t)(equal - name) : strlen(name));
    if (strncmp(argv[*i], "--", 2) != 0 || o == NULL)
        return epo_fail(EPO_E_ARG, "%.64s: no such option; ep-train --help lists them", argv[*i]);
    if (o->kind == FLAG) {
        if (equal != NULL)
            return epo_fail(EPO_E_ARG, "--%s takes no value", o->name);
        *(int *)(void *)((char *)out + o->offset) = (int)o->least;
        return EPO_OK;
    }
    if (equal != NULL)
        return read_value(o, equal + 1, out);
    if (*i + 1 >= argc)
        return epo_fail(EPO_E_ARG, "--%s needs a value: %s", o->name, o->value);
    return read_value(o, argv[++*i], out);
}

static epo_status check(const options *o) {
    if (o->top_k > o->experts)
        return epo_fail(EPO_E_ARG, "--top-k: found %d, allowed is at most --experts (%d)", o->top_k,
                        o->experts);
    if ((int64_t)o->batch * o->seq > 1 << 24)
        return epo_fail(EPO_E_ARG, "--batch times --seq: found %lld tokens, allowed are at most %d",
                        (long long)o->batch * o->seq, 1 << 24);
    return EPO_OK;
}

options_result options_read(int argc, char **argv, options *out, FILE *print) {
    options o = {.steps = 50,
                 .micro_batches = 2,
                 .batch = 16,
                 .seq = 64,
                 .layers = 2,
                 .hidden = 64,
                 .ffn = 128,
                 .experts = 8,
                 .top_k = 2,
                 .optimizer = OPTIM_ADAMW,
                 .dtype = EPO_F32,
                 .lr = -1,
                 .seed = 1,
                 .overlap = EPO_DEFAULT,
                 .dispatcher = EPO_DISPATCH_DEFAULT,
                 .delay_wgrad = EPO_DEFAULT,
                 .log_interval = 1,
                 .measure = 1};
    int only_names = 0;
    for (int i = 1; i < argc; i++) {
        if (!only_names && strcmp(argv[i], "--help") == 0) {
            print_help(print);
            return OPTIONS_DONE;
        }
        if (!only_names && strcmp(argv[i], "--version") == 0) {
            fprintf(print, "ep-train %s\n", epo_version());
            return OPTIONS_DONE;
        }
        if (!only_names && strcmp(argv[i], "--") == 0) {
            only_names = 1;
        } else if (!only_names && argv[i][0] == '-' && argv[i][1] != '\0') {
            if (read_option(argc, argv, &i, &o) != EPO_OK)
                return OPTIONS_WRONG;
        } else if (o.file != NULL) {
            epo_fail(EPO_E_ARG, "found two text files, %.200s and %.200s; allowed is one", o.file,
                     argv[i]);
            return OPTIONS_WRONG;
        } else {
            o.file = argv[i];
        }
    }
    if (check(&o) != EPO_OK)
        return OPTIONS_WRONG;
    if (o.lr < 0)
        o.lr = o.optimizer == OPTIM_SGD ? 0.3 : 0.003;
    *out = o;
    return OPTIONS_RUN;
}
