/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.c - ep-train's dense parts: what the GPU makes against the plain loops of the CPU,
 * and twice the same bits.
 *
 *   dense [SEED]
 */
#include "gpu_test.h"

#include "dense.h"

enum { ARRAYS = 12, EACH = 1 << 16 };

/* The same numbers here and on the GPU. */
typedef struct pair {
    real *host, *gpu;
} pair;

typedef struct suite {
    cudaStream_t stream;
    const dense_ops *g;
    pair a[ARRAYS];
    int64_t *chosen, *gpu_chosen;
    uint8_t *bytes, *gpu_bytes;
    double *loss, *gpu_loss;
    uint64_t seed;
} suite;

static void fill(suite *s, uint64_t round) {
    for (int i = 0; i < ARRAYS; i++) {
        for (int k = 0; k < EACH; k++)
            s->a[i].host[k] = test_uniform(s->seed + 100 * round + (uint64_t)i, (uint64_t)k);
        s->g->put(s->stream, s->a[i].gpu, s->a[i].host, EACH * sizeof(real));
    }
    for (int k = 0; k < EACH; k++)
        s->bytes[k] = (uint8_t)(test_random(s->seed + round, (uint64_t)k) % 256);
    s->g->put(s->stream, s->gpu_bytes, s->bytes, EACH);
}

/* Of `count` numbers of array i. */
static double off(const suite *s, int i, int count) {
    static real got[EACH];
    double d = 0, w = 0;
    s->g->get(s->stream, got, s->a[i].gpu, EACH * sizeof(real));
    for (int k = 0; k < EACH; k++) { /* what lies behind must stay */
        const double e = (double)got[k] - (double)s->a[i].host[k];
        d += e * e;
        w += k < count ? (double)s->a[i].host[k] * (double)s->a[i].host[k] : 0;
    }
    return w > 0 ? sqrt(d / w) : sqrt(d);
}

typedef void (*step)(suite *s, int rows, int in, int out, bool gpu);

#define OPS(s, gpu) ((gpu) ? (s)->g : &dense_host)
#define AT(s, gpu) ((gpu) ? (void *)(s)->stream : NULL)
#define A(i) (gpu ? s->a[i].gpu : s->a[i].host)

static void linear(suite *s, int rows, int in, int out, bool gpu) {
    OPS(s, gpu)->linear_forward(AT(s, gpu), A(0), A(1), A(2), rows, in, out);
    OPS(s, gpu)->linear_backward(AT(s, gpu), A(3), A(4), A(5), A(6), A(7), rows, in, out);
    OPS(s, gpu)->linear_backward(AT(s, gpu), NULL, A(8), A(5), A(6), A(7), rows, in, out);
}
static void norm(suite *s, int rows, int in, int out, bool gpu) {
    (void)out;
    OPS(s, gpu)->norm_forward(AT(s, gpu), A(0), A(1), A(2), A(3), rows, in);
    OPS(s, gpu)->norm_backward(AT(s, gpu), A(4), A(5), A(6), A(2), A(1), A(3), rows, in);
}
static void router(suite *s, int rows, int in, int out, bool gpu) {
    int64_t *chosen = gpu ? s->gpu_chosen : s->chosen;
    const int top_k = in % out % 6 + 1;
    OPS(s, gpu)->router_forward(AT(s, gpu), chosen, A(0), A(1), rows, out, top_k);
    OPS(s, gpu)->router_backward(AT(s, gpu), A(2), A(3), chosen, A(0), rows, out, top_k);
}
static void loss(suite *s, int rows, int in, int out, bool gpu) {
    (void)in, (void)out;
    OPS(s, gpu)->softmax_loss(AT(s, gpu), gpu ? s->gpu_loss : s->loss, A(0),
                              gpu ? s->gpu_bytes : s->bytes, rows, 256, 0.25);
}
static void rest(suite *s, int rows, int in, int out, bool gpu) {
    const uint8_t *bytes = gpu ? s->gpu_bytes : s->bytes;
    (void)out;
    OPS(s, gpu)->embed(AT(s, gpu), A(0), A(1), bytes, rows, in);
    OPS(s, gpu)->embed_backward(AT(s, gpu), A(2), A(3), bytes, rows, in);
    OPS(s, gpu)->add(AT(s, gpu), A(4), A(5), (size_t)(rows * in));
    OPS(s, gpu)->copy(AT(s, gpu), A(6), A(7), (size_t)(rows * in));
    OPS(s, gpu)->zero(AT(s, gpu), A(8), (size_t)(rows * in));
}

/* The worst of all arrays; *same: a second run's bits. */
static double run(suite *s, step f, uint64_t round, int rows, int in, int out, bool *same) {
    static real first[ARRAYS][EACH], again[EACH];
    double worst = 0;
    fill(s, round);
    f(s, rows, in, out, true);
    for (int i = 0; i < ARRAYS; i++)
        s->g->get(s->stream, first[i], s->a[i].gpu, EACH * sizeof(real));
    fill(s, round);
    f(s, rows, in, out, true);
    for (int i = 0; i < ARRAYS; i++) {
        s->g->get(s->stream, again, s->a[i].gpu, EACH * sizeof(real));
        *same = *same && memcmp(first[i], again, sizeof again) == 0;
    }
    f(s, rows, in, out, false);
    for (int i = 0; i < ARRAYS; i++) {
        const double e = off(s, i, rows * (in > out ? in : out));
        worst = !(e <= worst) ? e : worst;
    }
    if (f == loss) {
        double *got = calloc(EACH, sizeof *got);
        s->g->get(s->stream, got, s->gpu_loss, (size_t)rows * sizeof *got);
        for (int t = 0; t < rows; t++)
            worst = !(fabs(got[t] - s->loss[t]) < 1e-5 * fabs(s->loss[t])) ? 1 : worst;
        free(got);
    }
    if (f == router) {
        int64_t *got = calloc(EACH, sizeof *got);
        s->g->get(s->stream, got, s->gpu_chosen, (size_t)rows * sizeof *got);
        worst = memcmp(got, s->chosen, (size_t)rows * sizeof *got) != 0 ? 1 : worst;
        free(got);
    }
    return worst;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        step f;
    } parts[] = {
        {"linear", linear}, {"norm", norm}, {"router", router}, {"loss", loss}, {"the rest", rest}};
    suite s = {.g = dense_gpu(), .seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 0x51};
    TEST_CUDA(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    for (int i = 0; i < ARRAYS; i++)
        s.a[i] = (pair){calloc(EACH, sizeof(real)), s.g->alloc(s.stream, EACH * sizeof(real))};
    s.chosen = calloc(EACH, sizeof *s.chosen);
    s.gpu_chosen = s.g->alloc(s.stream, EACH * sizeof *s.chosen);
    s.bytes = calloc(EACH, 1);
    s.gpu_bytes = s.g->alloc(s.stream, EACH);
    s.loss = calloc(EACH, sizeof *s.loss);
    s.gpu_loss = s.g->alloc(s.stream, EACH * sizeof *s.loss);
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
        char name[64], text[128];
        double worst = 0;
        bool same = true;
        for (uint64_t i = 0; i < 20; i++) {
            const uint64_t r = test_random(s.seed ^ p, i);
            const int rows = i == 0 ? 0 : 1 + (int)(r % 200), in = 1 + (int)((r >> 20) % 250);
            const double e = run(&s, parts[p].f, i, rows, in, 1 + (int)((r >> 40) % 250), &same);
            worst = !(e <= worst) ? e : worst;
        }
        const char *wrong = s.g->wrong(s.stream);
        snprintf(name, sizeof name, "dense parts on the GPU, %s", parts[p].name);
        snprintf(text, sizeof text, "20 shapes, relative error %.1e%s%s%s", worst,
                 same ? "" : ", other bits the second time", wrong != NULL ? ", " : "",
                 wrong != NULL ? wrong : "");
        test_result(name, worst < 1e-5 && same && wrong == NULL, text);
    }
    return test_failed;
}
