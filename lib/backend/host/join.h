/* SPDX-License-Identifier: Apache-2.0
 *
 * join.h - how processes become a group: a star of sockets around rank 0, over
 * which rank 0 hands out descriptors of shared memory.
 */
#ifndef EPO_BACKEND_HOST_JOIN_H
#define EPO_BACKEND_HOST_JOIN_H

#include "backend/host/hello.h"

#define HOST_SUFFIXES 8 /* names tried when others sit on them */

struct host_join {
    int ranks, rank;
    int fd[HOST_RANKS_MAX]; /* rank 0: to each rank; others: fd[0] to rank 0; -1: none */
};

/* What rank 0 answers to a hello; with EPO_OK the shared block's descriptor. */
typedef struct host_welcome {
    uint32_t magic;
    int32_t status;
    char text[HOST_TEXT_MAX];
} host_welcome;

/* ---- socket.c ------------------------------------------------------------ */

typedef struct host_name {
    uint64_t key;
    int suffix;
} host_name;

/* A listening socket; EPO_E_STATE without text if a process of this user has the
 * name (its pid in *holder); names of other users' are passed over. */
epo_status host_socket_listen(host_name *name, int *fd, int *holder);
/* After a call below that returned -1: this process (or machine) has no descriptor or
 * memory for a socket, and waiting will not help. */
bool host_socket_starved(void);
/* A connection to the listener of this user, -1 if there is none now. */
int host_socket_connect(const host_name *name, int *pid);
/* The next connection of this user, -1 if there is none now. */
int host_socket_accept(int listener);
bool host_socket_send(int fd, const void *data, size_t size, int descriptor);
/* One message of `size` bytes and its descriptor (-1: none) if one is there:
 * 1 yes, 0 not yet, -1 the other side has closed or talks otherwise. */
int host_socket_receive(int fd, void *data, size_t size, int *descriptor);
/* Likewise a hello, of whatever version: what it does not have is 0. */
int host_socket_hello(int fd, host_hello *out);

/* ---- rendezvous.c, lead.c --------------------------------------------------- */

/* How long a rank waits for others to make a group. */
int64_t host_join_limit_ns(const host_place *place);
epo_status host_join_ranks(const host_place *place, struct host_join **join, host_shared **shared);
/* Rank 0's part: meets the others, gives them the shared block. */
epo_status host_join_lead(const host_place *place, const host_hello *me, const host_name *name,
                          int64_t until_ns, struct host_join *join, host_shared **shared);
/* Has `rank` closed its end?  Rank 0 sees all others, they see rank 0. */
bool host_join_hung_up(const struct host_join *join, int rank);
void host_join_destroy(struct host_join *join);

/* ---- memfile.c --------------------------------------------------------------- */

/* A file in memory without a name, mode 0600, of fixed size where the kernel can
 * fix it.  `named`: by way of a name that is removed at once (no memfd). */
epo_status host_memfile_create(uint64_t bytes, bool named, int *fd);
/* Maps it shared, after its size was checked. */
epo_status host_memfile_map(int fd, uint64_t bytes, void **out);
/* Rank 0 makes a file and sends it to all; the others take the one of that number, which
 * is there once rank 0 has told them so. */
epo_status host_memfile_give(const struct host_join *join, uint64_t bytes, uint64_t number,
                             int *fd);
epo_status host_memfile_take(const struct host_join *join, uint64_t number, int *fd);
/* [collective]  Rank 0 makes a file of `bytes`; every rank maps it. */
epo_status host_memfile_share(epo_backend *be, uint64_t bytes, void **out);

#endif
