/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/program.h"

#include "core/status.h"
#include "core/text.h"
#include "rules/launcher.h"
#include "rules/rules.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 24 /* launchers before a program */

/* One command: words in a row, of a vector or of a shell's text. */
typedef struct command {
    const epo_word *words;
    size_t count;
} command;

static void undecided(epo_program *program, const char *what, const char *word) {
    program->kind = EPO_PROGRAM_UNDECIDED;
    snprintf(program->why, sizeof program->why, "%s \"%.80s\"", what, word);
    epo_text_clean(program->why);
}

static bool is_one_of(const char *word, const char *const *list) {
    for (; *list != NULL; list++)
        if (strcmp(word, *list) == 0)
            return true;
    return false;
}

static bool starts(const char *text, const char *head) {
    return strncmp(text, head, strlen(head)) == 0;
}

static bool ends(const char *text, const char *tail) {
    size_t length = strlen(text), n = strlen(tail);
    return length > n && strcmp(text + length - n, tail) == 0;
}

/* --- which framework ---------------------------------------------------------- */

/* One of the folders of a path is called `name`. */
static bool has_folder(const char *path, const char *name) {
    size_t length = strlen(name);
    for (const char *at = path; *at != '\0';) {
        size_t part = strcspn(at, "/");
        if (part == length && strncmp(at, name, length) == 0 && at[part] == '/')
            return true;
        at += part + (at[part] == '/');
    }
    return false;
}

static size_t name_length(const char *word) { return strcspn(word, "="); }

/* One of `flags` is given, with '=' or without. */
static bool has_flag(const epo_words *words, const char *const *flags) {
    for (size_t i = 1; i < words->count; i++) {
        char name[64];
        const char *word = words->word[i].text;
        if (name_length(word) >= sizeof name)
            continue;
        snprintf(name, sizeof name, "%.*s", (int)name_length(word), word);
        if (is_one_of(name, flags))
            return true;
    }
    return false;
}

/* A script of any name, by arguments that Megatron-LM alone spells so.  Its tools
 * (servers, converters) take them, too: only a training run has something to overlap. */
static epo_program_kind judge_flags(const epo_words *words) {
    static const char *const overlap[] = {"--overlap-moe-expert-parallel-comm", NULL};
    static const char *const experts[] = {"--expert-model-parallel-size",
                                          "--moe-token-dispatcher-type", NULL};
    static const char *const trains[] = {"--train-iters", "--train-samples", "--global-batch-size",
                                         NULL};
    if (has_flag(words, overlap))
        return EPO_PROGRAM_FRAMEWORK;
    if (!has_flag(words, experts))
        return EPO_PROGRAM_OTHER;
    return has_flag(words, trains) ? EPO_PROGRAM_FRAMEWORK : EPO_PROGRAM_UNDECIDED;
}

static const char *override_of(const char *word) { return word + strspn(word, "+~"); }

static bool has_override(const epo_words *words, const char *head) {
    for (size_t i = 1; i < words->count; i++)
        if (starts(override_of(words->word[i].text), head) &&
            strchr(words->word[i].text, '=') != NULL)
            return true;
    return false;
}

/* "--flag" or "--flag=...". */
static bool has_word(const epo_words *words, const char *flag) {
    for (size_t i = 1; i < words->count; i++)
        if (starts(words->word[i].text, flag) &&
            (words->word[i].text[strlen(flag)] == '=' || words->word[i].text[strlen(flag)] == '\0'))
            return true;
    return false;
}

/* words[0] is a script or a module's name. */
static void recognise(epo_program *program) {
    static const char *const megatron[] = {"pretrain_gpt.py",        "pretrain_mamba.py",
                                           "pretrain_hybrid.py",     "pretrain_vlm.py",
                                           "pretrain_t5.py",         "pretrain_bert.py",
                                           "pretrain_retro.py",      "pretrain_ict.py",
                                           "pretrain_gpt",           "pretrain_mamba",
                                           "pretrain_hybrid",        "train_rl.py",
                                           "pretrain_multimodal.py", NULL};
    static const char *const bridge[] = {"run_recipe.py", "run_script.py", "finetune_decoder.py",
                                         NULL};
    const epo_words *words = &program->words;
    const char *script = words->word[0].text, *base = epo_launcher_base(script);
    bool overrides = has_override(words, "comm_overlap.");
    bool performance =
        has_word(words, "--moe_a2a_overlap") || has_word(words, "--moe_flex_dispatcher_backend");
    program->kind = EPO_PROGRAM_FRAMEWORK;
    if (overrides || performance || has_folder(script, "Megatron-Bridge") ||
        starts(script, "megatron.bridge.") ||
        (is_one_of(base, bridge) && has_override(words, "model.")))
        program->framework = EPO_FRAMEWORK_BRIDGE;
    else if (is_one_of(base, megatron) || judge_flags(words) == EPO_PROGRAM_FRAMEWORK)
        program->framework = EPO_FRAMEWORK_MEGATRON_LM;
    else if (judge_flags(words) == EPO_PROGRAM_UNDECIDED)
        undecided(program, "a training run? no --train-iters or --train-samples is given to", base);
    else if (has_override(words, "model.moe_") || has_override(words, "model.expert_model_"))
        undecided(program, "Bridge or NeMo? no comm_overlap setting is given to", base);
    else
        program->kind = EPO_PROGRAM_OTHER;
}

/* --- one command --------------------------------------------------------------- */

static epo_status copy_words(const command *c, size_t from, epo_words *to) {
    epo_status status = EPO_OK;
    for (size_t i = from; i < c->count && status == EPO_OK; i++) {
        if (c->words[i].redirects) { /* "> log", "2>": and the file's name behind it */
            i += strpbrk(c->words[i].text, "<>")[1] == '\0';
            continue;
        }
        status = epo_words_add(to, c->words[i].text, 0, c->words[i].open, to->count == 0);
    }
    return status;
}

/* $ARGS among the arguments can hold anything, unless it is a flag's value. */
static const char *free_word(const epo_words *words) {
    for (size_t i = 1; i < words->count; i++) {
        const epo_word *word = &words->word[i];
        if (!word->open || word->text[0] != '$')
            continue;
        const char *before = words->word[i - 1].text;
        bool flag = i > 1 && starts(before, "--") && strchr(before, '=') == NULL;
        const epo_key *key = NULL;
        char name[64] = "";
        if (flag && strlen(before) < sizeof name) {
            snprintf(name, sizeof name, "%s", before + 2);
            for (char *c = name; *c != '\0'; c++)
                *c = *c == '-' ? '_' : *c;
            key = epo_keys_find(name, strlen(name));
        }
        if (!flag || (key != NULL && key->type == EPO_KEY_SWITCH))
            return word->text;
    }
    return NULL;
}

static epo_status take_script(const command *c, size_t at, epo_program *program) {
    epo_status status = copy_words(c, at, &program->words);
    if (status != EPO_OK || program->words.count == 0)
        return status;
    if (c->words[at].open) {
        undecided(program, "what script is", c->words[at].text);
        return EPO_OK;
    }
    recognise(program);
    const char *open = free_word(&program->words);
    if (program->kind == EPO_PROGRAM_FRAMEWORK && open != NULL)
        undecided(program, "only the shell knows what is in", open);
    for (size_t i = at; i < c->count && !c->words[i].redirects; i++)
        program->end = c->words[i].end;
    return EPO_OK;
}

static epo_status read_command(const command *c, size_t depth, epo_program *program);

/* Words that may stand before a command in a shell. */
static size_t skip_shell_words(const command *c) {
    static const char *const before[] = {"exec", "time",    "then",    "do",    "else",
                                         "if",   "elif",    "while",   "until", "!",
                                         "{",    "command", "builtin", NULL};
    size_t at = 0;
    while (at < c->count) {
        const char *text = c->words[at].text;
        size_t n = 0;
        while (isalnum((unsigned char)text[n]) || text[n] == '_')
            n++;
        bool assigns = n > 0 && !isdigit((unsigned char)text[0]) && text[n] == '=';
        if (!assigns && !is_one_of(text, before))
            break;
        at++;
    }
    return at;
}

/* Of several commands the one that trains counts; two of them are one too many.
 * Takes what it needs out of `found`. */
static void merge(epo_program *program, epo_program *found, const char *text) {
    bool trains = program->words.count > 0 && program->kind != EPO_PROGRAM_OTHER;
    bool more = found->words.count > 0 && found->kind != EPO_PROGRAM_OTHER;
    bool by_exec = program->by_exec;
    if (trains && more) {
        undecided(program, "more than one training command in", text);
    } else if (more || (!trains && found->kind == EPO_PROGRAM_UNDECIDED)) {
        epo_program_free(program);
        *program = *found;
        program->by_exec = program->by_exec || by_exec;
        *found = (epo_program){0};
    }
}

/* A shell's text: the one command in it that is a framework's. */
static epo_status read_text(const char *text, size_t depth, epo_program *program) {
    epo_words words = {0};
    epo_status status = epo_words_split(&words, text, strlen(text));
    if (status == EPO_E_ARG || status == EPO_E_OVERFLOW) {
        undecided(program, "the text of the shell cannot be read:", text);
        status = EPO_OK;
        epo_words_free(&words);
    }
    for (size_t at = 0, next; at < words.count && status == EPO_OK; at = next) {
        for (next = at + 1; next < words.count && !words.word[next].begins; next++) {
        }
        command one = {words.word + at, next - at};
        size_t skip = skip_shell_words(&one);
        one.words += skip;
        one.count -= skip;
        epo_program found = {0};
        if (one.count > 0)
            status = read_command(&one, depth + 1, &found);
        merge(program, &found, text);
        epo_program_free(&found);
    }
    epo_words_free(&words);
    return status;
}

static epo_status read_inner(const command *c, size_t at, size_t depth, epo_program *program) {
    if (c->words[at].open) {
        undecided(program, "only the shell knows what is in", c->words[at].text);
        return EPO_OK;
    }
    epo_status status = read_text(c->words[at].text, depth, program);
    if (status == EPO_OK && program->kind == EPO_PROGRAM_FRAMEWORK) {
        if (program->text != 0)
            undecided(program, "a shell inside a shell:", c->words[at].text);
        program->text = at;
    }
    return status;
}

static epo_launcher_kind look(const command *c, size_t at, size_t *taken) {
    const char **words = calloc(c->count - at, sizeof *words);
    if (words == NULL)
        return EPO_LAUNCHER_OPAQUE;
    for (size_t i = at; i < c->count; i++)
        words[i - at] = c->words[i].text;
    epo_launcher_kind kind = epo_launcher_read(words, c->count - at, taken);
    free((void *)(uintptr_t)words);
    return kind;
}

/* Python's module that launches: torch.distributed.run is torchrun. */
static size_t skip_module_launcher(const command *c, size_t at, epo_launcher_kind *kind) {
    if (!is_one_of(c->words[at].text, (const char *const[]){"torch.distributed.run",
                                                            "torch.distributed.launch", NULL}))
        return at;
    epo_word *words = calloc(c->count - at, sizeof *words);
    if (words == NULL)
        return at;
    memcpy(words, c->words + at, (c->count - at) * sizeof *words);
    words[0].text = (char[]){"torchrun"};
    size_t taken = 0;
    command as_torchrun = {words, c->count - at};
    *kind = look(&as_torchrun, 0, &taken);
    free(words);
    return at + taken;
}

static epo_status read_command(const command *c, size_t depth, epo_program *program) {
    size_t at = 0;
    for (; depth < DEPTH_MAX && at < c->count; depth++) {
        const char *name = c->words[at].text;
        size_t taken = 0;
        if (c->words[at].open) {
            undecided(program, "only the shell knows what is in", name);
            return EPO_OK;
        }
        epo_launcher_kind kind = look(c, at, &taken);
        size_t behind = at + taken;
        if (kind == EPO_LAUNCHER_MODULE)
            behind = skip_module_launcher(c, behind, &kind);
        switch (kind) {
        case EPO_LAUNCHER_NONE: return ends(name, ".py") ? take_script(c, at, program) : EPO_OK;
        case EPO_LAUNCHER_SCRIPT:
        case EPO_LAUNCHER_MODULE: return take_script(c, behind, program);
        case EPO_LAUNCHER_TEXT: return read_inner(c, behind, depth, program);
        case EPO_LAUNCHER_NOTHING: return EPO_OK;
        case EPO_LAUNCHER_OPAQUE:
            if (taken > 0)
                undecided(program, "a shell's script is not read:", c->words[behind].text);
            else
                undecided(program, "cannot tell what is started by", name);
            return EPO_OK;
        case EPO_LAUNCHER_EXEC: program->by_exec = true; break;
        case EPO_LAUNCHER_COMMAND: break;
        }
        at = behind;
    }
    return EPO_OK;
}

epo_status epo_program_read(char *const *arguments, int count, epo_program *program) {
    epo_words words = {0};
    epo_status status = EPO_OK;
    *program = (epo_program){0};
    for (int i = 0; i < count && status == EPO_OK; i++)
        status = epo_words_add(&words, arguments[i], 0, false, i == 0);
    command whole = {words.word, words.count};
    if (status == EPO_E_OVERFLOW) {
        undecided(program, "too many arguments behind", arguments[0]);
        status = EPO_OK;
    } else if (status == EPO_OK && count > 0)
        status = read_command(&whole, 0, program);
    epo_words_free(&words);
    return status;
}

void epo_program_free(epo_program *program) {
    if (program == NULL)
        return;
    epo_words_free(&program->words);
}
