/* SPDX-License-Identifier: Apache-2.0 */
#include "input.h"

#include "core/scratch.h"
#include "core/status.h"
#include "rules/command.h"
#include "rules/rules.h"
#include "rules/settings.h"
#include "tool.h"
#include "trace/config_dump.h"
#include "trace/lines.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SCRIPT_MAX (16u << 20) /* bytes of a job script */

typedef struct dump_context {
    const char *name;
    epo_facts *facts;
    size_t settings;
} dump_context;

static epo_status put_dumped(void *context, const char *path, const char *value, uint64_t line) {
    dump_context *c = context;
    char source[300];
    bool known;
    snprintf(source, sizeof source, "%.200s:%llu", c->name, (unsigned long long)line);
    epo_status status = epo_setting_put(c->facts, path, value, source, &known);
    c->settings += status == EPO_OK && known;
    return status;
}

static const char *extension(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *dot = strrchr(slash == NULL ? path : slash, '.');
    return dot == NULL ? "" : dot + 1;
}

static bool is_one_of(const char *text, const char *const *words) {
    for (; *words != NULL; words++)
        if (strcmp(text, *words) == 0)
            return true;
    return false;
}

static bool looks_like_yaml(const char *line) {
    size_t n = 0;
    while (isalnum((unsigned char)line[n]) || line[n] == '_')
        n++;
    return isalpha((unsigned char)line[0]) && line[n] == ':' &&
           (line[n + 1] == '\0' || line[n + 1] == ' ');
}

typedef enum guess { GUESS_NONE, GUESS_SCRIPT, GUESS_YAML } guess;

/* Reads until a dump ends, or to the end; fills facts only from a dump. */
static epo_status scan(const char *path, const char *name, dump_context *context, epo_dump *dump,
                       guess *first) {
    epo_lines *lines = NULL;
    epo_status status = epo_lines_open(path, name, epo_tool_progress, (void *)name, &lines);
    bool begun = false;
    for (const char *line; status == EPO_OK && (line = epo_lines_next(lines, NULL)) != NULL;) {
        if (!begun && line[0] != '\0' && (line[0] != '#' || line[1] == '!')) {
            begun = true;
            *first = strncmp(line, "#!", 2) == 0 ? GUESS_SCRIPT
                     : looks_like_yaml(line)     ? GUESS_YAML
                                                 : GUESS_NONE;
        }
        status = epo_dump_feed(dump, line, epo_lines_number(lines), put_dumped, context);
        if (dump->complete || *first == GUESS_SCRIPT)
            break;
    }
    if (status == EPO_OK)
        status = epo_lines_status(lines);
    epo_tool_progress_end();
    epo_lines_close(lines);
    return status;
}

static epo_status read_all(const char *path, const char *name, char **text, size_t *length) {
    FILE *file = fopen(path, "re");
    char *buffer = malloc(SCRIPT_MAX);
    epo_status status = EPO_OK;
    size_t n = 0;
    if (file == NULL)
        status = epo_fail(EPO_E_SYSTEM, "%s: cannot be opened: %s", name, strerror(errno));
    else if (buffer == NULL)
        status = epo_fail(EPO_E_NOMEM, "%s: no memory to read it", name);
    else if ((n = fread(buffer, 1, SCRIPT_MAX, file)) == SCRIPT_MAX)
        status = epo_fail(EPO_E_OVERFLOW,
                          "%s: more than %u MiB without a configuration dump; a log "
                          "must hold the framework's, a script is smaller",
                          name, SCRIPT_MAX >> 20);
    else if (ferror(file))
        status = epo_fail(EPO_E_SYSTEM, "%s: cannot be read: %s", name, strerror(errno));
    else
        status = epo_lines_refuse(name, buffer, n);
    if (file != NULL)
        fclose(file);
    if (status != EPO_OK) {
        free(buffer);
        return status;
    }
    *text = buffer;
    *length = n;
    return EPO_OK;
}

static bool takes_settings_from_elsewhere(const epo_words *words) {
    static const char *const flags[] = {"--yaml-cfg", "--use-checkpoint-args",
                                        "--use-mp-args-from-checkpoint-args", NULL};
    for (size_t i = 0; i < words->count; i++)
        if (is_one_of(words->word[i].text, flags))
            return true;
    return false;
}

static epo_status read_words(const epo_words *words, const char *name, bool is_script,
                             epo_facts *facts, epo_input *input) {
    epo_command command = {0};
    epo_status status = epo_command_read(words, name, is_script, facts, &command);
    input->settings = command.settings;
    input->megatron_lm = command.framework == EPO_FRAMEWORK_MEGATRON_LM;
    input->defaults_unknown = takes_settings_from_elsewhere(words) || command.open_arguments;
    input->open_line = command.open_arguments ? command.open_line : 0;
    input->step_lacks = command.step_lacks;
    memcpy(input->uncalled, words->uncalled, sizeof input->uncalled);
    input->uncalled_line = words->uncalled_line;
    input->source_line = words->source_line;
    input->cut_line = words->cut_line;
    return status;
}

static bool has_dos_ends(const char *text, size_t length) {
    const char *end = memchr(text, '\n', length);
    return end != NULL && end > text && end[-1] == '\r';
}

static epo_status read_script(const char *path, const char *name, epo_facts *facts,
                              epo_input *input) {
    char *text = NULL;
    size_t length = 0;
    epo_words words = {0};
    epo_status status = read_all(path, name, &text, &length);
    if (status == EPO_OK && has_dos_ends(text, length))
        status = epo_fail(EPO_E_ARG,
                          "%s:1: ends in CR LF, as on DOS: sbatch and bash refuse such a script "
                          "(sed -i 's/\\r$//' FILE)",
                          name);
    if (status == EPO_OK)
        status = epo_lines_fail(epo_words_split(&words, text, length), name);
    if (status == EPO_OK)
        status = read_words(&words, name, true, facts, input);
    epo_words_free(&words);
    free(text);
    return status;
}

static epo_status read_yaml(const char *path, const char *name, epo_facts *facts,
                            epo_input *input) {
    epo_recipe recipe = {0};
    size_t settings = 0;
    epo_status status = epo_input_yaml(path, name, facts, &settings, &recipe);
    if (status == EPO_OK && recipe.words.count > 0)
        status = read_words(&recipe.words, name, false, facts, input);
    input->settings += settings;
    epo_words_free(&recipe.words);
    return status;
}

static epo_status finish_dump(const epo_dump *dump, epo_facts *facts, epo_input *input) {
    bool bridge = dump->kind == EPO_DUMP_BRIDGE;
    const epo_fact *type = epo_facts_find(facts, "moe_token_dispatcher_type");
    input->kind = bridge ? EPO_INPUT_LOG_BRIDGE : EPO_INPUT_LOG_MEGATRON_LM;
    input->defaults_unknown = !dump->complete;
    epo_status status = epo_facts_set(facts, "framework", bridge ? "bridge" : "megatron-lm",
                                      "the configuration dump");
    if (status == EPO_OK && bridge && type != NULL)
        status = epo_facts_set(
            facts, "run.backend_line_missing",
            epo_facts_find(facts, "moe_flex_dispatcher_backend") == NULL ? "true" : "false",
            "the configuration dump");
    return status;
}

static epo_status read_file(const char *path, const char *name, epo_facts *facts,
                            epo_input *input) {
    static const char *const yaml[] = {"yaml", "yml", NULL};
    static const char *const script[] = {"sh", "bash", "sbatch", "slurm", "job", NULL};
    dump_context context = {.name = name, .facts = facts};
    epo_dump dump = {0};
    guess kind = is_one_of(extension(name), yaml)     ? GUESS_YAML
                 : is_one_of(extension(name), script) ? GUESS_SCRIPT
                                                      : GUESS_NONE;
    epo_status status = kind == GUESS_NONE ? scan(path, name, &context, &dump, &kind) : EPO_OK;
    if (status != EPO_OK)
        return status;
    if (dump.kind != EPO_DUMP_NONE) {
        input->settings = context.settings;
        return finish_dump(&dump, facts, input);
    }
    input->kind = kind == GUESS_YAML ? EPO_INPUT_YAML : EPO_INPUT_SCRIPT;
    return kind == GUESS_YAML ? read_yaml(path, name, facts, input)
                              : read_script(path, name, facts, input);
}

/* Standard input can be read once only: it becomes a file without a name. */
static epo_status spool(char *path, size_t size, FILE **copy) {
    char block[65536];
    FILE *file = epo_scratch_open();
    bool fine = file != NULL;
    for (size_t n; fine && (n = fread(block, 1, sizeof block, stdin)) > 0;)
        fine = fwrite(block, 1, n, file) == n;
    if (!fine || ferror(stdin) || fflush(file) != 0) {
        if (file != NULL)
            fclose(file);
        return epo_fail(EPO_E_SYSTEM,
                        "standard input: cannot be kept in a temporary file: %s; let TMPDIR name a "
                        "folder with room",
                        strerror(errno));
    }
    snprintf(path, size, "/dev/fd/%d", fileno(file));
    *copy = file;
    return EPO_OK;
}

epo_status epo_input_file(const char *path, epo_facts *facts, epo_input *input) {
    epo_input made = {.name = epo_tool_shown(path)};
    char spooled[32];
    FILE *copy = NULL;
    bool from_stdin = strcmp(path, "-") == 0;
    if (from_stdin)
        made.name = "standard input";
    epo_status status = from_stdin ? spool(spooled, sizeof spooled, &copy) : EPO_OK;
    if (status == EPO_OK)
        status = read_file(from_stdin ? spooled : path, made.name, facts, &made);
    if (copy != NULL)
        fclose(copy);
    if (status == EPO_OK)
        *input = made;
    return status;
}

epo_status epo_input_command(int argc, char **argv, epo_facts *facts, epo_input *input) {
    epo_words words = {0};
    epo_input made = {.name = "the command", .kind = EPO_INPUT_COMMAND};
    epo_status status = EPO_OK;
    for (int i = 0; i < argc && status == EPO_OK; i++)
        status = epo_words_add(&words, argv[i], 0, false, i == 0);
    if (status == EPO_OK)
        status = read_words(&words, NULL, false, facts, &made);
    epo_words_free(&words);
    if (status == EPO_OK)
        *input = made;
    return status;
}

typedef struct environment_visit {
    epo_facts *facts;
    epo_status status;
} environment_visit;

static void visit_name(const char *name, size_t length, void *context) {
    environment_visit *v = context;
    char key[128];
    if (v->status != EPO_OK || length >= sizeof key || strncmp(name, "env.", 4) != 0)
        return;
    memcpy(key, name, length);
    key[length] = '\0';
    if (epo_facts_find(v->facts, key) == NULL)
        v->status = epo_facts_set_text(v->facts, key, getenv(key + 4), "environment");
}

epo_status epo_input_environment(epo_facts *facts) {
    environment_visit v = {.facts = facts};
    for (size_t i = 0; i < epo_rules_count(); i++)
        epo_condition_names(epo_rules_at(i)->condition, visit_name, &v);
    return v.status;
}

const char *epo_input_kind_name(epo_input_kind kind) {
    static const char *const names[] = {"command", "job script", "YAML configuration",
                                        "log with Megatron-LM's arguments",
                                        "log with Bridge's configuration summary"};
    return names[kind];
}
