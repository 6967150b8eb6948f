/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_chain.c - the host side of chains: which shapes can be one, the order of their
 * tiles, the workspace, the launches.
 */
#include <string.h>

#include "gg_host.h"

#define TILE_M 128

static bool is_back(const epo_gg_chain *c) { return c->first.kind == EPO_GG_DGRAD; }

/* ---- arguments ------------------------------------------------------------ */

static epo_status check_products(const epo_gg_chain *c) {
    const epo_gg *a = &c->first, *b = &c->second;
    bool forward =
        a->kind == EPO_GG_FORWARD && a->fuse == EPO_GG_SWIGLU && a->n == 2 * b->k && a->k == b->n;
    bool back = a->kind == EPO_GG_DGRAD && a->fuse == EPO_GG_PLAIN && b->n == 2 * a->k &&
                b->k == a->n && a->k % 8 == 0;
    if (b->kind != a->kind || b->fuse != EPO_GG_PLAIN || b->type != a->type ||
        b->experts != a->experts || b->rows != a->rows || (!forward && !back)) {
        return epo_fail(EPO_E_ARG,
                        "epo_gg_chain: kind %d, fuse %d, n %d, k %d and kind %d, fuse %d, n %d, k "
                        "%d are not the two products of an expert",
                        (int)a->kind, (int)a->fuse, a->n, a->k, (int)b->kind, (int)b->fuse, b->n,
                        b->k);
    }
    if (a->a_index != NULL || b->a_index != NULL) {
        return epo_fail(EPO_E_ARG, "epo_gg_chain: rows cannot be gathered");
    }
    return EPO_OK;
}

static epo_status check_parts(const epo_gg_chain *c) {
    if (c->parts < 1 || c->parts > EPO_GG_PARTS) {
        return epo_fail(EPO_E_ARG, "epo_gg_chain: parts found %d, allowed 1..%d", c->parts,
                        EPO_GG_PARTS);
    }
    int next = c->part[0].first;
    for (int i = 0; i < c->parts; i++) {
        const epo_gg_part *p = &c->part[i];
        if (p->first != next || p->count < 0 || p->first < 0 ||
            p->count > c->first.experts - p->first || (p->flag != NULL && p->words < 1)) {
            return epo_fail(EPO_E_ARG,
                            "epo_gg_chain: part %d has experts %d..%d of %d and %d words; parts "
                            "lie one behind the other, from 1 word on",
                            i, p->first, p->first + p->count - 1, c->first.experts, p->words);
        }
        next = p->first + p->count;
    }
    return EPO_OK;
}

static epo_status check_direct(const epo_gg_chain *c) {
    const epo_gg_direct *d = &c->direct;
    if (d->ranks == 0) {
        return EPO_OK;
    }
    bool sound = d->ranks > 0 && d->ranks <= EPO_GG_RANKS && d->own >= 0 && d->own < d->ranks &&
                 d->first != NULL && d->to != NULL && d->rows < INT32_MAX;
    for (int r = 0; sound && r < d->ranks; r++) {
        sound = r == d->own || (d->base[r] != NULL && ((uintptr_t)d->base[r] & 15) == 0);
    }
    return sound ? EPO_OK
                 : epo_fail(EPO_E_ARG,
                            "epo_gg_chain: direct rows: %d ranks, own %d, %llu rows; allowed are "
                            "1..%d ranks, 16-byte aligned bases, first and to",
                            d->ranks, d->own, (unsigned long long)d->rows, EPO_GG_RANKS);
}

static epo_status check_chain(const epo_gg_chain *c) {
    if (c == NULL || c->size != sizeof(epo_gg_chain)) {
        return epo_fail(EPO_E_ARG, "epo_gg_chain: size found %zu, allowed %zu",
                        c == NULL ? (size_t)0 : c->size, sizeof(epo_gg_chain));
    }
    epo_status st = check_products(c);
    if (st == EPO_OK) {
        st = check_parts(c);
    }
    return st == EPO_OK ? check_direct(c) : st;
}

static int part_experts(const epo_gg_chain *c) {
    const epo_gg_part *last = &c->part[c->parts - 1];
    return last->first + last->count - c->part[0].first;
}

/* One tile width for both, which no bit depends on; the wider one unless both are
 * narrow. */
static int chain_width(const epo_gg_chain *c) {
    int a = epo_gg_tile_n(&c->first), b = epo_gg_tile_n(&c->second);
    int width = a > b ? a : b;
    return width <= 192 ? 192 : 256;
}

/* The products as calls of their own, over all parts' experts. */
static void make_products(const epo_gg_chain *c, epo_gg g[2]) {
    g[0] = c->first;
    g[1] = c->second;
    for (int i = 0; i < 2; i++) {
        g[i].first = c->part[0].first;
        g[i].count = part_experts(c);
        g[i].path = EPO_GG_SM90;
        g[i].tile_n = chain_width(c);
        g[i].ready = (epo_gg_ready){0};
        g[i].workspace = c->workspace;
        g[i].workspace_bytes = c->workspace_bytes;
    }
    g[1].cluster = g[0].cluster;
}

int epo_gg_chain_covers(const epo_gg_chain *c) {
    epo_gg g[2];
    if (check_chain(c) != EPO_OK) {
        return 0;
    }
    make_products(c, g);
    g[0].path = g[1].path = EPO_GG_AUTO;
    return epo_gg_path_of(&g[0]) == EPO_GG_SM90 && epo_gg_path_of(&g[1]) == EPO_GG_SM90 &&
           ((uintptr_t)c->h & 15) == 0 && ((uintptr_t)c->dh & 15) == 0;
}

/* ---- order ------------------------------------------------------------------ */

/* Steps: the parts, and where they are few, pieces of them, so that a product's tiles
 * that wait for the one before come a step behind it. */
static void make_steps(const epo_gg_chain *c, gg_chain *to) {
    int pieces = c->parts >= 4 ? 1 : 4 / c->parts;
    int at = 0;
    to->steps = 0;
    for (int i = 0; i < c->parts; i++) {
        for (int j = 0; j < pieces; j++) {
            to->step_first[to->steps] = (int16_t)(at + c->part[i].count * j / pieces);
            to->step_part[to->steps++] = (int8_t)i;
        }
        at += c->part[i].count;
    }
    to->step_first[to->steps] = (int16_t)at;
}

/* ---- parameters ---------------------------------------------------------------- */

static uint64_t round_up(uint64_t x, uint64_t unit) { return (x + unit - 1) / unit * unit; }

/* Bytes of workspace; `to` may be NULL, else its pointers are set. */
static uint64_t set_workspace(const epo_gg_chain *c, gg_chain *to) {
    uint64_t count = (uint64_t)part_experts(c);
    uint64_t row_tiles = c->first.rows / TILE_M + count;
    uint64_t table = GG_WS_HEADER * 4;
    uint64_t counters = table + round_up((count * GG_STAGES + 1) * sizeof(gg_expert), 256);
    uint64_t words = row_tiles * (GG_STAGES - 1) + 3 * EPO_GG_PARTS + 2 * GG_SHARES + 3;
    if (to != NULL) {
        char *ws = (char *)c->workspace;
        for (int i = 0; i < to->stages; i++) {
            to->stage[i].ws = (int32_t *)ws;
            to->stage[i].table = (gg_expert *)(ws + table);
            to->stage[i].count = (int32_t)(count * (uint64_t)to->stages); /* entries */
        }
        to->row_tiles = (int32_t)row_tiles;
        to->counter_words = (int32_t)words;
        to->counters = (uint32_t *)(ws + counters);
        to->part_done = to->counters;
        to->part_total = to->part_done + EPO_GG_PARTS;
        to->seen = to->part_total + EPO_GG_PARTS;
        to->taken = to->seen + EPO_GG_PARTS;
        to->share = to->taken + GG_SHARES;
        to->all_done = to->share + GG_SHARES + 1;
        to->row_done = to->all_done + 2;
    }
    return round_up(counters + words * 4, 256);
}

uint64_t epo_gg_chain_workspace(const epo_gg_chain *c) {
    return check_chain(c) == EPO_OK ? set_workspace(c, NULL) : 0;
}

static epo_status check_memory(const epo_gg_chain *c) {
    if (c->workspace == NULL || ((uintptr_t)c->workspace & 255) != 0 ||
        c->workspace_bytes < set_workspace(c, NULL)) {
        return epo_fail(
            EPO_E_ARG, "epo_gg_chain: workspace of %llu bytes, %llu are needed, 256-byte aligned",
            (unsigned long long)c->workspace_bytes, (unsigned long long)set_workspace(c, NULL));
    }
    if (is_back(c) && c->first.rows > 0 &&
        (c->h == NULL || c->dh == NULL || c->row_weight == NULL || c->dh != c->second.a)) {
        return epo_fail(EPO_E_ARG, "epo_gg_chain: h, dh and row_weight must not be NULL, and "
                                   "second.a must be dh");
    }
    if (!is_back(c) && c->second.a != c->first.c) {
        return epo_fail(EPO_E_ARG, "epo_gg_chain: second.a must be first.c");
    }
    return EPO_OK;
}

static void set_parts(const epo_gg_chain *c, gg_chain *to) {
    to->parts = c->parts;
    to->first = c->part[0].first;
    to->count = part_experts(c);
    to->timeout_ns = c->timeout_ns;
    to->patience_ns = c->patience_ns;
    to->left = c->left;
    to->left_value = c->left_value;
    to->counter = c->counter;
    to->done_counter = c->done_counter;
    to->arrived = c->arrived != 0;
    to->hurry = c->hurry != 0 && c->parts > 1;
    for (int i = 0; i < c->parts; i++) {
        const epo_gg_part *p = &c->part[i];
        to->part[i] = (gg_chain_part){.flag = p->flag,
                                      .epoch = p->epoch,
                                      .words = p->words,
                                      .done = p->done,
                                      .done_value = p->done_value};
    }
    make_steps(c, to);
}

static void set_direct(const epo_gg_direct *d, gg_direct *to) {
    *to = (gg_direct){.first = d->first,
                      .to = d->to,
                      .words = d->ranks > 0 ? d->words : NULL,
                      .step = d->step,
                      .value = d->value,
                      .counter = d->counter,
                      .late = d->late,
                      .ranks = d->ranks,
                      .own = d->own};
    for (int r = 0; r < d->ranks; r++) {
        to->base[r] = d->base[r];
        to->dweight[r] = d->dweight[r];
    }
}

/* Backward: the pass between the products, a stage with one column of tiles. */
static void set_act(const epo_gg_chain *c, gg_chain *to) {
    to->stage[2] = to->stage[1];
    to->stage[1] = to->stage[0];
    to->stage[1].tiles_n = 1;
    to->act = (gg_act){.h = c->h,
                       .weight = c->row_weight,
                       .a = c->first.c,
                       .dh = c->dh,
                       .dweight = c->row_dweight,
                       .ffn = c->first.k};
}

static epo_status make_chain(const epo_gg_chain *c, epo_gg g[2], gg_chain *to) {
    int path = 0;
    epo_status st = check_chain(c);
    if (st == EPO_OK) {
        st = check_memory(c);
    }
    if (st != EPO_OK) {
        return st;
    }
    memset(to, 0, sizeof(*to));
    make_products(c, g);
    for (int i = 0; i < 2 && st == EPO_OK; i++) {
        st = gg_make_params(&g[i], &path, &to->stage[i]);
        if (i == 0) {
            g[1].cluster = to->stage[0].cluster;
        }
    }
    if (st != EPO_OK) {
        return st;
    }
    to->stages = is_back(c) ? GG_STAGES : GG_STAGES - 1;
    if (is_back(c)) {
        set_act(c, to);
    }
    set_workspace(c, to);
    set_parts(c, to);
    set_direct(&c->direct, &to->direct);
    return EPO_OK;
}

/* ---- launches ------------------------------------------------------------------- */

static epo_status prepare(gg_chain *to, void *stream) {
    void *args[1] = {to};
    return gg_launch(gg_chain_prepare_kernel(), 1, 256, 0, 1, args, false, stream);
}

_Static_assert(sizeof(gg_chain_maps) <= sizeof(((epo_gg_chain_maps *)0)->room), "room of maps");

/* The launches of a chain differ in SMs and waiting, which no map shows. */
static epo_status make_maps(const epo_gg_chain *c, const epo_gg g[2], const gg_chain *to,
                            gg_chain_maps *maps) {
    const gg_params *last = &to->stage[to->stages - 1];
    epo_status st = gg_make_maps(&g[0], &to->stage[0], &maps->map[0]);
    if (st == EPO_OK) {
        st = gg_make_maps(&g[1], last, &maps->map[1]);
    }
    for (int r = 0; r < c->direct.ranks && st == EPO_OK; r++) {
        if (r != c->direct.own) {
            st = gg_make_rows_map(&g[1], last, c->direct.base[r], c->direct.rows, &maps->direct[r]);
        }
    }
    return st;
}

static epo_status run(const epo_gg_chain *c, epo_gg g[2], gg_chain *to, bool early, void *stream) {
    gg_chain_maps mine;
    gg_chain_maps *maps = c->maps != NULL ? (gg_chain_maps *)(void *)c->maps->room : &mine;
    void *args[2] = {to, maps};
    int blocks = 0, width = g[0].tile_n;
    gg_kernel k = c->first.type == EPO_BF16 ? gg_sm90_chain_bf16(is_back(c), width)
                                            : gg_sm90_chain_f16(is_back(c), width);
    epo_status st = gg_count_blocks(&g[0], &to->stage[0], &blocks);
    if (st != EPO_OK || blocks == 0) {
        return st;
    }
    if (c->maps == NULL || !c->maps->made) {
        st = make_maps(c, g, to, maps);
    }
    if (c->maps != NULL && st == EPO_OK) {
        c->maps->made = 1;
    }
    return st != EPO_OK ? st
                        : gg_launch(k.function, blocks, k.threads, k.smem_bytes,
                                    to->stage[0].cluster, args, early, stream);
}

epo_status epo_gg_chain_prepare(const epo_gg_chain *c, void *stream) {
    epo_gg g[2];
    gg_chain to;
    epo_status st = make_chain(c, g, &to);
    return st != EPO_OK ? st : prepare(&to, stream);
}

epo_status epo_gg_chain_run(const epo_gg_chain *c, void *stream) {
    epo_gg g[2];
    gg_chain to;
    epo_status st = make_chain(c, g, &to);
    return st != EPO_OK ? st : run(c, g, &to, false, stream);
}

epo_status epo_gg_chain_launch(const epo_gg_chain *c, void *stream) {
    epo_gg g[2];
    gg_chain to;
    epo_status st = make_chain(c, g, &to);
    if (st == EPO_OK) {
        st = prepare(&to, stream);
    }
    return st != EPO_OK ? st : run(c, g, &to, true, stream);
}
