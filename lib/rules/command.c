/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/command.h"

#include "core/status.h"
#include "rules/rules.h"
#include "rules/settings.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NESTING_MAX 4   /* of bash -c "bash -c ..." */
#define NAME_MAX_ 256   /* bytes of a setting's name */
#define VALUE_MAX_ 8192 /* bytes of a list of words */

/* What srun, or #SBATCH, asks of ep-overlap; of several steps the one that is on. */
typedef struct step {
    bool on, exec;       /* exec: by `ep-overlap exec` */
    int delayed;         /* -1: not said */
    char dispatcher[24]; /* "": not said */
    char source[200];
} step;

/* What a shell's own command does with the names behind it. */
typedef enum verb { VERB_NONE, VERB_DECLARE, VERB_EXPORT, VERB_UNSET } verb;

typedef struct reader {
    const epo_words *words;
    size_t at;
    const char *name;
    bool is_script;
    epo_facts *facts;
    epo_facts *shell; /* of a script: NAME, assigned; "export NAME", exported */
    epo_command command;
    int nesting;
    verb verb;
    bool exports_all; /* set -a */
    bool runs;        /* the command is a program's: neither an assignment nor an array */
    bool prints;      /* the command is echo or printf: it only says what it is given */
    bool evaluates;   /* the command is eval */
    bool in_program;  /* behind a training script */
    bool harness;     /* one of Bridge's performance scripts */
    bool launched;    /* behind python or torchrun */
    bool seen;        /* a command that starts a training program */
    step step;
} reader;

static const epo_word *peek(const reader *r, size_t ahead) {
    return r->at + ahead < r->words->count ? &r->words->word[r->at + ahead] : NULL;
}

static void source_of(const reader *r, const epo_word *word, const char *label, char *source,
                      size_t size) {
    if (r->name != NULL && word->line > 0)
        snprintf(source, size, "%.128s:%u %.100s", r->name, word->line, label);
    else
        snprintf(source, size, "%.100s", label);
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/* Arguments gathered where a condition decides; those of a command hold if it runs. */
static bool is_maybe(const reader *r, const epo_word *word) { return word->maybe && !r->runs; }

static epo_status put(reader *r, const epo_word *word, const char *path, const char *label,
                      const char *value) {
    char source[300];
    bool known;
    value = is_maybe(r, word) ? NULL : value;
    source_of(r, word, label, source, sizeof source);
    epo_status status = epo_setting_put(r->facts, path, value, source, &known);
    r->command.settings += known;
    return status;
}

static bool is_flag(const char *text) {
    return text[0] == '-' && text[1] != '\0' && !isdigit((unsigned char)text[1]) && text[1] != '.';
}

/* Words behind a flag, up to the next flag or command, joined as [a, b]. */
static size_t take_values(const reader *r, char *value, bool *open) {
    size_t taken = 0, used = 0;
    *open = false;
    for (const epo_word *w; (w = peek(r, taken + 1)) != NULL && !w->begins; taken++) {
        if (is_flag(w->text))
            break;
        *open = *open || w->open;
        int n = snprintf(value + used, VALUE_MAX_ - used, "%s%s", taken > 0 ? ", " : "[", w->text);
        if (n < 0 || (size_t)n >= VALUE_MAX_ - used - 2)
            break;
        used += (size_t)n;
    }
    if (taken == 0)
        snprintf(value, VALUE_MAX_, "[]");
    else
        memcpy(value + used, "]", 2);
    return taken;
}

static bool is_switch_word(const char *text) {
    static const char *const words[] = {"true", "false", "True", "False", "None",
                                        "null", "1",     "0",    NULL};
    for (size_t i = 0; words[i] != NULL; i++)
        if (strcmp(words[i], text) == 0)
            return true;
    return false;
}

/* The key that a flag's name stands for decides how many words it takes. */
static epo_key_type type_of(const char *path) {
    static const char *const switches[] = {"disable_bias_linear",
                                           "no_gradient_accumulation_fusion",
                                           "recompute_activations",
                                           "enable_cuda_graph",
                                           "external_cuda_graph",
                                           "use_custom_fsdp",
                                           "use_nccl_ub",
                                           "sft",
                                           "moe_a2a_overlap",
                                           "account_for_embedding_in_pipeline_split",
                                           "account_for_loss_in_pipeline_split"};
    for (size_t i = 0; i < sizeof switches / sizeof *switches; i++)
        if (strcmp(path, switches[i]) == 0)
            return EPO_KEY_SWITCH;
    if (strcmp(path, "cuda_graph_scope") == 0 || strcmp(path, "fsdp_unit_modules") == 0)
        return EPO_KEY_LIST;
    const epo_key *key = epo_keys_find(path, strlen(path));
    return key == NULL ? EPO_KEY_WORD : key->type;
}

static epo_status put_flag_value(reader *r, const epo_word *flag, const char *path,
                                 const char *label) {
    char list[VALUE_MAX_];
    bool open = false;
    const epo_word *next = peek(r, 1);
    bool has_next = next != NULL && !next->begins && !is_flag(next->text);
    epo_key_type type = type_of(path);
    if (type == EPO_KEY_LIST) {
        r->at += take_values(r, list, &open);
        /* harness style: one word with commas, or a Python list */
        if (has_next && next->text[0] == '[')
            return put(r, flag, path, label, open ? NULL : next->text);
        return put(r, flag, path, label, open ? NULL : list);
    }
    if (type == EPO_KEY_SWITCH && !(has_next && is_switch_word(next->text)))
        return put(r, flag, path, label, "true");
    if (!has_next)
        return EPO_OK; /* a flag without its value: the framework itself will say so */
    r->at++;
    return put(r, flag, path, label, next->open ? NULL : next->text);
}

/* Bridge's performance scripts spell flags with underscores. */
static void map_harness(reader *r, const char *flag, char *path) {
    if (strchr(flag, '_') == NULL)
        return;
    static const char *const own[] = {"--moe_a2a_overlap",      "--moe_flex_dispatcher_backend",
                                      "--cuda_graph_impl",      "--cuda_graph_scope",
                                      "--recompute_num_layers", "--recompute_modules"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strncmp(flag, own[i], strlen(own[i])) == 0) {
            r->command.framework = EPO_FRAMEWORK_BRIDGE;
            epo_facts_set(r->facts, "harness.used", "true", own[i]);
            if (i == 4)
                snprintf(path, NAME_MAX_, "harness.recompute_num_layers");
        }
}

/* Launchers tell how many ranks and nodes there are. */
static bool map_launcher(const char *name, char *path) {
    static const struct {
        const char *flag, *key;
    } flags[] = {{"nnodes", "num_nodes"},
                 {"nodes", "num_nodes"},
                 {"ntasks", "world_size"},
                 {"nproc_per_node", "launcher.ranks_per_node"},
                 {"ntasks_per_node", "launcher.ranks_per_node"}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (strcmp(flags[i].flag, name) == 0) {
            snprintf(path, NAME_MAX_, "%s", flags[i].key);
            return true;
        }
    return false;
}

static epo_status put_launcher(reader *r, const epo_word *flag, const char *path,
                               const char *value) {
    char source[300];
    source_of(r, flag, flag->text, source, sizeof source);
    if (value == NULL && peek(r, 1) != NULL && !peek(r, 1)->begins && !is_flag(peek(r, 1)->text)) {
        r->at++;
        value = peek(r, 0)->open ? NULL : peek(r, 0)->text;
    }
    if (is_maybe(r, flag) || (flag->open && strchr(flag->text, '=') != NULL))
        return epo_facts_set_unknown(r->facts, path, "?", source);
    return value == NULL ? EPO_OK : epo_facts_set(r->facts, path, value, source);
}

/* --ep-overlap, --ep-dispatcher, --delay-wgrad of srun and sbatch. */
static bool read_step_option(reader *r, const epo_word *word, const char *name, const char *value) {
    if (is_maybe(r, word))
        return strcmp(name, "ep_overlap") == 0 || strcmp(name, "ep_dispatcher") == 0 ||
               strcmp(name, "delay_wgrad") == 0 || strcmp(name, "no_delay_wgrad") == 0;
    bool overlap = strcmp(name, "ep_overlap") == 0, dispatcher = strcmp(name, "ep_dispatcher") == 0;
    bool delay = strcmp(name, "delay_wgrad") == 0;
    if (delay || strcmp(name, "no_delay_wgrad") == 0) {
        r->step.delayed = delay;
        return true;
    }
    if (!overlap && !dispatcher)
        return false;
    bool is_open = word->open;
    if (value == NULL && peek(r, 1) != NULL && !peek(r, 1)->begins) {
        r->at++;
        value = peek(r, 0)->text;
        is_open = peek(r, 0)->open;
    }
    if (value == NULL || is_open)
        return true;
    if (dispatcher)
        snprintf(r->step.dispatcher, sizeof r->step.dispatcher, "%.20s", value);
    else if (strcmp(value, "on") == 0) {
        r->step.on = true;
        source_of(r, word, "--ep-overlap=on, by ep-overlap exec", r->step.source,
                  sizeof r->step.source);
    }
    return true;
}

/* -g h100 -c bf16 -ng 16 -gn 8 of Bridge's performance scripts. */
static epo_status read_harness_flag(reader *r, const epo_word *word) {
    static const struct {
        const char *flag, *key;
    } flags[] = {
        {"-g", "gpu"}, {"-ng", "world_size"}, {"-gn", "launcher.ranks_per_node"}, {"-c", "bf16"}};
    const epo_word *next = peek(r, 1);
    char source[300];
    if (next == NULL || next->begins || next->open || is_flag(next->text))
        return EPO_OK;
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (strcmp(flags[i].flag, word->text) == 0) {
            r->at++;
            source_of(r, word, word->text, source, sizeof source);
            /* every recipe sits on bf16: bf16, fp8_mx, nvfp4 */
            return epo_facts_set(r->facts, flags[i].key, i == 3 ? "true" : next->text, source);
        }
    return EPO_OK;
}

static epo_status read_export(reader *r, const epo_word *word, const char *value);

static epo_status read_flag(reader *r, const epo_word *word) {
    char name[NAME_MAX_], path[NAME_MAX_], label[NAME_MAX_];
    const char *equals = strchr(word->text, '=');
    size_t length = equals == NULL ? strlen(word->text) : (size_t)(equals - word->text);
    if (length < 3 || length >= NAME_MAX_ || word->text[1] != '-')
        return r->harness && r->in_program ? read_harness_flag(r, word) : EPO_OK;
    snprintf(label, sizeof label, "%.*s", (int)length, word->text);
    snprintf(name, sizeof name, "%.*s", (int)length - 2, word->text + 2);
    for (char *c = name; *c != '\0'; c++)
        *c = *c == '-' ? '_' : *c;
    snprintf(path, sizeof path, "%s", name);
    if (!r->in_program && read_step_option(r, word, name, equals == NULL ? NULL : equals + 1))
        return EPO_OK;
    if (!r->in_program && strcmp(name, "export") == 0)
        return read_export(r, word, equals == NULL ? NULL : equals + 1);
    if (map_launcher(name, path))
        return put_launcher(r, word, path, equals == NULL ? NULL : equals + 1);
    map_harness(r, word->text, path);
    const char *value = equals == NULL ? NULL : equals + 1;
    size_t before = r->command.settings;
    epo_status status = value != NULL ? put(r, word, path, label, word->open ? NULL : value)
                                      : put_flag_value(r, word, path, label);
    if (r->command.settings > before && r->command.framework == EPO_FRAMEWORK_UNKNOWN)
        r->command.framework = EPO_FRAMEWORK_MEGATRON_LM;
    return status;
}

/* [+]model.num_moe_experts=8, ~comm_overlap */
static bool is_override(const char *text) {
    while (*text == '+' || *text == '~')
        text++;
    const char *equals = strchr(text, '=');
    if (equals == NULL || !(islower((unsigned char)*text) || *text == '_'))
        return false;
    bool has_dot = false;
    for (const char *c = text; c < equals; c++) {
        has_dot = has_dot || *c == '.';
        if (!isalnum((unsigned char)*c) && *c != '_' && *c != '.')
            return false;
    }
    return has_dot || strncmp(text, "mixed_precision=", 16) == 0 ||
           strncmp(text, "comm_overlap=", 13) == 0;
}

static epo_status read_override(reader *r, const epo_word *word) {
    char path[NAME_MAX_];
    const char *text = word->text;
    while (*text == '+' || *text == '~')
        text++;
    const char *equals = strchr(text, '=');
    if ((size_t)(equals - text) >= sizeof path)
        return EPO_OK;
    snprintf(path, sizeof path, "%.*s", (int)(equals - text), text);
    size_t before = r->command.settings;
    epo_status status = put(r, word, path, path, word->open ? NULL : equals + 1);
    if (r->command.settings > before)
        r->command.framework = EPO_FRAMEWORK_BRIDGE;
    return status;
}

static bool is_variable(const char *text) {
    size_t n = 0;
    while (isupper((unsigned char)text[n]) || text[n] == '_' ||
           (n > 0 && isdigit((unsigned char)text[n])))
        n++;
    return n > 0 && text[n] == '=';
}

static bool is_exported(const reader *r, const char *name, size_t length) {
    char key[NAME_MAX_];
    snprintf(key, sizeof key, "export %.*s", (int)length, name);
    return r->exports_all || epo_fact_is_true(epo_facts_find(r->shell, key));
}

/* A variable counts if it is exported or stands before a program. */
static bool reaches_program(const reader *r, const epo_word *word) {
    if (!r->is_script || r->verb == VERB_EXPORT ||
        is_exported(r, word->text, strcspn(word->text, "=")))
        return true;
    for (size_t back = r->at; !r->words->word[back].begins && back > 0;)
        if (strcmp(r->words->word[--back].text, "env") == 0)
            return true;
    for (size_t ahead = 1; peek(r, ahead) != NULL && !peek(r, ahead)->begins; ahead++)
        if (!is_variable(peek(r, ahead)->text))
            return r->verb == VERB_NONE;
    return false;
}

/* `value` NULL: it is not set; `known` false: only a shell can tell. */
static epo_status put_variable(reader *r, const epo_word *word, const char *name, const char *value,
                               bool known) {
    char key[NAME_MAX_], script_key[NAME_MAX_ + 16], source[300], label[80];
    snprintf(key, sizeof key, "env.%s", name);
    snprintf(script_key, sizeof script_key, "script.%s", key);
    snprintf(label, sizeof label, "%.64s", name);
    source_of(r, word, label, source, sizeof source);
    if (!known || is_maybe(r, word))
        return epo_facts_set_unknown(r->facts, key, "?", source);
    epo_status status = epo_facts_set_text(r->facts, key, value, source);
    return status == EPO_OK && r->is_script
               ? epo_facts_set_text(r->facts, script_key, value, source)
               : status;
}

/* NAME=value. */
static epo_status read_variable(reader *r, const epo_word *word) {
    char name[NAME_MAX_ - 8], key[NAME_MAX_];
    size_t length = strcspn(word->text, "=");
    const char *value = word->text + length + 1;
    if (length >= sizeof name || r->verb == VERB_UNSET)
        return EPO_OK;
    snprintf(name, sizeof name, "%.*s", (int)length, word->text);
    snprintf(key, sizeof key, "export %s", name);
    epo_status status = EPO_OK;
    if (r->is_script && (r->verb == VERB_EXPORT || (r->exports_all && !word->maybe)))
        status = epo_facts_set(r->shell, key, "true", "script");
    if (status == EPO_OK && reaches_program(r, word))
        return put_variable(r, word, name, value, !word->open);
    if (status == EPO_OK && (word->open || word->maybe))
        return epo_facts_set_unknown(r->shell, name, "?", "script");
    return status == EPO_OK ? epo_facts_set_text(r->shell, name, value, "script") : status;
}

/* NAME behind export or unset. */
static epo_status read_name(reader *r, const epo_word *word) {
    char key[NAME_MAX_];
    const char *name = word->text;
    size_t length = strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
    if (length == 0 || name[length] != '\0' || length + 8 > sizeof key || !r->is_script)
        return EPO_OK;
    bool is_unset = r->verb == VERB_UNSET;
    const epo_fact *value = is_unset ? NULL : epo_facts_find(r->shell, name);
    snprintf(key, sizeof key, "export %s", name);
    epo_status status = epo_facts_set(r->shell, key, is_unset ? "false" : "true", "script");
    if (status != EPO_OK || (!is_unset && value == NULL))
        return status;
    return put_variable(r, word, name, is_unset ? NULL : value->text,
                        is_unset || value->kind != EPO_FACT_UNKNOWN);
}

/* export, declare -x, export -n, unset, set -a, and the names behind them. */
static epo_status follow_verb(reader *r, const epo_word *word, bool *taken) {
    const char *text = word->text;
    bool is_option = text[0] == '-' && text[1] != '-';
    *taken = r->verb != VERB_NONE && !is_variable(text);
    if (r->verb == VERB_NONE || (!is_option && r->verb == VERB_DECLARE))
        return EPO_OK;
    if (is_option && r->verb == VERB_EXPORT && strchr(text, 'n') != NULL)
        r->verb = VERB_UNSET;
    else if (is_option && r->verb == VERB_DECLARE && strchr(text, 'x') != NULL)
        r->verb = VERB_EXPORT;
    else if (is_option && strchr(text, 'f') != NULL)
        r->verb = VERB_DECLARE; /* functions */
    return is_option || !*taken ? EPO_OK : read_name(r, word);
}

/* --export=ALL,NAME=value of srun and sbatch. */
static epo_status read_export(reader *r, const epo_word *word, const char *value) {
    char text[VALUE_MAX_], *rest = text;
    epo_status status = EPO_OK;
    if (value == NULL || strlen(value) >= sizeof text)
        return EPO_OK;
    snprintf(text, sizeof text, "%s", value);
    for (char *item; status == EPO_OK && (item = strsep(&rest, ",")) != NULL;) {
        char *equals = strchr(item, '=');
        if (equals == NULL || equals == item || (size_t)(equals - item) > NAME_MAX_ - 8)
            continue;
        *equals = '\0';
        status = put_variable(r, word, item, equals + 1, strchr(equals + 1, '$') == NULL);
    }
    return status;
}

static epo_status read_words(reader *r);

/* A line of the inner text says little: where the text stands is told. */
static epo_status fail_inside(const reader *r, const epo_word *text, epo_status status) {
    char why[200];
    if (status != EPO_E_ARG)
        return status;
    snprintf(why, sizeof why, "%s", epo_fail_text());
    if (r->name == NULL || text->line == 0)
        return epo_fail(status, "the command: what its shell is given: %s", why);
    return epo_fail(status, "%.128s:%u: what its shell is given: %s", r->name, text->line, why);
}

/* bash -c "TEXT": the words are inside. */
static epo_status read_inner_shell(reader *r, const epo_word *text) {
    epo_words inner = {0};
    epo_status status =
        fail_inside(r, text, epo_words_split(&inner, text->text, strlen(text->text)));
    for (size_t i = 0; i < inner.count; i++)
        inner.word[i].line = text->line;
    reader nested = *r;
    nested.words = &inner;
    nested.at = 0;
    nested.nesting++;
    if (status == EPO_OK)
        status = read_words(&nested);
    r->command = nested.command;
    r->step = nested.step;
    r->seen = nested.seen;
    epo_words_free(&inner);
    return status;
}

static bool is_shell(const char *text) {
    const char *base = base_name(text);
    return strcmp(base, "bash") == 0 || strcmp(base, "sh") == 0;
}

static bool is_training_script(const char *base) {
    static const char *const bridge[] = {"run_recipe.py", "run_script.py", "finetune_decoder.py"};
    for (size_t i = 0; i < sizeof bridge / sizeof *bridge; i++)
        if (strcmp(base, bridge[i]) == 0)
            return true;
    return strncmp(base, "pretrain_", 9) == 0 && strstr(base, ".py") != NULL;
}

/* set -a, set +a, set -o allexport. */
static void follow_set(reader *r, const epo_word *word) {
    const epo_word *next = peek(r, 1), *name = peek(r, 2);
    if (strcmp(word->text, "set") != 0 || next == NULL || next->begins || word->maybe)
        return;
    bool is_named = name != NULL && !name->begins && strcmp(name->text, "allexport") == 0;
    if (strchr("-+", next->text[0]) != NULL && (is_named || strchr(next->text, 'a') != NULL))
        r->exports_all = next->text[0] == '-';
}

/* Whether a command that begins so is a program's. */
static void follow_command(reader *r, const epo_word *word) {
    static const char *const others[] = {"export",   "declare", "local",
                                         "readonly", "typeset", "unset"};
    static const char *const keywords[] = {"then", "else", "elif", "do", "if", "{"};
    const epo_word *before = r->at > 0 ? &r->words->word[r->at - 1] : NULL;
    bool starts = word->begins;
    for (size_t i = 0; before != NULL && i < sizeof keywords / sizeof *keywords; i++)
        starts = starts || (before->begins && strcmp(before->text, keywords[i]) == 0);
    if (before != NULL && is_variable(before->text) && !r->runs && r->verb == VERB_NONE)
        starts = true; /* NAME=value before a program */
    if (!starts)
        return;
    bool is_declaration = false;
    r->runs = !is_flag(word->text) && !is_variable(word->text) && word->text[0] != '$' &&
              strchr(word->text, '=') == NULL;
    r->prints = r->runs && (strcmp(word->text, "echo") == 0 || strcmp(word->text, "printf") == 0);
    r->evaluates = r->runs && strcmp(word->text, "eval") == 0;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        is_declaration = is_declaration || strcmp(word->text, others[i]) == 0;
    r->runs = r->runs && !is_declaration;
    r->verb = strcmp(word->text, "export") == 0  ? VERB_EXPORT
              : strcmp(word->text, "unset") == 0 ? VERB_UNSET
              : is_declaration                   ? VERB_DECLARE
                                                 : VERB_NONE;
    follow_set(r, word);
}

/* Where the word stands: before, behind, outside of a training program. */
static void follow(reader *r, const epo_word *word, const char *base) {
    const epo_word *next = peek(r, 1);
    r->in_program = r->in_program || is_training_script(base);
    r->launched = r->launched || strncmp(base, "python", 6) == 0 || strcmp(base, "torchrun") == 0;
    r->seen = r->seen || r->in_program || (r->launched && is_override(word->text));
    r->harness = (r->harness && r->in_program) || strcmp(base, "run_script.py") == 0;
    if (strcmp(base, "ep-overlap") == 0 && next != NULL && strcmp(next->text, "exec") == 0)
        r->step.exec = true;
    if (r->in_program && word->open && word->text[0] == '$' && word->text[1] != '\0' &&
        !r->command.open_arguments) {
        r->command.open_arguments = true;
        r->command.open_line = word->line;
    }
}

static epo_status read_word(reader *r, const epo_word *word) {
    const char *base = base_name(word->text);
    bool taken;
    r->in_program = r->in_program && !word->begins;
    r->launched = r->launched && !word->begins;
    follow_command(r, word);
    epo_status status = follow_verb(r, word, &taken);
    if (status != EPO_OK || taken || r->prints)
        return status;
    follow(r, word, base);
    const epo_word *before = r->at > 0 ? &r->words->word[r->at - 1] : NULL;
    if (before != NULL && word->text[0] == '-' && strchr(word->text, 'c') != NULL &&
        word->text[1] != '-' && is_shell(before->text) && peek(r, 1) != NULL &&
        r->nesting < NESTING_MAX) {
        r->at++;
        return read_inner_shell(r, peek(r, 0));
    }
    if (r->evaluates && strpbrk(word->text, " \t\n") != NULL && r->nesting < NESTING_MAX)
        return read_inner_shell(r, word); /* eval "$COMMAND" */
    if (is_variable(word->text))
        return read_variable(r, word);
    if (is_flag(word->text))
        return read_flag(r, word);
    if (is_override(word->text))
        return read_override(r, word);
    if (strncmp(base, "pretrain_", 9) == 0 && strstr(base, ".py") != NULL &&
        r->command.framework == EPO_FRAMEWORK_UNKNOWN)
        r->command.framework = EPO_FRAMEWORK_MEGATRON_LM;
    return EPO_OK;
}

static epo_status read_words(reader *r) {
    epo_status status = EPO_OK;
    for (r->at = 0; r->at < r->words->count && status == EPO_OK; r->at++)
        status = read_word(r, peek(r, 0));
    return status;
}

static epo_status count_ranks(epo_facts *facts) {
    const epo_fact *nodes = epo_facts_find(facts, "num_nodes");
    const epo_fact *per_node = epo_facts_find(facts, "launcher.ranks_per_node");
    if (epo_facts_find(facts, "world_size") != NULL || per_node == NULL ||
        per_node->kind != EPO_FACT_NUMBER)
        return EPO_OK;
    if (nodes != NULL && nodes->kind != EPO_FACT_NUMBER)
        return EPO_OK;
    char text[32];
    snprintf(text, sizeof text, "%.0f", per_node->number * (nodes == NULL ? 1 : nodes->number));
    epo_status status = epo_facts_set(facts, "world_size", text, "nodes x ranks per node");
    return status == EPO_OK ? epo_facts_set_default(facts, "num_nodes", "1", "launcher") : status;
}

/* As `epo_launch_arguments` has them. */
static epo_status put_step(reader *r) {
    const char *type = strncmp(r->step.dispatcher, "flex", 4) == 0 ? "flex" : r->step.dispatcher;
    const char *backend = strchr(r->step.dispatcher, ':');
    const char *const added[][2] = {
        {"overlap_moe_expert_parallel_comm", "true"},
        {"delay_wgrad_compute", r->step.delayed < 0 ? NULL
                                : r->step.delayed   ? "true"
                                                    : "false"},
        {"moe_token_dispatcher_type", type[0] != '\0' ? type : NULL},
        {"moe_flex_dispatcher_backend", backend != NULL ? backend + 1 : NULL}};
    epo_status status = EPO_OK;
    for (size_t i = 0; i < sizeof added / sizeof *added && status == EPO_OK; i++)
        if (added[i][1] != NULL && epo_facts_find(r->facts, added[i][0]) == NULL) {
            status = epo_setting_put(r->facts, added[i][0], added[i][1], r->step.source, NULL);
            r->command.settings++;
        }
    return status;
}

static bool may_be_enabled(const epo_facts *facts) {
    const epo_fact *overlap = epo_facts_find(facts, "overlap_moe_expert_parallel_comm");
    return overlap != NULL && (overlap->kind == EPO_FACT_UNKNOWN || epo_fact_is_true(overlap));
}

epo_status epo_command_read(const epo_words *words, const char *name, bool is_script,
                            epo_facts *facts, epo_command *command) {
    reader r = {.words = words,
                .name = name,
                .is_script = is_script,
                .facts = facts,
                .shell = epo_facts_create(),
                .step.delayed = -1};
    if (r.shell == NULL)
        return epo_fail(EPO_E_NOMEM, "command: no memory");
    epo_status status = read_words(&r);
    epo_facts_destroy(r.shell);
    bool asked = r.step.on && r.seen && r.command.framework != EPO_FRAMEWORK_UNKNOWN;
    if (status == EPO_OK && asked && r.step.exec)
        status = put_step(&r);
    r.command.step_lacks = asked && !r.command.open_arguments && !may_be_enabled(facts);
    if (status == EPO_OK)
        status = count_ranks(facts);
    if (status == EPO_OK && r.command.framework != EPO_FRAMEWORK_UNKNOWN)
        status = epo_facts_set(facts, "framework", epo_framework_name(r.command.framework),
                               "the command");
    if (status == EPO_OK)
        *command = r.command;
    return status;
}

const char *epo_framework_name(epo_framework framework) {
    static const char *const names[] = {"unknown", "megatron-lm", "bridge"};
    return names[framework];
}
