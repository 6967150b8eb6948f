/* SPDX-License-Identifier: Apache-2.0 */
#include "preload/environment.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/names.h"
#include "core/status.h"
#include "core/unserved.h"

#define CHUNKS_MAX 1024
#define TIMEOUT_MAX 1e7 /* seconds; a longer wait is a typing error */

/* Where a value came from, for messages. */
typedef enum origin { FROM_CALLER, FROM_JOB, FROM_DEFAULT } origin;

static const char *value_of(const char *name) {
    const char *value = getenv(name);
    return value == NULL || *value == '\0' ? NULL : value;
}

/* A word of `words` ("off\0on\0") by its index; the caller's value is kept. */
static epo_status read_word(const char *name, const char *const words[2], int *value, int builtin,
                            origin *from) {
    if (*value != -1) {
        *from = FROM_CALLER;
        return EPO_OK;
    }
    const char *text = value_of(name);
    *from = text == NULL ? FROM_DEFAULT : FROM_JOB;
    *value = builtin;
    if (text == NULL)
        return EPO_OK;
    for (int i = 0; i < 2; i++)
        if (strcmp(text, words[i]) == 0) {
            *value = i;
            return EPO_OK;
        }
    return epo_fail(EPO_E_ARG, "%s: found \"%.64s\", allowed is %s or %s; correct or unset it",
                    name, text, words[0], words[1]);
}

static epo_status check_caller(const epo_group_config *c) {
    if (c->overlap < EPO_DEFAULT || c->overlap > EPO_ON)
        return epo_fail(EPO_E_ARG, "overlap: found %d, allowed is EPO_DEFAULT, EPO_OFF or EPO_ON",
                        (int)c->overlap);
    if (c->dispatcher < EPO_DISPATCH_DEFAULT || c->dispatcher > EPO_DISPATCH_FLEX)
        return epo_fail(EPO_E_ARG,
                        "dispatcher: found %d, allowed is EPO_DISPATCH_DEFAULT, "
                        "EPO_DISPATCH_ALLTOALL or EPO_DISPATCH_FLEX",
                        (int)c->dispatcher);
    if (c->delay_wgrad < EPO_DEFAULT || c->delay_wgrad > EPO_ON)
        return epo_fail(EPO_E_ARG,
                        "delay_wgrad: found %d, allowed is EPO_DEFAULT, EPO_OFF or EPO_ON",
                        (int)c->delay_wgrad);
    if (c->chunks < 0 || c->chunks > CHUNKS_MAX)
        return epo_fail(EPO_E_ARG, "chunks: found %d, allowed is 0 (chosen for you) to %d",
                        c->chunks, CHUNKS_MAX);
    if (!(c->timeout_s >= 0 && c->timeout_s <= TIMEOUT_MAX) ||
        !(c->warn_s >= 0 && c->warn_s <= TIMEOUT_MAX))
        return epo_fail(EPO_E_ARG,
                        "timeout_s and warn_s: found %g and %g, allowed is 0 (600 and 30) to %.0f "
                        "seconds",
                        c->timeout_s, c->warn_s, TIMEOUT_MAX);
    return EPO_OK;
}

/* The engine asks the communicator. */
static epo_status check_comm(const epo_group_config *c) {
    const char *beside = c->members != NULL     ? "members"
                         : c->bootstrap != NULL ? "a bootstrap"
                         : c->threads != NULL   ? "threads"
                                                : NULL;
    if (beside != NULL)
        return epo_fail(EPO_E_ARG,
                        "nccl_comm: found %s beside it; give the communicator alone, its ranks "
                        "form the group",
                        beside);
    if (c->engine == EPO_ENGINE_HOST)
        return epo_fail(EPO_E_ARG, "nccl_comm: the host engine cannot use a communicator; leave "
                                   "the engine EPO_ENGINE_AUTO");
    return EPO_OK;
}

static epo_status resolve_ranks(epo_group_config *c) {
    const char *source;
    if (c->nccl_comm != NULL)
        return check_comm(c);
    if (c->rank == -1 && c->ranks == -1) {
        if (c->threads != NULL)
            return epo_fail(EPO_E_ARG, "rank and ranks: not given; ranks that are threads have no "
                                       "environment of their own, set both");
        return epo_ranks_find(&c->rank, &c->ranks, &source);
    }
    if (c->ranks < 1)
        return epo_fail(EPO_E_ARG,
                        "ranks: found %d beside rank %d, allowed is a number from 1, or -1 for "
                        "both (found in the environment)",
                        c->ranks, c->rank);
    if (c->rank < 0 || c->rank >= c->ranks)
        return epo_fail(EPO_E_ARG, "rank: found %d, allowed is 0..%d (ranks is %d)", c->rank,
                        c->ranks - 1, c->ranks);
    return EPO_OK;
}

static epo_status check_members(const epo_group_config *c) {
    bool here = false;
    if (c->members == NULL)
        return c->nmembers == 0 ? EPO_OK
                                : epo_fail(EPO_E_ARG,
                                           "nmembers: found %d with members NULL, "
                                           "allowed is 0",
                                           c->nmembers);
    if (c->nmembers < 1 || c->nmembers > c->ranks)
        return epo_fail(EPO_E_ARG, "nmembers: found %d, allowed is 1..%d", c->nmembers, c->ranks);
    for (int i = 0; i < c->nmembers; i++) {
        if (c->members[i] < 0 || c->members[i] >= c->ranks)
            return epo_fail(EPO_E_ARG, "members[%d]: found %d, allowed is 0..%d", i, c->members[i],
                            c->ranks - 1);
        for (int j = 0; j < i; j++)
            if (c->members[j] == c->members[i])
                return epo_fail(EPO_E_ARG,
                                "members[%d] and members[%d] are both %d; a rank is in "
                                "a group once",
                                j, i, c->members[i]);
        here = here || c->members[i] == c->rank;
    }
    return here ? EPO_OK
                : epo_fail(EPO_E_ARG,
                           "members does not list this rank (%d); only listed ranks make the call",
                           c->rank);
}

/* Chunks, limits: the caller's value, the user's variable, the built-in one. */
static epo_status resolve_numbers(epo_group_config *c) {
    const char *text = value_of(EPO_ENV_CHUNKS);
    if (c->chunks == 0 && text != NULL &&
        (!epo_text_int(text, &c->chunks) || c->chunks > CHUNKS_MAX))
        return epo_fail(EPO_E_ARG, "%s: found \"%.64s\", allowed is 0 (chosen for you) to %d",
                        EPO_ENV_CHUNKS, text, CHUNKS_MAX);
    if (c->overlap == EPO_OFF)
        c->chunks = 1;
    text = value_of(EPO_ENV_TIMEOUT);
    if (c->timeout_s == 0 && text != NULL &&
        (!epo_text_seconds(text, &c->timeout_s) || c->timeout_s <= 0 || c->timeout_s > TIMEOUT_MAX))
        return epo_fail(EPO_E_ARG, "%s: found \"%.64s\", allowed is more than 0 to %.0f seconds",
                        EPO_ENV_TIMEOUT, text, TIMEOUT_MAX);
    if (c->timeout_s == 0)
        c->timeout_s = 600;
    if (c->warn_s == 0)
        c->warn_s = 30;
    if (c->wgrad_limit_bytes == 0)
        c->wgrad_limit_bytes = UINT64_C(1) << 30;
    return EPO_OK;
}

static void explain(char *reason, int overlap, origin from) {
    const char *why = value_of(EPO_OUT_REASON), *word = overlap == EPO_ON ? "on" : "off";
    if (from == FROM_CALLER)
        snprintf(reason, EPO_REASON_MAX, "%s: the program asked for it", word);
    else if (from == FROM_JOB)
        snprintf(reason, EPO_REASON_MAX, "%s: by the job, %s", word,
                 why != NULL ? why : EPO_OUT_DECISION " says so");
    else
        snprintf(reason, EPO_REASON_MAX, "%s: nothing asked for it (srun --ep-overlap=on does)",
                 word);
}

/* Overlap, dispatcher, delayed weight gradients, and whether they fit together.
 * As on the command line: a caller's own off drops the job's companion, anything
 * else that asks for delay without overlap is an error. */
static epo_status resolve_switches(epo_group_config *c, char *reason) {
    static const char *const switches[2] = {"off", "on"}, *const bits[2] = {"0", "1"},
                             *const dispatchers[2] = {"alltoall", "flex"};
    int overlap = c->overlap, dispatcher = c->dispatcher, delay = c->delay_wgrad;
    origin overlap_from, dispatcher_from, delay_from;
    epo_status status = read_word(EPO_OUT_DECISION, switches, &overlap, EPO_OFF, &overlap_from);
    if (status == EPO_OK)
        status = read_word(EPO_OUT_DISPATCHER, dispatchers, &dispatcher, EPO_DISPATCH_ALLTOALL,
                           &dispatcher_from);
    if (status == EPO_OK)
        status = read_word(EPO_OUT_DELAY_WGRAD, bits, &delay, EPO_OFF, &delay_from);
    if (status != EPO_OK)
        return status;
    char node[64];
    if (overlap_from == FROM_DEFAULT && epo_step_is_unserved(node, sizeof node))
        return epo_fail(EPO_E_STATE,
                        "node %s has no ep-overlap plugin, but the step asks for overlap: leave it "
                        "out (--exclude=%s), or tell the site's administrators",
                        node, node);
    explain(reason, overlap, overlap_from);
    if (overlap == EPO_OFF && delay == EPO_ON) {
        if (overlap_from != FROM_CALLER || delay_from == FROM_CALLER)
            return epo_fail(EPO_E_ARG,
                            "delayed weight gradients (%s) need overlap, which is %s; turn overlap "
                            "on or the delay off",
                            delay_from == FROM_CALLER ? "the program's delay_wgrad"
                                                      : EPO_OUT_DELAY_WGRAD "=1",
                            reason);
        delay = EPO_OFF;
    }
    c->overlap = (epo_switch)overlap;
    c->dispatcher = (epo_dispatcher)dispatcher;
    c->delay_wgrad = (epo_switch)delay;
    return EPO_OK;
}

epo_status epo_environment_resolve(epo_group_config *config, char *reason) {
    epo_group_config c = *config;
    char why[EPO_REASON_MAX];
    epo_status status = check_caller(&c);
    if (status == EPO_OK)
        status = resolve_ranks(&c);
    if (status == EPO_OK)
        status = check_members(&c);
    if (status == EPO_OK)
        status = resolve_switches(&c, why);
    if (status == EPO_OK)
        status = resolve_numbers(&c);
    if (status != EPO_OK)
        return status;
    *config = c;
    memcpy(reason, why, sizeof why);
    return EPO_OK;
}

bool epo_environment_place(epo_group_config *config) {
    epo_group_config c = *config, plain = {.overlap = EPO_ON, .chunks = 1};
    if (resolve_ranks(&c) != EPO_OK || check_members(&c) != EPO_OK)
        return false;
    plain.timeout_s = c.timeout_s >= 0 && c.timeout_s <= TIMEOUT_MAX ? c.timeout_s : 0;
    c.timeout_s = resolve_numbers(&plain) == EPO_OK ? plain.timeout_s : 0; /* 0: the engine's own */
    c.warn_s = 0;
    *config = c;
    return true;
}
