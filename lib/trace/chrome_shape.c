/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/chrome_shape.h"

#include <stdlib.h>
#include <string.h>

#define SHAPES 8
#define HOLES_MAX 96
#define TEXT_MAX 4096
#define DEPTH_MAX 8

/* A value, and the text in front of it (for a string with its quote). */
typedef struct hole {
    uint16_t text, length; /* of the text in front */
    bool is_string;
    epo_chrome_key key;
} hole;

typedef struct shape {
    size_t holes, length; /* length of all texts; 0: not in use */
    size_t tail;          /* the text behind the last value */
    uint64_t used;        /* when */
    size_t next;          /* the shape that came after it the last time */
    hole hole[HOLES_MAX];
    char text[TEXT_MAX];
} shape;

struct epo_chrome_shapes {
    shape shape[SHAPES], spare; /* spare: being learnt */
    size_t last;
    uint64_t clock;
};

typedef struct value {
    const char *text;
    size_t length;
} value;

epo_chrome_shapes *epo_chrome_shapes_create(void) { return calloc(1, sizeof(epo_chrome_shapes)); }
void epo_chrome_shapes_destroy(epo_chrome_shapes *shapes) { free(shapes); }

/* ---- values: NULL is no value, or one that is not ordinary ------------------- */

#define EACH(byte) (0x0101010101010101u * (byte))

/* Some byte of the word is a quote, a backslash or a control character; other words
 * may say so too, which costs time only. */
static bool may_end_string(uint64_t word) {
    uint64_t quote = word ^ EACH('"'), escape = word ^ EACH('\\');
    uint64_t zero = ((quote - EACH(1)) & ~quote) | ((escape - EACH(1)) & ~escape);
    return ((zero | ((word - EACH(0x20)) & ~word)) & EACH(0x80)) != 0;
}

/* Behind the opening quote; returns the place of the closing one. */
static const char *end_of_string(const char *at, const char *end) {
    uint64_t word;
    for (; end - at >= (ptrdiff_t)sizeof word; at += sizeof word) {
        memcpy(&word, at, sizeof word);
        if (may_end_string(word))
            break;
    }
    while (at < end && *at != '"' && *at != '\\' && (unsigned char)*at >= 0x20)
        at++;
    return at < end && *at == '"' ? at : NULL;
}

static bool is_digit(char c) { return (unsigned)(c - '0') < 10; }

static const char *skip_digits(const char *at, const char *end) {
    while (at < end && is_digit(*at))
        at++;
    return at;
}

/* A number never ends a block: what stands behind it tells that it is whole. */
static const char *end_of_number(const char *at, const char *end) {
    const char *digits = at < end && *at == '-' ? ++at : at;
    at = skip_digits(at, end);
    if (at == digits || (*digits == '0' && at > digits + 1))
        return NULL;
    if (at < end && *at == '.') {
        digits = ++at;
        at = skip_digits(at, end);
        if (at == digits)
            return NULL;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        at++;
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        digits = at;
        at = skip_digits(at, end);
        if (at == digits)
            return NULL;
    }
    return at < end ? at : NULL;
}

/* ---- learning a shape ---------------------------------------------------------- */

typedef struct learner {
    const char *at, *end;
    const char *done; /* up to here the texts are kept */
    shape *shape;
} learner;

static bool keep_text(learner *l) {
    size_t length = (size_t)(l->at - l->done);
    if (l->shape->length + length > TEXT_MAX)
        return false;
    memcpy(l->shape->text + l->shape->length, l->done, length);
    l->shape->length += length;
    return true;
}

/* The value that begins here; `to` is its end. */
static bool keep_hole(learner *l, bool is_string, epo_chrome_key key, const char *to) {
    shape *s = l->shape;
    size_t before = s->length;
    if (to == NULL || s->holes == HOLES_MAX || !keep_text(l))
        return false;
    s->hole[s->holes++] = (hole){.text = (uint16_t)before,
                                 .length = (uint16_t)(s->length - before),
                                 .is_string = is_string,
                                 .key = key};
    l->at = l->done = to;
    return true;
}

static void skip_blanks(learner *l) {
    while (l->at < l->end && (*l->at == ' ' || (*l->at >= '\t' && *l->at <= '\r')))
        l->at++;
}

static bool take(learner *l, char c) {
    if (l->at >= l->end || *l->at != c)
        return false;
    l->at++;
    return true;
}

static bool take_word(learner *l, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(l->end - l->at) <= length || memcmp(l->at, word, length) != 0)
        return false;
    l->at += length;
    return true;
}

/* What a value may mean where it stands. */
typedef enum place { IN_EVENT, IN_ARGS, ELSEWHERE } place;

static bool learn_value(learner *l, place where, epo_chrome_key key, int depth);

static bool learn_member(learner *l, place where, int depth) {
    skip_blanks(l);
    if (!take(l, '"'))
        return false;
    const char *name = l->at, *end = end_of_string(name, l->end);
    if (end == NULL)
        return false;
    l->at = end + 1;
    skip_blanks(l);
    if (!take(l, ':'))
        return false;
    epo_chrome_key key = where == ELSEWHERE
                             ? EPO_CHROME_OTHER
                             : epo_chrome_key_find(where == IN_ARGS, name, (size_t)(end - name));
    return learn_value(l, where, key, depth);
}

/* An object or an array, behind its bracket. */
static bool learn_inside(learner *l, char close, place where, int depth) {
    if (depth > DEPTH_MAX)
        return false;
    skip_blanks(l);
    if (take(l, close))
        return true;
    do {
        if (close == '}' ? !learn_member(l, where, depth)
                         : !learn_value(l, ELSEWHERE, EPO_CHROME_OTHER, depth))
            return false;
        skip_blanks(l);
    } while (take(l, ','));
    return take(l, close);
}

static bool learn_value(learner *l, place where, epo_chrome_key key, int depth) {
    skip_blanks(l);
    if (take(l, '"'))
        return keep_hole(l, true, key, end_of_string(l->at, l->end)) && take(l, '"');
    if (take(l, '{'))
        return learn_inside(
            l, '}', where == IN_EVENT && key == EPO_CHROME_ARGS ? IN_ARGS : ELSEWHERE, depth + 1);
    if (take(l, '['))
        return learn_inside(l, ']', ELSEWHERE, depth + 1);
    if (take_word(l, "true") || take_word(l, "false") || take_word(l, "null"))
        return true;
    return keep_hole(l, false, key, end_of_number(l->at, l->end));
}

static bool learn(shape *s, const char *at, const char *end) {
    learner l = {.at = at, .done = at, .end = end, .shape = s};
    s->holes = s->length = 0;
    skip_blanks(&l);
    bool fine = take(&l, ',');
    skip_blanks(&l);
    fine = fine && take(&l, '{') && learn_inside(&l, '}', IN_EVENT, 1) && s->holes > 0;
    size_t before = s->length;
    fine = fine && keep_text(&l);
    s->tail = s->length - before;
    if (!fine)
        s->length = 0;
    return fine;
}

/* ---- comparing with one ---------------------------------------------------------- */

/* The end of the event; NULL: it has another shape. */
static const char *match(const shape *s, const char *at, const char *end,
                         value values[static HOLES_MAX]) {
    for (size_t i = 0; i < s->holes; i++) {
        const hole *h = &s->hole[i];
        if ((size_t)(end - at) < h->length || memcmp(at, s->text + h->text, h->length) != 0)
            return NULL;
        at += h->length;
        const char *to = h->is_string ? end_of_string(at, end) : end_of_number(at, end);
        if (to == NULL)
            return NULL;
        values[i] = (value){at, (size_t)(to - at)};
        at = to;
    }
    bool same =
        (size_t)(end - at) >= s->tail && memcmp(at, s->text + s->length - s->tail, s->tail) == 0;
    return same ? at + s->tail : NULL;
}

static void fill(const shape *s, const value *values, epo_chrome_event *event) {
    epo_chrome_event_clear(event);
    for (size_t i = 0; i < s->holes; i++) {
        const hole *h = &s->hole[i];
        if (h->key == EPO_CHROME_OTHER)
            continue;
        if (h->is_string)
            epo_chrome_event_string(event, h->key, values[i].text, values[i].length);
        else
            epo_chrome_event_number(event, h->key, values[i].text, values[i].length);
    }
}

/* The shape of the event, an old one or a new one; SHAPES: none. */
static size_t find(epo_chrome_shapes *shapes, const char *at, const char **end, value *values) {
    const char *limit = *end;
    size_t likely = shapes->shape[shapes->last].next, oldest = 0;
    for (size_t i = 0; i < SHAPES; i++) {
        size_t index = (likely + i) % SHAPES; /* the likely one first */
        const shape *s = &shapes->shape[index];
        if (s->length > 0 && (*end = match(s, at, limit, values)) != NULL)
            return index;
        if (s->used < shapes->shape[oldest].used)
            oldest = index;
    }
    if (!learn(&shapes->spare, at, limit) ||
        (*end = match(&shapes->spare, at, limit, values)) == NULL)
        return SHAPES;
    shapes->shape[oldest] = shapes->spare;
    shapes->shape[oldest].next = oldest;
    return oldest;
}

size_t epo_chrome_shapes_read(epo_chrome_shapes *shapes, const char *at, const char *end,
                              epo_chrome_event *event) {
    value values[HOLES_MAX];
    size_t index = find(shapes, at, &end, values);
    if (index == SHAPES)
        return 0;
    shapes->shape[shapes->last].next = index;
    shapes->shape[index].used = ++shapes->clock;
    shapes->last = index;
    fill(&shapes->shape[index], values, event);
    return (size_t)(end - at);
}
