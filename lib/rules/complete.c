/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/complete.h"

#include "core/status.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* A setting as the command line gives it. */
typedef struct setting {
    const char *name; /* "--bf16", "model.bf16" */
    size_t name_length;
    const char *value; /* NULL: a flag without one, or ~name */
    size_t value_length;
    bool removed; /* Hydra's ~name */
} setting;

static bool is_flag(const char *word) {
    return word[0] == '-' && word[1] == '-' && word[2] != '\0';
}

/* Reads the setting at words[at]; 0: there is none, else how many words it takes. */
static size_t read_setting(const epo_words *words, size_t at, setting *s) {
    const char *word = words->word[at].text;
    *s = (setting){.name = word};
    if (!is_flag(word)) {
        s->removed = word[0] == '~';
        s->name += strspn(word, "+~");
    }
    s->name_length = strcspn(s->name, "=");
    if (s->name[s->name_length] == '=') {
        s->value = s->name + s->name_length + 1;
        s->value_length = strlen(s->value);
        return 1;
    }
    if (!is_flag(word))
        return s->removed ? 1 : 0;
    if (at + 1 < words->count && !is_flag(words->word[at + 1].text)) {
        s->value = words->word[at + 1].text;
        s->value_length = strlen(s->value);
        return 2;
    }
    return 1;
}

static bool is_named(const setting *s, const char *name) {
    return strlen(name) == s->name_length && strncmp(s->name, name, s->name_length) == 0;
}

/* The last one of that name counts, as for argparse and OmegaConf. */
static bool find_setting(const epo_words *words, const setting *wanted, setting *found) {
    bool any = false;
    setting one;
    for (size_t i = 1; i < words->count; i++)
        if (read_setting(words, i, &one) > 0 && one.name_length == wanted->name_length &&
            strncmp(one.name, wanted->name, one.name_length) == 0) {
            *found = one;
            any = true;
        }
    return any;
}

static bool same_value(const setting *a, const setting *b) {
    if (a->removed != b->removed)
        return false;
    if (a->value == NULL || b->value == NULL) /* flags: a word behind one is not its value */
        return true;
    return a->value_length == b->value_length &&
           strncasecmp(a->value, b->value, a->value_length) == 0;
}

/* Which option a framework's setting answers to. */
static epo_option_id option_of(const setting *s) {
    static const struct {
        const char *name;
        epo_option_id id;
    } known[] = {
        {"--overlap-moe-expert-parallel-comm", EPO_OPT_OVERLAP},
        {"comm_overlap.overlap_moe_expert_parallel_comm", EPO_OPT_OVERLAP},
        {"model.moe_shared_expert_overlap", EPO_OPT_OVERLAP},
        {"--moe-token-dispatcher-type", EPO_OPT_DISPATCHER},
        {"--moe-flex-dispatcher-backend", EPO_OPT_DISPATCHER},
        {"model.moe_token_dispatcher_type", EPO_OPT_DISPATCHER},
        {"model.moe_flex_dispatcher_backend", EPO_OPT_DISPATCHER},
        {"--delay-wgrad-compute", EPO_OPT_DELAY_WGRAD},
        {"comm_overlap.delay_wgrad_compute", EPO_OPT_DELAY_WGRAD},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (is_named(s, known[i].name))
            return known[i].id;
    return EPO_OPT_COUNT;
}

/* "--flag value", "name=value", "~name" */
static void describe(const setting *s, char *text, size_t room) {
    bool flag = s->name[0] == '-';
    snprintf(text, room, "%s%.*s%s%.*s", s->removed ? "~" : "", (int)s->name_length, s->name,
             s->value == NULL ? ""
             : flag           ? " "
                              : "=",
             (int)(s->value == NULL ? 0 : s->value_length), s->value == NULL ? "" : s->value);
    epo_text_clean(text);
}

static void contradict(epo_completion *completion, const epo_wish *wish, epo_option_id id,
                       const char *given) {
    if (completion->contradictions == EPO_CONTRADICTIONS_MAX)
        return;
    snprintf(completion->contradiction[completion->contradictions++],
             sizeof completion->contradiction[0],
             "%.96s contradicts the argument %.120s: change one of them",
             wish->asked_by[id] != NULL ? wish->asked_by[id] : epo_options[id].name, given);
}

static epo_status add(epo_completion *completion, const char *text, size_t length) {
    char *word = strndup(text, length);
    epo_status status = word == NULL ? epo_fail(EPO_E_NOMEM, "arguments: no memory")
                                     : epo_words_add(&completion->added, word, 0, false, false);
    free(word);
    return status;
}

static epo_status add_setting(epo_completion *completion, const setting *s, bool flag) {
    if (!flag)
        return add(completion, s->name, s->name_length + (s->value != NULL) + s->value_length);
    epo_status status = add(completion, s->name, s->name_length);
    return status != EPO_OK || s->value == NULL ? status
                                                : add(completion, s->value, s->value_length);
}

/* What the user's own dispatcher makes pointless. */
static bool belongs_to_flex(const setting *s) {
    return is_named(s, "--moe-flex-dispatcher-backend") || is_named(s, "--moe-router-dtype") ||
           is_named(s, "model.moe_flex_dispatcher_backend") ||
           is_named(s, "model.moe_router_dtype");
}

static bool is_dispatcher_type(const setting *s) {
    return is_named(s, "--moe-token-dispatcher-type") ||
           is_named(s, "model.moe_token_dispatcher_type");
}

static bool is_wgrad(const setting *s) { return option_of(s) == EPO_OPT_DELAY_WGRAD; }

/* Megatron-Core before 0.15 knows --moe-enable-deepep and no backends: who says that has
 * named deepep, and gets no flag that his version refuses. */
static bool named_deepep(const epo_program *program, const epo_wish *wish, const setting *want,
                         epo_completion *completion) {
    static const setting older = {.name = "--moe-enable-deepep", .name_length = 19};
    setting have;
    if (!is_named(want, "--moe-flex-dispatcher-backend") ||
        !find_setting(&program->words, &older, &have))
        return false;
    if (want->value_length != 6 || strncmp(want->value, "deepep", 6) != 0)
        contradict(completion, wish, EPO_OPT_DISPATCHER, older.name);
    return true;
}

/* Spellings of "no" that the wanted arguments do not mirror. */
static void check_opposites(const epo_program *program, const epo_wish *wish,
                            epo_completion *completion) {
    setting s;
    char text[160];
    for (size_t i = 1; i < program->words.count; i++) {
        size_t taken = read_setting(&program->words, i, &s);
        if (taken == 0)
            continue;
        describe(&s, text, sizeof text);
        bool no = s.value != NULL && s.value_length == 5 && strncasecmp(s.value, "false", 5) == 0;
        if (is_named(&s, "--no-overlap-moe-expert-parallel-comm") ||
            (is_named(&s, "--moe_a2a_overlap") && no))
            contradict(completion, wish, EPO_OPT_OVERLAP, text);
        if (is_named(&s, "--no-delay-wgrad-compute") && wish->delayed)
            contradict(completion, wish, EPO_OPT_DELAY_WGRAD, text);
        if (is_named(&s, "--delay-wgrad-compute") && !wish->delayed &&
            wish->given[EPO_OPT_DELAY_WGRAD])
            contradict(completion, wish, EPO_OPT_DELAY_WGRAD, text);
    }
}

epo_status epo_complete(const epo_program *program, const epo_wish *wish,
                        epo_completion *completion) {
    epo_words wanted = {0};
    const char *text = wish->arguments == NULL ? "" : wish->arguments;
    bool own_dispatcher = false;
    *completion = (epo_completion){0};
    epo_status status = epo_words_split(&wanted, text, strlen(text));
    for (size_t i = 0, taken; i < wanted.count && status == EPO_OK; i += taken > 0 ? taken : 1) {
        setting want, have;
        char given[160];
        taken = read_setting(&wanted, i, &want);
        if (taken == 0)
            continue;
        epo_option_id id = option_of(&want);
        if (!find_setting(&program->words, &want, &have)) {
            if ((!own_dispatcher || !belongs_to_flex(&want)) &&
                !named_deepep(program, wish, &want, completion))
                status = add_setting(completion, &want, is_flag(want.name));
            continue;
        }
        if (same_value(&want, &have))
            continue;
        describe(&have, given, sizeof given);
        if (id == EPO_OPT_OVERLAP || (id != EPO_OPT_COUNT && wish->given[id]) ||
            (is_wgrad(&want) && wish->delayed))
            contradict(completion, wish, id, given);
        own_dispatcher = own_dispatcher || is_dispatcher_type(&want);
    }
    if (status == EPO_OK)
        check_opposites(program, wish, completion);
    epo_words_free(&wanted);
    return status;
}

void epo_quote(struct epo_text *text, const char *word) {
    bool plain = word[0] != '\0';
    for (const char *c = word; *c != '\0'; c++)
        plain = plain && (isalnum((unsigned char)*c) || strchr("_-+./:,=@%", *c) != NULL);
    if (plain) {
        epo_text_add_string(text, word);
        return;
    }
    epo_text_add_string(text, "'");
    for (const char *c = word; *c != '\0'; c++) {
        if (*c == '\'')
            epo_text_add_string(text, "'\\''");
        else
            epo_text_add(text, c, 1);
    }
    epo_text_add_string(text, "'");
}

/* The shell's text with the words behind its command's last argument. */
static char *complete_text(const char *text, size_t end, const epo_words *added) {
    struct epo_text made = EPO_TEXT_INIT;
    epo_text_add(&made, text, end);
    for (size_t i = 0; i < added->count; i++) {
        epo_text_add_string(&made, " ");
        epo_quote(&made, added->word[i].text);
    }
    epo_text_add_string(&made, text + end);
    return epo_text_take(&made);
}

epo_status epo_complete_vector(char *const *arguments, int count, const epo_program *program,
                               const epo_completion *completion, char ***vector) {
    size_t extra = program->text == 0 ? completion->added.count : 0, at = 0;
    char **made = calloc((size_t)count + extra + 1, sizeof *made);
    bool whole = made != NULL;
    for (; whole && at < (size_t)count; at++) {
        made[at] = program->text != 0 && at == program->text
                       ? complete_text(arguments[at], program->end, &completion->added)
                       : strdup(arguments[at]);
        whole = made[at] != NULL;
    }
    for (size_t i = 0; whole && i < extra; i++, at++) {
        made[at] = strdup(completion->added.word[i].text);
        whole = made[at] != NULL;
    }
    if (!whole) {
        epo_vector_free(made);
        return epo_fail(EPO_E_NOMEM, "arguments: no memory for %zu words", (size_t)count + extra);
    }
    *vector = made;
    return EPO_OK;
}

void epo_vector_free(char **vector) {
    for (size_t i = 0; vector != NULL && vector[i] != NULL; i++)
        free(vector[i]);
    free(vector);
}

void epo_completion_free(epo_completion *completion) {
    if (completion != NULL)
        epo_words_free(&completion->added);
}
