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
    int32_t device;
    void *address;
    cudaIpcMemHandle_t handle;
} window_card;

static epo_status card_fill(epo_backend *be, window_card *card, void *base) {
    card->pid = (int64_t)getpid();
    card->device = be->device;
    card->address = base;
    if (!gpu_meet_threads(be->meet))
        GPU_TRY(be, "window", cudaIpcGetMemHandle(&card->handle, base));
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

/* Addresses of peers' memory that are to be closed. */
typedef struct peers_rest {
    bool used; /* by this GPU: not before it is at rest */
    int count;
    void *at[];
} peers_rest;

static void peers_end(void *ctx) {
    peers_rest *p = ctx;
    if (p->used)
        (void)cudaDeviceSynchronize();
    for (int i = 0; i < p->count; i++)
        (void)cudaIpcCloseMemHandle(p->at[i]);
    free(p);
}

/* False: not within the limit. */
static bool peers_close(epo_backend *be, char **peer, bool *opened, bool used) {
    int count = 0;
    for (int r = 0; r < be->ranks; r++)
        count += opened[r];
    if (count == 0 && !used)
        return true;
    peers_rest *p = calloc(1, sizeof *p + (size_t)count * sizeof *p->at);
    if (p == NULL)
        return false;
    p->used = used;
    for (int r = 0; r < be->ranks; r++)
        if (opened[r])
            p->at[p->count++] = peer[r];
    return used ? gpu_release(be, "peers' memory", peers_end, p)
                : gpu_release_within(GPU_BESIDE_S, be->device, be->rank, "peers' memory", true,
                                     peers_end, p);
}

/* [collective unless broken]  Have all closed what they had opened?  Of a broken group nobody
 * knows; then this rank's answer counts. */
static bool all_closed(epo_backend *be, bool mine) {
    bool all[256], closed = true;
    if (atomic_load(&be->late) != EPO_OK ||
        gpu_meet_allgather(be->meet, &mine, sizeof mine, all) != EPO_OK)
        return mine;
    for (int r = 0; r < be->ranks; r++)
        closed = closed && all[r];
    return closed;
}

/* [collective]  Opens the allocations of the other ranks of this node.  The same verdict
 * everywhere: `mine` is what this rank has to say before. */
static epo_status peers_open(epo_backend *be, epo_status mine, void *base, char **peer,
                             bool *opened) {
    window_card card, all[256]; /* no memory that could be lacking: the others wait here */
    const epo_peers node = epo_peers_of(EPO_SCOPE_NODE, be->rank, be->ranks, be->info.nodes);
    memset(&card, 0, sizeof card);
    epo_status status =
        gpu_meet_agree(be->meet, mine == EPO_OK ? card_fill(be, &card, base) : mine);
    if (status == EPO_OK)
        status = gpu_meet_allgather(be->meet, &card, sizeof card, all);
    if (status != EPO_OK)
        return status;
    for (int r = 0; status == EPO_OK && r < be->ranks; r++) {
        if (r == be->rank)
            peer[r] = base;
        else if (r >= node.first && r < node.first + node.count)
            status = card_open(be, &all[r], &peer[r], &opened[r]);
    }
    return gpu_meet_agree(be->meet, status);
}

static void probe_free(void *probe) { (void)cudaFree(probe); }

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
out:;
    const bool closed = peers_close(be, peer, opened, false);
    if ((status == EPO_OK ? all_closed(be, closed) : closed) && probe != NULL) {
        gpu_memory_count(be, -4096);
        (void)gpu_release_within(GPU_BESIDE_S, be->device, be->rank, "memory that peers were shown",
                                 true, probe_free, probe);
    }
    return status == EPO_OK ? gpu_meet_barrier(be->meet) : status;
}

/* ---- flags ---- */

static uint64_t flags_bytes(int ranks) {
    return GPU_FLAGS * (sizeof(uint64_t) + (uint64_t)ranks * (uint64_t)ranks * sizeof(uint64_t));
}

/* Threads share one mapping: rank 0 registers it for all contexts. */
static epo_status flags_register(epo_backend *be, epo_window *w, void *shared) {
    cudaError_t e = cudaSuccess;
    if (!gpu_meet_threads(be->meet) || be->rank == 0)
        e = cudaHostRegister(shared, w->shared_bytes,
                             cudaHostRegisterPortable | cudaHostRegisterMapped);
    w->registered = e == cudaSuccess && (!gpu_meet_threads(be->meet) || be->rank == 0);
    return e == cudaSuccess ? EPO_OK : gpu_fail(be, "cudaHostRegister", "window", e);
}

/* [collective]  The same verdict everywhere. */
static epo_status flags_create(epo_backend *be, epo_window *w) {
    void *shared = NULL;
    char *device = NULL;
    w->shared_bytes = (flags_bytes(be->ranks) + 4095) / 4096 * 4096;
    epo_status status = gpu_meet_shared(be->meet, w->shared_bytes, &shared);
    if (status != EPO_OK)
        return status;
    w->key = shared;
    w->words = (volatile uint64_t *)shared + GPU_FLAGS;
    status = gpu_meet_agree(be->meet, flags_register(be, w, shared));
    if (status != EPO_OK)
        return status;
    const cudaError_t e = cudaHostGetDevicePointer((void **)&device, shared, 0);
    w->words_dev = device + GPU_FLAGS * sizeof(uint64_t);
    return gpu_meet_agree(be->meet, e == cudaSuccess
                                        ? EPO_OK
                                        : gpu_fail(be, "cudaHostGetDevicePointer", "window", e));
}

static epo_window *window_new(epo_backend *be) {
    epo_window *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->be = be;
    w->peer = calloc((size_t)be->ranks, sizeof *w->peer);
    w->opened = calloc((size_t)be->ranks, sizeof *w->opened);
    if (w->peer != NULL && w->opened != NULL)
        return w;
    free(w->opened);
    free(w->peer);
    free(w);
    return NULL;
}

/* What this rank has to make by itself. */
static epo_status window_fill(epo_backend *be, epo_window *w, uint64_t bytes) {
    void *base = NULL;
    const uint64_t size = (bytes + GPU_WINDOW_PAGE - 1) / GPU_WINDOW_PAGE * GPU_WINDOW_PAGE;
    if (w == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for a window", be->rank);
    if (bytes > UINT64_MAX - GPU_WINDOW_PAGE)
        return epo_fail(EPO_E_NOMEM, "rank %d: window: need %" PRIu64 " bytes", be->rank, bytes);
    GPU_TRY(be, "window", cudaSetDevice(be->device));
    epo_status status = gpu_alloc_shared(be, size, &base);
    if (status != EPO_OK)
        return status;
    w->base = base;
    w->bytes = size;
    return gpu_zero_now(be, base, size); /* whatever else this GPU has to do */
}

epo_status gpu_window_create(epo_backend *be, uint64_t bytes, epo_window **out) {
    epo_window *w = window_new(be);
    epo_status status = window_fill(be, w, bytes);
    status = be->one_sided ? peers_open(be, status, w != NULL ? w->base : NULL,
                                        w != NULL ? w->peer : NULL, w != NULL ? w->opened : NULL)
                           : gpu_meet_agree(be->meet, status);
    if (status == EPO_OK)
        status = flags_create(be, w);
    if (status != EPO_OK && w == NULL)
        (void)all_closed(be, true); /* the others ask */
    if (status != EPO_OK) {
        char text[EPO_ERROR_MAX];
        snprintf(text, sizeof text, "%s", epo_fail_text());
        gpu_window_destroy(be, w);
        return epo_fail(status, "%s", text);
    }
    w->next = be->windows;
    be->windows = w;
    *out = w;
    return EPO_OK;
}

static void flags_unregister(void *shared) { (void)cudaHostUnregister(shared); }

/* Threads have one mapping of flags and rows, which no peer's stream may still write when it
 * goes: of a broken group nobody knows, and both stay.  Processes have each their own. */
static bool stays(const epo_backend *be) {
    return be->ranks > 1 && gpu_meet_threads(be->meet) && atomic_load(&be->late) != EPO_OK;
}

static void flags_end(epo_backend *be, epo_window *w) {
    const bool threads = gpu_meet_threads(be->meet);
    if (w->key == NULL || stays(be))
        return;
    const bool mine = !w->registered || gpu_release(be, "flags", flags_unregister, (void *)w->key);
    if (mine && (!threads || gpu_meet_barrier(be->meet) == EPO_OK))
        gpu_meet_unshare(be->meet, (void *)w->key, w->shared_bytes);
}

/* [collective unless broken]  Where a GPU does not come to rest, another group's work on it or the
 * caller's, the window stays. */
void gpu_window_destroy(epo_backend *be, epo_window *w) {
    if (w == NULL)
        return;
    for (epo_window **at = &be->windows; *at != NULL; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    const bool closed = peers_close(be, w->peer, w->opened, true);
    gpu_watch_forget(be, w->words, w->shared_bytes);
    if (all_closed(be, closed)) {
        flags_end(be, w);
        if (!stays(be))
            gpu_free_shared(be, w->base, w->bytes);
    }
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
