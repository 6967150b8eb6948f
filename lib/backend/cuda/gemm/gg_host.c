/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_host.c - checks a grouped GEMM's arguments, lays out its workspace, makes
 * the tensor maps and launches.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "core/status.h"
#include "gg_host.h"
#include "gg_tuning.h"

#define TILE_M 128 /* of the sm_90 kernels */
#define PORTABLE_TILE 64
#define PORTABLE_BLOCKS 4 /* on an SM */

/* ---- arguments --------------------------------------------------------- */

static bool is_swiglu_forward(const epo_gg *g) {
    return g->kind == EPO_GG_FORWARD && g->fuse == EPO_GG_SWIGLU;
}
static bool is_swiglu_backward(const epo_gg *g) {
    return g->kind == EPO_GG_DGRAD && g->fuse == EPO_GG_SWIGLU;
}

/* Gradients of 16 bits that are not added to. */
static bool is_fresh(const epo_gg *g) {
    return g->kind == EPO_GG_WGRAD && g->c_type == g->type && g->accumulate == 0;
}

static epo_status check_shape(const epo_gg *g) {
    if (g == NULL || g->size != sizeof(epo_gg)) {
        return epo_fail(EPO_E_ARG, "epo_gg: size found %zu, allowed %zu (use EPO_GG_INIT)",
                        g == NULL ? (size_t)0 : g->size, sizeof(epo_gg));
    }
    if (g->kind < EPO_GG_FORWARD || g->kind > EPO_GG_WGRAD || g->fuse < EPO_GG_PLAIN ||
        g->fuse > EPO_GG_SWIGLU || (g->kind == EPO_GG_WGRAD && g->fuse != EPO_GG_PLAIN)) {
        return epo_fail(EPO_E_ARG, "epo_gg: kind %d with fuse %d does not exist", (int)g->kind,
                        (int)g->fuse);
    }
    if ((g->type != EPO_F32 && g->type != EPO_BF16 && g->type != EPO_F16) ||
        (g->kind == EPO_GG_WGRAD && g->c_type != g->type && g->c_type != EPO_F32)) {
        return epo_fail(EPO_E_ARG, "epo_gg: type %d with c_type %d is not supported", (int)g->type,
                        (int)g->c_type);
    }
    if (g->n < 1 || g->k < 1 || (is_swiglu_forward(g) && g->n % 2 != 0)) {
        return epo_fail(EPO_E_ARG, "epo_gg: n %d, k %d; allowed from 1, n even for SwiGLU", g->n,
                        g->k);
    }
    if (g->experts < 1 || g->first < 0 || g->count < 0 || g->first > g->experts - g->count ||
        g->count > GG_MAX_EXPERTS || g->rows > INT32_MAX || g->a_rows > INT32_MAX ||
        g->b_rows > INT32_MAX) {
        return epo_fail(EPO_E_ARG,
                        "epo_gg: experts %d..%d of %d (at most %d a call), rows %llu (below 2^31)",
                        g->first, g->first + g->count - 1, g->experts, GG_MAX_EXPERTS,
                        (unsigned long long)g->rows);
    }
    return EPO_OK;
}

static bool aligned(const void *p) { return ((uintptr_t)p & 15) == 0; }

static epo_status check_pointers(const epo_gg *g) {
    bool rows = g->rows > 0;
    if (g->row_first == NULL || g->row_count == NULL || g->c == NULL || (g->a == NULL && rows) ||
        (g->b == NULL && (rows || g->kind != EPO_GG_WGRAD)) ||
        (is_swiglu_backward(g) && g->h == NULL && rows)) {
        return epo_fail(EPO_E_ARG, "epo_gg: row_first, row_count, a, b, c (and h for SwiGLU's "
                                   "backward) must not be NULL");
    }
    if (g->keep != NULL && (g->kind == EPO_GG_WGRAD || g->a_index != NULL || !aligned(g->keep))) {
        return epo_fail(EPO_E_ARG, "epo_gg: keep is for FORWARD and DGRAD, for rows that are not "
                                   "gathered, and 16-byte aligned");
    }
    if ((g->b_index != NULL && g->kind != EPO_GG_WGRAD) ||
        (g->ready.flag != NULL &&
         (g->kind == EPO_GG_WGRAD || g->ready.words < 1 || g->ready.block_rows < 0))) {
        return epo_fail(EPO_E_ARG,
                        "epo_gg: b_index is for WGRAD, ready (words %d, allowed from "
                        "1) for the others",
                        g->ready.words);
    }
    if (g->workspace == NULL || ((uintptr_t)g->workspace & 255) != 0 ||
        g->workspace_bytes < epo_gg_workspace(g)) {
        return epo_fail(EPO_E_ARG,
                        "epo_gg: workspace of %llu bytes, %llu are needed, 256-byte "
                        "aligned",
                        (unsigned long long)g->workspace_bytes,
                        (unsigned long long)epo_gg_workspace(g));
    }
    return EPO_OK;
}

/* ---- path and tile ------------------------------------------------------ */

/* Shapes and pointers that the sm_90 kernels take. */
static bool fits_sm90(const epo_gg *g) {
    int unit_n = is_swiglu_forward(g) ? 16 : 8;
    return (g->type == EPO_BF16 || g->type == EPO_F16) && g->n % unit_n == 0 && g->k % 8 == 0 &&
           aligned(g->a) && aligned(g->b) && aligned(g->c) && aligned(g->h) && aligned(g->act);
}

/* What every call asks of its device, which does not change: asked for once a device. */
typedef struct device_facts {
    int device, major, minor, sms;
} device_facts;

static cudaError_t find_facts(device_facts *facts) {
    static _Atomic uint64_t known[64]; /* 0: not asked yet */
    static const enum cudaDeviceAttr what[] = {cudaDevAttrComputeCapabilityMajor,
                                               cudaDevAttrComputeCapabilityMinor,
                                               cudaDevAttrMultiProcessorCount};
    int value[3] = {0, 0, 0};
    cudaError_t err = cudaGetDevice(&facts->device);
    const bool kept = err == cudaSuccess && facts->device >= 0 && facts->device < 64;
    uint64_t packed = kept ? atomic_load_explicit(&known[facts->device], memory_order_relaxed) : 0;
    for (int i = 0; i < 3 && err == cudaSuccess && packed == 0; i++) {
        err = cudaDeviceGetAttribute(&value[i], what[i], facts->device);
    }
    if (err != cudaSuccess) {
        return err;
    }
    if (packed == 0) {
        packed = (uint64_t)value[0] << 48 | (uint64_t)value[1] << 32 | (uint32_t)value[2];
    }
    if (kept) {
        atomic_store_explicit(&known[facts->device], packed, memory_order_relaxed);
    }
    facts->major = (int)(packed >> 48);
    facts->minor = (int)(packed >> 32 & 0xffff);
    facts->sms = (int)(uint32_t)packed;
    return cudaSuccess;
}

int epo_gg_path_of(const epo_gg *g) {
    device_facts on;
    epo_status st = check_shape(g);
    if (st != EPO_OK) {
        return -(int)st;
    }
    if (find_facts(&on) != cudaSuccess) {
        return -(int)epo_fail(EPO_E_SYSTEM, "grouped GEMM: no CUDA device: %s",
                              cudaGetErrorString(cudaGetLastError()));
    }
    bool sm90 = on.major == 9 && on.minor == 0 && fits_sm90(g);
    if (g->path == EPO_GG_SM90 && !sm90) {
        return -(int)epo_fail(EPO_E_UNSUPPORTED,
                              "grouped GEMM: the sm_90 path was asked for on sm_%d%d with type %d, "
                              "n %d, k %d; it needs sm_90, bf16 or fp16, multiples of 8 and "
                              "16-byte aligned pointers",
                              on.major, on.minor, (int)g->type, g->n, g->k);
    }
    return sm90 && g->path != EPO_GG_PORTABLE ? EPO_GG_SM90 : EPO_GG_PORTABLE;
}

static const gg_tuned *find_tuned(const epo_gg *g) {
    for (size_t i = 0; i < sizeof(gg_tuning) / sizeof(gg_tuning[0]); i++) {
        const gg_tuned *t = &gg_tuning[i];
        if (t->kind == (int)g->kind && t->fuse == (int)g->fuse && t->n == g->n && t->k == g->k) {
            return t;
        }
    }
    return NULL;
}

int epo_gg_tile_n(const epo_gg *g) {
    const gg_tuned *tuned = find_tuned(g);
    if (g->tile_n != 0 || tuned != NULL) {
        return g->tile_n != 0 ? g->tile_n : tuned->tile_n;
    }
    /* Untuned: the width that wastes the fewest columns, wider ones being faster. */
    int columns = g->kind == EPO_GG_FORWARD ? g->n : g->k;
    int widest = is_swiglu_backward(g) ? 192 : 256; /* its epilogue needs registers */
    int best = widest;
    double cost = 1e30;
    for (int width = widest; width >= 128; width -= 64) {
        double c = (double)((columns + width - 1) / width) * width * (1.0 + (256 - width) / 1024.0);
        if (c < cost) {
            cost = c;
            best = width;
        }
    }
    return best;
}

/* ---- parameters ---------------------------------------------------------- */

static uint64_t round_up(uint64_t x, uint64_t unit) { return (x + unit - 1) / unit * unit; }

/* The GEMM's own dimensions, tile and tile counts. */
static void set_shape(const epo_gg *g, int path, gg_params *p) {
    bool wgrad = g->kind == EPO_GG_WGRAD;
    int width = path == EPO_GG_SM90 ? epo_gg_tile_n(g) : PORTABLE_TILE;
    p->m = wgrad ? g->n : 0;
    p->n = g->kind == EPO_GG_FORWARD ? g->n : g->k;
    p->k = wgrad ? 0 : (g->kind == EPO_GG_FORWARD ? g->k : g->n);
    p->tile_m = path == EPO_GG_SM90 ? TILE_M : PORTABLE_TILE;
    p->tile_n = is_swiglu_forward(g) ? width / 2 : width;
    int columns = is_swiglu_forward(g) ? g->n / 2 : p->n;
    p->tiles_n = (columns + p->tile_n - 1) / p->tile_n;
    const gg_tuned *tuned = find_tuned(g);
    p->cluster = 1;
    if (path == EPO_GG_SM90) {
        /* fp32 gradients in place are bound by memory, not by what is read twice. */
        bool in_place = p->accumulate && p->c_type == EPO_F32;
        int best = tuned != NULL ? tuned->cluster : 2;
        p->cluster = g->cluster != 0 ? g->cluster : (in_place ? 1 : best);
    }
    p->group_m = g->group_m != 0 ? g->group_m : (tuned != NULL ? tuned->group_m : 8);
    p->lda = g->kind == EPO_GG_FORWARD ? g->k : g->n;
    p->ldb = g->k;
}

/* Bytes of workspace; `p` may be NULL, else its pointers are set. */
static uint64_t set_workspace(const epo_gg *g, gg_params *p) {
    uint64_t table = GG_WS_HEADER * 4;
    uint64_t arrived = table + round_up(((uint64_t)g->count + 1) * sizeof(gg_expert), 256);
    uint64_t bytes = arrived, words = 0, partial = 0;
    if (is_swiglu_backward(g) && g->row_dweight != NULL) {
        /* The larger of both paths, so that the size does not depend on the device. */
        words = (g->rows / PORTABLE_TILE + (uint64_t)g->count) * 8;
        partial = arrived + round_up(words * 4, 256);
        bytes = partial + ((uint64_t)g->k + PORTABLE_TILE - 1) / PORTABLE_TILE * g->rows * 4;
    }
    if (p != NULL) {
        char *ws = (char *)g->workspace;
        p->ws = (int32_t *)ws;
        p->table = (gg_expert *)(ws + table);
        p->arrived = (uint32_t *)(ws + arrived);
        p->partial = (float *)(ws + partial);
        p->arrived_words = (int32_t)words;
    }
    return round_up(bytes, 256);
}

uint64_t epo_gg_workspace(const epo_gg *g) {
    return check_shape(g) == EPO_OK ? set_workspace(g, NULL) : 0;
}

static void set_params(const epo_gg *g, int path, gg_params *p) {
    memset(p, 0, sizeof(*p));
    p->a = g->a;
    p->b = g->b;
    p->c = g->c;
    p->keep = g->keep;
    p->a_index = g->a_index;
    p->b_index = g->b_index;
    p->row_weight = g->row_weight;
    p->h = g->h;
    p->act = g->act;
    p->row_dweight = g->row_dweight;
    p->row_first = g->row_first;
    p->row_count = g->row_count;
    p->ready = g->ready;
    p->sm_limit = g->sm_limit;
    p->spin_ns = (unsigned long long *)g->spin_ns;
    p->error = g->error;
    p->kind = (int)g->kind;
    p->fuse = (int)g->fuse;
    p->type = (int)g->type;
    p->c_type = g->kind == EPO_GG_WGRAD ? (int)g->c_type : (int)g->type;
    p->accumulate = g->kind == EPO_GG_WGRAD && g->accumulate != 0;
    p->first = g->first;
    p->count = g->count;
    p->experts = g->experts;
    p->rows = (int32_t)g->rows;
    p->a_rows = (int32_t)(g->a_index != NULL ? g->a_rows : g->rows);
    p->b_rows = (int32_t)(g->b_index != NULL ? g->b_rows : g->rows);
    set_shape(g, path, p);
    set_workspace(g, p);
}

/* Everything that a call needs, checked. */
epo_status gg_make_params(const epo_gg *g, int *path, gg_params *p) {
    epo_status st = check_shape(g);
    if (st == EPO_OK) {
        st = check_pointers(g);
    }
    if (st != EPO_OK) {
        return st;
    }
    int found = epo_gg_path_of(g);
    if (found < 0) {
        return (epo_status)-found;
    }
    if (g->tile_n != 0 && g->tile_n != 128 && g->tile_n != 192 &&
        (g->tile_n != 256 || is_swiglu_backward(g))) {
        return epo_fail(EPO_E_ARG,
                        "epo_gg: tile_n found %d, allowed 0, 128, 192 and, but for "
                        "SwiGLU's backward, 256",
                        g->tile_n);
    }
    if (g->group_m < 0 || g->cluster < 0 || g->cluster > 2) {
        return epo_fail(EPO_E_ARG, "epo_gg: group_m %d, cluster %d; allowed from 0, 0..2",
                        g->group_m, g->cluster);
    }
    if (found != EPO_GG_SM90 && g->keep != NULL) {
        return epo_fail(EPO_E_UNSUPPORTED, "epo_gg: rows are kept by the sm_90 kernels alone");
    }
    *path = found;
    set_params(g, found, p);
    return EPO_OK;
}

/* ---- tensor maps ---------------------------------------------------------- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Asked for by every call: looked for once. */
static _Atomic(encode_fn) known_encode;

static encode_fn find_encode(void) {
    encode_fn known = atomic_load_explicit(&known_encode, memory_order_acquire);
    void *fn = NULL;
    if (known != NULL) {
        return known;
    }
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t err = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
                                                       cudaEnableDefault, &found);
#else
    cudaError_t err =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &fn, cudaEnableDefault, &found);
#endif
    if (err != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        return NULL;
    }
    atomic_store_explicit(&known_encode, (encode_fn)fn, memory_order_release);
    return (encode_fn)fn;
}

static epo_status no_encode(void) {
    return epo_fail(EPO_E_SYSTEM, "the driver has no cuTensorMapEncodeTiled; 525 or newer is "
                                  "needed");
}

/* [z][y][x], read or written in boxes of box_y lines of 128 bytes. */
static epo_status make_map(encode_fn encode, int type, const void *base, uint64_t x, uint64_t y,
                           uint64_t z, uint32_t box_y, CUtensorMap *map) {
    bool f32 = type == EPO_F32;
    uint64_t bytes = f32 ? 4 : 2;
    cuuint64_t size[3] = {x, y, z};
    cuuint64_t pitch[2] = {x * bytes, x * y * bytes};
    cuuint32_t box[3] = {f32 ? 32 : 64, box_y, 1};
    cuuint32_t step[3] = {1, 1, 1};
    CUtensorMapDataType name = f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : (type == EPO_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
    CUresult err = encode(map, name, 3, (void *)base, size, pitch, box, step,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (err != CUDA_SUCCESS) {
        return epo_fail(EPO_E_SYSTEM, "cuTensorMapEncodeTiled: error %d for %llu x %llu x %llu",
                        (int)err, (unsigned long long)z, (unsigned long long)y,
                        (unsigned long long)x);
    }
    return EPO_OK;
}

static uint64_t at_least_one(int32_t x) { return x > 0 ? (uint64_t)x : 1; }

/* The operands.  Without rows nothing is read, but a map needs an address. */
static epo_status make_inputs(encode_fn encode, const epo_gg *g, const gg_params *p,
                              gg_maps *maps) {
    bool wgrad = g->kind == EPO_GG_WGRAD;
    int width = epo_gg_tile_n(g);
    const void *a = p->rows > 0 ? g->a : g->workspace;
    const void *b = p->rows > 0 || !wgrad ? g->b : g->workspace;
    epo_status st = make_map(encode, (int)g->type, a, (uint64_t)p->lda, at_least_one(p->a_rows), 1,
                             64, &maps->a);
    if (st != EPO_OK) {
        return st;
    }
    if (wgrad) {
        return make_map(encode, (int)g->type, b, (uint64_t)g->k, at_least_one(p->b_rows), 1, 64,
                        &maps->b);
    }
    return make_map(encode, (int)g->type, b, (uint64_t)g->k, (uint64_t)g->n, (uint64_t)g->experts,
                    g->kind == EPO_GG_FORWARD ? (uint32_t)width / 2 : 64, &maps->b);
}

/* What is stored: by warps, 16 rows at a time, or by warpgroups. */
static epo_status make_outputs(encode_fn encode, const epo_gg *g, const gg_params *p,
                               gg_maps *maps) {
    if (g->kind == EPO_GG_WGRAD) {
        return make_map(encode, p->c_type, g->c, (uint64_t)g->k, (uint64_t)g->n,
                        (uint64_t)g->experts, is_fresh(g) ? 64 : 16, &maps->c);
    }
    uint64_t width = is_swiglu_forward(g) ? (uint64_t)g->n / 2
                                          : (uint64_t)p->n * (is_swiglu_backward(g) ? 2 : 1);
    epo_status st =
        make_map(encode, (int)g->type, g->c, width, at_least_one(p->rows), 1, 16, &maps->c);
    if (st == EPO_OK && is_swiglu_forward(g) && g->h != NULL) {
        st = make_map(encode, (int)g->type, g->h, (uint64_t)g->n, at_least_one(p->rows), 1, 16,
                      &maps->h);
    }
    if (st == EPO_OK && g->keep != NULL) {
        st = make_map(encode, (int)g->type, g->keep, (uint64_t)p->k, at_least_one(p->rows), 1, 16,
                      &maps->keep);
    }
    return st;
}

epo_status gg_make_rows_map(const epo_gg *g, const gg_params *p, const void *base, uint64_t rows,
                            CUtensorMap *map) {
    encode_fn encode = find_encode();
    if (encode == NULL) {
        return no_encode();
    }
    return make_map(encode, (int)g->type, base, (uint64_t)p->n, rows > 0 ? rows : 1, 1, 16, map);
}

epo_status gg_make_maps(const epo_gg *g, const gg_params *p, gg_maps *maps) {
    encode_fn encode = find_encode();
    if (encode == NULL) {
        return no_encode();
    }
    memset(maps, 0, sizeof(*maps));
    epo_status st = make_inputs(encode, g, p, maps);
    return st != EPO_OK ? st : make_outputs(encode, g, p, maps);
}

/* ---- launches -------------------------------------------------------------- */

epo_status gg_cuda_status(cudaError_t err, const char *what) {
    if (err == cudaSuccess) {
        return EPO_OK;
    }
    return epo_fail(EPO_E_SYSTEM, "%s: %s", what, cudaGetErrorString(err));
}

/* A kernel has the shared memory that it wants once the device was told, and as long as that is
 * not reset.  The table holds which were told where; one that has no room in it is told each
 * time. */
enum { TOLD = 256 };
typedef struct told_kernel {
    _Atomic(const void *) fn;
    _Atomic uint64_t devices;
} told_kernel;

static told_kernel *find_told(const void *fn) {
    static told_kernel told[TOLD];
    const unsigned at = (unsigned)((uintptr_t)fn >> 4);
    for (unsigned i = 0; i < TOLD; i++) {
        told_kernel *t = &told[(at + i) % TOLD];
        const void *found = atomic_load_explicit(&t->fn, memory_order_relaxed);
        if (found == NULL && atomic_compare_exchange_strong(&t->fn, &found, fn)) {
            return t;
        }
        if (found == fn) {
            return t;
        }
    }
    return NULL;
}

static epo_status tell_kernel(const void *fn, int smem, bool again) {
    told_kernel *t = find_told(fn);
    device_facts on;
    cudaError_t err = find_facts(&on);
    if (err != cudaSuccess) {
        return gg_cuda_status(err, "grouped GEMM: device");
    }
    const uint64_t bit = on.device >= 0 && on.device < 64 ? UINT64_C(1) << on.device : 0;
    if (t != NULL && !again &&
        (atomic_load_explicit(&t->devices, memory_order_acquire) & bit) != 0) {
        return EPO_OK;
    }
    err = cudaFuncSetAttribute(fn, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    if (err == cudaSuccess && t != NULL) {
        atomic_fetch_or_explicit(&t->devices, bit, memory_order_release);
    }
    return gg_cuda_status(err, "grouped GEMM: shared memory");
}

/* `early`: begin while the kernel before in the stream (prepare) still runs. */
epo_status gg_launch(const void *fn, int blocks, int threads, int smem, int cluster, void **args,
                     bool early, void *stream) {
    cudaLaunchAttribute attr[2];
    cudaLaunchConfig_t config;
    memset(attr, 0, sizeof(attr));
    memset(&config, 0, sizeof(config));
    config.gridDim.x = (unsigned)blocks;
    config.gridDim.y = config.gridDim.z = 1;
    config.blockDim.x = (unsigned)threads;
    config.blockDim.y = config.blockDim.z = 1;
    config.dynamicSmemBytes = (size_t)smem;
    config.stream = (cudaStream_t)stream;
    config.attrs = attr;
    if (cluster > 1) {
        attr[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attr[config.numAttrs].val.clusterDim.x = (unsigned)cluster;
        attr[config.numAttrs].val.clusterDim.y = attr[config.numAttrs].val.clusterDim.z = 1;
        config.numAttrs++;
    }
    if (early) {
        attr[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attr[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs++;
    }
    epo_status st = smem > 0 ? tell_kernel(fn, smem, false) : EPO_OK;
    if (st != EPO_OK) {
        return st;
    }
    cudaError_t err = cudaLaunchKernelExC(&config, fn, args);
    if (err == cudaErrorInvalidValue && smem > 0) { /* the device was reset since it was told */
        (void)cudaGetLastError();
        st = tell_kernel(fn, smem, true);
        err = st == EPO_OK ? cudaLaunchKernelExC(&config, fn, args) : err;
    }
    return gg_cuda_status(err, "launch of a grouped GEMM");
}

static gg_kernel find_kernel(const epo_gg *g, int path) {
    if (path != EPO_GG_SM90) {
        return gg_portable_kernel((int)g->kind, (int)g->fuse, (int)g->type);
    }
    int fuse = is_fresh(g) ? GG_FRESH : (int)g->fuse;
    return g->type == EPO_BF16 ? gg_sm90_kernel_bf16((int)g->kind, fuse, epo_gg_tile_n(g))
                               : gg_sm90_kernel_f16((int)g->kind, fuse, epo_gg_tile_n(g));
}

/* Blocks: the SM budget, but no more than there can be tiles.  The portable kernel's are
 * small: without a budget several share an SM. */
epo_status gg_count_blocks(const epo_gg *g, const gg_params *p, int *blocks) {
    device_facts on;
    cudaError_t err = find_facts(&on);
    if (err != cudaSuccess) {
        return gg_cuda_status(err, "grouped GEMM: SM count");
    }
    int sms = on.sms;
    if (g->sms > 0 && g->sms < sms) {
        sms = g->sms;
    } else if (p->tile_m == PORTABLE_TILE && g->sm_limit == NULL) {
        sms *= PORTABLE_BLOCKS;
    }
    uint64_t tiles_m = g->kind == EPO_GG_WGRAD
                           ? (uint64_t)g->count * (((uint64_t)p->m + p->tile_m - 1) / p->tile_m)
                           : g->rows / (uint64_t)p->tile_m + (uint64_t)g->count;
    uint64_t tiles = tiles_m * (uint64_t)p->tiles_n;
    int wanted = tiles < (uint64_t)sms ? (int)tiles : sms;
    *blocks = wanted / p->cluster * p->cluster;
    if (wanted > 0 && *blocks == 0) {
        *blocks = p->cluster;
    }
    return EPO_OK;
}

static epo_status run(const epo_gg *g, int path, gg_params *p, bool early, void *stream) {
    int blocks = 0;
    epo_status st = gg_count_blocks(g, p, &blocks);
    if (st != EPO_OK || blocks == 0) {
        return st;
    }
    gg_kernel kernel = find_kernel(g, path);
    gg_maps maps;
    void *args[2] = {p, &maps};
    if (path == EPO_GG_SM90) {
        st = gg_make_maps(g, p, &maps);
        if (st != EPO_OK) {
            return st;
        }
    }
    return gg_launch(kernel.function, blocks, kernel.threads, kernel.smem_bytes, p->cluster, args,
                     early, stream);
}

epo_status epo_gg_prepare(const epo_gg *g, void *stream) {
    gg_params p;
    int path = 0;
    epo_status st = gg_make_params(g, &path, &p);
    void *args[1] = {&p};
    return st != EPO_OK ? st : gg_launch(gg_prepare_kernel(), 1, 256, 0, 1, args, false, stream);
}

epo_status epo_gg_run(const epo_gg *g, void *stream) {
    gg_params p;
    int path = 0;
    epo_status st = gg_make_params(g, &path, &p);
    return st != EPO_OK ? st : run(g, path, &p, false, stream);
}

epo_status epo_gg_launch(const epo_gg *g, void *stream) {
    gg_params p;
    int path = 0;
    epo_status st = gg_make_params(g, &path, &p);
    void *args[1] = {&p};
    if (st == EPO_OK) {
        st = gg_launch(gg_prepare_kernel(), 1, 256, 0, 1, args, false, stream);
    }
    return st != EPO_OK ? st : run(g, path, &p, path == EPO_GG_SM90, stream);
}
