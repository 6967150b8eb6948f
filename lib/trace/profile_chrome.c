/* SPDX-License-Identifier: Apache-2.0
 *
 * Chrome traces: PyTorch's profiler ("kernel", "gpu_memcpy", "gpu_memset") and our
 * own recordings, whose category is the class itself ("ep_comm", "gemm", ...), pid
 * the rank.  Read as a stream: memory does not grow with the file.
 */
#include "trace/profile.h"

#include "core/status.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yajl/yajl_parse.h>

#define BLOCK 262144
#define DEPTH_MAX 64
#define TOKEN_MAX (32u << 20) /* bytes of one string or number */
#define TEXT_MAX 4096
#define PROGRESS_STEP (64u << 20)

typedef enum where { AT_OTHER, AT_EVENT, AT_ARGS } where;

typedef enum key {
    KEY_OTHER,
    KEY_EVENTS,
    KEY_PH,
    KEY_CAT,
    KEY_NAME,
    KEY_TS,
    KEY_DUR,
    KEY_PID,
    KEY_ARGS,
    KEY_DEVICE,
    KEY_STREAM
} key;

typedef struct event {
    char name[TEXT_MAX], cat[64];
    bool complete, has_start, has_length, has_device, has_stream, has_pid;
    int64_t start, length; /* ns */
    int64_t pid, device, stream;
} event;

typedef struct chrome {
    const char *path;
    epo_profile *profile;
    int depth;        /* brackets open */
    int events_depth; /* of the array of events; 0: not inside */
    bool is_array;    /* the array is the whole file: its end may be missing */
    where where;
    key key;
    event event;
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

/* Microseconds with decimals to nanoseconds, exactly: 1.7e15 us do not fit a double. */
static bool parse_microseconds(const char *text, size_t length, int64_t *ns) {
    bool negative = length > 0 && text[0] == '-';
    size_t i = negative;
    int64_t whole = 0, fraction = 0;
    for (; i < length && isdigit((unsigned char)text[i]); i++)
        if (whole > (INT64_MAX / 1000 - 9) / 10)
            return false;
        else
            whole = whole * 10 + (text[i] - '0');
    if (i < length && text[i] == '.') {
        int64_t scale = 100;
        for (i++; i < length && isdigit((unsigned char)text[i]); i++, scale /= 10)
            fraction += (text[i] - '0') * scale;
    }
    if (i < length) { /* an exponent */
        char copy[64], *end;
        if (length >= sizeof copy)
            return false;
        memcpy(copy, text, length);
        copy[length] = '\0';
        double value = strtod(copy, &end) * 1000;
        if (*end != '\0' || !(fabs(value) < 9e18))
            return false;
        *ns = (int64_t)value;
        return true;
    }
    whole = whole * 1000 + fraction;
    *ns = negative ? -whole : whole;
    return true;
}

static bool parse_integer(const char *text, size_t length, int64_t *out) {
    char copy[32], *end;
    if (length == 0 || length >= sizeof copy)
        return false;
    memcpy(copy, text, length);
    copy[length] = '\0';
    errno = 0;
    long long value = strtoll(copy, &end, 10);
    *out = value;
    return errno == 0 && *end == '\0';
}

/* "Memcpy PtoP (Device -> Device)" */
static epo_copy_kind copy_kind(const char *name) {
    if (strstr(name, "PtoP") != NULL || strstr(name, "Peer") != NULL)
        return EPO_COPY_PEER;
    if (strstr(name, "DtoD") != NULL)
        return EPO_COPY_LOCAL;
    static const char *const host[] = {"HtoD", "DtoH", "HtoH", "HtoA", "AtoH", "Memset"};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        if (strstr(name, host[i]) != NULL)
            return EPO_COPY_HOST;
    return EPO_COPY_UNKNOWN;
}

static epo_status add_kernel(chrome *c, int64_t process, int64_t device, const char *name) {
    const event *e = &c->event;
    uint32_t handle;
    epo_status status = epo_profile_intern(c->profile, name, &handle);
    return status != EPO_OK ? status
                            : epo_profile_kernel(c->profile, process, device, e->stream, handle,
                                                 e->start, e->start + e->length);
}

static bool is_copy(const char *cat) {
    return strcmp(cat, "gpu_memcpy") == 0 || strcmp(cat, "gpu_memset") == 0 ||
           strcmp(cat, "Memcpy") == 0 || strcmp(cat, "Memset") == 0;
}

static epo_status end_event(chrome *c) {
    const event *e = &c->event;
    epo_kernel_class kind;
    c->events++;
    if (!e->complete)
        return EPO_OK;
    bool own = epo_kernel_class_find(e->cat, strlen(e->cat), &kind);
    bool kernel = strcmp(e->cat, "kernel") == 0 || strcmp(e->cat, "Kernel") == 0;
    if (!own && !kernel && !is_copy(e->cat))
        return EPO_OK;
    int64_t device = e->has_device ? e->device : own ? 0 : e->pid;
    int64_t process = own ? e->pid : 0;
    if (!e->has_start || !e->has_length || e->length < 0 || e->start > INT64_MAX - e->length)
        return epo_profile_copy(c->profile, process, device, 0, false, EPO_COPY_HOST, 1, 0);
    if (own)
        return epo_profile_interval(c->profile, process, device, e->stream, kind, e->name, e->start,
                                    e->start + e->length);
    if (kernel)
        return add_kernel(c, process, device, e->name[0] == '\0' ? "(no name)" : e->name);
    return epo_profile_copy(c->profile, process, device, e->stream, e->has_stream,
                            copy_kind(e->name), e->start, e->start + e->length);
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
    event *e = &c->event;
    where at = where_now(c);
    if (at == AT_EVENT && c->key == KEY_TS)
        e->has_start = parse_microseconds(text, length, &e->start);
    else if (at == AT_EVENT && c->key == KEY_DUR)
        e->has_length = parse_microseconds(text, length, &e->length);
    else if (at == AT_EVENT && c->key == KEY_PID)
        e->has_pid = parse_integer(text, length, &e->pid);
    else if (at == AT_ARGS && c->key == KEY_DEVICE)
        e->has_device = parse_integer(text, length, &e->device);
    else if (at == AT_ARGS && c->key == KEY_STREAM)
        e->has_stream = parse_integer(text, length, &e->stream);
    return carry_on(c);
}

static void copy_text(char *to, size_t room, const unsigned char *text, size_t length) {
    size_t n = length < room - 1 ? length : room - 1;
    memcpy(to, text, n);
    to[n] = '\0';
}

static int on_string(void *context, const unsigned char *text, size_t length) {
    chrome *c = context;
    where at = where_now(c);
    if (at == AT_EVENT && c->key == KEY_PH)
        c->event.complete = length == 1 && text[0] == 'X';
    else if (at == AT_EVENT && c->key == KEY_CAT)
        copy_text(c->event.cat, sizeof c->event.cat, text, length);
    else if (at == AT_EVENT && c->key == KEY_NAME)
        copy_text(c->event.name, sizeof c->event.name, text, length);
    else if (at != AT_OTHER && length < 64)
        return on_number(context, (const char *)text, length); /* "ts": "12.5" */
    return carry_on(c);
}

static bool is_key(const unsigned char *text, size_t length, const char *word) {
    return strlen(word) == length && memcmp(text, word, length) == 0;
}

static int on_key(void *context, const unsigned char *text, size_t length) {
    static const struct {
        const char *word;
        key key;
    } event_keys[] = {{"ph", KEY_PH},   {"cat", KEY_CAT}, {"name", KEY_NAME}, {"ts", KEY_TS},
                      {"dur", KEY_DUR}, {"pid", KEY_PID}, {"args", KEY_ARGS}},
      args_keys[] = {{"device", KEY_DEVICE}, {"stream", KEY_STREAM}};
    chrome *c = context;
    where at = where_now(c);
    c->key = KEY_OTHER;
    if (c->depth == 1 && is_key(text, length, "traceEvents"))
        c->key = KEY_EVENTS;
    for (size_t i = 0; at == AT_EVENT && i < sizeof event_keys / sizeof *event_keys; i++)
        if (is_key(text, length, event_keys[i].word))
            c->key = event_keys[i].key;
    for (size_t i = 0; at == AT_ARGS && i < sizeof args_keys / sizeof *args_keys; i++)
        if (is_key(text, length, args_keys[i].word))
            c->key = args_keys[i].key;
    return carry_on(c);
}

static bool deeper(chrome *c) {
    if (++c->depth <= DEPTH_MAX)
        return true;
    c->status = epo_fail(EPO_E_ARG, "%s: near byte %llu: nested deeper than %d levels", c->path,
                         (unsigned long long)c->done, DEPTH_MAX);
    return false;
}

static void clear_event(event *e) {
    e->name[0] = e->cat[0] = '\0';
    memset((char *)e + offsetof(event, complete), 0, sizeof *e - offsetof(event, complete));
}

static int on_object(void *context) {
    chrome *c = context;
    bool is_args = where_now(c) == AT_EVENT && c->key == KEY_ARGS;
    if (!deeper(c))
        return 0;
    if (c->events_depth > 0 && c->depth == c->events_depth + 1)
        clear_event(&c->event);
    if (c->events_depth > 0 && c->depth == c->events_depth + 2)
        c->where = is_args ? AT_ARGS : AT_OTHER;
    c->key = KEY_OTHER;
    return carry_on(c);
}

static int on_object_end(void *context) {
    chrome *c = context;
    if (where_now(c) == AT_EVENT)
        c->status = end_event(c);
    c->depth--;
    c->key = KEY_OTHER;
    return carry_on(c);
}

static int on_array(void *context) {
    chrome *c = context;
    bool is_events = c->depth == 1 && c->key == KEY_EVENTS;
    if (c->depth == 0)
        c->is_array = is_events = true;
    if (!deeper(c))
        return 0;
    if (is_events)
        c->events_depth = c->depth;
    else if (c->events_depth > 0 && c->depth == c->events_depth + 2)
        c->where = AT_OTHER;
    c->key = KEY_OTHER;
    return carry_on(c);
}

static int on_array_end(void *context) {
    chrome *c = context;
    if (c->depth == c->events_depth)
        c->events_depth = 0;
    c->depth--;
    c->key = KEY_OTHER;
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
static epo_status syntax_error(chrome *c, yajl_handle parser, uint64_t at) {
    unsigned char *text = yajl_get_error(parser, 0, NULL, 0);
    char line[128];
    copy_text(line, sizeof line, text == NULL ? (const unsigned char *)"?" : text,
              text == NULL ? 1 : strcspn((const char *)text, "\n"));
    if (text != NULL)
        yajl_free_error(parser, text);
    return epo_fail(EPO_E_ARG, "%s: byte %llu: not JSON: %s", c->path, (unsigned long long)at + 1,
                    line);
}

static epo_status feed(chrome *c, yajl_handle parser, const unsigned char *block, size_t n) {
    yajl_status parsed = yajl_parse(parser, block, n);
    if (c->status != EPO_OK)
        return c->status;
    if (parsed != yajl_status_ok)
        return syntax_error(c, parser, c->done + yajl_get_bytes_consumed(parser));
    c->done += n;
    if (c->done - c->quiet_since > TOKEN_MAX)
        return epo_fail(EPO_E_ARG, "%s: byte %llu: a value longer than %u MiB", c->path,
                        (unsigned long long)c->quiet_since + 1, TOKEN_MAX >> 20);
    return EPO_OK;
}

static epo_status read_all(chrome *c, int fd, yajl_handle parser,
                           const epo_profile_options *options) {
    struct stat s;
    unsigned char *block = malloc(BLOCK);
    uint64_t told = 0, total = fstat(fd, &s) == 0 && S_ISREG(s.st_mode) ? (uint64_t)s.st_size : 0;
    epo_status status = block == NULL ? epo_fail(EPO_E_NOMEM, "%s: no memory", c->path) : EPO_OK;
    while (status == EPO_OK) {
        ssize_t n = read(fd, block, BLOCK);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            status = epo_fail(EPO_E_SYSTEM, "%s: cannot be read at byte %llu: %s", c->path,
                              (unsigned long long)c->done + 1, strerror(errno));
        if (n <= 0)
            break;
        status = feed(c, parser, block, (size_t)n);
        if (options->progress != NULL && c->done - told >= PROGRESS_STEP) {
            told = c->done;
            options->progress(options->progress_context, c->done, total);
        }
    }
    free(block);
    if (status == EPO_OK && yajl_complete_parse(parser) != yajl_status_ok &&
        !(c->is_array && c->depth == 1))
        status = c->done == 0
                     ? epo_fail(EPO_E_ARG, "%s: is empty", c->path)
                     : epo_fail(EPO_E_ARG, "%s: cut off at byte %llu: %d brackets are open",
                                c->path, (unsigned long long)c->done, c->depth);
    return status == EPO_OK ? c->status : status;
}

epo_status epo_profile_read_chrome(const char *path, const epo_profile_options *options,
                                   epo_profile **out) {
    chrome *c = calloc(1, sizeof *c);
    yajl_handle parser = c == NULL ? NULL : yajl_alloc(&callbacks, NULL, c);
    int fd = strcmp(path, "-") == 0 ? dup(STDIN_FILENO) : open(path, O_RDONLY | O_CLOEXEC);
    epo_status status = EPO_OK;
    if (parser == NULL)
        status = epo_fail(EPO_E_NOMEM, "%s: no memory", path);
    else if (fd < 0)
        status = epo_fail(EPO_E_SYSTEM, "%s: cannot be opened: %s", path, strerror(errno));
    if (status == EPO_OK) {
        c->path = strcmp(path, "-") == 0 ? "standard input" : path;
        yajl_config(parser, yajl_dont_validate_strings, 1);
        status = epo_profile_create(options, EPO_PROFILE_CHROME, &c->profile);
    }
    if (status == EPO_OK)
        status = read_all(c, fd, parser, options);
    if (status == EPO_OK && c->events == 0)
        status = epo_fail(EPO_E_ARG, "%s: JSON without trace events", c->path);
    if (status == EPO_OK)
        status = epo_profile_finish(c->profile);
    if (parser != NULL)
        yajl_free(parser);
    if (fd >= 0)
        close(fd);
    if (status == EPO_OK)
        *out = c->profile;
    else if (c != NULL)
        epo_profile_destroy(c->profile);
    free(c);
    return status;
}
