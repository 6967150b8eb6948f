/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.c - opening, closing, and the table of operations.
 */
#include "backend/cuda/flex.h"
#include "backend/cuda/gpu.h"
#include "backend/meet.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_CHUNKS 4
/* Of flex's rows to peers: less hides no pass over the own ones. */
#define NEAR_BYTES (UINT64_C(3) << 20)
#define NEAR_MOST (UINT64_C(32) << 20)
/* Rows of a chunk below this cost more in GEMMs' ends than their exchange can hide. */
#define CHUNK_BYTES (UINT64_C(32) << 20)
/* Smaller pieces cost a copy engine more to start than to move. */
#define SMALL_PIECE (UINT64_C(64) << 10)
#define PACK_SMS 8

/* What may wait for the GPU, and all that is needed until then. */
static void backend_end(void *ctx) {
    epo_backend *be = ctx;
    gpu_watch_stop(be); /* no stream waits any more, and it may end the communicator */
    gpu_routing_close(be);
    gpu_flex_close(be);
    gpu_words_close(be);
    gpu_replay_close(be);
    gpu_record_destroy(be);
    gpu_pairs_destroy(be, be->broken);
    gpu_late_close(be);
    gpu_memory_close(be);
    gpu_meet_close(be->meet, be->broken);
    pthread_mutex_destroy(&be->lock);
    free(be);
}

static void backend_free(epo_backend *be, bool broken) {
    if (be == NULL)
        return;
    be->broken = broken;
    if (be->sum != NULL)
        gpu_window_destroy(be, be->sum);
    gpu_queue_destroy(be, be->sum_queue);
    gpu_event_destroy(be, be->sum_done);
    if (be->memory == NULL) /* it has not come to the GPU */
        backend_end(be);
    else
        (void)gpu_release_within(gpu_release_limit(be), be->device, be->rank, "the group", true,
                                 backend_end, be);
}

static epo_status device_open(epo_backend *be) {
    const char *why = NULL;
    int count = 0;
    if (gpu_driver_get(&why) == NULL)
        return epo_fail(EPO_E_UNSUPPORTED, "no NVIDIA driver here: %s is missing", why);
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count == 0)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "no GPU is visible: %s (CUDA_VISIBLE_DEVICES hides them?)",
                        e != cudaSuccess ? cudaGetErrorString(e) : "0 devices");
    GPU_TRY(be, "device", cudaGetDevice(&be->device));
    struct cudaDeviceProp prop;
    GPU_TRY(be, "device", cudaGetDeviceProperties(&prop, be->device));
    if (prop.major < 8)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "GPU %d (%s) has compute capability %d.%d; 8.0 or newer is needed",
                        be->device, prop.name, prop.major, prop.minor);
    be->sms = prop.multiProcessorCount;
    be->bulk = gpu_flex_bulk();
    return EPO_OK;
}

/* Who shares this GPU, and so how waits are done: streams of one process share few
 * hardware queues, where one rank's waiting stream would hold up the other's. */
static epo_status waits_choose(epo_backend *be) {
    struct {
        char uuid[16];
        int ok;
    } mine, all[256];
    struct cudaDeviceProp prop;
    memset(&mine, 0, sizeof mine);
    GPU_TRY(be, "device", cudaGetDeviceProperties(&prop, be->device));
    memcpy(mine.uuid, prop.uuid.bytes, sizeof mine.uuid);
    epo_status status = gpu_meet_allgather(be->meet, &mine, sizeof mine, all);
    if (status != EPO_OK)
        return status;
    for (int r = 0; r < be->ranks; r++)
        for (int s = 0; s < r; s++)
            if (memcmp(all[r].uuid, all[s].uuid, sizeof mine.uuid) == 0) {
                be->any_shared = true;
                be->shared_device = be->shared_device || r == be->rank || s == be->rank;
            }
    int can = 0;
    CUresult r = gpu_driver_get(NULL)->attribute(
        &can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, be->device);
    be->stream_ops = r == CUDA_SUCCESS && can;
    be->wait_mode = !be->stream_ops || (be->shared_device && gpu_meet_threads(be->meet))
                        ? GPU_WAIT_HOST
                        : GPU_WAIT_STREAM;
    const char *wish = getenv("EP_OVERLAP_CUDA_WAIT");
    if (wish != NULL && (strcmp(wish, "host") == 0 || strcmp(wish, "cpu") == 0)) {
        be->wait_mode = GPU_WAIT_HOST;
        be->stream_ops = be->stream_ops && strcmp(wish, "cpu") != 0;
    } else if (wish != NULL && strcmp(wish, "stream") == 0 && be->stream_ops)
        be->wait_mode = GPU_WAIT_STREAM;
    else if (wish != NULL && strcmp(wish, "stream") == 0)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "EP_OVERLAP_CUDA_WAIT=stream: GPU %d has no stream memory operations",
                        be->device);
    else if (wish != NULL && wish[0] != '\0')
        return epo_fail(EPO_E_ARG, "EP_OVERLAP_CUDA_WAIT: found '%s', allowed cpu, host, stream",
                        wish);
    return EPO_OK;
}

/* A switch that is on unless its variable says 0; *asked, if not NULL: it says 1. */
static epo_status switch_read(const char *name, bool *on, bool *asked) {
    const char *wish = getenv(name);
    if (wish != NULL && wish[0] != '\0' && strcmp(wish, "0") != 0 && strcmp(wish, "1") != 0)
        return epo_fail(EPO_E_ARG, "%s: found '%s', allowed 0, 1", name, wish);
    *on = wish == NULL || strcmp(wish, "0") != 0;
    if (asked != NULL)
        *asked = wish != NULL && strcmp(wish, "1") == 0;
    return EPO_OK;
}

static epo_status bytes_read(const char *name, uint64_t *out) {
    const char *wish = getenv(name);
    char *end = NULL;
    if (wish == NULL || wish[0] == '\0')
        return EPO_OK;
    *out = strtoull(wish, &end, 10);
    return *end == '\0' && *out <= UINT64_C(1) << 40
               ? EPO_OK
               : epo_fail(EPO_E_ARG, "%s: found '%s', allowed bytes, 0..2^40", name, wish);
}

static epo_status copies_choose(epo_backend *be) {
    be->batch_copies = true;
    be->small_piece = SMALL_PIECE;
    be->near_bytes = NEAR_BYTES;
    epo_status status = bytes_read("EP_OVERLAP_CUDA_SMALL", &be->small_piece);
    be->pack = be->small_piece == 0; /* everything by copy engines */
    return status == EPO_OK ? bytes_read("EP_OVERLAP_CUDA_NEAR", &be->near_bytes) : status;
}

/* A number of SMs from the environment, `otherwise` without. */
static epo_status sms_read(const epo_backend *be, const char *name, int low, int otherwise,
                           int *out) {
    const char *wish = getenv(name);
    char *end = NULL;
    *out = otherwise;
    if (wish == NULL || wish[0] == '\0')
        return EPO_OK;
    const long sms = strtol(wish, &end, 10);
    if (*end != '\0' || sms < low || sms > be->sms)
        return epo_fail(EPO_E_ARG, "%s: found '%s', allowed %d..%d (of GPU %d)", name, wish, low,
                        be->sms, be->device);
    *out = (int)sms;
    return EPO_OK;
}

/* Stores by SMs, copy engines, or whichever is measured to be faster. */
static epo_status way_choose(epo_backend *be) {
    const char *wish = getenv("EP_OVERLAP_CUDA_WAY");
    if (wish == NULL || wish[0] == '\0')
        be->ways = 1U << EPO_WAY_STORES | 1U << EPO_WAY_ENGINES;
    else if (strcmp(wish, "stores") == 0)
        be->ways = 1U << EPO_WAY_STORES;
    else if (strcmp(wish, "engines") == 0)
        be->ways = 1U << EPO_WAY_ENGINES;
    else
        return epo_fail(EPO_E_ARG, "EP_OVERLAP_CUDA_WAY: found '%s', allowed stores, engines",
                        wish);
    epo_status status = sms_read(be, "EP_OVERLAP_CUDA_LEND", 0, 0, &be->lend_sms);
    return status == EPO_OK ? sms_read(be, "EP_OVERLAP_CUDA_PACK_SMS", 1, PACK_SMS, &be->pack_sms)
                            : status;
}

static epo_status sums_choose(epo_backend *be) {
    bool asked = false;
    epo_status status = switch_read("EP_OVERLAP_CUDA_SUMS", &be->sums, &asked);
    if (status == EPO_OK && asked && !be->bulk)
        status =
            epo_fail(EPO_E_UNSUPPORTED,
                     "EP_OVERLAP_CUDA_SUMS=1: GPU %d does not copy in bulk (compute capability "
                     "9.0 and newer), or this build has no code for it",
                     be->device);
    be->sums = be->sums && be->bulk;
    return status;
}

/* flex's rows home one by one: by the chain that stores them, on the ranks of a node. */
static epo_status home_choose(epo_backend *be, epo_backend_info *to) {
    bool on = false, asked = false;
    epo_status status = switch_read("EP_OVERLAP_CUDA_FLEX_HOME", &on, &asked);
    const bool able =
        be->one_sided && be->info.nodes == 1 && be->bulk && be->direct && be->grouped && be->chains;
    to->home = on && able ? 16 : 0;
    to->home_asked = asked;
    return status;
}

static epo_status gemm_choose(epo_backend *be) {
    epo_status status = switch_read("EP_OVERLAP_CUDA_CHAIN", &be->chains, &be->chains_asked);
    if (status == EPO_OK)
        status = switch_read("EP_OVERLAP_CUDA_DIRECT", &be->direct, NULL);
    if (status == EPO_OK)
        status = switch_read("EP_OVERLAP_CUDA_KEEP", &be->keeps, NULL);
    if (status == EPO_OK)
        status = gpu_gemm_choose(be);
    return status == EPO_OK ? sms_read(be, "EP_OVERLAP_CUDA_SMS", 2, 0, &be->gemm_sms) : status;
}

static epo_status reach_choose(epo_backend *be, bool overlap, char *why, size_t size) {
    const bool links = be->info.nodes > 1;
    bool wanted = true;
    epo_status status = switch_read("EP_OVERLAP_CUDA_PEER", &wanted, NULL);
    if (status == EPO_OK)
        status = gpu_window_reach(be, wanted, &be->one_sided, why, size);
    if (status != EPO_OK || (be->one_sided && !links))
        return status;
    if (links && !be->one_sided)
        return epo_fail(
            EPO_E_UNSUPPORTED,
            "rank %d: a group on several nodes needs P2P between the GPUs of a node: %s", be->rank,
            why);
    if (be->any_shared && !links && getenv("NCCL_HOSTID") == NULL)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "rank %d: ranks share one GPU, which NCCL refuses (unless each has an "
                        "NCCL_HOSTID of its own), and do not reach each other's memory: %s",
                        be->rank, why);
    status = gpu_pairs_create(be);
    const bool slow = be->pairs_rate > 0 && be->pairs_rate < GPU_PAIRS_SLOW;
    int lend = 0;
    if (status == EPO_OK)
        status = sms_read(be, "EP_OVERLAP_CUDA_LEND", 0, slow ? GPU_PAIRS_SMS_SLOW : GPU_PAIRS_SMS,
                          &lend);
    be->lend_sms = overlap && be->sms > 2 * lend ? lend : 0;
    return status;
}

/* What is asked for and cannot be is told, once a group: nobody compares what is not there. */
static void asked_in_vain(const epo_backend *be) {
    const bool chains = be->grouped && be->chains;
    const char *far = be->one_sided ? NULL : "peers' rows go by NCCL";
    const char *gemm = be->grouped ? NULL : "the products are not the kernels for sm_90";
    const char *chain = chains ? NULL : "there are no chains";
    const char *direct = far != NULL ? far : chain;
    const struct {
        const char *name, *value; /* NULL: any */
        const char *why;          /* NULL: it has its effect */
    } asked[] = {
        {"EP_OVERLAP_CUDA_CHAIN", "1", gemm},
        {"EP_OVERLAP_CUDA_DIRECT", "1", direct},
        {"EP_OVERLAP_CUDA_KEEP", "1", gemm},
        {"EP_OVERLAP_CUDA_SUMS", "1", far},
        {"EP_OVERLAP_CUDA_NEAR", NULL, far},
        {"EP_OVERLAP_CUDA_SMALL", NULL, far},
        {"EP_OVERLAP_CUDA_WAY", NULL, far},
        {"EP_OVERLAP_CUDA_PACK_SMS", NULL, far},
        {"EP_OVERLAP_CUDA_FLEX_HOME", "1",
         be->info.home > 0    ? NULL
         : be->ranks == 1     ? "there is one rank"
         : direct != NULL     ? direct
         : be->info.nodes > 1 ? "the ranks are on several nodes"
         : !be->direct        ? "EP_OVERLAP_CUDA_DIRECT is 0"
                              : "the GPU does not copy in bulk"},
    };
    for (size_t i = 0; be->rank == 0 && i < sizeof asked / sizeof *asked; i++) {
        const char *wish = getenv(asked[i].name);
        if (asked[i].why != NULL && wish != NULL && wish[0] != '\0' &&
            (asked[i].value == NULL || strcmp(wish, asked[i].value) == 0))
            (void)fprintf(stderr, "ep-overlap: %s=%s has no effect in this group: %s\n",
                          asked[i].name, wish, asked[i].why);
    }
}

static void versions_write(epo_backend *be, const char *why) {
    const char *missing = NULL;
    char gemm[96], pairs[80] = "", nodes[24] = "";
    int runtime = 0, version = 0;
    (void)cudaRuntimeGetVersion(&runtime);
    gpu_gemm_version(be, gemm, sizeof gemm);
    if (be->pairs != NULL && gpu_pairs_find(&version, &missing))
        snprintf(pairs, sizeof pairs, ", NCCL %d.%d.%d (%.0f GB/s)", version / 10000,
                 version / 100 % 100, version % 100, 1e-9 * be->pairs_rate);
    if (be->info.nodes > 1)
        snprintf(nodes, sizeof nodes, ", %d nodes", be->info.nodes);
    const int driver = gpu_driver_get(NULL)->version;
    snprintf(be->versions, sizeof be->versions,
             "CUDA %d.%d (driver for %d.%d), %s%s, peers by %s%s%s%s", runtime / 1000,
             runtime % 1000 / 10, driver / 1000, driver % 1000 / 10, gemm, pairs,
             be->one_sided ? "P2P" : "NCCL: ", be->one_sided ? "" : why, nodes,
             be->wait_mode == GPU_WAIT_HOST ? ", host waits" : "");
}

/* The ranks meet, if need be over the caller's communicator. */
static epo_status backend_meet(const epo_backend_config *given, gpu_meet **out) {
    epo_backend_config config = *given;
    gpu_comm *comm = NULL;
    epo_status status = config.nccl_comm != NULL ? gpu_comm_open(&config, &comm) : EPO_OK;
    if (status == EPO_OK)
        status = gpu_meet_open(&config, out);
    if (comm != NULL)
        status = gpu_comm_explain(comm, status);
    gpu_comm_close(comm);
    return status;
}

/* This rank makes no group, and those who wait for it hear of it. */
static epo_status backend_refuse(const epo_backend_config *given) {
    epo_backend_config config = *given;
    gpu_meet *none = NULL;
    if (config.wrong == EPO_OK)
        config.wrong = epo_fail(EPO_E_NOMEM, "no memory for the backend");
    return backend_meet(&config, &none);
}

static epo_status backend_open(const epo_backend_config *config, epo_backend **out) {
    char why[160] = "";
    epo_backend_info chosen = {0};
    epo_backend *be = calloc(1, sizeof *be);
    if (be == NULL || config->wrong != EPO_OK) {
        free(be);
        return backend_refuse(config);
    }
    pthread_mutex_init(&be->lock, NULL);
    be->timeout_s = config->timeout_s;
    be->warn_s = config->warn_s;
    epo_status status = backend_meet(config, &be->meet);
    if (status != EPO_OK)
        goto failed;
    be->rank = gpu_meet_rank(be->meet);
    be->ranks = gpu_meet_ranks(be->meet);
    be->info.nodes = 1;
    epo_backend_config named = *config; /* a communicator's numbers, if there is one */
    if (config->nccl_comm != NULL) {
        named.rank = be->rank;
        named.ranks = be->ranks;
    }
    if (gpu_meet_nodes(be->meet) > 0)
        be->info.nodes = gpu_meet_nodes(be->meet);
    else
        status = epo_nodes_read(&named, &be->info.nodes);
    if (status != EPO_OK || (status = device_open(be)) != EPO_OK ||
        (status = gpu_memory_open(be)) != EPO_OK || (status = gpu_kernels_load(be)) != EPO_OK ||
        (status = gpu_late_open(be)) != EPO_OK || (status = gpu_watch_start(be)) != EPO_OK ||
        (status = waits_choose(be)) != EPO_OK || (status = gemm_choose(be)) != EPO_OK ||
        (status = sums_choose(be)) != EPO_OK || (status = copies_choose(be)) != EPO_OK ||
        (status = way_choose(be)) != EPO_OK ||
        (status = reach_choose(be, config->overlap, why, sizeof why)) != EPO_OK ||
        (status = home_choose(be, &chosen)) != EPO_OK) {
        char text[EPO_ERROR_MAX]; /* the peers need not wait for this rank */
        snprintf(text, sizeof text, "%s", epo_fail_text());
        gpu_meet_abort(be->meet, status, text);
        epo_fail(status, "%s", text);
        goto failed;
    }
    versions_write(be, why);
    be->info = (epo_backend_info){
        .engine = "cuda",
        .versions = be->versions,
        .rank = be->rank,
        .ranks = be->ranks,
        .nodes = be->info.nodes,
        .default_chunks = DEFAULT_CHUNKS,
        .flex_chunks = be->one_sided ? 1 : 0, /* more of them lost at every size */
        .chunk_bytes = CHUNK_BYTES,
        .near_bytes = be->one_sided ? be->near_bytes : 0,
        .near_most = NEAR_MOST,
        .one_sided = be->one_sided,
        .fused = true,
        .parts = be->one_sided,
        .own_rows = true,
        .window_page = GPU_WINDOW_PAGE,
        .window_flags = GPU_FLAGS,
        .sums = be->one_sided && be->sums,
        .few = be->one_sided && be->sums && !be->pack,
        .home = chosen.home,
        .home_asked = chosen.home_asked,
        .ways = be->one_sided ? be->ways : 0,
        .types = 1U << EPO_F32 | 1U << EPO_BF16 | 1U << EPO_F16,
    };
    asked_in_vain(be);
    *out = be;
    return EPO_OK;
failed:
    backend_free(be, true);
    return status;
}

static const epo_backend_info *backend_info(const epo_backend *be) { return &be->info; }

static epo_status backend_barrier(epo_backend *be) {
    epo_status status = gpu_late(be);
    return status == EPO_OK ? gpu_meet_barrier(be->meet) : status;
}

static epo_status backend_allgather(epo_backend *be, const void *mine, size_t bytes, void *all) {
    epo_status status = gpu_late(be);
    return status == EPO_OK ? gpu_meet_allgather(be->meet, mine, bytes, all) : status;
}

/* ---- operations that are one launch ---- */

static const uint32_t *late_of(const epo_queue *q, const epo_deps *deps) {
    return deps->result ? q->be->late_word : NULL;
}

static epo_status op_poison(epo_queue *q, void *ptr, uint64_t bytes, void *ptr2, uint64_t bytes2,
                            const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    if ((status = gpu_late_fetch(q, deps->name)) != EPO_OK)
        return status;
    GPU_TRY(q->be, deps->name,
            gpu_kernel_poison(q->stream, q->be->late_word, ptr, bytes, ptr2, bytes2));
    return gpu_op_end(q, deps);
}

/* Beside GEMMs, for lib/moe's own arrays: a few SMs by bulk copies. */
static bool gathers_in_bulk(const epo_queue *q, const epo_rows_gather *g, const epo_deps *deps) {
    return g->beside && q->be->bulk && g->wire == 0 && g->own == NULL && !deps->result &&
           g->row_bytes % 16 == 0 && g->rows <= INT32_MAX;
}

static epo_status op_gather(epo_queue *q, const epo_rows_gather *g, const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    if (gathers_in_bulk(q, g, deps)) {
        const gpu_segment rows = {g->dst, g->src, g->index, g->rows};
        GPU_TRY(q->be, deps->name,
                gpu_flex_copy_segments(q->stream, GPU_BESIDE_SMS, &rows, 1, g->row_bytes));
        return gpu_op_end(q, deps);
    }
    if (g->wire == 0)
        GPU_TRY(q->be, deps->name, gpu_kernel_gather(q->stream, q->be->sms, g, late_of(q, deps)));
    else
        GPU_TRY(q->be, deps->name, gpu_kernel_wire_gather(q->stream, q->be->sms, g));
    if (g->wire > 0 && deps->result)
        GPU_TRY(q->be, deps->name,
                gpu_kernel_poison(q->stream, q->be->late_word, g->dst, g->rows * g->row_bytes, NULL,
                                  0));
    return gpu_op_end(q, deps);
}

static epo_status op_spread(epo_queue *q, const epo_rows_spread *s, const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    GPU_TRY(q->be, deps->name, gpu_kernel_spread(q->stream, q->be->sms, s, late_of(q, deps)));
    return gpu_op_end(q, deps);
}

static epo_status op_wire_pack(epo_queue *q, const epo_wire_pack *p, const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    GPU_TRY(q->be, deps->name, gpu_kernel_wire_pack(q->stream, q->be->sms, p));
    return gpu_op_end(q, deps);
}

static epo_status op_reduce(epo_queue *q, const epo_rows_reduce *r, const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    if (r->home != NULL)
        GPU_TRY(q->be, deps->name, gpu_kernel_home(q->stream, q->be->sms, r, late_of(q, deps)));
    else
        GPU_TRY(q->be, deps->name, gpu_kernel_reduce(q->stream, q->be->sms, r, late_of(q, deps)));
    return gpu_op_end(q, deps);
}

static epo_status op_swiglu(epo_queue *q, const epo_swiglu *s, const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    GPU_TRY(q->be, deps->name, gpu_kernel_swiglu(q->stream, s));
    return gpu_op_end(q, deps);
}

static epo_status op_zero(epo_queue *q, void *ptr, uint64_t bytes, const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    if (bytes > 0)
        GPU_TRY(q->be, deps->name, cudaMemsetAsync(ptr, 0, bytes, q->stream));
    return gpu_op_end(q, deps);
}

/* Of two ranks the one that comes later finds that their calls do not fit. */
static epo_status backend_turn(epo_backend *be, const epo_turn *turn, bool refused) {
    char text[512];
    /* A graph that is replayed makes no calls: ranks may count differently then. */
    const epo_turn *compared = be->board != NULL ? NULL : turn;
    return gpu_meet_turn(be->meet, compared, refused, text, sizeof text)
               ? EPO_OK
               : epo_fail(EPO_E_PEER, "%s", text);
}

static const epo_backend_ops ops = {
    .size = sizeof(epo_backend_ops),
    .name = "cuda",
    .world_create = gpu_world_create,
    .world_destroy = gpu_world_destroy,
    .open = backend_open,
    .close = backend_free,
    .info = backend_info,
    .status = gpu_late,
    .barrier = backend_barrier,
    .allgather = backend_allgather,
    .allreduce = gpu_allreduce,
    .alloc = gpu_alloc,
    .free = gpu_free,
    .read = gpu_read,
    .write = gpu_write,
    .window_create = gpu_window_create,
    .window_destroy = gpu_window_destroy,
    .window_local = gpu_window_local,
    .queue_create = gpu_queue_create,
    .queue_destroy = gpu_queue_destroy,
    .event_create = gpu_event_create,
    .event_destroy = gpu_event_destroy,
    .event_query = gpu_event_query,
    .mark = gpu_mark,
    .between = gpu_between,
    .stream_enter = gpu_stream_enter,
    .stream_leave = gpu_stream_leave,
    .sync = gpu_sync,
    .exchange = gpu_exchange,
    .gather = op_gather,
    .spread = op_spread,
    .wire_pack = op_wire_pack,
    .reduce = op_reduce,
    .gemm = gpu_gemm,
    .gemm_drops_h = gpu_gemm_drops_h,
    .gemm_keeps = gpu_gemm_keeps,
    .swiglu = op_swiglu,
    .chain_covers = gpu_chain_covers,
    .chain = gpu_chain_op,
    .zero = op_zero,
    .poison = op_poison,
    .copy = gpu_copy,
    .route_count = gpu_route_count,
    .route_send = gpu_route_send,
    .route_pad = gpu_route_pad,
    .flex_send = gpu_flex_send_maps,
    .flex_receive = gpu_flex_receive_maps,
    .call = gpu_call,
    .run = gpu_run,
    .replay_open = gpu_replay_open,
    .replay_enter = gpu_replay_enter,
    .replay_leave = gpu_replay_leave,
    .replay_write = gpu_write_now,
    .replay_scratch = gpu_replay_scratch,
    .replay_route = gpu_replay_route,
    .replay_dropped = gpu_replay_dropped,
    .replay_flex_send = gpu_replay_flex_send,
    .replay_flex_arrived = gpu_replay_flex_arrived,
    .record_start = gpu_record_start,
    .record_stop = gpu_record_stop,
    .memory = gpu_memory,
    .abort = gpu_break,
    .turn = backend_turn,
};

const epo_backend_ops *epo_backend_get(void) { return &ops; }
