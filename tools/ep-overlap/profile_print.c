/* SPDX-License-Identifier: Apache-2.0 */
#include "profile_view.h"

#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double profile_share(const epo_profile_times *t) {
    return t->comm == 0 ? NAN : (double)t->overlapped / (double)t->comm;
}

static const char *kind_name(epo_profile_kind kind) {
    return kind == EPO_PROFILE_NSIGHT ? "Nsight Systems export" : "Chrome trace";
}

static void print_file(const profile_file *f) {
    const char *copies = f->facts.copies == 1 ? "copy" : "copies";
    printf("%s: %s, %llu kernel%s, %llu %s, %zu %s\n", f->path, kind_name(f->facts.kind),
           (unsigned long long)f->facts.kernels, f->facts.kernels == 1 ? "" : "s",
           (unsigned long long)f->facts.copies, copies, f->facts.units,
           f->facts.units == 1 ? "device" : "processes and devices");
    if (f->facts.line[0] != '\0')
        printf("  recorded: %s\n", f->facts.line);
    if (f->facts.missing[0] != '\0')
        printf("  not in this file: %s\n", f->facts.missing);
    if (f->facts.skipped > 0)
        printf("  %llu records without a time, or with an end before their start, were left out\n",
               (unsigned long long)f->facts.skipped);
    if (f->facts.graph_launches > 0)
        printf("  %llu CUDA graphs were recorded as one block each: what ran inside is not seen; "
               "record with nsys --cuda-graph-trace=node (rule PRO-002)\n",
               (unsigned long long)f->facts.graph_launches);
    for (size_t i = 0; i < f->facts.units; i++)
        if (epo_profile_unit_at(f->profile, i)->send_recv_streams > 1) {
            printf("  ncclDevKernel_SendRecv runs on %llu streams of a device: if pipeline traffic "
                   "is among them, name its streams with --pipeline-stream (rule PRO-004)\n",
                   (unsigned long long)epo_profile_unit_at(f->profile, i)->send_recv_streams);
            break;
        }
}

typedef struct row {
    const char *label;
    size_t offset; /* of an uint64_t in epo_profile_times */
} row;

#define AT(member) offsetof(epo_profile_times, member)
#define CLASS_AT(c) (offsetof(epo_profile_times, of) + sizeof(uint64_t) * EPO_KERNEL_##c)
static const row rows[] = {
    {"busy (anything at all)", AT(busy)},
    {"expert communication", AT(comm)},
    {"  beside GEMM and attention", AT(overlapped)},
    {"  exposed", AT(exposed)},
    {"  beside any computation", AT(overlapped_any)},
    {"GEMM and attention", AT(gemm_attention)},
    {"  GEMM", CLASS_AT(GEMM)},
    {"  attention", CLASS_AT(ATTENTION)},
    {"permutation", CLASS_AT(PERMUTE)},
    {"other kernels", CLASS_AT(OTHER)},
    {"other communication", CLASS_AT(OTHER_COMM)},
    {"copies and memset", CLASS_AT(COPY)},
};

static uint64_t value_at(const epo_profile_times *t, size_t offset) {
    uint64_t value;
    memcpy(&value, (const char *)t + offset, sizeof value);
    return value;
}

static void print_row(const profile_view *v, size_t unit, const row *r) {
    uint64_t value[2] = {0};
    printf("  %-28s", r->label);
    for (size_t i = 0; i < v->files; i++) {
        if (unit >= v->file[i].facts.units) {
            printf(" %18s", "-");
            continue;
        }
        value[i] = value_at(&v->file[i].times[unit], r->offset);
        printf(" %15.3f ms", (double)value[i] * 1e-6);
    }
    if (v->files == 2 && value[0] > 0 && unit < v->file[1].facts.units)
        printf(" %+9.3f %%", 100 * ((double)value[1] / (double)value[0] - 1));
    putchar('\n');
}

static void print_share(const profile_view *v, size_t unit) {
    printf("  %-28s", "overlapped share");
    for (size_t i = 0; i < v->files; i++) {
        char text[32] = "-";
        if (v->file[i].refused[0] != '\0')
            snprintf(text, sizeof text, "refused");
        else if (unit < v->file[i].facts.units && v->file[i].times[unit].comm > 0)
            snprintf(text, sizeof text, "%.2f %%", 100 * profile_share(&v->file[i].times[unit]));
        printf(" %18s", text);
    }
    putchar('\n');
}

static void print_counts(const profile_view *v, size_t unit) {
    printf("  %-28s", "kernels");
    uint64_t count[2] = {0};
    for (size_t i = 0; i < v->files; i++) {
        if (unit < v->file[i].facts.units)
            count[i] = epo_profile_unit_at(v->file[i].profile, unit)->kernels;
        printf(" %18llu", (unsigned long long)count[i]);
    }
    if (v->files == 2 && count[0] != count[1])
        printf("   differ: not the same work (rule PRO-005)");
    putchar('\n');
}

static void print_unit(const profile_view *v, size_t unit) {
    for (size_t i = 0; i < v->files; i++)
        if (unit < v->file[i].facts.units) {
            const epo_profile_unit *u = epo_profile_unit_at(v->file[i].profile, unit);
            printf("%s%s process %lld, device %lld", i == 0 ? "\n" : ";  ", v->file[i].path,
                   (long long)u->process, (long long)u->device);
        }
    putchar('\n');
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        print_row(v, unit, &rows[i]);
        if (rows[i].offset == AT(overlapped))
            print_share(v, unit);
    }
    print_counts(v, unit);
}

static int compare_names(const void *a, const void *b) {
    const epo_profile_name *x = a, *y = b;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    return x->count != y->count ? (x->count < y->count ? 1 : -1) : strcmp(x->name, y->name);
}

static epo_profile_name *sorted_names(const profile_file *f, size_t *count) {
    size_t n = epo_profile_name_count(f->profile);
    epo_profile_name *list = calloc(n + 1, sizeof *list);
    *count = list == NULL ? 0 : n;
    for (size_t i = 0; i < *count; i++)
        list[i] = epo_profile_name_at(f->profile, i);
    if (list != NULL)
        qsort(list, n, sizeof *list, compare_names);
    return list;
}

static void print_names(const profile_file *f) {
    size_t count;
    epo_profile_name *list = sorted_names(f, &count);
    printf("\n%s: kernels by class (change one with --class 'GLOB=CLASS')\n", f->path);
    for (size_t i = 0; i < count; i++)
        printf("  %-11s %10llu  %.100s%s\n", epo_kernel_class_name(list[i].kind),
               (unsigned long long)list[i].count, list[i].name,
               strlen(list[i].name) > 100 ? "..." : "");
    free(list);
}

void profile_print_text(const profile_view *v) {
    size_t units = 0;
    for (size_t i = 0; i < v->files; i++) {
        print_file(&v->file[i]);
        if (v->file[i].facts.units > units)
            units = v->file[i].facts.units;
    }
    for (size_t u = 0; u < units; u++)
        print_unit(v, u);
    for (size_t i = 0; i < v->files && v->names; i++)
        print_names(&v->file[i]);
    for (size_t i = 0; i < v->files; i++)
        if (v->file[i].refused[0] != '\0')
            printf("\n%s: no overlapped share: %s\n", v->file[i].path, v->file[i].refused);
    printf("\nUnions of intervals per process and device; they explain a run, the speed is\n"
           "judged by report on runs without a profiler.\n");
}

static void json_unit(epo_json *json, const profile_file *f, size_t index) {
    static const char *const names[] = {
        "busy", "ep_comm",   "overlapped", "exposed", "overlapped_any", "gemm_attention",
        "gemm", "attention", "permute",    "other",   "other_comm",     "copy"};
    const epo_profile_unit *u = epo_profile_unit_at(f->profile, index);
    const epo_profile_times *t = &f->times[index];
    epo_json_object(json, NULL);
    epo_json_integer(json, "process", u->process);
    epo_json_integer(json, "device", u->device);
    epo_json_integer(json, "kernels", (int64_t)u->kernels);
    epo_json_integer(json, "copies", (int64_t)u->copies);
    epo_json_object(json, "nanoseconds");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        epo_json_integer(json, names[i], (int64_t)value_at(t, rows[i].offset));
    epo_json_end(json, '}');
    epo_json_object(json, "counts");
    for (int c = 0; c < EPO_KERNEL_CLASSES; c++)
        epo_json_integer(json, epo_kernel_class_name((epo_kernel_class)c), (int64_t)u->count[c]);
    epo_json_end(json, '}');
    epo_json_number(json, "overlapped_share", f->refused[0] != '\0' ? NAN : profile_share(t));
    epo_json_end(json, '}');
}

static void json_names(epo_json *json, const profile_file *f) {
    size_t count;
    epo_profile_name *list = sorted_names(f, &count);
    epo_json_array(json, "names");
    for (size_t i = 0; i < count; i++) {
        epo_json_object(json, NULL);
        epo_json_text(json, "class", epo_kernel_class_name(list[i].kind));
        epo_json_integer(json, "count", (int64_t)list[i].count);
        epo_json_text(json, "name", list[i].name);
        epo_json_end(json, '}');
    }
    epo_json_end(json, ']');
    free(list);
}

static void json_file(epo_json *json, const profile_view *v, const profile_file *f) {
    epo_json_object(json, NULL);
    epo_json_text(json, "file", f->path);
    epo_json_text(json, "kind", kind_name(f->facts.kind));
    epo_json_integer(json, "kernels", (int64_t)f->facts.kernels);
    epo_json_integer(json, "copies", (int64_t)f->facts.copies);
    epo_json_integer(json, "left_out", (int64_t)f->facts.skipped);
    epo_json_integer(json, "nameless", (int64_t)f->facts.nameless);
    epo_json_integer(json, "graph_launches", (int64_t)f->facts.graph_launches);
    epo_json_integer(json, "flex_kernels", (int64_t)f->facts.flex_kernels);
    epo_json_text(json, "recorded", f->facts.line[0] != '\0' ? f->facts.line : NULL);
    epo_json_text(json, "missing", f->facts.missing[0] != '\0' ? f->facts.missing : NULL);
    epo_json_text(json, "share_refused", f->refused[0] != '\0' ? f->refused : NULL);
    epo_json_integer(json, "from_ns", f->from == INT64_MIN ? f->first : f->from);
    epo_json_integer(json, "to_ns", f->to == INT64_MAX ? f->last : f->to);
    epo_json_array(json, "units");
    for (size_t i = 0; i < f->facts.units; i++)
        json_unit(json, f, i);
    epo_json_end(json, ']');
    if (v->names)
        json_names(json, f);
    epo_json_end(json, '}');
}

void profile_print_json(const profile_view *v) {
    epo_json json = {.out = stdout};
    epo_json_object(&json, NULL);
    epo_json_array(&json, "files");
    for (size_t i = 0; i < v->files; i++)
        json_file(&json, v, &v->file[i]);
    epo_json_end(&json, ']');
    if (v->files == 2)
        epo_json_bool(&json, "same_kernel_count",
                      v->file[0].facts.kernels == v->file[1].facts.kernels);
    epo_json_end(&json, '}');
}
