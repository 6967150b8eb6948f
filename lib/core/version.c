/* SPDX-License-Identifier: Apache-2.0
 *
 * The order is PEP 440's, section "Summary of permitted suffixes and relative
 * ordering"; the grammar is its appendix B.
 */
#include "core/version.h"

#include "core/status.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

typedef struct cursor {
    const char *at;
    bool bad; /* a number does not fit 64 bits */
} cursor;

static bool is_separator(char c) { return c == '.' || c == '-' || c == '_'; }

static uint64_t take_number(cursor *c) {
    uint64_t value = 0;
    while (isdigit((unsigned char)*c->at)) {
        unsigned digit = (unsigned)(*c->at++ - '0');
        if (value > (UINT64_MAX - digit) / 10)
            c->bad = true;
        value = value * 10 + digit;
    }
    return value;
}

/* Takes [sep]WORD[sep]N where WORD is one of `words`; returns its index or -1
 * and leaves the cursor.  A missing number is 0. */
static int take_tag(cursor *c, const char *const *words, uint64_t *number) {
    const char *start = is_separator(*c->at) ? c->at + 1 : c->at;
    for (int i = 0; words[i] != NULL; i++) {
        size_t length = strlen(words[i]);
        if (strncasecmp(start, words[i], length) != 0 || isalpha((unsigned char)start[length]))
            continue;
        c->at = start + length;
        if (is_separator(*c->at) && isdigit((unsigned char)c->at[1]))
            c->at++;
        *number = take_number(c);
        return i;
    }
    return -1;
}

static bool take_release(cursor *c, epo_pep440 *v) {
    for (;;) {
        if (!isdigit((unsigned char)*c->at) || v->release_count == EPO_VERSION_RELEASE_MAX)
            return false;
        v->release[v->release_count++] = take_number(c);
        if (c->at[0] != '.' || !isdigit((unsigned char)c->at[1]))
            break;
        c->at++;
    }
    while (v->release_count > 1 && v->release[v->release_count - 1] == 0)
        v->release_count--;
    return true;
}

static void take_pre(cursor *c, epo_pep440 *v) {
    static const char *const words[] = {"alpha", "a",       "beta", "b", "c",
                                        "rc",    "preview", "pre",  NULL};
    static const int phases[] = {1, 1, 2, 2, 3, 3, 3, 3};
    int found = take_tag(c, words, &v->pre);
    if (found >= 0)
        v->pre_phase = phases[found];
}

static void take_post(cursor *c, epo_pep440 *v) {
    static const char *const words[] = {"post", "rev", "r", NULL};
    if (c->at[0] == '-' && isdigit((unsigned char)c->at[1])) {
        c->at++;
        v->has_post = true;
        v->post = take_number(c);
        return;
    }
    v->has_post = take_tag(c, words, &v->post) >= 0;
}

static void take_dev(cursor *c, epo_pep440 *v) {
    static const char *const words[] = {"dev", NULL};
    v->has_dev = take_tag(c, words, &v->dev) >= 0;
}

static bool take_local(cursor *c, epo_pep440 *v) {
    if (*c->at != '+')
        return true;
    v->local = ++c->at;
    for (;;) {
        if (!isalnum((unsigned char)*c->at))
            return false;
        while (isalnum((unsigned char)*c->at))
            c->at++;
        if (!is_separator(*c->at))
            break;
        c->at++;
    }
    v->local_length = (size_t)(c->at - v->local);
    return true;
}

static bool take_version(cursor *c, epo_pep440 *v) {
    while (isspace((unsigned char)*c->at))
        c->at++;
    if (*c->at == 'v' || *c->at == 'V')
        c->at++;
    const char *start = c->at;
    if (isdigit((unsigned char)*c->at)) {
        uint64_t epoch = take_number(c);
        if (*c->at == '!') {
            v->epoch = epoch;
            c->at++;
        } else {
            c->at = start;
            c->bad = false;
        }
    }
    if (!take_release(c, v))
        return false;
    take_pre(c, v);
    take_post(c, v);
    take_dev(c, v);
    if (!take_local(c, v))
        return false;
    while (isspace((unsigned char)*c->at))
        c->at++;
    return *c->at == '\0' && !c->bad;
}

epo_status epo_pep440_parse(const char *text, epo_pep440 *out) {
    if (text == NULL || out == NULL)
        return epo_fail(EPO_E_ARG, "version: nothing to read");
    cursor c = {.at = text};
    epo_pep440 v = {0};
    if (!take_version(&c, &v))
        return epo_fail(
            EPO_E_ARG,
            "version: \"%.64s\" is not a version (byte %zu); like 2.6.0 or 2.7.0a0+cu126", text,
            (size_t)(c.at - text) + 1);
    *out = v;
    return EPO_OK;
}

static int order(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

static int compare_release(const epo_pep440 *a, const epo_pep440 *b) {
    unsigned count = a->release_count > b->release_count ? a->release_count : b->release_count;
    for (unsigned i = 0; i < count; i++) {
        uint64_t left = i < a->release_count ? a->release[i] : 0;
        uint64_t right = i < b->release_count ? b->release[i] : 0;
        if (left != right)
            return order(left, right);
    }
    return 0;
}

/* 1.0.dev1 stands before 1.0a1, 1.0 behind 1.0rc1. */
static int pre_rank(const epo_pep440 *v) {
    if (v->pre_phase != 0)
        return v->pre_phase;
    return !v->has_post && v->has_dev ? 0 : 4;
}

/* Length of the local segment at `at`, which ends at a separator or at `end`. */
static size_t segment_length(const char *at, const char *end) {
    size_t length = 0;
    while (at + length < end && !is_separator(at[length]))
        length++;
    return length;
}

static bool all_digits(const char *at, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (!isdigit((unsigned char)at[i]))
            return false;
    return true;
}

static int compare_segment(const char *a, size_t na, const char *b, size_t nb) {
    bool number_a = all_digits(a, na), number_b = all_digits(b, nb);
    if (number_a != number_b)
        return number_a ? 1 : -1; /* a number is newer than a word */
    if (number_a) {
        while (na > 1 && *a == '0')
            a++, na--;
        while (nb > 1 && *b == '0')
            b++, nb--;
        if (na != nb)
            return na > nb ? 1 : -1;
    }
    int by_text = strncasecmp(a, b, na < nb ? na : nb);
    return by_text != 0 ? by_text : order(na, nb);
}

static int compare_local(const epo_pep440 *a, const epo_pep440 *b) {
    if (a->local == NULL || b->local == NULL)
        return (a->local != NULL) - (b->local != NULL);
    const char *at = a->local, *end_a = a->local + a->local_length;
    const char *bt = b->local, *end_b = b->local + b->local_length;
    while (at < end_a && bt < end_b) {
        size_t na = segment_length(at, end_a), nb = segment_length(bt, end_b);
        int difference = compare_segment(at, na, bt, nb);
        if (difference != 0)
            return difference;
        at += na + 1;
        bt += nb + 1;
    }
    return (at < end_a) - (bt < end_b);
}

int epo_pep440_compare(const epo_pep440 *a, const epo_pep440 *b) {
    if (a->epoch != b->epoch)
        return order(a->epoch, b->epoch);
    int difference = compare_release(a, b);
    if (difference != 0)
        return difference;
    if (pre_rank(a) != pre_rank(b))
        return pre_rank(a) > pre_rank(b) ? 1 : -1;
    if (a->pre_phase != 0 && a->pre != b->pre)
        return order(a->pre, b->pre);
    if (a->has_post != b->has_post)
        return a->has_post ? 1 : -1;
    if (a->post != b->post)
        return order(a->post, b->post);
    if (a->has_dev != b->has_dev)
        return a->has_dev ? -1 : 1;
    if (a->dev != b->dev)
        return order(a->dev, b->dev);
    return compare_local(a, b);
}
