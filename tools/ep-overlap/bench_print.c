/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "bench.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "json.h"

/* ---- for people ----------------------------------------------------------------- */

/* How far the middle round is from the best one, in the arm where it is farthest: what else ran
 * on the machine, since each round does the same. */
static double unrest(int arms, const bench_result *r) {
    double worst = 1;
    for (int a = 0; a < arms; a++) {
        const spread *times[] = {&r->arm[a].forward, &r->arm[a].both};
        for (int t = 0; t < 2; t++)
            worst = fmax(worst, times[t]->median / times[t]->least);
    }
    return worst;
}

static void warn_unrest(int arms, const bench_result *r) {
    const double worst = unrest(arms, r);
    if (worst > BENCH_UNREST)
        printf("\nNOTE: in one arm the middle round took %.1f times the best one: other work ran "
               "here, "
               "or --repeat\nis too low; take no figure from this run\n",
               worst);
}

static const char *ratio(double value, char *text, size_t bytes) {
    if (isfinite(value))
        snprintf(text, bytes, "%.2f", value);
    else
        snprintf(text, bytes, "-");
    return text;
}

static void heading(const bench_options *o, const bench_result *r) {
    printf("workload %s: %d tokens a rank, hidden %d, %d experts of %d, top %d, %s\n", o->workload,
           o->tokens, o->hidden, o->experts, o->ffn, o->top_k, bench_type_name(o->type));
    printf("%s engine, %d rank%s (%s)", r->engine, r->info.ranks, r->info.ranks == 1 ? "" : "s",
           r->threads ? "threads of one process" : "processes");
    if (r->sms > 0)
        printf(", %s with %d SMs", r->gpu, r->sms);
    if (o->sms > 0)
        printf(", GEMMs on %d of them", o->sms);
    if (r->info.link_gbs > 0)
        printf(", EMULATED link %g GB/s + %g us", r->info.link_gbs, r->info.link_us);
    printf("\nep-overlap %s, %s\n", epo_version(), r->versions);
    if (o->why_host != NULL || r->why_host[0] != '\0')
        printf("%s\n", o->why_host != NULL ? o->why_host : r->why_host);
    if (r->shared)
        printf("%d ranks share %d GPU%s: times show the order of things, not a speed\n",
               r->info.ranks, r->gpus, r->gpus == 1 ? "" : "s");
    if (r->share > 1)
        printf("%d ranks share %d cores: times show the order of things, not a speed\n",
               r->info.ranks, r->cores);
    if (r->info.ranks == 1)
        puts("one rank: rows go nowhere, so there is no communication to hide (--ranks, srun -n)");
}

static void times_row(const bench_arm *arm, const spread *t, const spread *faster, double exposed,
                      double efficiency, bool serial, bool identical) {
    char x[16], eff[16];
    printf("  %-26s %9.3f %8.3f..%-8.3f %5s %9.3f %10s%s\n", arm->name, t->median, t->least,
           t->most, serial ? "1.00" : ratio(faster->median, x, sizeof x), exposed,
           serial ? "-" : ratio(efficiency, eff, sizeof eff),
           serial      ? ""
           : identical ? "   same bits"
                       : "   OTHER RESULTS");
}

static void times_head(const char *what, const char *note) {
    printf("\n%s%s\n  %-26s %9s %18s %5s %9s %10s\n", what, note, "", "ms", "least..most   ", "x",
           "exposed", "efficiency");
}

static void times_tables(const bench_arm *arm, int arms, const bench_result *r) {
    times_head("forward", "");
    for (int a = 0; a < arms; a++)
        times_row(&arm[a], &r->arm[a].forward, &r->arm[a].faster_f, r->arm[a].exposed_f,
                  r->arm[a].efficiency_f, arm[a].serial == a, r->arm[a].identical);
    times_head("forward + backward", ", a micro-batch of 4, the flush of delayed gradients shared");
    for (int a = 0; a < arms; a++)
        times_row(&arm[a], &r->arm[a].both, &r->arm[a].faster_b, r->arm[a].exposed_b,
                  r->arm[a].efficiency_b, arm[a].serial == a, r->arm[a].identical);
}

static double share(const epo_overlap_times *u) {
    return u->comm > 0 ? 100.0 * (double)u->overlapped / (double)u->comm : 0;
}

static void cost_table(const bench_arm *arm, int arms, const bench_result *r) {
    printf("\none forward and backward of rank 0\n  %-26s %6s %9s %9s %9s %8s %8s %9s %8s\n", "",
           "chunks", "sent MB", "local MB", "own MB", "call us", "plan ms", "overlap %", "delayed");
    for (int a = 0; a < arms; a++) {
        const bench_figures *f = &r->arm[a];
        const double sent =
            (double)(f->pass.dispatch_bytes + f->pass.combine_bytes + f->pass.control_bytes);
        printf("  %-26s %6d %9.3f %9.1f %9.1f %8.0f %8.3f %9.1f %8" PRIu64 "\n", arm[a].name,
               f->chunks, sent * 1e-6, (double)f->pass.local_bytes * 1e-6,
               (double)f->pass.memory_peak * 1e-6, f->call_us, f->plan_ms, share(&f->unions),
               f->pass.wgrad_delayed);
    }
}

static void ceilings(const bench_arm *arm, int arms, const bench_result *r) {
    char shared[48] = "";
    if (r->share > 1)
        snprintf(shared, sizeof shared, " x %d ranks / %d cores", r->info.ranks, r->cores);
    const bool tera = r->gflops_f >= 1000;
    puts("\nceilings of this run");
    printf("  FFN*       %9.3f ms forward at %.1f %s, %.3f ms both at %.1f%s\n", r->ffn_best_f,
           r->gflops_f * (tera ? 1e-3 : 1), tera ? "TFLOP/s" : "GFLOP/s", r->ffn_best_b,
           r->gflops_b * (tera ? 1e-3 : 1), shared);
    printf("  D* = C*    %9.3f ms a pass: one row per token and other rank, %s", r->least_ms,
           r->copy_of);
    if (r->copy_gbs > 0)
        printf(" at %.*f GB/s", r->copy_gbs < 10 ? 2 : 1, r->copy_gbs);
    printf("\n  floor      %9.3f ms forward, %.3f ms both\n", r->arm[0].floor_f, r->arm[0].floor_b);
    for (int a = 0; a < arms; a++)
        if (arm[a].serial == a)
            printf("  FFN alone  %9.3f ms forward, %.3f ms both: %s\n", r->arm[a].ffn_f,
                   r->arm[a].ffn_b, arm[a].name);
    printf("  memory     %9.1f MB of the process", r->process_mb);
    if (r->gpu_used_mb > 0)
        printf(", %.0f MB in use on its GPU, by all", r->gpu_used_mb);
    puts("");
}

void bench_print_text(const bench_options *o, const bench_arm *arm, int arms,
                      const bench_result *r) {
    heading(o, r);
    times_tables(arm, arms, r);
    cost_table(arm, arms, r);
    ceilings(arm, arms, r);
    warn_unrest(arms, r);
}

/* ---- for programs --------------------------------------------------------------- */

static void put_spread(epo_json *j, const char *name, const spread *s) {
    epo_json_object(j, name);
    epo_json_number(j, "median", s->median);
    epo_json_number(j, "least", s->least);
    epo_json_number(j, "most", s->most);
    epo_json_end(j, '}');
}

static void put_side(epo_json *j, const char *name, const spread *ms, const spread *faster,
                     const double value[3], bool serial) {
    epo_json_object(j, name);
    put_spread(j, "ms", ms);
    put_spread(j, "speedup", faster);
    epo_json_number(j, "exposed_ms", value[0]);
    epo_json_number(j, "efficiency", serial ? NAN : value[1]);
    epo_json_number(j, "floor_ms", value[2]);
    epo_json_end(j, '}');
}

static void put_pass(epo_json *j, const bench_figures *f) {
    epo_json_integer(j, "chunks", f->chunks);
    epo_json_integer(j, "dispatch_bytes", (int64_t)f->pass.dispatch_bytes);
    epo_json_integer(j, "combine_bytes", (int64_t)f->pass.combine_bytes);
    epo_json_integer(j, "control_bytes", (int64_t)f->pass.control_bytes);
    epo_json_integer(j, "local_bytes", (int64_t)f->pass.local_bytes);
    epo_json_integer(j, "memory_bytes", (int64_t)f->pass.memory_peak);
    epo_json_integer(j, "wgrad_delayed", (int64_t)f->pass.wgrad_delayed);
    epo_json_integer(j, "wgrad_hidden", (int64_t)f->pass.wgrad_hidden);
    epo_json_integer(j, "union_comm_ns", (int64_t)f->unions.comm);
    epo_json_integer(j, "union_compute_ns", (int64_t)f->unions.compute);
    epo_json_integer(j, "union_overlapped_ns", (int64_t)f->unions.overlapped);
    epo_json_number(j, "call_us", f->call_us);
    epo_json_number(j, "plan_ms", f->plan_ms);
}

static void put_arm(epo_json *j, const bench_arm *arm, int a, const bench_result *r) {
    const bench_figures *f = &r->arm[a], *s = &r->arm[arm[a].serial];
    const bool serial = arm[a].serial == a;
    const double forward[] = {f->exposed_f, f->efficiency_f, f->floor_f};
    const double both[] = {f->exposed_b, f->efficiency_b, f->floor_b};
    char bits[20];
    epo_json_object(j, NULL);
    epo_json_text(j, "name", arm[a].name);
    epo_json_text(j, "dispatcher", arm[a].dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall");
    epo_json_bool(j, "overlap", arm[a].overlap == EPO_ON);
    epo_json_bool(j, "delay_wgrad", arm[a].delay == EPO_ON);
    epo_json_text(j, "serial", arm[arm[a].serial].name);
    snprintf(bits, sizeof bits, "%016" PRIx64, f->bits);
    epo_json_bool(j, "identical", f->identical);
    epo_json_text(j, "bits", bits);
    put_side(j, "forward", &f->forward, &f->faster_f, forward, serial);
    put_side(j, "forward_backward", &f->both, &f->faster_b, both, serial);
    epo_json_number(j, "ffn_alone_forward_ms", s->ffn_f);
    epo_json_number(j, "ffn_alone_forward_backward_ms", s->ffn_b);
    put_pass(j, f);
    epo_json_end(j, '}');
}

static void put_settings(epo_json *j, const bench_options *o, const bench_result *r) {
    epo_json_text(j, "schema", "ep-overlap-bench/1");
    epo_json_text(j, "version", epo_version());
    epo_json_text(j, "engine", r->engine);
    epo_json_text(j, "versions", r->versions);
    epo_json_text(j, "device", r->gpu);
    epo_json_integer(j, "sms", r->sms);
    epo_json_integer(j, "gemm_sms", o->sms > 0 ? o->sms : r->sms);
    epo_json_text(j, "workload", o->workload);
    epo_json_integer(j, "tokens", o->tokens);
    epo_json_integer(j, "hidden", o->hidden);
    epo_json_integer(j, "ffn", o->ffn);
    epo_json_integer(j, "experts", o->experts);
    epo_json_integer(j, "top_k", o->top_k);
    epo_json_text(j, "type", bench_type_name(o->type));
    epo_json_integer(j, "ranks", r->info.ranks);
    epo_json_text(j, "ranks_are", r->threads ? "threads" : "processes");
    epo_json_integer(j, "gpus", r->gpus);
    epo_json_bool(j, "ranks_share", r->shared || r->share > 1);
    epo_json_integer(j, "cores", r->cores);
    epo_json_number(j, "link_gbs", r->info.link_gbs);
    epo_json_number(j, "link_us", r->info.link_us);
    epo_json_integer(j, "repeats", o->repeats);
    epo_json_integer(j, "micro_batches", BENCH_MICROBATCHES);
}

void bench_print_json(const bench_options *o, const bench_arm *arm, int arms,
                      const bench_result *r) {
    epo_json j = {.out = stdout};
    epo_json_object(&j, NULL);
    put_settings(&j, o, r);
    epo_json_number(&j, "copy_gbs", r->copy_gbs);
    epo_json_text(&j, "copy_of", r->copy_of);
    epo_json_number(&j, "flop_forward", r->flop_f);
    epo_json_number(&j, "ffn_best_forward_ms", r->ffn_best_f);
    epo_json_number(&j, "ffn_best_forward_backward_ms", r->ffn_best_b);
    epo_json_number(&j, "gflops_forward", r->gflops_f);
    epo_json_number(&j, "gflops_forward_backward", r->gflops_b);
    epo_json_number(&j, "least_dispatch_ms", r->least_ms);
    epo_json_number(&j, "process_peak_mb", r->process_mb);
    epo_json_number(&j, "gpu_used_mb", r->gpu_used_mb);
    epo_json_number(&j, "unrest", unrest(arms, r));
    epo_json_array(&j, "arms");
    for (int a = 0; a < arms; a++)
        put_arm(&j, arm, a, r);
    epo_json_end(&j, ']');
    epo_json_end(&j, '}');
    puts("");
}
