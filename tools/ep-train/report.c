/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "report.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const char *dispatcher_name(const epo_group_info *i) {
    return i->dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall";
}

static void chunks_text(const epo_group_info *i, int seen, char *text, size_t bytes) {
    if (i->chunks > 0)
        snprintf(text, bytes, "%d chunk%s", i->chunks, i->chunks == 1 ? "" : "s");
    else if (seen > 0)
        snprintf(text, bytes, "%d chunk%s (chosen by the engine)", seen, seen == 1 ? "" : "s");
    else
        snprintf(text, bytes, "chunks chosen by the engine");
}

void report_opening(const train *t, FILE *out) {
    const epo_group_info *i = &t->world->info;
    const options *o = t->opt;
    char chunks[48], link[64] = "";
    chunks_text(i, 0, chunks, sizeof chunks);
    if (i->link_gbs > 0)
        snprintf(link, sizeof link, ", emulated link %g GB/s + %g us", i->link_gbs, i->link_us);
    fprintf(
        out,
        "ep-train: overlap %s, dispatcher %s, weight gradients %s, %s, %s engine, %d rank%s%s\n",
        i->overlap ? "on" : "off", dispatcher_name(i), i->delay_wgrad ? "delayed" : "at once",
        chunks, i->engine, i->ranks, i->ranks == 1 ? "" : "s", link);
    fprintf(out, "ep-train: overlap is %s\n", i->reason);
    fprintf(out,
            "ep-train: %d layers, hidden %d, %d experts of %d, top %d, %s; step of %d x %d "
            "sequences of %d bytes from %s (%zu bytes); seed %" PRIu64 "\n",
            o->layers, o->hidden, o->experts, o->ffn, o->top_k,
            o->dtype == EPO_BF16 ? "bf16" : "fp32", o->micro_batches, o->batch, o->seq,
            o->file != NULL ? o->file : DATA_DEFAULT, t->text.count, o->seed);
    if (t->world->why != NULL)
        fprintf(out, "ep-train: %s\n", t->world->why);
    if (t->world->device.gpu)
        fprintf(out,
                "ep-train: experts%s on GPU %d of %d here, %s; the %soptimizer runs on the CPU\n",
                t->world->dense_at != NULL ? " and dense parts" : "", t->world->device.number,
                t->world->device.visible, t->world->device.name,
                t->world->dense_at != NULL ? "" : "dense parts and the ");
    if (t->cores > 0 && i->ranks > t->cores)
        fprintf(out,
                "ep-train: %d ranks share %d cores: times show the order of things, not a speed\n",
                i->ranks, t->cores);
    fflush(out);
}

/* ---- the table -------------------------------------------------------- */

static void row(FILE *out, const char *name, const char *value, const char *note) {
    fprintf(out, "  %-16s %12s  %s\n", name, value, note);
}

static void row_ms(FILE *out, const char *name, double ms, const char *note) {
    char value[32];
    snprintf(value, sizeof value, "%.3f ms", ms);
    row(out, name, value, note);
}

static void row_spread(FILE *out, const char *name, const spread *s, const char *what) {
    char note[128];
    snprintf(note, sizeof note, "%.3f .. %.3f%s%s", s->least, s->most, *what != '\0' ? ", " : "",
             what);
    row_ms(out, name, s->median, note);
}

static void training_rows(const report *r, FILE *out) {
    const train *t = r->t;
    char value[48], note[160];
    snprintf(value, sizeof value, "%.4f", t->last_loss);
    snprintf(note, sizeof note, "after %d steps; the first was %.4f", t->opt->steps, t->first_loss);
    row(out, "loss", value, note);
    row_spread(out, "step", &r->step_ms, "without the first tenth");
    double moe = r->training.call_s * 1e3 / t->opt->steps;
    snprintf(note, sizeof note,
             t->world->device.gpu
                 ? "of a step's CPU time, %.0f %% of it (the calls return early)"
                 : "of a step, %.0f %% of it (forward and backward of the experts)",
             r->step_ms.median > 0 ? 100 * moe / r->step_ms.median : 0.0);
    row_ms(out, "in MoE calls", moe, note);
}

static void comparison_rows(const report *r, FILE *out) {
    const measured *m = r->m;
    char value[48], note[200], shared[48] = "";
    if (m->share > 1)
        snprintf(shared, sizeof shared, " x %d ranks / %d cores", r->t->world->info.ranks,
                 r->t->cores);
    if (m->have_on)
        fprintf(out, "serial and overlapped, %d interleaved pairs: all expert layers of one step\n",
                m->pairs);
    else
        fprintf(out, "serial, %d passes: all expert layers of one step\n", m->pairs);
    row_spread(out, "T_serial", &m->serial, "one chunk, nothing delayed");
    if (m->have_on)
        row_spread(out, "T_on", &m->on, "as in the training");
    row_ms(out, "FFN_alone", m->ffn_alone_ms, "the experts' work without communication");
    snprintf(note, sizeof note, "max(FFN* %.3f%s, D*+C* %.3f): %.1f GFLOP/s a rank, %.2f GB/s %s",
             m->ffn_best_ms, shared, m->dispatch_least_ms + m->combine_least_ms, m->ffn_gflops,
             m->rate_gbs, m->rate_of);
    row_ms(out, "T_floor", m->floor_ms, note);
    if (m->have_on) {
        snprintf(value, sizeof value, "%.3f x", m->speedup.median);
        snprintf(note, sizeof note, "%.3f .. %.3f over the pairs; at most %.3f (T_serial/T_floor)",
                 m->speedup.least, m->speedup.most,
                 m->floor_ms > 0 ? m->serial.median / m->floor_ms : 0.0);
        row(out, "speed-up", value, note);
        row_ms(out, "exposed", m->exposed_ms, "T_on - FFN_alone");
        if (isnan(m->efficiency))
            row(out, "efficiency", "-", "T_serial is at its floor already");
        else {
            snprintf(value, sizeof value, "%.1f %%", 100 * m->efficiency);
            row(out, "efficiency", value, "(T_serial - T_on) / (T_serial - T_floor)");
        }
    } else {
        row(out, "T_on", "-", "overlap is off (srun --ep-overlap=on, or --overlap on)");
    }
    if (r->t->world->info.link_gbs == 0 && !r->t->world->device.gpu &&
        m->dispatch_least_ms + m->combine_least_ms < m->ffn_best_ms / 10)
        row(out, "", "",
            "communication is copies in one memory here, with little to hide;\n"
            "                                 EP_OVERLAP_HOST_LINK=GB/s,us emulates a network");
    const epo_overlap_times *u = &m->unions;
    snprintf(value, sizeof value, "%.1f %%",
             u->comm > 0 ? 100.0 * (double)u->overlapped / (double)u->comm : 0.0);
    snprintf(note, sizeof note, "of %.3f ms communication beside %.3f ms work%s",
             (double)u->comm * 1e-6, (double)u->compute * 1e-6,
             m->dropped > 0 ? " (incomplete: too many intervals)" : "");
    row(out, "overlapped", value, note);
}

static void byte_rows(const report *r, FILE *out) {
    const epo_stats *s = r->m != NULL ? &r->m->pass : &r->training;
    const double per = r->m != NULL ? 1 : r->t->opt->steps;
    char value[48], note[200];
    snprintf(value, sizeof value, "%.3f MB",
             (double)(s->dispatch_bytes + s->combine_bytes + s->control_bytes) * 1e-6 / per);
    snprintf(note, sizeof note, "sent a step: dispatch %.3f, combine %.3f, control %.3f",
             (double)s->dispatch_bytes * 1e-6 / per, (double)s->combine_bytes * 1e-6 / per,
             (double)s->control_bytes * 1e-6 / per);
    row(out, "wire", value, note);
    snprintf(value, sizeof value, "%.3f MB", (double)s->local_bytes * 1e-6 / per);
    row(out, "local passes", value, "read and written by permute, expand, reduce, a step");
    if (s->wgrad_delayed > 0) {
        snprintf(value, sizeof value, "%.1f", (double)s->wgrad_delayed / per);
        snprintf(note, sizeof note, "experts a step, %.1f of them done behind communication",
                 (double)s->wgrad_hidden / per);
        row(out, "delayed wgrad", value, note);
    }
    snprintf(value, sizeof value, "%.2f MB", (double)s->memory_peak * 1e-6);
    int used =
        snprintf(note, sizeof note, "of the library at most; the process %.1f MB", r->rss_mb);
    if (r->gpu_used_mb > 0)
        snprintf(note + used, sizeof note - (size_t)used, "; %.0f MB in use on its GPU, by all",
                 r->gpu_used_mb);
    row(out, "memory", value, note);
}

void report_closing(const report *r, FILE *out) {
    const epo_group_info *i = &r->t->world->info;
    char chunks[48];
    chunks_text(i, r->m != NULL ? r->m->chunks : 0, chunks, sizeof chunks);
    fprintf(out, "\nfigures of rank %d of %d; medians, least .. most\n", i->rank, i->ranks);
    if (r->t->opt->bench == 0)
        training_rows(r, out);
    if (r->m != NULL)
        comparison_rows(r, out);
    byte_rows(r, out);
    fprintf(out, "  %-16s overlap %s, %s, weight gradients %s, %s", "settings",
            i->overlap ? "on" : "off", dispatcher_name(i), i->delay_wgrad ? "delayed" : "at once",
            chunks);
    if (i->link_gbs > 0)
        fprintf(out, ", EMULATED link %g GB/s + %g us", i->link_gbs, i->link_us);
    fprintf(out, "\n  %-16s ep-overlap %s, %s engine, %s\n", "versions", epo_version(), i->engine,
            i->versions);
    fflush(out);
}
