/* SPDX-License-Identifier: Apache-2.0 */
#include "core/hostlist.h"

#include <stdio.h>
#include <string.h>

#define DIGITS_MAX 9
#define NUMBERS_MAX (1 << 18) /* that a walk writes: Slurm's largest list has 65,533 nodes */

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static bool is_literal(char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '_' || c == '.';
}

/* A range "LOW" or "LOW-HIGH"; `width` is LOW's, which pads with zeros. */
struct range {
    long low, high;
    int width;
};

static long read_number(const char **at) {
    long value = 0;
    while (is_digit(**at))
        value = value * 10 + (*(*at)++ - '0');
    return value;
}

/* The range at `*at`, which moves behind it and behind one comma. */
static bool next_range(const char **at, struct range *range) {
    size_t width = strspn(*at, "0123456789");
    if (width == 0 || width > DIGITS_MAX)
        return false;
    range->width = (int)width;
    range->low = range->high = read_number(at);
    if (**at == '-') {
        (*at)++;
        width = strspn(*at, "0123456789");
        if (width == 0 || width > DIGITS_MAX)
            return false;
        range->high = read_number(at);
    }
    if (**at == ',' && is_digit((*at)[1]))
        (*at)++;
    else if (**at != ']')
        return false;
    return range->low <= range->high;
}

/* Behind the name that starts at `at`; NULL when it is not valid. */
static const char *skip_name(const char *at) {
    const char *start = at;
    while (*at != '\0' && *at != ',') {
        if (*at == '[') {
            struct range range;
            for (at++; *at != ']';)
                if (!next_range(&at, &range))
                    return NULL;
            if (at[-1] == '[')
                return NULL;
            at++;
        } else if (is_literal(*at)) {
            at++;
        } else {
            return NULL;
        }
    }
    return at > start ? at : NULL;
}

bool epo_hostlist_valid(const char *list) {
    for (;;) {
        list = skip_name(list);
        if (list == NULL || *list == '\0')
            return list != NULL;
        list++;
    }
}

static bool match_name(const char *pattern, const char *node);

/* `pattern` stands behind a '['; tries every way to read a number of `node`. */
static bool match_ranges(const char *pattern, const char *node) {
    const char *behind = strchr(pattern, ']') + 1;
    const char *number = node;
    size_t width = strspn(node, "0123456789");
    for (size_t use = 1; use <= width && use <= DIGITS_MAX; use++) {
        char digits[DIGITS_MAX + 1] = "";
        memcpy(digits, node, use);
        number = digits;
        long value = read_number(&number);
        const char *at = pattern;
        struct range range;
        while (*at != ']' && next_range(&at, &range)) {
            char padded[DIGITS_MAX + 16];
            snprintf(padded, sizeof padded, "%0*ld", range.width, value);
            if (value >= range.low && value <= range.high && strcmp(padded, digits) == 0 &&
                match_name(behind, node + use))
                return true;
        }
    }
    return false;
}

static bool match_name(const char *pattern, const char *node) {
    while (*pattern != '\0' && *pattern != ',' && *pattern != '[' && *pattern == *node) {
        pattern++;
        node++;
    }
    if (*pattern == '[')
        return match_ranges(pattern + 1, node);
    return (*pattern == '\0' || *pattern == ',') && *node == '\0';
}

bool epo_hostlist_has(const char *list, const char *node) {
    if (!epo_hostlist_valid(list))
        return false;
    while (list != NULL) {
        if (match_name(list, node))
            return true;
        list = skip_name(list);
        list = *list == ',' ? list + 1 : NULL;
    }
    return false;
}

struct walk {
    char name[EPO_HOST_NAME_MAX];
    bool (*visit)(const char *node, void *context);
    void *context;
    long left; /* numbers and names that may still be written */
};

/* Completes the name, `used` bytes of which are known; false stops. */
static bool visit_name(struct walk *walk, size_t used, const char *pattern) {
    while (*pattern != '\0' && *pattern != ',' && *pattern != '[' && used < sizeof walk->name - 1)
        walk->name[used++] = *pattern++;
    walk->name[used] = '\0';
    if (walk->left-- <= 0)
        return false;
    if (*pattern != '[')
        return (*pattern != '\0' && *pattern != ',') || walk->visit(walk->name, walk->context);
    const char *behind = strchr(pattern, ']') + 1, *at = pattern + 1;
    struct range range;
    while (*at != ']' && next_range(&at, &range))
        for (long value = range.low; value <= range.high; value++) {
            int more =
                snprintf(walk->name + used, sizeof walk->name - used, "%0*ld", range.width, value);
            if (more < 0 || (size_t)more >= sizeof walk->name - used)
                return true; /* longer than any host's name */
            if (!visit_name(walk, used + (size_t)more, behind))
                return false;
        }
    return true;
}

bool epo_hostlist_each(const char *list, bool (*visit)(const char *node, void *context),
                       void *context) {
    if (!epo_hostlist_valid(list))
        return false;
    struct walk walk = {.visit = visit, .context = context, .left = NUMBERS_MAX};
    bool more = true;
    while (list != NULL && more) {
        more = visit_name(&walk, 0, list);
        list = skip_name(list);
        list = *list == ',' ? list + 1 : NULL;
    }
    return walk.left >= 0;
}
