/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/record/rhythm.h"

#include <stdlib.h>

static int compare(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* `kinds`, sorted. */
static size_t keep(rhythm_call *call, size_t count, const uint64_t *kinds, size_t many) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (bsearch(&call[i].what, kinds, many, sizeof *kinds, compare) != NULL)
            call[kept++] = call[i];
    return kept;
}

void rhythm_forget_bytes(rhythm_call *call, size_t count) {
    for (size_t i = 0; i < count; i++)
        call[i].what = call[i].kind;
}

size_t rhythm_without_rare(rhythm_call *call, size_t count, uint64_t *room) {
    size_t often = 0;
    for (size_t i = 0; i < count; i++)
        room[i] = call[i].what;
    qsort(room, count, sizeof *room, compare);
    for (size_t i = 0, next; i < count; i = next) {
        for (next = i + 1; next < count && room[next] == room[i]; next++)
            ;
        if (next - i >= RHYTHM_REPEATS)
            room[often++] = room[i];
    }
    return keep(call, count, room, often);
}

size_t rhythm_only(rhythm_call *call, size_t count, const rhythm_call *recent, size_t recents,
                   size_t period, uint64_t *room) {
    const size_t first = period < recents ? recents - period : 0;
    for (size_t i = first; i < recents; i++)
        room[i - first] = recent[i].what;
    qsort(room, recents - first, sizeof *room, compare);
    return keep(call, count, room, recents - first);
}

/* The sequence read backwards, so that its end is where prefixes begin: with fail[m] the
 * longest border of the last m calls (Knuth, Morris and Pratt 1977), m - fail[m] is their
 * shortest period. */
rhythm_found rhythm_find(const rhythm_call *call, size_t count, size_t *fail) {
    rhythm_found found = {0, 0};
    size_t border = 0;
    if (count == 0)
        return found;
    const rhythm_call *last = call + count - 1;
    fail[0] = 0;
    for (size_t m = 1; m < count; m++) {
        while (border > 0 && last[-(ptrdiff_t)m].what != last[-(ptrdiff_t)border].what)
            border = fail[border - 1];
        border += last[-(ptrdiff_t)m].what == last[-(ptrdiff_t)border].what;
        fail[m] = border;
        const size_t length = m + 1, period = length - border;
        if (length / RHYTHM_REPEATS >= period && length >= count / 2)
            found = (rhythm_found){period, length};
    }
    return found;
}

int64_t rhythm_step(const rhythm_call *call, size_t count, size_t period, int64_t from, int64_t to,
                    size_t *steps) {
    size_t end = count, first = 0;
    *steps = 0;
    while (end > 0 && call[end - 1].when > to)
        end--;
    while (first < end && call[first].when < from)
        first++;
    if (period == 0 || end == first)
        return 0;
    const size_t whole = (end - 1 - first) / period;
    if (whole == 0)
        return 0;
    *steps = whole;
    return (call[end - 1].when - call[end - 1 - whole * period].when) / (int64_t)whole;
}
