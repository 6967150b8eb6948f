/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/log.h"

#include "core/status.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUMBER_MAX 1000000000000000 /* of an iteration: sums of two still fit */

epo_log *epo_log_create(void) {
    epo_log *log = calloc(1, sizeof *log);
    if (log != NULL)
        log->peak_allocated = log->peak_reserved = NAN;
    return log;
}

void epo_log_destroy(epo_log *log) {
    if (log == NULL)
        return;
    free(log->iteration);
    free(log->step_time);
    free(log->step_tflops);
    free(log);
}

static const char *skip_blanks(const char *at) {
    while (isspace((unsigned char)*at))
        at++;
    return at;
}

/* "iteration   12/   50": its two numbers and where it ends; NULL: not in `line`. */
static const char *find_iteration(const char *line, int64_t *number, int64_t *planned) {
    for (const char *at = line; (at = strstr(at, "iteration")) != NULL; at += 9) {
        char *end;
        const char *digits = skip_blanks(at + 9);
        if (!isdigit((unsigned char)*digits) || digits == at + 9)
            continue;
        long long n = strtoll(digits, &end, 10);
        const char *slash = skip_blanks(end);
        if (*slash != '/')
            continue;
        slash = skip_blanks(slash + 1);
        long long m = strtoll(slash, &end, 10);
        if (end == slash || n < 0 || m < 0 || n > NUMBER_MAX || m > NUMBER_MAX)
            continue;
        *number = n;
        *planned = m;
        return end;
    }
    return NULL;
}

static epo_iteration no_iteration(int64_t number, uint64_t line) {
    return (epo_iteration){.number = number,
                           .line = line,
                           .time_ms = NAN,
                           .tflops = NAN,
                           .tokens = NAN,
                           .loss = NAN,
                           .grad_norm = NAN,
                           .batch = NAN,
                           .skipped = NAN,
                           .nans = NAN,
                           .no_loss = true};
}

/* One "name: value" between bars; the last colon before the value parts them, so
 * that timestamps before the first field do not matter. */
static bool take_field(const char *from, size_t length, epo_iteration *it, epo_log *log) {
    char text[512];
    if (length == 0 || length >= sizeof text)
        return false;
    memcpy(text, from, length);
    text[length] = '\0';
    char *colon = strrchr(text, ':');
    if (colon == NULL)
        return false;
    *colon = '\0';
    const char *name = skip_blanks(text);
    size_t n = strlen(name);
    while (n > 0 && isspace((unsigned char)name[n - 1]))
        n--;
    bool had_loss = !isnan(it->loss);
    bool known = epo_log_field(name, n, skip_blanks(colon + 1), it, log);
    if (known && !had_loss && !isnan(it->loss))
        it->no_loss = false;
    return known;
}

static size_t take_fields(const char *line, epo_iteration *it, epo_log *log) {
    size_t known = 0;
    for (const char *at = line; *at != '\0';) {
        size_t length = strcspn(at, "|");
        known += take_field(at, length, it, log);
        at += length + (at[length] == '|');
    }
    return known;
}

static epo_status append(epo_log *log, const epo_iteration *it) {
    if (log->count == EPO_LOG_ITERATIONS_MAX)
        return epo_fail(
            EPO_E_OVERFLOW,
            "line %llu: more than %d iterations, which is all that is read; cut the log",
            (unsigned long long)it->line, EPO_LOG_ITERATIONS_MAX);
    if (log->count == log->room) {
        size_t room = log->room == 0 ? 256 : log->room * 2;
        epo_iteration *grown = reallocarray(log->iteration, room, sizeof *grown);
        if (grown == NULL)
            return epo_fail(EPO_E_NOMEM, "log: no memory for %zu iterations", room);
        log->iteration = grown;
        log->room = room;
    }
    log->iteration[log->count++] = *it;
    return EPO_OK;
}

/* Fields that the first print of an iteration lacks. */
static void fill_in(epo_iteration *into, const epo_iteration *from) {
    double *const to[] = {&into->time_ms,   &into->tflops, &into->tokens,  &into->loss,
                          &into->grad_norm, &into->batch,  &into->skipped, &into->nans};
    const double given[] = {from->time_ms,   from->tflops, from->tokens,  from->loss,
                            from->grad_norm, from->batch,  from->skipped, from->nans};
    for (size_t i = 0; i < sizeof to / sizeof *to; i++)
        if (isnan(*to[i]))
            *to[i] = given[i];
    into->no_loss = into->no_loss && from->no_loss;
}

/* "3: ", "[rank3]:" or "[3]" in front tells one rank's lines from another's; a date does not. */
static uint32_t rank_of(const char *line) {
    uint32_t hash = 2166136261u;
    const char *at = skip_blanks(line), *digits;
    char close = *at == '[' ? ']' : ':';
    at += *at == '[';
    const char *start = at;
    while (isalpha((unsigned char)*at))
        at++;
    for (digits = at; isdigit((unsigned char)*at);)
        at++;
    if (at == digits || *at != close || isdigit((unsigned char)at[1]))
        return 0;
    for (; start < at; start++)
        hash = (hash ^ (unsigned char)*start) * 16777619u;
    return hash;
}

/* The iteration `number`, NULL if there is none. */
static epo_iteration *find_number(epo_log *log, int64_t number) {
    size_t low = 0, high = log->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (log->iteration[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low < log->count && log->iteration[low].number == number ? &log->iteration[low] : NULL;
}

/* A run goes on from its checkpoint: what is read from here on counts, and what it ended with
 * before is overcome. */
static epo_status restart(epo_log *log, const epo_iteration *it) {
    epo_iteration first = *it;
    first.restarts = true;
    log->restarts++;
    log->failure_line = 0;
    while (log->count > 0 && log->iteration[log->count - 1].number >= it->number)
        log->count--;
    return append(log, &first);
}

/* The same number again is another rank's print, so is a smaller one of another rank; else that
 * is a restart. */
static epo_status add(epo_log *log, const epo_iteration *it) {
    epo_iteration *last = log->count > 0 ? &log->iteration[log->count - 1] : NULL;
    if (last != NULL && it->number == last->number) {
        fill_in(last, it);
        log->duplicates++;
        return EPO_OK;
    }
    if (last == NULL || it->number > last->number)
        return append(log, it);
    epo_iteration *known = find_number(log, it->number);
    if (known == NULL || known->rank == it->rank || known->rank == 0 || it->rank == 0)
        return restart(log, it);
    fill_in(known, it);
    log->duplicates++;
    return EPO_OK;
}

static void guess_kind(epo_log *log, const char *line) {
    if (log->kind != EPO_LOG_UNKNOWN && log->kind != EPO_LOG_MEGATRON_LM)
        return;
    if (strstr(line, "train_step_timing") != NULL || strstr(line, "reduced_train_loss") != NULL)
        log->kind = EPO_LOG_NEMO;
    else if (strncmp(epo_line_payload(line), "ep-train: ", 10) == 0)
        log->kind = EPO_LOG_EP_TRAIN;
    else if (log->dump.kind == EPO_DUMP_BRIDGE || strstr(line, "Step Time :") != NULL)
        log->kind = EPO_LOG_BRIDGE;
}

static epo_status feed_iteration(epo_log *log, const char *line, uint64_t number) {
    int64_t n, planned;
    const char *behind = find_iteration(line, &n, &planned);
    if (behind == NULL)
        return EPO_OK;
    epo_iteration it = no_iteration(n, number);
    it.rank = rank_of(line);
    /* fields may stand before the iteration too: blank it out by reading both sides */
    size_t known = take_fields(behind, &it, log);
    const char *word = strstr(line, "iteration");
    char before[512];
    if (word != NULL && word > line && (size_t)(word - line) < sizeof before) {
        snprintf(before, sizeof before, "%.*s", (int)(word - line), line);
        known += strchr(before, '|') != NULL ? take_fields(before, &it, log) : 0;
    }
    if (known == 0)
        return EPO_OK; /* "saved at iteration 10/ 50" and the like */
    if (log->comma[0] != '\0')
        return epo_fail(
            EPO_E_ARG,
            "line %llu: \"%s\" has a comma for its point, and points are read: run the "
            "program with LC_ALL=C, or put points in (sed -E 's/([0-9]),([0-9])/\\1.\\2/g')",
            (unsigned long long)number, log->comma);
    if (planned > log->planned)
        log->planned = planned;
    if (log->kind == EPO_LOG_UNKNOWN)
        log->kind = EPO_LOG_MEGATRON_LM;
    return add(log, &it);
}

static epo_status feed_titan(epo_log *log, const char *line, uint64_t number) {
    epo_iteration it = no_iteration(0, number);
    it.rank = rank_of(line);
    if (!epo_log_titan(line, &it, log))
        return EPO_OK;
    if (log->kind == EPO_LOG_UNKNOWN)
        log->kind = EPO_LOG_TORCHTITAN;
    return add(log, &it);
}

static double number_behind(const char *line, const char *label) {
    const char *at = strstr(line, label);
    char *end;
    if (at == NULL)
        return NAN;
    at = skip_blanks(at + strlen(label));
    double number = strtod(at, &end);
    return end == at ? NAN : number;
}

static epo_status feed_step_time(epo_log *log, const char *line) {
    double seconds = number_behind(line, "Step Time :");
    if (isnan(seconds))
        return EPO_OK;
    if (log->step_count == EPO_LOG_ITERATIONS_MAX)
        return EPO_OK;
    if (log->step_count == log->step_room) {
        size_t room = log->step_room == 0 ? 256 : log->step_room * 2;
        double *times = reallocarray(log->step_time, room, sizeof *times);
        log->step_time = times != NULL ? times : log->step_time;
        double *flops = reallocarray(log->step_tflops, room, sizeof *flops);
        log->step_tflops = flops != NULL ? flops : log->step_tflops;
        if (times == NULL || flops == NULL)
            return epo_fail(EPO_E_NOMEM, "log: no memory for %zu steps", room);
        log->step_room = room;
    }
    log->step_time[log->step_count] = seconds * 1000;
    log->step_tflops[log->step_count++] = number_behind(line, "GPU utilization:");
    return EPO_OK;
}

/* Every occurrence: lines of several ranks may have run into one. */
static void feed_memory_label(const char *line, const char *label, double unit, double *peak) {
    for (const char *at = line; (at = strstr(at, label)) != NULL; at += strlen(label)) {
        char *end;
        const char *value = skip_blanks(at + strlen(label));
        double number = strtod(value, &end);
        double bytes = number * unit;
        if (end != value && isfinite(bytes) && bytes >= 0 && !(*peak >= bytes))
            *peak = bytes;
    }
}

/* Bridge: 1e9 bytes.  Megatron-LM's "MB" are 1024 * 1024 bytes, ep-train's are 1e6. */
static void feed_memory(epo_log *log, const char *line) {
    if (log->kind == EPO_LOG_EP_TRAIN && strstr(line, " MB  of the library at most") != NULL) {
        feed_memory_label(line, "  memory ", 1e6, &log->peak_allocated);
        const char *gpu = strstr(line, " MB in use on its GPU"); /* else the process's */
        feed_memory_label(line, gpu != NULL ? " MB; " : "; the process ", 1e6, &log->peak_reserved);
    }
    feed_memory_label(line, "mem-max-allocated-gigabytes:", 1e9, &log->peak_allocated);
    feed_memory_label(line, "mem-max-reserved-gigabytes:", 1e9, &log->peak_reserved);
    if (strstr(line, "memory (MB)") == NULL)
        return;
    feed_memory_label(line, "max allocated:", 1048576, &log->peak_allocated);
    feed_memory_label(line, "max reserved:", 1048576, &log->peak_reserved);
}

static void add_event(epo_log *log, epo_event_kind kind, uint64_t number) {
    if (log->events == EPO_LOG_EVENTS_MAX)
        return;
    int64_t after = log->count > 0 ? log->iteration[log->count - 1].number : 0;
    log->event[log->events++] = (epo_log_event){kind, after, number};
}

static void feed_events(epo_log *log, const char *line, uint64_t number) {
    static const struct {
        const char *text;
        epo_event_kind kind;
    } marks[] = {{"saving checkpoint at iteration", EPO_EVENT_SAVE},
                 {"validation loss at iteration", EPO_EVENT_EVALUATION},
                 {"Evaluating on", EPO_EVENT_EVALUATION},
                 {"Capture range started", EPO_EVENT_PROFILER},
                 {"cudaProfilerStart", EPO_EVENT_PROFILER},
                 {"nsys profile", EPO_EVENT_PROFILER},
                 {"Collecting data...", EPO_EVENT_PROFILER}};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        if (strstr(line, marks[i].text) != NULL) {
            add_event(log, marks[i].kind, number);
            return;
        }
}

static void feed_failure(epo_log *log, const char *line, uint64_t number) {
    static const char *const marks[] = {"Traceback (most recent call last)",
                                        "CUDA out of memory",
                                        "OutOfMemoryError",
                                        "Watchdog caught collective operation timeout",
                                        "srun: error:",
                                        "slurmstepd: error:",
                                        "Segmentation fault",
                                        "ep-overlap: this step is refused",
                                        "CUDA error:"};
    if (log->failure_line != 0)
        return;
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        if (strstr(line, marks[i]) != NULL) {
            log->failure_line = number;
            snprintf(log->failure, sizeof log->failure, "%.150s",
                     skip_blanks(epo_line_payload(line)));
            return;
        }
}

/* "host engine, 4 ranks, emulated link ..."; "chunks chosen by the engine" may stand before. */
static const char *engine_and_ranks(const char *at) {
    const char *engine = NULL, *next = strstr(at, " engine, ");
    for (; next != NULL; next = strstr(next + 1, " engine, "))
        engine = next;
    while (engine != NULL && engine > at && engine[-1] != ' ')
        engine--; /* its name */
    return engine;
}

/* ep-train: overlap on, dispatcher flex, weight gradients delayed, 4 chunks, host engine, 4 ranks
 * ep-train: 2 layers, ... ; seed 1 */
static epo_status feed_ep_train(const char *line, uint64_t number, epo_dump_setting *setting,
                                void *context) {
    const char *at = epo_line_payload(line);
    char word[32];
    epo_status status = EPO_OK;
    if (strncmp(at, "ep-train: ", 10) != 0 || setting == NULL)
        return EPO_OK;
    at += 10;
    if (strstr(at, "; seed ") != NULL && isdigit((unsigned char)*at))
        return setting(context, "ep_train_model", at, number);
    if (strncmp(at, "overlap is ", 11) == 0 || sscanf(at, "overlap %31[a-z],", word) != 1)
        return EPO_OK;
    status = setting(context, "overlap_moe_expert_parallel_comm",
                     strcmp(word, "on") == 0 ? "true" : "false", number);
    const char *dispatcher = strstr(at, "dispatcher ");
    if (status == EPO_OK && dispatcher != NULL &&
        sscanf(dispatcher, "dispatcher %31[a-z]", word) == 1)
        status = setting(context, "moe_token_dispatcher_type", word, number);
    if (status == EPO_OK)
        status = setting(context, "delay_wgrad_compute",
                         strstr(at, "weight gradients delayed") != NULL ? "true" : "false", number);
    const char *ranks = engine_and_ranks(at);
    if (status == EPO_OK && ranks != NULL)
        status = setting(context, "ep_train_ranks", ranks, number);
    return status;
}

static epo_status no_setting(void *context, const char *path, const char *value, uint64_t line) {
    (void)context, (void)path, (void)value, (void)line;
    return EPO_OK;
}

epo_status epo_log_feed(epo_log *log, const char *line, uint64_t number, epo_dump_setting *setting,
                        void *context) {
    setting = setting == NULL ? no_setting : setting;
    log->lines++;
    if (line[0] == '\0')
        return EPO_OK;
    epo_status status = epo_dump_feed(&log->dump, line, number, setting, context);
    guess_kind(log, line);
    if (status == EPO_OK && log->kind == EPO_LOG_EP_TRAIN)
        status = feed_ep_train(line, number, setting, context);
    if (status == EPO_OK && !log->dump.inside)
        status = feed_iteration(log, line, number);
    if (status == EPO_OK && (log->kind == EPO_LOG_UNKNOWN || log->kind == EPO_LOG_TORCHTITAN))
        status = feed_titan(log, line, number);
    if (status == EPO_OK)
        status = feed_step_time(log, line);
    feed_memory(log, line);
    feed_events(log, line, number);
    feed_failure(log, line, number);
    return status;
}

/* Bridge's rank 0 prints "Step Time", its last rank the iteration line: the
 * k-th of one belongs to the k-th of the other. */
static void match_step_times(epo_log *log) {
    if (log->count == 0)
        for (size_t i = 0; i < log->step_count; i++) {
            epo_iteration it = no_iteration((int64_t)i + 1, 0);
            if (append(log, &it) != EPO_OK)
                return;
        }
    if (log->count != log->step_count)
        return;
    for (size_t i = 0; i < log->count; i++) {
        epo_iteration *it = &log->iteration[i];
        it->time_ms = isnan(it->time_ms) ? log->step_time[i] : it->time_ms;
        it->tflops = isnan(it->tflops) ? log->step_tflops[i] : it->tflops;
    }
}

void epo_log_finish(epo_log *log) {
    match_step_times(log);
    for (size_t i = 0; i < log->count; i++) {
        log->has_loss = log->has_loss || !log->iteration[i].no_loss;
        if (i > 0) {
            int64_t step = log->iteration[i].number - log->iteration[i - 1].number;
            log->interval = log->interval == 0 || step < log->interval ? step : log->interval;
        }
    }
}

epo_status epo_log_read(const char *path, epo_progress *progress, void *progress_context,
                        epo_dump_setting *setting, void *context, epo_log **out) {
    epo_lines *lines = NULL;
    epo_log *log = epo_log_create();
    epo_status status =
        log == NULL
            ? epo_fail(EPO_E_NOMEM, "%s: no memory to read it", epo_lines_name(path))
            : epo_lines_open(path, epo_lines_name(path), progress, progress_context, &lines);
    size_t length;
    for (const char *line; status == EPO_OK && (line = epo_lines_next(lines, &length)) != NULL;) {
        status = epo_log_feed(log, line, epo_lines_number(lines), setting, context);
        log->cut_lines += length == EPO_LINE_MAX;
        log->bytes = epo_lines_offset(lines) + length;
    }
    if (status == EPO_OK)
        status = epo_lines_status(lines);
    epo_lines_close(lines);
    if (status != EPO_OK) {
        epo_log_destroy(log);
        return epo_lines_fail(status, path);
    }
    epo_log_finish(log);
    *out = log;
    return EPO_OK;
}

const char *epo_log_kind_name(epo_log_kind kind) {
    static const char *const names[] = {"unknown", "Megatron-LM", "Megatron-Bridge",
                                        "NeMo",    "ep-train",    "torchtitan"};
    return names[kind];
}
