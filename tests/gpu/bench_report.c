/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_report.c - medians, the table, JSON.
 */
#include "bench.h"

static int ascending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

/* Median over repeats of the slowest rank; *spread: half the distance of quartiles. */
static double median(bench_times t, double *spread) {
    float v[BENCH_REPEATS];
    const int n = bench.shape.repeats;
    for (int i = 0; i < n; i++) {
        v[i] = 0;
        for (int r = 0; r < bench.shape.ranks; r++)
            v[i] = t[r][i] > v[i] ? t[r][i] : v[i];
    }
    qsort(v, (size_t)n, sizeof *v, ascending);
    if (spread != NULL)
        *spread = 0.5 * (double)(v[n * 3 / 4] - v[n / 4]);
    return (double)v[n / 2];
}

/* The ratio of the two in the same repeat: what drifts during a run drops out. */
static double median_ratio(bench_times base, bench_times arm) {
    float v[BENCH_REPEATS];
    const int n = bench.shape.repeats;
    for (int i = 0; i < n; i++) {
        float a = 0, b = 0;
        for (int r = 0; r < bench.shape.ranks; r++) {
            a = base[r][i] > a ? base[r][i] : a;
            b = arm[r][i] > b ? arm[r][i] : b;
        }
        v[i] = a / b;
    }
    qsort(v, (size_t)n, sizeof *v, ascending);
    return (double)v[n / 2];
}

double bench_peer_rate(void) {
    const size_t bytes = 256u << 20;
    char *p[2] = {NULL, NULL}, *q[2] = {NULL, NULL};
    cudaStream_t s[2];
    cudaEvent_t begin, end;
    double best = 0;
    int reach = 0;
    if (bench.shape.ranks < 2 || bench.devices < bench.shape.ranks ||
        cudaDeviceCanAccessPeer(&reach, 0, 1) != cudaSuccess)
        return 0;
    for (int i = 0; i < 2; i++) {
        TEST_CUDA(cudaSetDevice(i));
        TEST_CUDA(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
        TEST_CUDA(cudaMalloc((void **)&p[i], bytes));
        TEST_CUDA(cudaMalloc((void **)&q[i], bytes));
    }
    TEST_CUDA(cudaSetDevice(0));
    TEST_CUDA(cudaEventCreate(&begin));
    TEST_CUDA(cudaEventCreate(&end));
    for (int rep = 0; rep < 4; rep++) {
        float ms = 0;
        TEST_CUDA(cudaEventRecord(begin, s[0]));
        for (int k = 0; k < 4; k++) {
            TEST_CUDA(cudaMemcpyAsync(q[1], p[0], bytes, cudaMemcpyDeviceToDevice, s[0]));
            TEST_CUDA(cudaMemcpyAsync(q[0], p[1], bytes, cudaMemcpyDeviceToDevice, s[1]));
        }
        TEST_CUDA(cudaEventRecord(end, s[0]));
        TEST_CUDA(cudaEventSynchronize(end));
        TEST_CUDA(cudaStreamSynchronize(s[1]));
        TEST_CUDA(cudaEventElapsedTime(&ms, begin, end));
        const double rate = 4e-6 * (double)bytes / (double)ms;
        best = rate > best ? rate : best;
    }
    for (int i = 0; i < 2; i++) {
        cudaFree(p[i]);
        cudaFree(q[i]);
    }
    return best;
}

static void report_arm(int a, int base, double rate, double ffn, double ffn_both) {
    double sf = 0, sb = 0;
    const double f = median(bench.forward[a], &sf), b = median(bench.both[a], &sb);
    const double f0 = median(bench.forward[base], NULL), b0 = median(bench.both[base], NULL);
    const double xf = median_ratio(bench.forward[base], bench.forward[a]);
    const double xb = median_ratio(bench.both[base], bench.both[a]);
    const double cpu_f = median(bench.cpu_forward[a], NULL);
    const double cpu_b = median(bench.cpu_backward[a], NULL), plan = median(bench.plan[a], NULL);
    const unsigned long long d = bench.bytes_out[a][0], c = bench.bytes_out[a][1];
    const double wire = rate > 0 ? 1e-6 * (double)(d + c) / rate : 0;
    const double floor_f = ffn > wire ? ffn : wire;
    const double floor_b = ffn_both > 2 * wire ? ffn_both : 2 * wire;
    const double ef = (f0 - f) / (f0 - floor_f), eb = (b0 - b) / (b0 - floor_b);
    printf("%-20s %2d %8.3f %6.3f %8.3f %6.3f %6.2f %6.2f %6.3f %6.3f %6.0f %6.0f %7.2f\n",
           bench.arm[a].name, bench.chosen[a], f, sf, b, sb, ef, eb, xf, xb, cpu_f, cpu_b, plan);
    printf("json\t{\"label\":\"%s\",\"arm\":\"%s\",\"chunks\":%d,\"tokens\":%d,\"hidden\":%d,"
           "\"ffn\":%d,\"experts\":%d,\"forward_ms\":%.4f,\"forward_spread\":%.4f,"
           "\"forward_backward_ms\":%.4f,\"forward_backward_spread\":%.4f,"
           "\"efficiency_forward\":%.3f,\"efficiency_both\":%.3f,\"ratio_forward\":%.4f,"
           "\"ratio_both\":%.4f,\"ffn_ms\":%.4f,\"ffn_both_ms\":%.4f,\"dispatch_bytes\":%llu,"
           "\"combine_bytes\":%llu,\"cpu_forward_us\":%.0f,\"cpu_backward_us\":%.0f,"
           "\"plan_ms\":%.3f,\"peer_gbs\":%.1f,\"gpus\":%d}\n",
           bench.label, bench.arm[a].name, bench.chosen[a], bench.shape.tokens, bench.shape.hidden,
           bench.shape.ffn, bench.shape.experts, f, sf, b, sb, ef, eb, xf, xb, ffn, ffn_both, d, c,
           cpu_f, cpu_b, plan, rate, bench.devices);
}

void bench_report(double rate) {
    const bench_shape *s = &bench.shape;
    const double ffn = median(bench.ffn_forward, NULL), both = median(bench.ffn_both, NULL);
    printf("# %s\n# %s: %d ranks, T %d H %d F %d E %d K %d bf16, weight gradients %s%s; peer copy "
           "%.0f GB/s\n",
           bench.versions, bench.label, s->ranks, s->tokens, s->hidden, s->ffn, s->experts,
           s->top_k, test_type(bench.wgrad_type), bench.fresh ? ", fresh" : "", rate);
    printf("# FFN alone: forward %.3f ms (in four pieces %.3f, as a chain of four parts %.3f), "
           "forward + backward %.3f ms\n",
           ffn, median(bench.ffn_pieces, NULL), median(bench.ffn_chain, NULL), both);
    if (bench.devices < s->ranks)
        printf("# %d ranks share %d GPUs: arms can be compared, no link was crossed\n", s->ranks,
               bench.devices);
    printf("%-20s %2s %8s %6s %8s %6s %6s %6s %6s %6s %6s %6s %7s\n", "arm", "n", "fwd ms", "+-",
           "f+b ms", "+-", "eff f", "eff fb", "x f", "x fb", "cpu f", "cpu b", "plan ms");
    int base = 0;
    for (int a = 0; a < bench.arms; a++) {
        if (bench.arm[a].overlap == EPO_OFF)
            base = a;
        report_arm(a, base, rate, ffn, both);
    }
}
