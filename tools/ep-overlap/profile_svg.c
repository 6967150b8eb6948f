/* SPDX-License-Identifier: Apache-2.0
 *
 * A picture for one look: lanes over time, and how much of the communication is
 * hidden.  Plain SVG 1.1 without scripts or fonts of its own.
 */
#include "profile_view.h"

#include "core/status.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LEFT 190
#define PLOT 1200
#define WIDTH (LEFT + PLOT + 40)
#define LANE 26
#define LANE_GAP 6
#define SHADES 8

typedef struct lane_style {
    epo_kernel_class kind;
    const char *label, *colour;
} lane_style;

/* Colours that people with any colour vision tell apart (Okabe and Ito). */
static const lane_style lanes[] = {
    {EPO_KERNEL_EP_COMM, "expert communication", "#D55E00"},
    {EPO_KERNEL_GEMM, "GEMM", "#0072B2"},
    {EPO_KERNEL_ATTENTION, "attention", "#56B4E9"},
    {EPO_KERNEL_PERMUTE, "permutation", "#009E73"},
    {EPO_KERNEL_OTHER, "other kernels", "#999999"},
    {EPO_KERNEL_OTHER_COMM, "other communication", "#CC79A7"},
    {EPO_KERNEL_COPY, "copies", "#B8A000"},
};
#define LANES (sizeof lanes / sizeof *lanes)
#define PANEL ((int)LANES * (LANE + LANE_GAP) + 140)

static void put_text(FILE *out, const char *text) {
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '<': fputs("&lt;", out); break;
        case '>': fputs("&gt;", out); break;
        case '&': fputs("&amp;", out); break;
        case '"': fputs("&quot;", out); break;
        default: fputc((unsigned char)*text < 0x20 ? ' ' : *text, out);
        }
    }
}

static int shade(float covered) {
    int s = (int)ceilf(covered * SHADES);
    return s > SHADES ? SHADES : s;
}

/* Neighbouring parts of one shade are one rectangle. */
static void draw_lane(FILE *out, const epo_profile_timeline *t, const lane_style *lane, int y) {
    const double width = (double)PLOT / EPO_PROFILE_BINS;
    fprintf(out, "<text x=\"%d\" y=\"%d\" class=\"label\">%s</text>\n", LEFT - 10, y + LANE - 8,
            lane->label);
    fprintf(out, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" class=\"lane\"/>\n", LEFT, y,
            PLOT, LANE);
    fprintf(out, "<g fill=\"%s\">\n", lane->colour);
    for (int bin = 0; bin < EPO_PROFILE_BINS;) {
        int s = shade(t->covered[bin][lane->kind]), end = bin + 1;
        while (end < EPO_PROFILE_BINS && shade(t->covered[end][lane->kind]) == s)
            end++;
        if (s > 0)
            fprintf(out,
                    "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" opacity=\"%.3f\"/>\n",
                    LEFT + bin * width, y, (end - bin) * width, LANE, 0.25 + 0.75 * s / SHADES);
        bin = end;
    }
    fputs("</g>\n", out);
}

/* A round step that gives 5 to 12 marks. */
static double tick_step(double range) {
    double step = pow(10, floor(log10(range / 5)));
    static const double factors[] = {1, 2, 5};
    for (size_t i = 0; i < 3; i++)
        if (range / (step * factors[i]) <= 12)
            return step * factors[i];
    return step * 10;
}

static void draw_axis(FILE *out, double milliseconds, int y) {
    double step = tick_step(milliseconds);
    int decimals = step >= 1 ? 0 : (int)ceil(-log10(step));
    for (double t = 0; t <= milliseconds * 1.0001; t += step) {
        double x = LEFT + PLOT * t / milliseconds;
        fprintf(out, "<path d=\"M%.2f %d v6\" stroke=\"#555\"/>", x, y);
        fprintf(out, "<text x=\"%.2f\" y=\"%d\" class=\"tick\">%.*f%s</text>\n", x, y + 20,
                decimals, t, t == 0 ? " ms" : "");
    }
}

static void draw_part(FILE *out, double x, double width, int y, const char *colour,
                      const char *label, double ms, double share) {
    fprintf(out, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"24\" fill=\"%s\"/>\n", x, y,
            width, colour);
    if (width > 190)
        fprintf(out, "<text x=\"%.2f\" y=\"%d\" class=\"part\">%s %.3f ms (%.1f %%)</text>\n",
                x + width / 2, y + 17, label, ms, 100 * share);
}

/* |U(comm)| as a bar, hidden part first; the longest of all files is the full width. */
static void draw_overlap(FILE *out, const profile_file *f, const epo_profile_times *t,
                         uint64_t longest, int y) {
    fprintf(out, "<text x=\"%d\" y=\"%d\" class=\"label\">communication</text>\n", LEFT - 10,
            y + 17);
    if (f->refused[0] != '\0' || t->comm == 0) {
        fprintf(out, "<text x=\"%d\" y=\"%d\" class=\"note\">", LEFT, y + 17);
        put_text(out, t->comm == 0 ? "no expert communication was recorded" : f->refused);
        fputs("</text>\n", out);
        return;
    }
    double full = PLOT * (double)t->comm / (double)longest, share = profile_share(t);
    draw_part(out, LEFT, full * share, y, "#009E73", "beside GEMM and attention",
              (double)t->overlapped * 1e-6, share);
    draw_part(out, LEFT + full * share, full * (1 - share), y, "#D55E00", "exposed",
              (double)t->exposed * 1e-6, 1 - share);
    fprintf(out,
            "<text x=\"%d\" y=\"%d\" class=\"note\">%.1f %% of %.3f ms expert communication ran "
            "beside GEMM and attention; busy %.3f ms</text>\n",
            LEFT, y + 44, 100 * share, (double)t->comm * 1e-6, (double)t->busy * 1e-6);
}

static epo_status draw_file(FILE *out, profile_file *f, size_t unit, uint64_t longest, int64_t span,
                            int y) {
    const epo_profile_unit *u = epo_profile_unit_at(f->profile, unit);
    epo_profile_timeline *t = calloc(1, sizeof *t);
    epo_profile_times times;
    if (t == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory");
    t->first = f->from == INT64_MIN ? f->first : f->from;
    if (__builtin_add_overflow(t->first, span, &t->last)) /* one scale for all files */
        t->last = INT64_MAX;
    epo_status status = epo_profile_measure(f->profile, unit, f->from, f->to, &times, t);
    if (status == EPO_OK) {
        fprintf(out, "<text x=\"%d\" y=\"%d\" class=\"title\">", LEFT, y);
        put_text(out, f->path);
        fprintf(out,
                "</text><text x=\"%d\" y=\"%d\" class=\"right\">process %lld, device %lld, "
                "%llu kernels</text>\n",
                LEFT + PLOT, y, (long long)u->process, (long long)u->device,
                (unsigned long long)u->kernels);
        y += 12;
        for (size_t i = 0; i < LANES; i++, y += LANE + LANE_GAP)
            draw_lane(out, t, &lanes[i], y);
        draw_axis(out, (double)span * 1e-6, y);
        draw_overlap(out, f, &times, longest, y + 36);
    }
    free(t);
    return status;
}

static void draw_head(FILE *out, int height) {
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n"
            "<style>.label{font-size:13px;text-anchor:end;fill:#222}.lane{fill:#f2f2f2}"
            ".tick{font-size:11px;text-anchor:middle;fill:#555}"
            ".title{font-size:16px;font-weight:bold}"
            ".right{font-size:12px;text-anchor:end;fill:#555}"
            ".part{font-size:12px;text-anchor:middle;fill:#fff}.note{font-size:12px;fill:#222}"
            "</style>\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            WIDTH, height, WIDTH, height);
}

static epo_status draw(FILE *out, profile_view *v, size_t unit) {
    int64_t span = 1;
    uint64_t longest = 1;
    for (size_t i = 0; i < v->files; i++) {
        const profile_file *f = &v->file[i];
        int64_t from = f->from == INT64_MIN ? f->first : f->from;
        int64_t to = f->to == INT64_MAX ? f->last : f->to;
        int64_t length;
        if (__builtin_sub_overflow(to, from, &length))
            length = INT64_MAX;
        span = length > span ? length : span;
        longest = f->times[unit].comm > longest ? f->times[unit].comm : longest;
    }
    draw_head(out, 30 + PANEL * (int)v->files);
    epo_status status = EPO_OK;
    for (size_t i = 0; i < v->files && status == EPO_OK; i++)
        status = draw_file(out, &v->file[i], unit, longest, span, 30 + PANEL * (int)i);
    fputs("</svg>\n", out);
    return status;
}

/* A name where --svg was given none is the next file's: no trace is lost for a picture. */
static bool holds_other(const char *path) {
    char head[4] = "";
    struct stat there;
    const int fd = stat(path, &there) == 0 && S_ISREG(there.st_mode) && there.st_size > 0
                       ? open(path, O_RDONLY | O_CLOEXEC)
                       : -1;
    if (fd < 0)
        return false;
    const bool other = read(fd, head, sizeof head) != (ssize_t)sizeof head ||
                       memcmp(head, "<svg", sizeof head) != 0;
    close(fd);
    return other;
}

epo_status profile_draw_svg(profile_view *v, size_t unit, const char *path) {
    for (size_t i = 0; i < v->files; i++)
        if (unit >= v->file[i].facts.units)
            return epo_fail(EPO_E_ARG, "%s: there is no device number %zu to draw, only %zu",
                            v->file[i].path, unit, v->file[i].facts.units);
    if (holds_other(path))
        return epo_fail(EPO_E_ARG,
                        "%s: is there already and is no picture (--svg takes the name of the file "
                        "to draw); remove it, or name another",
                        path);
    FILE *out = fopen(path, "we");
    if (out == NULL)
        return epo_fail(EPO_E_SYSTEM, "%s: cannot be written: %s", path, strerror(errno));
    struct stat made;
    const bool file = fstat(fileno(out), &made) == 0 && S_ISREG(made.st_mode);
    epo_status status = draw(out, v, unit);
    bool failed = ferror(out) != 0;
    if ((fclose(out) != 0 || failed) && status == EPO_OK)
        status = epo_fail(EPO_E_SYSTEM, "%s: cannot be written: %s", path, strerror(errno));
    if (status != EPO_OK && file) /* half a picture is none */
        (void)unlink(path);
    return status;
}
