/* SPDX-License-Identifier: Apache-2.0
 *
 * hello.c - who this process is, and under which name its group meets.
 */
#include "config.h"

#include "backend/host/hello.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static void hello_node(char *node, size_t size) {
    const char *slurm = getenv("SLURMD_NODENAME");
    node[0] = '\0';
    if (slurm != NULL && *slurm != '\0')
        snprintf(node, size, "%s", slurm);
    else if (gethostname(node, size) == 0)
        node[size - 1] = '\0';
    for (char *c = node; *c != '\0'; c++)
        if (*c <= ' ' || *c > '~')
            *c = '?';
}

void host_hello_make(const host_place *place, host_hello *out) {
    memset(out, 0, sizeof *out);
    out->magic = HOST_MAGIC;
    out->abi = EPO_ENGINE_ABI;
    snprintf(out->version, sizeof out->version, "%s", PACKAGE_VERSION);
    out->rank = place->rank;
    out->ranks = place->ranks;
    out->pid = (int32_t)getpid();
    out->link_gbs = place->link.gbs;
    out->link_us = place->link.us;
    struct stat st;
    if (stat("/proc/self/ns/ipc", &st) == 0)
        out->ipc = (uint64_t)st.st_ino;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (f != NULL) {
        out->has_boot = fscanf(f, "%39s", out->boot) == 1;
        fclose(f);
    }
    out->wrong = (int32_t)place->wrong;
    memcpy(out->why, place->why, sizeof out->why);
    hello_node(out->node, sizeof out->node);
    if (getrandom(&out->nonce, sizeof out->nonce, 0) != (ssize_t)sizeof out->nonce)
        out->nonce = (uint64_t)host_now_ns() ^ (uint64_t)getpid() << 40;
}

const char *host_hello_name(const host_hello *hello, char *text, size_t size) {
    snprintf(text, size, "rank %d (pid %d on %.*s)", (int)hello->rank, (int)hello->pid,
             HOST_NODE_MAX - 1, hello->node);
    return text;
}

epo_status host_hello_check(const host_hello *zero, const host_hello *other) {
    char a[HOST_NODE_MAX + 48], b[HOST_NODE_MAX + 48];
    host_hello_name(zero, a, sizeof a);
    host_hello_name(other, b, sizeof b);
    if (zero->abi != other->abi ||
        strncmp(zero->version, other->version, sizeof zero->version) != 0)
        return epo_fail(EPO_E_VERSION,
                        "versions differ: %s has %.15s, ABI %u; %s has %.15s, ABI %u", a,
                        zero->version, zero->abi, b, other->version, other->abi);
    if (other->wrong > EPO_OK && other->wrong <= EPO_E_VERSION)
        return epo_fail((epo_status)other->wrong, "%s made no group: %.*s", b, HOST_WHY_MAX - 1,
                        other->why);
    if (zero->has_boot && other->has_boot && strcmp(zero->boot, other->boot) != 0)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "%s and %s are on different machines; the ranks of a group must be on one: "
                        "make a group of each node's ranks (members)",
                        a, b);
    if (zero->ipc != 0 && other->ipc != 0 && zero->ipc != other->ipc)
        return epo_fail(
            EPO_E_UNSUPPORTED,
            "%s and %s are in different IPC namespaces (%llu, %llu); start the ranks in "
            "one container, or with the host's IPC namespace",
            a, b, (unsigned long long)zero->ipc, (unsigned long long)other->ipc);
    if (zero->ranks != other->ranks)
        return epo_fail(EPO_E_PEER, "%s makes a group of %d ranks, %s one of %d", a,
                        (int)zero->ranks, b, (int)other->ranks);
    if (zero->link_gbs != other->link_gbs || zero->link_us != other->link_us)
        return epo_fail(EPO_E_PEER, "%s differs: %s has %g GB/s, %g us, %s has %g GB/s, %g us",
                        EPO_ENV_HOST_LINK, a, zero->link_gbs, zero->link_us, b, other->link_gbs,
                        other->link_us);
    if (other->rank < 0 || other->rank >= zero->ranks)
        return epo_fail(EPO_E_PEER, "%s is not in the group of %s: ranks 0..%d", b, a,
                        (int)zero->ranks - 1);
    return EPO_OK;
}

/* ---- the name under which a group meets -------------------------------------- */

static uint64_t mix(uint64_t h, const void *data, size_t size) { /* FNV-1a */
    const unsigned char *p = data;
    for (size_t i = 0; i < size; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* A launcher's own count that is not the step's. */
static bool launcher_inside(void) {
    static const char *const counts[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS");
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const char *v = getenv(counts[i]);
        if (v != NULL && (tasks == NULL || strcmp(v, tasks) != 0))
            return true;
    }
    return false;
}

static uint64_t mix_variable(uint64_t h, const char *name, bool *there) {
    const char *v = getenv(name);
    *there = v != NULL && *v != '\0';
    if (!*there)
        return h;
    h = mix(h, name, strlen(name) + 1);
    return mix(h, v, strlen(v) + 1);
}

/* Names and values of what tells this launch from others; *enough: some of it is
 * the launcher's own, so that the parent need not be the same for all ranks. */
static uint64_t mix_launch(uint64_t h, bool *enough) {
    static const char *const slurm[] = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_CLUSTER_NAME",
                                        "SLURM_CONF"};
    static const char *const launcher[] = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE",
                                           "PMI_JOBID"};
    bool there;
    *enough = false;
    for (size_t i = 0; i < sizeof slurm / sizeof *slurm; i++)
        h = mix_variable(h, slurm[i], &there);
    for (size_t i = 0; i < sizeof launcher / sizeof *launcher; i++) {
        h = mix_variable(h, launcher[i], &there);
        *enough = *enough || there;
    }
    /* Two clusters on one machine may both have a step 1.0; srun's port differs.
     * The components of a heterogeneous step have one each. */
    if (getenv("SLURM_HET_SIZE") == NULL)
        h = mix_variable(h, "SLURM_STEP_LAUNCHER_PORT", &there);
    /* The step is the launch, unless a launcher inside a task made the ranks. */
    *enough = *enough || (getenv("SLURM_STEP_ID") != NULL && !launcher_inside());
    return h;
}

/* Groups made so far, per member list.  The process's own: ranks that make their
 * groups in the same order count alike. */
static struct {
    pthread_mutex_t mutex;
    struct group_count {
        uint64_t list, made;
    } * counts;
    size_t n;
} groups = {PTHREAD_MUTEX_INITIALIZER, NULL, 0};

static uint64_t group_number(uint64_t list) {
    uint64_t number = 0;
    pthread_mutex_lock(&groups.mutex);
    size_t i = 0;
    while (i < groups.n && groups.counts[i].list != list)
        i++;
    if (i == groups.n) {
        void *more = realloc(groups.counts, (groups.n + 1) * sizeof *groups.counts);
        if (more != NULL) {
            groups.counts = more;
            groups.counts[groups.n++] = (struct group_count){list, 0};
        }
    }
    if (i < groups.n)
        number = groups.counts[i].made++;
    pthread_mutex_unlock(&groups.mutex);
    return number;
}

uint64_t host_hello_key(const host_place *place) {
    bool enough;
    uint64_t list = UINT64_C(0xcbf29ce484222325);
    for (int i = 0; place->members != NULL && i < place->ranks; i++)
        list = mix(list, &place->members[i], sizeof place->members[i]);
    uint64_t number = group_number(list), key = mix_launch(list, &enough);
    if (!enough) {
        pid_t parent = getppid();
        key = mix(key, &parent, sizeof parent);
    }
    return mix(key, &number, sizeof number);
}
