/* SPDX-License-Identifier: Apache-2.0
 *
 * window.c - symmetric windows.  Ranks of one process use each other's plain
 * pointers (with peer access where their GPUs differ), other ranks CUDA IPC
 * handles.  The flags of a window are shared host memory.
 */
#include "backend/cuda/gpu.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What a rank tells the others about one allocation. */
typedef struct window_card {
    int64_t pid;
    int32_t device, ok;
    char uuid[16];
    void *address;
    cudaIpcMemHandle_t handle;
} window_card;

static epo_status card_fill(epo_backend *be, window_card *card, void *base) {
    struct cudaDeviceProp prop;
    memset(card, 0, sizeof *card);
    GPU_TRY(be, "window", cudaGetDeviceProperties(&prop, be->device));
    card->pid = (int64_t)getpid();
    card->device = be->device;
    memcpy(card->uuid, prop.uuid.bytes, sizeof card->uuid);
    card->address = base;
    if (!gpu_meet_threads(be->meet))
        GPU_TRY(be, "window", cudaIpcGetMemHandle(&card->handle, base));
    card->ok = 1;
    return EPO_OK;
}

/* The address of rank r's memory here; `opened` tells whether to close it. */
static epo_status card_open(epo_backend *be, const window_card *card, char **out, bool *opened) {
    *opened = false;
    if (card->pid == (int64_t)getpid() && gpu_meet_threads(be->meet)) {
        if (card->device != be->device) {
            int can = 0;
            GPU_TRY(be, "window", cudaDeviceCanAccessPeer(&can, be->device, card->device));
            if (!can)
                return epo_fail(EPO_E_UNSUPPORTED,
                                "rank %d: GPU %d cannot reach GPU %d (no P2P between them)",
                                be->rank, be->device, card->device);
            cudaError_t e = cudaDeviceEnablePeerAccess(card->device, 0);
            if (e == cudaErrorPeerAccessAlreadyEnabled)
                (void)cudaGetLastError();
            else if (e != cudaSuccess)
                return gpu_fail(be, "cudaDeviceEnablePeerAccess", "window", e);
        }
        *out = card->address;
        return EPO_OK;
    }
    GPU_TRY(be, "window",
            cudaIpcOpenMemHandle((void **)out, card->handle, cudaIpcMemLazyEnablePeerAccess));
    *opened = true;
    return EPO_OK;
}

static void peers_close(epo_backend *be, char **peer, bool *opened) {
    for (int r = 0; peer != NULL && opened != NULL && r < be->ranks; r++)
        if (opened[r])
            (void)cudaIpcCloseMemHandle(peer[r]);
}

/* [collective]  Opens the allocations of the other ranks of this node.  The same verdict
 * everywhere: `mine` is what this rank has to say before. */
static epo_status peers_open(epo_backend *be, epo_status mine, void *base, char **peer,
                             bool *opened) {
    window_card card, *all = calloc((size_t)be->ranks, sizeof *all);
    const epo_peers node = epo_peers_of(EPO_SCOPE_NODE, be->rank, be->ranks, be->info.nodes);
    memset(&card, 0, sizeof card);
    if (mine == EPO_OK && all != NULL)
        mine = card_fill(be, &card, base);
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    if (all == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d ranks", be->rank, be->ranks);
    epo_status met = gpu_meet_allgather(be->meet, &card, sizeof card, all);
    for (int r = 0; met == EPO_OK && mine == EPO_OK && r < be->ranks; r++) {
        if (!all[r].ok)
            mine = epo_fail(EPO_E_PEER,
                            "rank %d could not offer its window; its own message says "
                            "why",
                            r);
        else if (r == be->rank)
            peer[r] = base;
        else if (r >= node.first && r < node.first + node.count)
            mine = card_open(be, &all[r], &peer[r], &opened[r]);
        snprintf(text, sizeof text, "%s", epo_fail_text());
    }
    card.ok = mine == EPO_OK;
    if (met == EPO_OK)
        met = gpu_meet_allgather(be->meet, &card, sizeof card, all);
    for (int r = 0; met == EPO_OK && mine == EPO_OK && r < be->ranks; r++)
        if (!all[r].ok) {
            mine = EPO_E_PEER;
            snprintf(text, sizeof text, "rank %d could not open the windows of its peers", r);
        }
    free(all);
    if (met != EPO_OK)
        return met;
    return mine == EPO_OK ? EPO_OK : epo_fail(mine, "%s", text);
}

epo_status gpu_window_reach(epo_backend *be, bool wanted, bool *all, char *why, size_t size) {
    char *peer[256] = {NULL};
    bool opened[256] = {false};
    void *probe = NULL;
    *all = true;
    why[0] = '\0';
    if (be->ranks == 1)
        return EPO_OK;
    epo_status mine = EPO_OK;
    if (!wanted)
        mine = epo_fail(EPO_E_UNSUPPORTED, "EP_OVERLAP_CUDA_PEER=0");
    else
        mine = gpu_alloc_shared(be, 4096, &probe);
    epo_status status = peers_open(be, mine, probe, peer, opened);
    if (status == EPO_E_TIMEOUT)
        goto out;
    if (status != EPO_OK) {
        *all = false;
        snprintf(why, size, "%s", epo_fail_text());
        status = EPO_OK;
    }
out:
    peers_close(be, peer, opened);
    if (status == EPO_OK)
        status = gpu_meet_barrier(be->meet); /* before the memory goes */
    gpu_free_shared(be, probe, 4096);
    return status;
}

/* ---- flags ---- */

static uint64_t flags_bytes(int ranks) {
    return GPU_FLAGS * (sizeof(uint64_t) + (uint64_t)ranks * (uint64_t)ranks * sizeof(uint64_t));
}

static epo_status flags_create(epo_backend *be, epo_window *w) {
    void *shared = NULL;
    w->shared_bytes = (flags_bytes(be->ranks) + 4095) / 4096 * 4096;
    epo_status status = gpu_meet_shared(be->meet, w->shared_bytes, &shared);
    if (status != EPO_OK)
        return status;
    w->key = shared;
    w->words = (volatile uint64_t *)shared + GPU_FLAGS;
    /* Threads share one mapping: rank 0 registers it for all contexts. */
    cudaError_t e = cudaSuccess;
    w->registered = !gpu_meet_threads(be->meet) || be->rank == 0;
    if (w->registered)
        e = cudaHostRegister(shared, w->shared_bytes,
                             cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (e != cudaSuccess) {
        w->registered = false;
        return gpu_fail(be, "cudaHostRegister", "window", e);
    }
    status = gpu_meet_barrier(be->meet);
    if (status != EPO_OK)
        return status;
    char *device = NULL;
    GPU_TRY(be, "window", cudaHostGetDevicePointer((void **)&device, shared, 0));
    w->words_dev = device + GPU_FLAGS * sizeof(uint64_t);
    return EPO_OK;
}

epo_status gpu_window_create(epo_backend *be, uint64_t bytes, epo_window **out) {
    GPU_TRY(be, "window", cudaSetDevice(be->device));
    epo_window *w = calloc(1, sizeof *w);
    epo_status status = EPO_OK;
    if (w != NULL) {
        w->be = be;
        w->peer = calloc((size_t)be->ranks, sizeof *w->peer);
        w->opened = calloc((size_t)be->ranks, sizeof *w->opened);
    }
    if (w == NULL || w->peer == NULL || w->opened == NULL)
        status = epo_fail(EPO_E_NOMEM, "rank %d: no memory for a window", be->rank);
    if (status == EPO_OK && bytes > UINT64_MAX - GPU_WINDOW_PAGE)
        status = epo_fail(EPO_E_NOMEM, "rank %d: window: need %" PRIu64 " bytes", be->rank, bytes);
    void *base = NULL;
    const uint64_t size = (bytes + GPU_WINDOW_PAGE - 1) / GPU_WINDOW_PAGE * GPU_WINDOW_PAGE;
    if (status == EPO_OK)
        status = gpu_alloc_shared(be, size, &base);
    if (status == EPO_OK) {
        w->base = base;
        w->bytes = size;
        status = gpu_zero_now(be, base, size); /* whatever else this GPU has to do */
    }
    if (be->one_sided && w != NULL) {
        status = peers_open(be, status, base, w->peer, w->opened);
    } else {
        int32_t mine = (int32_t)status, all[256];
        char text[EPO_ERROR_MAX];
        snprintf(text, sizeof text, "%s", epo_fail_text());
        epo_status met = gpu_meet_allgather(be->meet, &mine, sizeof mine, all);
        if (met != EPO_OK)
            status = met;
        else if (status != EPO_OK)
            epo_fail(status, "%s", text);
        for (int r = 0; status == EPO_OK && r < be->ranks; r++)
            if (all[r] != EPO_OK)
                status = epo_fail(EPO_E_PEER, "rank %d could not make its window", r);
    }
    if (status == EPO_OK)
        status = flags_create(be, w);
    if (status == EPO_OK)
        status = gpu_meet_barrier(be->meet);
    if (status != EPO_OK) {
        if (w != NULL) {
            w->next = NULL;
            gpu_window_destroy(be, w);
        }
        return status;
    }
    w->next = be->windows;
    be->windows = w;
    *out = w;
    return EPO_OK;
}

/* [collective unless broken] */
void gpu_window_destroy(epo_backend *be, epo_window *w) {
    if (w == NULL)
        return;
    for (epo_window **at = &be->windows; *at != NULL; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    (void)cudaSetDevice(be->device);
    (void)cudaDeviceSynchronize();
    peers_close(be, w->peer, w->opened);
    /* Nobody may still write to this window or its flags when they go.  Of a broken
     * group nobody knows: its flags stay mapped. */
    if (atomic_load(&be->late) == EPO_OK)
        (void)gpu_meet_barrier(be->meet);
    gpu_watch_forget(be, w->words, w->shared_bytes);
    if (atomic_load(&be->late) == EPO_OK && w->key != NULL) {
        if (w->registered)
            (void)cudaHostUnregister((void *)w->key);
        if (gpu_meet_barrier(be->meet) == EPO_OK)
            gpu_meet_unshare(be->meet, (void *)w->key, w->shared_bytes);
    }
    gpu_free_shared(be, w->base, w->bytes);
    free(w->opened);
    free(w->peer);
    free(w);
}

void *gpu_window_local(epo_window *w) { return w->base; }

epo_window *gpu_window_of(epo_backend *be, const volatile void *address) {
    const volatile char *p = address;
    for (epo_window *w = be->windows; w != NULL; w = w->next)
        if (p >= w->base && p < w->base + w->bytes)
            return w;
    return NULL;
}
