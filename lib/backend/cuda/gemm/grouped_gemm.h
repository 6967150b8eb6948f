/* SPDX-License-Identifier: Apache-2.0
 *
 * grouped_gemm.h - the experts' matrix products over expert-major rows, on CUDA
 * devices: one persistent launch for all experts of a call.
 *
 * With the weight stack w [experts][n][k] (gate rows before up rows in W1):
 *   FORWARD  c[row][n] = a[row][k] w^T           W1, W2 forward
 *   DGRAD    c[row][k] = a[row][n] w             gradients of the rows
 *   WGRAD    c[e][n][k] (+)= sum over e's rows of a[row][n]^T b[row][k]
 * and fused with EPO_GG_SWIGLU, F = n/2 of W1 = k of W2:
 *   FORWARD  of W1: h = rows w^T rounded to the type (stored if `h`),
 *            c[row][F] = row_weight * silu(h gate) * h up
 *   DGRAD    of W2: da = a w in fp32, then from the stored h
 *            c = dh [row][2F], row_dweight = sum of da silu(gate) up (fp32, in a
 *            fixed order), act = row_weight * silu(gate) * up again (if `act`)
 *
 * Rows.  Expert e owns the rows row_first[e] .. row_first[e]+row_count[e]-1 of
 * every expert-major array; both arrays are read on the device when the kernel
 * runs.  Any alignment of row_first will do, 1 included; experts must not
 * overlap.  Rows between experts are never stored and never reach a result,
 * whatever they hold.
 *
 * Results do not depend on `first` and `count`, on the SM budget, on sm_limit,
 * on how many launches work on it, or on when rows arrive: each output element
 * is one chain of fp32 additions in ascending order (no split-K), in a tile
 * shape chosen from kind, type, n and k alone.
 *
 * Paths.  SM90: wgmma and TMA; bf16 and fp16, n and k multiples of 8 (of 16 for
 * the halved dimension of W1), 16-byte aligned pointers.  PORTABLE: everything
 * else, fp32 too; any shape, any architecture from sm_80.  The two agree within
 * the tolerance of the type, not to the bit.  epo_gg_path_of() tells which.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GROUPED_GEMM_H
#define EPO_BACKEND_CUDA_GEMM_GROUPED_GEMM_H

#include <stddef.h>
#include <stdint.h>

#include "ep_overlap.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum epo_gg_kind { EPO_GG_FORWARD = 0, EPO_GG_DGRAD = 1, EPO_GG_WGRAD = 2 } epo_gg_kind;
typedef enum epo_gg_fuse { EPO_GG_PLAIN = 0, EPO_GG_SWIGLU = 1 } epo_gg_fuse;
typedef enum epo_gg_path {
    EPO_GG_AUTO = 0,
    EPO_GG_SM90 = 1,    /* an error where it cannot be used */
    EPO_GG_PORTABLE = 2 /* for comparison */
} epo_gg_path;

/* Bits of the error word. */
#define EPO_GG_ERROR_ROWS 1u    /* an expert's rows do not lie in 0..rows-1; taken as empty */
#define EPO_GG_ERROR_TIMEOUT 2u /* rows were not ready within the limit; computed as they were */

/* Rows may still be arriving (FORWARD and DGRAD): before rows of a unit are read,
 * each of its `words` words must have reached `epoch` (>=).  Units are experts
 * (block_rows == 0: unit e at flag + e*words) or blocks of that many consecutive
 * expert-major rows (unit r/block_rows).  Words are read with acquire semantics
 * at system scope.  While the call waits it holds its SMs: what writes the words
 * needs an SM or a copy engine of its own, and its kernels must have been loaded
 * before (loading one waits for kernels that run). */
typedef struct epo_gg_ready {
    const uint64_t *flag; /* NULL: all rows are there */
    uint64_t epoch;
    int words;
    int block_rows;
    uint64_t timeout_ns; /* 0: no limit in the kernel; a watchdog's poison epoch ends the wait */
} epo_gg_ready;

/* All pointers are device pointers (or mapped host memory). */
typedef struct epo_gg {
    size_t size;
    epo_gg_kind kind;
    epo_gg_fuse fuse;
    epo_dtype type;   /* of a, b and, but for WGRAD, c */
    epo_dtype c_type; /* WGRAD: `type` or EPO_F32 */
    int accumulate;   /* WGRAD: c += instead of c = */
    int n, k;         /* of the weight stack */
    int experts;      /* in the stack, and length of row_first and row_count */
    int first, count; /* experts of this call */
    uint64_t rows;    /* expert-major rows that the arrays hold; < 2^31 */
    const uint64_t *row_first, *row_count;
    const void *a;          /* FORWARD [rows][k], DGRAD [rows][n], WGRAD [rows][n] */
    const void *b;          /* FORWARD, DGRAD [experts][n][k], WGRAD [rows][k] */
    void *c;                /* as above; WGRAD [experts][n][k] */
    const int32_t *a_index; /* not NULL: row r of a is a[a_index[r]]; -1: zeros */
    uint64_t a_rows;        /* rows of a when gathered */
    const int32_t *b_index; /* WGRAD: likewise for b */
    uint64_t b_rows;
    /* FORWARD, DGRAD, SM90: not NULL: the experts' rows of a are stored here, too, as they lie
     * in a, which is not gathered. */
    void *keep;
    const float *row_weight; /* SWIGLU: [rows]; NULL: 1 */
    void *h;                 /* SWIGLU: [rows][2F]; FORWARD: written, may be NULL; DGRAD: read */
    void *act;               /* SWIGLU DGRAD: [rows][F], may be NULL */
    float *row_dweight;      /* SWIGLU DGRAD: [rows], may be NULL */
    epo_gg_ready ready;
    /* Thread blocks, one per SM; 0: all SMs (PORTABLE: more than one each).  Clusters of two:
     * rounded down to an even number, at least 2.  While the call runs, *sm_limit (if given, in
     * memory that the device sees) lowers it: blocks beyond the limit end at their next tile.  It
     * rises again by another epo_gg_run(). */
    int sms;
    const volatile int *sm_limit;
    uint64_t *spin_ns; /* += time that blocks waited for `ready`; may be NULL */
    uint32_t *error;   /* |= EPO_GG_ERROR_*; may be NULL */
    epo_gg_path path;
    /* For tuning, the same in prepare and run; 0: as the table says.  Columns of a
     * tile (128, 192, 256; only the sums of row_dweight depend on it), row tiles that
     * pass over the columns together, thread blocks that load for each other (1, 2). */
    int tile_n, group_m, cluster;
    void *workspace;
    uint64_t workspace_bytes;
} epo_gg;
#define EPO_GG_INIT                                                                                \
    { sizeof(epo_gg) }

/* Bytes of workspace, 256-byte aligned, that a call of this shape needs; depends
 * on kind, fuse, type, n, k, experts and rows.  0 on an argument error. */
uint64_t epo_gg_workspace(const epo_gg *g);
/* Which path a call takes on the current device: EPO_GG_SM90, EPO_GG_PORTABLE,
 * or a negative epo_status. */
int epo_gg_path_of(const epo_gg *g);
/* The columns of a tile, as epo_gg_run takes them. */
int epo_gg_tile_n(const epo_gg *g);

/* One call = prepare, then run on the same workspace, in stream order. */
epo_status epo_gg_launch(const epo_gg *g, void *stream);
/* The two halves apart, for a call that several launches work on: prepare once;
 * then any number of epo_gg_run(), on any streams ordered behind it, each with
 * its own `sms`, share the tiles.  A run that finds none left ends at once, so
 * the stream of a communication kernel can hand its SMs over by a run behind it.
 * The result is complete when all of them are. */
epo_status epo_gg_prepare(const epo_gg *g, void *stream);
epo_status epo_gg_run(const epo_gg *g, void *stream);

/* ---- chains -------------------------------------------------------------
 *
 * The two products of the experts in one launch, part by part of the experts:
 *   FORWARD  W1 with SwiGLU, then W2
 *   DGRAD    W2, SwiGLU's backward as a pass of its own over the rows, W1
 * Parts lie one behind the other.  A part's tiles begin when its rows have arrived, and
 * its second product's when its first product's row tiles are stored; meanwhile other
 * parts' tiles run, so that no SM idles between products and parts.  When all rows of a
 * part are stored its word is written, while the kernel runs on.
 *
 * Results are those of the products apart (DGRAD: and of the pass of gg_act.cuh between
 * them), to the bit, whatever the parts, the order, the SM budget and the tile.
 *
 * sm_90 alone; see epo_gg_chain_covers(). */
#define EPO_GG_PARTS 16
typedef struct epo_gg_part {
    int first, count; /* experts */
    /* As epo_gg_ready, one unit: `words` words reach `epoch`; NULL: the rows are there. */
    const uint64_t *flag;
    uint64_t epoch;
    int words;
    /* Becomes done_value (release, system) when the part's rows of second.c, and
     * dweight, are stored; may be NULL. */
    uint64_t *done;
    uint64_t done_value;
} epo_gg_part;

/* Rows of the second product that are other ranks': they are stored to those ranks' memory
 * and not to second.c.  Of expert e, rank r's rows begin at row first[e * ranks + r] and end
 * where the next rank's do, or the expert; they go to the rows from to[e * ranks + r] on. */
#define EPO_GG_RANKS 8
typedef struct epo_gg_direct {
    int ranks, own;            /* ranks 0: there are none; `own`: this rank, whose rows stay */
    const int32_t *first, *to; /* [experts][ranks]; the ranks of an expert ascend */
    void *base[EPO_GG_RANKS];  /* each rank's row 0, as this device sees it; 16-byte aligned */
    /* DGRAD: row_dweight goes likewise, to these; all NULL: it stays. */
    float *dweight[EPO_GG_RANKS];
    uint64_t rows; /* that there is room for, as of each */
    /* When all rows are stored, word d * step becomes `value` for each rank d
     * (release, system); NULL: nobody is told. */
    uint64_t *words;
    uint64_t step, value;
    const uint64_t *counter; /* not NULL: added to `value` when the kernel runs */
    const uint32_t *late;    /* not NULL: where it is set by then, nobody is told */
} epo_gg_direct;

/* What launches of one chain share: made by the first, for the next.  made: 0 before. */
typedef struct epo_gg_chain_maps {
    unsigned char room[2304] __attribute__((aligned(64)));
    int made;
} epo_gg_chain_maps;

typedef struct epo_gg_chain {
    size_t size;
    /* `first` and `count` of both, `ready` and the workspaces are not looked at; SM budget,
     * sm_limit, spin_ns and error are those of `first`.  FORWARD: second.a is first.c.
     * DGRAD: first.c is da, second.a is dh. */
    epo_gg first, second;
    /* DGRAD: SwiGLU's backward between them.  [rows][2F] h, from which dh is made (the
     * same memory is allowed), [rows] weight and dweight (may be NULL); the activation
     * comes into da's place. */
    const void *h;
    void *dh;
    const float *row_weight;
    float *row_dweight;
    int parts;
    epo_gg_part part[EPO_GG_PARTS];
    epo_gg_direct direct;
    uint64_t timeout_ns; /* as in epo_gg_ready */
    /* Not 0: a launch whose blocks have waited so long for a part ends there, with *left (may
     * be NULL) = left_value; another epo_gg_chain_run() goes on.  So no SM is held for ever
     * for rows that may be waiting for SMs themselves. */
    uint64_t patience_ns;
    uint64_t *left, left_value;
    /* Not NULL: added to all parts' epochs, and to their done values, when the kernel runs. */
    const uint64_t *counter, *done_counter;
    /* This launch stands behind all parts' rows: it looks at no flag and leaves nothing. */
    int arrived;
    /* The parts before the last are to be done before it: what follows them is waited for. */
    int hurry;
    void *workspace;
    uint64_t workspace_bytes;
    epo_gg_chain_maps *maps; /* may be NULL */
} epo_gg_chain;
#define EPO_GG_CHAIN_INIT                                                                          \
    { sizeof(epo_gg_chain) }

/* Can the current device run this chain?  Pointers may be NULL still. */
int epo_gg_chain_covers(const epo_gg_chain *c);
/* As epo_gg_workspace(). */
uint64_t epo_gg_chain_workspace(const epo_gg_chain *c);
/* As epo_gg_launch(), _prepare() and _run(). */
epo_status epo_gg_chain_launch(const epo_gg_chain *c, void *stream);
epo_status epo_gg_chain_prepare(const epo_gg_chain *c, void *stream);
epo_status epo_gg_chain_run(const epo_gg_chain *c, void *stream);

#ifdef __cplusplus
}
#endif
#endif
