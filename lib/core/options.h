/* SPDX-License-Identifier: Apache-2.0
 *
 * options.h - the option table: the one list of what can be asked for, its
 * words and its names.  The plugin's options, the configuration file, the user's
 * environment and every report are made from it.
 */
#ifndef EPO_CORE_OPTIONS_H
#define EPO_CORE_OPTIONS_H

#include "core/status.h"

typedef enum epo_option_id {
    EPO_OPT_OVERLAP,
    EPO_OPT_DISPATCHER,
    EPO_OPT_DELAY_WGRAD,
    EPO_OPT_COUNT
} epo_option_id;

/* Values, in the order of the table's `values`. */
enum { EPO_OVERLAP_OFF, EPO_OVERLAP_ON, EPO_OVERLAP_AUTO };
enum {
    EPO_CHOICE_ALLTOALL,
    EPO_CHOICE_FLEX,
    EPO_CHOICE_DEEPEP,
    EPO_CHOICE_HYBRIDEP,
    EPO_CHOICE_NCCLEP
};
enum { EPO_WGRAD_INLINE, EPO_WGRAD_DELAYED };
#define EPO_UNSET (-1)

struct epo_option {
    const char *name;          /* srun's: --NAME */
    const char *key;           /* the configuration file's */
    const char *input;         /* the user's default in the environment */
    const char *output;        /* what the task is told */
    const char *const *values; /* the words, NULL at the end */
    const char *const *twins;  /* other words for the same values, or NULL */
    int preset;                /* without any wish */
    const char *argument;      /* how help shows the argument; NULL: a flag */
    const char *doc;           /* one line of help, at most 80 columns with its option */
};
extern const struct epo_option epo_options[EPO_OPT_COUNT];

/* The value that `text` names.  `where` says whose word it is ("--ep-overlap",
 * "FILE:LINE: overlap").  EPO_E_ARG with found, allowed and an example. */
epo_status epo_option_parse(epo_option_id id, const char *text, const char *where, int *value);
/* The word for a value; "-" when it has none. */
const char *epo_option_word(epo_option_id id, int value);

/* "alltoall" or "flex", as the library reads it, and the backend after
 * "flex:" ("deepep", ...) or NULL. */
const char *epo_dispatcher_kind(int choice);
const char *epo_dispatcher_backend(int choice);

#endif
