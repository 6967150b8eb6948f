/* SPDX-License-Identifier: Apache-2.0
 *
 * hello.h - how processes of a job introduce themselves before they share memory.
 */
#ifndef EPO_BACKEND_HOST_HELLO_H
#define EPO_BACKEND_HOST_HELLO_H

#include "backend/host/host.h"

#define HOST_MAGIC UINT32_C(0x31504f45) /* "EOP1" */

/* The first three fields never move: processes of other versions read them. */
typedef struct host_hello {
    uint32_t magic, abi;
    char version[16];
    int32_t rank, ranks, pid;
    int32_t has_boot;
    uint64_t ipc;    /* inode of the IPC namespace; 0: unknown */
    uint64_t nonce;  /* random */
    int64_t left_ns; /* of this rank's limit for joining */
    double link_gbs, link_us;
    char boot[40];
    char node[HOST_NODE_MAX];
    int32_t wrong; /* not EPO_OK: it makes no group, */
    char why[HOST_WHY_MAX];
} host_hello;

void host_hello_make(const host_place *place, host_hello *out);
/* "rank 3 (pid 71 on n2)" */
const char *host_hello_name(const host_hello *hello, char *text, size_t size);
/* Can `other` be in the group of `zero`, which is rank 0's?  The error names both. */
epo_status host_hello_check(const host_hello *zero, const host_hello *other);
/* The rendezvous of this job's group number n of this member list: what all its
 * processes know without having met, and nobody else's job. */
uint64_t host_hello_key(const host_place *place);

/* ---- nodes.c: what Slurm tells about ranks that are not there --------------- */

/* The node on which Slurm started a rank of the job; false: not known. */
bool host_node_of_rank(const host_place *place, int rank, char *node, size_t size);
/* Refuses when that node has addresses and none is this machine's. */
epo_status host_node_check(const host_place *place, int rank);
/* The i-th name of a hostlist, "n[01-03,7],m"; false: there is none, or the list
 * is of a form that is not read here. */
bool host_node_nth(const char *list, int i, char *node, size_t size);
/* The i-th number of "2(x3),1"; -1: there is none. */
int host_tasks_nth(const char *list, int i);

#endif
