/* SPDX-License-Identifier: Apache-2.0
 *
 * Chrome traces: PyTorch's profiler ("kernel", "gpu_memcpy", "gpu_memset") and our
 * own recordings, whose category is the class itself ("ep_comm", "gemm", ...), pid
 * the rank.  Read as a stream: memory does not grow with the file.
 */
#include "trace/chrome_event.h"
#include "trace/chrome_shape.h"

#include "core/status.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yajl/yajl_parse.h>

#define BLOCK 262144
#define EVENT_MAX 65536 /* bytes of an event that the fast way reads */
#define DEPTH_MAX 64
#define TOKEN_MAX (32u << 20) /* bytes of one string or number */
#define PROGRESS_STEP (64u << 20)

typedef enum where { AT_OTHER, AT_EVENT, AT_ARGS } where;

typedef struct chrome {
    const char *path;
    epo_profile *profile;
    yajl_handle parser;
    epo_chrome_shapes *shapes;
    int depth;        /* brackets open */
    int events_depth; /* of the array of events; 0: not inside */
    bool is_array;    /* the array is the whole file: its end may be missing */
    bool between;     /* the parser stands behind an event, before a comma or the end */
    bool plain;       /* options->plain */
    where where;
    bool to_events; /* the value to come is the array of events */
    bool in_report; /* inside the report of our recorder */
    bool to_line;   /* the value to come is its line */
    epo_chrome_key key;
    epo_chrome_event event;
    uint64_t events;
    uint64_t done, quiet_since; /* bytes read; at the last call from the parser */
    epo_status status;
} chrome;

static where where_now(const chrome *c) {
    if (c->events_depth == 0 || c->depth <= c->events_depth)
        return AT_OTHER;
    return c->depth == c->events_depth + 1   ? AT_EVENT
           : c->depth == c->events_depth + 2 ? c->where
                                             : AT_OTHER;
}

static epo_status end_event(chrome *c) {
    c->events++;
    return epo_chrome_event_end(&c->event, c->profile);
}

static int carry_on(chrome *c) {
    c->quiet_since = c->done;
    return c->status == EPO_OK;
}

static int on_other(void *context) { return carry_on(context); }
static int on_bool(void *context, int value) {
    (void)value;
    return carry_on(context);
}

static int on_number(void *context, const char *text, size_t length) {
    chrome *c = context;
    epo_chrome_event_number(&c->event, c->key, text, length);
    return carry_on(c);
}

static int on_string(void *context, const unsigned char *text, size_t length) {
    chrome *c = context;
    if (c->to_line)
        epo_profile_line(c->profile, (const char *)text, length);
    else
        epo_chrome_event_string(&c->event, c->key, (const char *)text, length);
    return carry_on(c);
}

static int on_key(void *context, const unsigned char *text, size_t length) {
    chrome *c = context;
    where at = where_now(c);
    c->to_events = c->depth == 1 && length == 11 && memcmp(text, "traceEvents", 11) == 0;
    if (c->depth == 1)
        c->in_report = length == 10 && memcmp(text, "ep_overlap", 10) == 0;
    c->to_line = c->in_report && c->depth == 2 && length == 4 && memcmp(text, "line", 4) == 0;
    c->key = at == AT_OTHER ? EPO_CHROME_OTHER
                            : epo_chrome_key_find(at == AT_ARGS, (const char *)text, length);
    return carry_on(c);
}

static bool deeper(chrome *c) {
    if (++c->depth <= DEPTH_MAX)
        return true;
    c->status = epo_fail(EPO_E_ARG, "%s: near byte %llu: nested deeper than %d levels", c->path,
                         (unsigned long long)c->done, DEPTH_MAX);
    return false;
}

/* A key belongs to the value behind it alone. */
static void after_bracket(chrome *c) {
    c->key = EPO_CHROME_OTHER;
    c->to_events = c->to_line = false;
}

static int on_object(void *context) {
    chrome *c = context;
    bool is_args = where_now(c) == AT_EVENT && c->key == EPO_CHROME_ARGS;
    if (!deeper(c))
        return 0;
    if (c->events_depth > 0 && c->depth == c->events_depth + 1)
        epo_chrome_event_clear(&c->event);
    if (c->events_depth > 0 && c->depth == c->events_depth + 2)
        c->where = is_args ? AT_ARGS : AT_OTHER;
    after_bracket(c);
    return carry_on(c);
}

static int on_object_end(void *context) {
    chrome *c = context;
    if (where_now(c) == AT_EVENT)
        c->status = end_event(c);
    c->depth--;
    c->between = c->events_depth > 0 && c->depth == c->events_depth;
    after_bracket(c);
    return carry_on(c);
}

static int on_array(void *context) {
    chrome *c = context;
    bool is_events = c->depth == 1 && c->to_events;
    if (c->depth == 0)
        c->is_array = is_events = true;
    if (!deeper(c))
        return 0;
    if (is_events)
        c->events_depth = c->depth;
    else if (c->events_depth > 0 && c->depth == c->events_depth + 2)
        c->where = AT_OTHER;
    after_bracket(c);
    return carry_on(c);
}

static int on_array_end(void *context) {
    chrome *c = context;
    if (c->depth == c->events_depth)
        c->events_depth = 0;
    c->depth--;
    after_bracket(c);
    return carry_on(c);
}

static const yajl_callbacks callbacks = {.yajl_null = on_other,
                                         .yajl_boolean = on_bool,
                                         .yajl_number = on_number,
                                         .yajl_string = on_string,
                                         .yajl_start_map = on_object,
                                         .yajl_map_key = on_key,
                                         .yajl_end_map = on_object_end,
                                         .yajl_start_array = on_array,
                                         .yajl_end_array = on_array_end};

/* One line of yajl's text, without its drawing of the place. */
static epo_status syntax_error(chrome *c) {
    unsigned char *text = yajl_get_error(c->parser, 0, NULL, 0);
    const char *line = text == NULL ? "?" : (const char *)text;
    uint64_t at = c->done + yajl_get_bytes_consumed(c->parser);
    epo_status status = epo_fail(EPO_E_ARG, "%s: byte %llu: not JSON: %.*s", c->path,
                                 (unsigned long long)at + 1, (int)strcspn(line, "\n"), line);
    if (text != NULL)
        yajl_free_error(c->parser, text);
    return status;
}

static epo_status feed(chrome *c, const char *text, size_t n) {
    yajl_status parsed = yajl_parse(c->parser, (const unsigned char *)text, n);
    if (c->status != EPO_OK)
        return c->status;
    if (parsed != yajl_status_ok)
        return syntax_error(c);
    c->done += n;
    if (c->done - c->quiet_since > TOKEN_MAX)
        return epo_fail(EPO_E_ARG, "%s: byte %llu: a value longer than %u MiB", c->path,
                        (unsigned long long)c->quiet_since + 1, TOKEN_MAX >> 20);
    return EPO_OK;
}

/* Events that need no parser.  It is not told of them: behind each it would stand where
 * it stands already. */
static epo_status skim(chrome *c, const char **at, const char *end) {
    epo_status status = EPO_OK;
    size_t n;
    while (status == EPO_OK && (n = epo_chrome_shapes_read(c->shapes, *at, end, &c->event)) > 0) {
        *at += n;
        c->done += n;
        c->quiet_since = c->done;
        status = end_event(c);
    }
    return status;
}

/* Reads what is there, `last`: all that will be.  What may be the beginning of an ordinary
 * event is left; *at tells. */
static epo_status read_block(chrome *c, const char **at, const char *end, bool last) {
    epo_status status = EPO_OK;
    while (status == EPO_OK && *at < end) {
        if (c->between && !c->plain) {
            status = skim(c, at, end);
            if (status != EPO_OK || (end - *at < EVENT_MAX && !last))
                return status;
        }
        /* One bracket a time: the parser cannot stop behind it by itself. */
        const char *bracket = memchr(*at, '}', (size_t)(end - *at));
        size_t n = (size_t)((bracket == NULL ? end : bracket + 1) - *at);
        c->between = false;
        status = feed(c, *at, n);
        *at += n;
    }
    return status;
}

static epo_status end_of_file(chrome *c) {
    if (yajl_complete_parse(c->parser) == yajl_status_ok || (c->is_array && c->depth == 1))
        return c->status;
    if (c->done == 0)
        return epo_fail(EPO_E_ARG, "%s: is empty", c->path);
    return epo_fail(EPO_E_ARG, "%s: cut off at byte %llu: %d brackets are open", c->path,
                    (unsigned long long)c->done, c->depth);
}

static epo_status read_all(chrome *c, int fd, char *block, const epo_profile_options *options) {
    struct stat s;
    size_t used = 0;
    ssize_t n = 1;
    uint64_t told = 0, total = fstat(fd, &s) == 0 && S_ISREG(s.st_mode) ? (uint64_t)s.st_size : 0;
    epo_status status = EPO_OK;
    while (status == EPO_OK && n != 0) {
        n = read(fd, block + used, BLOCK - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return epo_fail(EPO_E_SYSTEM, "%s: cannot be read at byte %llu: %s", c->path,
                            (unsigned long long)(c->done + used) + 1, strerror(errno));
        const char *at = block;
        used += (size_t)n;
        if (c->done == 0 && used >= 3 && memcmp(block, "\xEF\xBB\xBF", 3) == 0) {
            at += 3; /* the mark of UTF-8, as editors on Windows put it in front */
            c->done = 3;
        }
        status = read_block(c, &at, block + used, n == 0);
        used -= (size_t)(at - block);
        memmove(block, at, used);
        if (options->progress != NULL && c->done - told >= PROGRESS_STEP) {
            told = c->done;
            options->progress(options->progress_context, c->done, total);
        }
    }
    return status == EPO_OK ? end_of_file(c) : status;
}

static epo_status prepare(chrome *c, const char *path, const epo_profile_options *options) {
    c->path = strcmp(path, "-") == 0 ? "standard input" : path;
    c->plain = options->plain;
    c->parser = yajl_alloc(&callbacks, NULL, c);
    c->shapes = epo_chrome_shapes_create();
    if (c->parser == NULL || c->shapes == NULL)
        return epo_fail(EPO_E_NOMEM, "%s: no memory", path);
    yajl_config(c->parser, yajl_dont_validate_strings, 1);
    return epo_profile_create(options, EPO_PROFILE_CHROME, &c->profile);
}

/* Our recorder writes a file that says why it has none. */
static epo_status without_events(const chrome *c) {
    const epo_profile_facts facts = epo_profile_tell(c->profile);
    if (facts.line[0] != '\0')
        return epo_fail(EPO_E_ARG, "%s: holds no trace: %s", c->path, facts.line);
    return epo_fail(EPO_E_ARG, "%s: JSON without trace events", c->path);
}

epo_status epo_profile_read_chrome(const char *path, const epo_profile_options *options,
                                   epo_profile **out) {
    chrome *c = calloc(1, sizeof *c);
    char *block = malloc(BLOCK);
    int fd = strcmp(path, "-") == 0 ? dup(STDIN_FILENO) : open(path, O_RDONLY | O_CLOEXEC);
    epo_status status = EPO_OK;
    if (fd < 0)
        status = epo_fail(EPO_E_SYSTEM, "%s: cannot be opened: %s", path, strerror(errno));
    else if (c == NULL || block == NULL)
        status = epo_fail(EPO_E_NOMEM, "%s: no memory", path);
    if (status == EPO_OK)
        status = prepare(c, path, options);
    if (status == EPO_OK)
        status = read_all(c, fd, block, options);
    if (status == EPO_OK && c->events == 0)
        status = without_events(c);
    if (status == EPO_OK)
        status = epo_profile_finish(c->profile);
    if (status == EPO_OK)
        *out = c->profile;
    else if (c != NULL)
        epo_profile_destroy(c->profile);
    if (fd >= 0)
        close(fd);
    if (c != NULL && c->parser != NULL)
        yajl_free(c->parser);
    if (c != NULL)
        epo_chrome_shapes_destroy(c->shapes);
    free(block);
    free(c);
    return status;
}
