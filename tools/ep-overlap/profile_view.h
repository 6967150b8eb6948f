/* SPDX-License-Identifier: Apache-2.0
 *
 * profile_view.h - one or two profiles, measured, for people and programs.
 */
#ifndef EPO_TOOLS_PROFILE_VIEW_H
#define EPO_TOOLS_PROFILE_VIEW_H

#include "trace/profile.h"

#include <stdio.h>

typedef struct profile_file {
    const char *path;
    epo_profile *profile;
    epo_profile_facts facts;
    int64_t first, last;      /* of all units, ns */
    int64_t from, to;         /* what is measured */
    epo_profile_times *times; /* per unit */
    char refused[192];        /* why no percentage is given; "" if it is */
} profile_file;

typedef struct profile_view {
    profile_file file[2];
    size_t files;
    bool names; /* list kernels by class */
} profile_view;

/* Share of the expert communication that ran beside GEMM and attention, 0 .. 1; NAN without. */
double profile_share(const epo_profile_times *times);

void profile_print_text(const profile_view *view);
void profile_print_json(const profile_view *view);
/* Draws unit `unit` of each file: a timeline and an overlap bar. */
epo_status profile_draw_svg(profile_view *view, size_t unit, const char *path);

#endif
