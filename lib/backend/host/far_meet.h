/* SPDX-License-Identifier: Apache-2.0
 *
 * far_meet.h - how the ranks of several machines get their connections to rank 0.
 */
#ifndef EPO_BACKEND_HOST_FAR_MEET_H
#define EPO_BACKEND_HOST_FAR_MEET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep_overlap.h"

#define FAR_ADDRESSES 8
#define FAR_KEY_BYTES 32

/* Rank 0's, told over the bootstrap: the key goes no other way. */
typedef struct far_card {
    uint8_t key[FAR_KEY_BYTES];
    uint32_t address[FAR_ADDRESSES]; /* IPv4, network order */
    uint16_t port;
    uint16_t count;
    int32_t status; /* of whoever gives the card, and why */
    char why[120];
} far_card;

double far_now(void);
/* Bytes, within a limit: 0, ETIMEDOUT, or what ended the connection. */
int far_move(int fd, void *data, size_t bytes, bool out, double until);
int far_send(int fd, const void *data, size_t bytes, double until);

/* Rank 0 listens: the card, and a descriptor. */
epo_status far_listen(far_card *card, int *listener);
/* Takes those who prove that they hold the key until fd[1..ranks) are all there; false: the
 * limit came first.  Who connects and proves nothing holds up nobody. */
bool far_gather(int listener, const far_card *card, int ranks, int *fd, double until);
/* Another rank's connection to rank 0; -1: none by then, *stage is how far it came. */
typedef enum far_stage { FAR_NOWHERE, FAR_REACHED, FAR_PROVED } far_stage;
int far_reach(const far_card *card, int rank, int ranks, double until, far_stage *stage);

#endif
