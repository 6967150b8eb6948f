/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/status.h"
#include "output.h"

static void string(FILE *f, const char *name, const char *text) {
    fprintf(f, "  \"%s\": \"", name);
    for (const char *c = text; *c != '\0'; c++) {
        if (*c == '"' || *c == '\\')
            fputc('\\', f);
        if ((unsigned char)*c < 0x20)
            fprintf(f, "\\u%04x", (unsigned)*c);
        else
            fputc(*c, f);
    }
    fputs("\",\n", f);
}

/* JSON has no NaN and no infinity. */
static void number(FILE *f, const char *name, double value) {
    if (isfinite(value))
        fprintf(f, "  \"%s\": %.9g,\n", name, value);
    else
        fprintf(f, "  \"%s\": null,\n", name);
}

static void whole(FILE *f, const char *name, uint64_t value) {
    fprintf(f, "  \"%s\": %" PRIu64 ",\n", name, value);
}

static void three(FILE *f, const char *name, const spread *s) {
    fprintf(f, "  \"%s\": {\"median\": %.9g, \"least\": %.9g, \"most\": %.9g},\n", name, s->median,
            s->least, s->most);
}

static void settings(FILE *f, const train *t) {
    const epo_group_info *i = &t->world->info;
    const options *o = t->opt;
    string(f, "version", epo_version());
    string(f, "engine", i->engine);
    string(f, "versions", i->versions);
    string(f, "device", t->world->device.name);
    whole(f, "sms", (uint64_t)t->world->device.sms);
    string(f, "dense_on", "host");
    string(f, "reason", i->reason);
    whole(f, "ranks", (uint64_t)i->ranks);
    whole(f, "overlap", (uint64_t)i->overlap);
    string(f, "dispatcher", i->dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall");
    whole(f, "delay_wgrad", (uint64_t)i->delay_wgrad);
    whole(f, "chunks", (uint64_t)i->chunks);
    number(f, "link_gbs", i->link_gbs);
    number(f, "link_us", i->link_us);
    whole(f, "layers", (uint64_t)o->layers);
    whole(f, "hidden", (uint64_t)o->hidden);
    whole(f, "ffn", (uint64_t)o->ffn);
    whole(f, "experts", (uint64_t)o->experts);
    whole(f, "top_k", (uint64_t)o->top_k);
    whole(f, "seq", (uint64_t)o->seq);
    whole(f, "batch", (uint64_t)o->batch);
    whole(f, "micro_batches", (uint64_t)o->micro_batches);
    string(f, "dtype", o->dtype == EPO_BF16 ? "bf16" : "fp32");
    whole(f, "seed", o->seed);
}

static void comparison(FILE *f, const measured *m) {
    whole(f, "pairs", (uint64_t)m->pairs);
    three(f, "t_serial_ms", &m->serial);
    if (m->have_on) {
        three(f, "t_on_ms", &m->on);
        three(f, "speedup", &m->speedup);
    }
    number(f, "ffn_alone_ms", m->ffn_alone_ms);
    number(f, "ffn_best_ms", m->ffn_best_ms);
    number(f, "ffn_gflops", m->ffn_gflops);
    number(f, "dispatch_least_ms", m->dispatch_least_ms);
    number(f, "combine_least_ms", m->combine_least_ms);
    number(f, "rate_gbs", m->rate_gbs);
    string(f, "rate_of", m->rate_of);
    number(f, "t_floor_ms", m->floor_ms);
    number(f, "exposed_ms", m->have_on ? m->exposed_ms : NAN);
    number(f, "efficiency", m->efficiency);
    whole(f, "union_comm_ns", m->unions.comm);
    whole(f, "union_compute_ns", m->unions.compute);
    whole(f, "union_overlapped_ns", m->unions.overlapped);
    whole(f, "union_exposed_ns", m->unions.exposed);
    whole(f, "intervals_dropped", m->dropped);
    whole(f, "chunks_used", (uint64_t)m->chunks);
}

static void bytes(FILE *f, const epo_stats *s, uint64_t steps) {
    whole(f, "bytes_of_steps", steps);
    whole(f, "dispatch_bytes", s->dispatch_bytes);
    whole(f, "combine_bytes", s->combine_bytes);
    whole(f, "control_bytes", s->control_bytes);
    whole(f, "local_bytes", s->local_bytes);
    whole(f, "wgrad_delayed", s->wgrad_delayed);
    whole(f, "wgrad_hidden", s->wgrad_hidden);
    whole(f, "memory_bytes", s->memory_bytes);
    whole(f, "memory_peak", s->memory_peak);
}

epo_status report_json(const report *r, const char *path) {
    const train *t = r->t;
    output out;
    epo_status status = output_open(path, &out);
    if (status != EPO_OK)
        return status;
    FILE *f = out.file;
    fputs("{\n", f);
    settings(f, t);
    if (t->opt->bench == 0) {
        whole(f, "steps", (uint64_t)t->opt->steps);
        number(f, "first_loss", t->first_loss);
        number(f, "last_loss", t->last_loss);
        three(f, "step_ms", &r->step_ms);
        number(f, "moe_call_ms", r->training.call_s * 1e3 / t->opt->steps);
        whole(f, "skipped", (uint64_t)t->skipped);
        whole(f, "nans", (uint64_t)t->nans);
    }
    if (r->m != NULL)
        comparison(f, r->m);
    if (r->m != NULL)
        bytes(f, &r->m->pass, 1);
    else
        bytes(f, &r->training, (uint64_t)t->opt->steps);
    number(f, "gpu_used_mb", r->gpu_used_mb);
    fprintf(f, "  \"process_peak_mb\": %.9g\n}\n", r->rss_mb);
    return output_close(&out, EPO_OK);
}
