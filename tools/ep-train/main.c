/* SPDX-License-Identifier: Apache-2.0
 *
 * main.c - ep-train: trains a small mixture-of-experts language model, its experts
 * spread over the job's ranks, to see what overlap does.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/status.h"
#include "measure.h"
#include "measure/launch.h"
#include "measure/machine.h"
#include "options.h"
#include "output.h"
#include "report.h"
#include "train.h"

#define STATUS_FAILED 1
#define STATUS_USAGE 2
#define PAIRS 5 /* of the comparison after a training */

static int status_of(epo_status status) {
    return status == EPO_OK ? 0 : status == EPO_E_ARG ? STATUS_USAGE : STATUS_FAILED;
}

/* The ranks no longer agree.  Closing is collective and would wait for peers that
 * may not come; this process's end tells them. */
static void abandon(const train *t) {
    if (t->world != NULL)
        fprintf(stderr, "ep-train: rank %d: %s\n", t->world->info.rank, epo_fail_text());
    else
        fprintf(stderr, "ep-train: %s\n", epo_fail_text());
    fflush(NULL);
    _exit(STATUS_FAILED);
}

static void speak(train_voice voice) {
    if (voice == VOICE_FIRST_RANK && launch_is_other() && !launch_names_rank(epo_fail_text()))
        return;
    if (voice != VOICE_OTHER)
        fprintf(stderr, "ep-train: %s\n", epo_fail_text());
}

static epo_status train_part(train *t, report *r) {
    const options *o = t->opt;
    if (o->bench > 0)
        return train_prime(t);
    epo_status status = moe_world_stats(t->world, &r->training, 1);
    if (status == EPO_OK)
        status = train_run(t, stdout);
    if (status == EPO_OK)
        status = moe_world_stats(t->world, &r->training, 0);
    return status;
}

/* What rank 0 writes; the others learn whether it could. */
static epo_status write_part(train *t, report *r, train_voice *voice) {
    const options *o = t->opt;
    epo_status status = EPO_OK;
    *voice = VOICE_EACH;
    if (o->save_weights != NULL && o->bench == 0) {
        status = train_agree(t->world, train_save(t, o->save_weights), voice);
        if (status != EPO_OK)
            return status;
    }
    r->rss_mb = measure_process_mb();
    r->gpu_used_mb = measure_device_used_mb(&t->world->device);
    r->step_ms = spread_of(t->step_ms.value, t->step_ms.count);
    if (t->world->info.rank == 0) {
        report_closing(r, stdout);
        if (o->json != NULL)
            status = report_json(r, o->json);
    }
    return train_agree(t->world, status, voice);
}

/* A table that nobody could read is a failure. */
static bool printed(FILE *out) {
    if (fflush(out) == 0 && ferror(out) == 0)
        return true;
    fprintf(stderr, "ep-train: lines are missing: the standard output could not be written\n");
    return false;
}

static int run(void *ctx) {
    const options *o = ctx;
    train t = {.opt = o};
    report r = {.t = &t};
    measured m;
    train_voice voice;
    epo_status status = train_open(o, &t, &voice);
    if (status != EPO_OK) {
        if (voice == VOICE_EACH)
            abandon(&t);
        speak(voice);
        return status_of(status);
    }
    if (t.world->info.rank == 0)
        report_opening(&t, stdout);
    status = train_part(&t, &r);
    if (status == EPO_OK && (o->measure || o->bench > 0)) {
        status = measure_run(&t, o->bench > 0 ? o->bench : PAIRS, &m);
        r.m = &m;
    }
    if (status != EPO_OK)
        abandon(&t);
    status = write_part(&t, &r, &voice);
    if (status != EPO_OK && voice == VOICE_EACH)
        abandon(&t);
    if (status != EPO_OK)
        speak(voice);
    else if (t.skipped > 0 && t.world->info.rank == 0)
        fprintf(stderr,
                "ep-train: %d of %d steps were skipped, their loss or gradient was no number; "
                "lower --lr\n",
                t.skipped, o->steps);
    int failed = status != EPO_OK || t.skipped > 0 || !printed(stdout);
    if (train_close(&t) != EPO_OK) {
        fprintf(stderr, "ep-train: %s\n", epo_fail_text());
        failed = 1;
    }
    return failed ? STATUS_FAILED : 0;
}

int main(int argc, char **argv) {
    options o;
    output_standard();
    switch (options_read(argc, argv, &o, stdout)) {
    case OPTIONS_DONE: return 0;
    case OPTIONS_WRONG:
        if (!launch_is_other())
            fprintf(stderr, "ep-train: %s\n", epo_fail_text());
        return STATUS_USAGE;
    case OPTIONS_RUN: break;
    }
    if (o.launch == 0)
        return run(&o);
    epo_fail_clear();
    int status = launch_ranks("ep-train", o.launch, run, &o);
    if (status != 0 && epo_fail_text()[0] != '\0')
        fprintf(stderr, "ep-train: %s\n", epo_fail_text());
    return status;
}
