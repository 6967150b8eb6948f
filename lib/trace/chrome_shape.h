/* SPDX-License-Identifier: Apache-2.0
 *
 * chrome_shape.h - the fast way through a trace's array of events.
 *
 * A profiler writes its events all alike: the same keys in the same order with the
 * same blanks, only the values differ.  So the text between the values of one event
 * (its shape) is learnt once, checked for being JSON then, and compared byte by byte
 * with the next events; only their values are looked at.  Whatever is not learnt
 * easily (escapes, deep nesting, mistakes) is left to the JSON parser.
 */
#ifndef EPO_TRACE_CHROME_SHAPE_H
#define EPO_TRACE_CHROME_SHAPE_H

#include "trace/chrome_event.h"

typedef struct epo_chrome_shapes epo_chrome_shapes;

epo_chrome_shapes *epo_chrome_shapes_create(void); /* NULL: no memory */
void epo_chrome_shapes_destroy(epo_chrome_shapes *shapes);

/* Reads a comma and the object behind it, as they follow an element of an array.
 * Returns the bytes read, which are JSON, and fills `event`; 0: they are cut off at
 * `end` or not ordinary, and `event` is anything. */
size_t epo_chrome_shapes_read(epo_chrome_shapes *shapes, const char *at, const char *end,
                              epo_chrome_event *event);

#endif
