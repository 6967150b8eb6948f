/* SPDX-License-Identifier: Apache-2.0
 *
 * pieces.c - memory that a program has mapped in pieces (cuMemCreate, cuMemMap; PyTorch's
 * expandable segments): a message may lie on many of them, and none has a handle of the older kind.
 *
 * What lies in a row around a message is a stretch, which peers get as a whole and map in a row,
 * so that a message is one copy there, too.  It is good as long as each piece of the message is
 * the one that was handed over: the driver numbers them as it numbers allocations.
 */
#include "config.h"

#include "preload/intercept/channel.h"
#include "preload/intercept/hand.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AROUND 16   /* pieces before a message and behind it that come along */
#define HAND_MOST 3 /* times that a peer is given a stretch which it does not reach */

struct reach_piece {
    uint64_t id, bytes;
};

typedef struct stretch { /* while it is made */
    cu_pointer base, end;
    uint32_t first, count; /* of `piece` */
    reach_piece piece[2 * HAND_PIECES];
} stretch;

/* ---- ours ---- */

static bool can(const cuda_driver *cu) {
    return cu->piece_retain != NULL && cu->piece_release != NULL && cu->piece_range != NULL &&
           cu->piece_kind != NULL && cu->piece_export != NULL && cu->piece_import != NULL &&
           cu->piece_map != NULL && cu->piece_unmap != NULL && cu->piece_access != NULL &&
           cu->range_reserve != NULL && cu->range_free != NULL && cu->device_get != NULL;
}

/* The kind of handle that the piece at `at` was made for; 0: none, or nothing of that sort. */
static int kind_at(const cuda_driver *cu, cu_pointer at) {
    cu_memory piece;
    cu_memory_kind kind = {.handles = 0};
    if (cu->piece_retain(&piece, (void *)at) != 0)
        return 0;
    const bool told = cu->piece_kind(&kind, piece) == 0;
    (void)cu->piece_release(piece);
    if (!told || kind.location.type != CU_LOCATION_DEVICE)
        return 0;
    return (kind.handles & CU_HANDLE_DESCRIPTOR) != 0 ? CU_HANDLE_DESCRIPTOR
           : (kind.handles & CU_HANDLE_FABRIC) != 0   ? CU_HANDLE_FABRIC
                                                      : 0;
}

/* The piece that `at` lies in, of that kind of handle.  (As an attribute, the driver gives the
 * whole range that was reserved.) */
static bool piece_at(const cuda_driver *cu, cu_pointer at, int kind, cu_pointer *base,
                     reach_piece *p) {
    size_t size = 0;
    return cu->attribute(&p->id, CU_ATTRIBUTE_BUFFER_ID, at) == 0 && p->id != 0 &&
           cu->piece_range(base, &size, at) == 0 && (p->bytes = size) > 0 &&
           kind_at(cu, at) == kind;
}

/* Pieces from s->end on, until `end` is within or there are `most`. */
static void grow_up(const cuda_driver *cu, stretch *s, cu_pointer end, int kind, uint32_t most) {
    cu_pointer base;
    for (; s->count < most && s->end < end; s->count++) {
        reach_piece *p = &s->piece[s->first + s->count];
        if (!piece_at(cu, s->end, kind, &base, p) || base != s->end)
            return;
        s->end += p->bytes;
    }
}

static void grow_down(const cuda_driver *cu, stretch *s, int kind, uint32_t most) {
    cu_pointer base;
    reach_piece p;
    for (; s->count < most && s->first > 0; s->count++) {
        if (!piece_at(cu, s->base - 1, kind, &base, &p) || base + p.bytes != s->base)
            return;
        s->base = base;
        s->piece[--s->first] = p;
    }
}

static uint32_t at_most(uint32_t count) { return count < HAND_PIECES ? count : HAND_PIECES; }

/* The stretch around a message; false: not all of it can be handed over. */
static bool stretch_find(const cuda_driver *cu, cu_pointer target, uint64_t bytes, int kind,
                         stretch *s) {
    s->first = HAND_PIECES;
    s->count = 0;
    if (!piece_at(cu, target, kind, &s->base, &s->piece[s->first]))
        return false;
    s->end = s->base;
    grow_up(cu, s, target + bytes, kind, HAND_PIECES);
    if (s->end < target + bytes)
        return false;
    grow_up(cu, s, UINTPTR_MAX, kind, at_most(s->count + AROUND));
    grow_down(cu, s, kind, at_most(s->count + AROUND));
    return true;
}

/* Every piece of what lies from `from` to `end` is still the one it was. */
static bool still_there(const channel *ch, const reach_entry *e, cu_pointer from, cu_pointer end) {
    cu_pointer at = e->base;
    for (uint32_t i = 0; i < e->count && at < end; at += e->piece[i++].bytes) {
        uint64_t id = 0;
        if (at + e->piece[i].bytes > from &&
            (ch->cu->attribute(&id, CU_ATTRIBUTE_BUFFER_ID, at) != 0 || id != e->piece[i].id))
            return false;
    }
    return true;
}

bool pieces_gone(const channel *ch, const reach_entry *e) {
    return !still_there(ch, e, e->base, e->base + e->size);
}

reach_entry *pieces_known(channel *ch, cu_pointer target, uint64_t bytes) {
    reach_table *t = &ch->offered;
    for (int i = 0; i < CHANNEL_REACH; i++) {
        reach_entry *e = &t->entry[i];
        if (e->piece != NULL && target >= e->base && bytes <= e->size &&
            target - e->base <= e->size - bytes && still_there(ch, e, target, target + bytes)) {
            e->used = ++t->now;
            return e;
        }
    }
    return NULL;
}

static bool stretch_keep(channel *ch, const stretch *s, int kind, reach_entry *e) {
    e->piece = calloc(s->count, sizeof *e->piece);
    if (e->piece == NULL)
        return false;
    memcpy(e->piece, &s->piece[s->first], s->count * sizeof *e->piece);
    e->base = s->base;
    e->size = s->end - s->base;
    e->count = s->count;
    e->kind = kind;
    e->id = PIECES_ID | ++ch->stretches;
    e->usable = true;
    return true;
}

bool pieces_look(channel *ch, cu_pointer target, uint64_t bytes, reach_entry *e) {
    const int kind = ch->hand >= 0 ? kind_at(ch->cu, target) : 0;
    stretch *s = kind != 0 ? malloc(sizeof *s) : NULL;
    const bool made =
        s != NULL && stretch_find(ch->cu, target, bytes, kind, s) && stretch_keep(ch, s, kind, e);
    free(s);
    return made;
}

static size_t handle_bytes(int kind) {
    return kind == CU_HANDLE_FABRIC ? HAND_FABRIC_BYTES : sizeof(int);
}

/* The handle of the piece at `at`, behind those that are there. */
static bool export_at(const cuda_driver *cu, cu_pointer at, int kind, void *handle, kept *k) {
    cu_memory piece;
    sigset_t before;
    if (cu->piece_retain(&piece, (void *)at) != 0)
        return false;
    kept_lock(&before);
    const bool done = cu->piece_export(handle, piece, kind, 0) == 0;
    if (done && kind == CU_HANDLE_DESCRIPTOR) {
        (void)fcntl(k->fd[k->count], F_SETFD, FD_CLOEXEC);
        k->count++;
    }
    kept_unlock(&before);
    (void)cu->piece_release(piece);
    return done;
}

static bool export_all(const channel *ch, const reach_entry *e, hand_stretch *s, char *handles,
                       kept *k) {
    cu_pointer at = e->base;
    for (uint32_t n = 0; n < e->count; at += e->piece[n++].bytes) {
        if (!export_at(ch->cu, at, e->kind, handles + n * handle_bytes(e->kind), k))
            return false;
        s->bytes[n] = e->piece[n].bytes;
    }
    return true;
}

/* Its handles, to one peer. */
static fallback hand_over(const channel *ch, int peer, const reach_entry *e) {
    hand_stretch *s = calloc(1, sizeof *s);
    char *handles = malloc((size_t)HAND_PIECES * HAND_FABRIC_BYTES);
    fallback why = FALLBACK_MEMORY;
    kept k;
    kept_begin(&k, (int *)(void *)handles);
    if (s != NULL && handles != NULL && export_all(ch, e, s, handles, &k)) {
        memcpy(s->room, ch->owner->key.word, sizeof s->room);
        s->id = e->id;
        s->from = (uint32_t)ch->agree.me;
        s->kind = (uint32_t)e->kind;
        s->count = e->count;
        why = hand_give(ch->agree.room->card[peer].socket, s, handles);
    } else if (hand_is_full()) {
        why = FALLBACK_FILES;
    }
    kept_close(&k);
    free(handles);
    free(s);
    return why;
}

fallback pieces_offer(channel *ch, int peer, reach_entry *e) {
    const unsigned bit = 1u << peer;
    if ((e->handed & bit) != 0)
        return FALLBACK_NONE;
    if (e->tries[peer] == HAND_MOST)
        return e->lost[peer];
    e->tries[peer]++;
    e->lost[peer] = hand_over(ch, peer, e);
    if (e->lost[peer] == FALLBACK_NONE)
        e->handed |= bit;
    return e->lost[peer];
}

void pieces_heard(channel *ch, int peer, uint64_t id, fallback why) {
    for (int i = 0; i < CHANNEL_REACH; i++) {
        reach_entry *e = &ch->offered.entry[i];
        if (e->id != id)
            continue;
        e->lost[peer] = why;
        if (why == FALLBACK_NONE)
            e->tries[peer] = 0; /* (it may have to give the mapping back some day) */
        else
            e->handed &= ~(1u << peer);
    }
}

/* ---- theirs ---- */

/* Where this process does not see the peer's GPU, the driver takes a copy to its pieces for one
 * inside this GPU, whose SMs make it: slower than NCCL, and no engine's.  (Not so with CUDA IPC.)
 * Seen on driver 580: the location of what was imported is then -2, and the GPU's number else.
 */
static bool is_seen(const cuda_driver *cu, cu_memory piece) {
    cu_memory_kind kind = {.location = {CU_LOCATION_DEVICE, 0}};
    return cu->piece_kind(&kind, piece) != 0 || kind.location.id >= 0;
}

/* All pieces in a row at `base`, and access to them. */
static bool map_all(const channel *ch, cu_pointer base, uint64_t size, const hand_stretch *s,
                    char *handles) {
    const cuda_driver *cu = ch->cu;
    cu_access access = {{CU_LOCATION_DEVICE, 0}, CU_ACCESS_READ_WRITE};
    cu_pointer at = base;
    bool done = cu->device_get(&access.location.id) == 0;
    for (uint32_t i = 0; done && i < s->count; at += s->bytes[i++]) {
        char *handle = handles + i * handle_bytes((int)s->kind);
        cu_memory piece;
        int descriptor;
        memcpy(&descriptor, handle, sizeof descriptor);
        done = cu->piece_import(&piece,
                                s->kind == CU_HANDLE_FABRIC ? handle : (void *)(intptr_t)descriptor,
                                (int)s->kind) == 0;
        if (!done)
            break;
        done = is_seen(cu, piece) && cu->piece_map(at, s->bytes[i], 0, piece, 0) == 0;
        (void)cu->piece_release(piece); /* (the mapping holds it) */
        if (!done)
            break;
    }
    done = done && cu->piece_access(base, size, &access, 1) == 0;
    if (!done && at > base)
        (void)cu->piece_unmap(base, at - base);
    return done;
}

static bool map(const channel *ch, const hand_stretch *s, char *handles, reach_entry *e) {
    e->size = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        if (s->bytes[i] == 0 || s->bytes[i] > UINT64_MAX / 2 / HAND_PIECES)
            return false;
        e->size += s->bytes[i];
    }
    if (ch->cu->range_reserve(&e->base, e->size, 0, 0, 0) != 0)
        return false;
    if (map_all(ch, e->base, e->size, s, handles))
        return true;
    (void)ch->cu->range_free(e->base, e->size);
    return false;
}

/* Other than with memory of CUDA IPC, the driver does not wait for the copies that use it, so
 * whoever gives back what may have some does. */
void pieces_forget(const channel *ch, const reach_entry *e) {
    (void)ch->cu->piece_unmap(e->base, e->size);
    (void)ch->cu->range_free(e->base, e->size);
}

static void hear_one(channel *ch, const hand_stretch *s, char *handles, bool whole) {
    reach_entry e = {
        .id = s->id, .mapped = true, .why = whole ? FALLBACK_UNREACHED : FALLBACK_FILES};
    if (memcmp(s->room, ch->owner->key.word, sizeof s->room) != 0 || s->from >= AGREE_RANKS ||
        (s->id & PIECES_ID) == 0 || !channel_has(ch, (int)s->from))
        return;
    e.usable = whole && reach_has_room(ch, (int)s->from) && map(ch, s, handles, &e);
    reach_keep(ch, (int)s->from, &e);
}

fallback pieces_hear(channel *ch) {
    hand_stretch *s = ch->hand >= 0 ? malloc(sizeof *s) : NULL;
    char *handles = s != NULL ? malloc((size_t)HAND_PIECES * HAND_FABRIC_BYTES) : NULL;
    hand_result r = handles != NULL ? HAND_TAKEN : HAND_NONE;
    while (r != HAND_NONE) {
        kept k;
        r = hand_take(ch->hand, s, handles, &k);
        if (r == HAND_FILES && s->count == 0)
            break;
        if (r != HAND_NONE)
            hear_one(ch, s, handles, r == HAND_TAKEN);
        kept_close(&k);
    }
    free(handles);
    free(s);
    return r == HAND_FILES ? FALLBACK_FILES : FALLBACK_NONE;
}

void pieces_open(channel *ch) {
    char *name = ch->agree.room->card[ch->agree.me].socket;
    sigset_t before;
    kept_lock(&before);
    ch->hand = can(ch->cu) ? hand_open(name) : -1;
    kept_add(&ch->hand_kept, &ch->hand, 1);
    kept_unlock(&before);
}

void pieces_close(channel *ch) {
    kept_close(&ch->hand_kept);
    ch->hand = -1;
    for (int i = 0; i < CHANNEL_REACH; i++) {
        free(ch->offered.entry[i].piece);
        ch->offered.entry[i].piece = NULL;
    }
}
