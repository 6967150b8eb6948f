/* SPDX-License-Identifier: Apache-2.0
 *
 * profile.h - who ran what on which GPU, from profilers' files: unions of
 * intervals per process and device, never sums of durations.
 *
 * Readers add kernels and copies; epo_profile_measure sweeps the unions once.
 */
#ifndef EPO_TRACE_PROFILE_H
#define EPO_TRACE_PROFILE_H

#include "trace/kernel_class.h"
#include "trace/lines.h"
#include "trace/span_set.h"

#define EPO_PROFILE_UNITS_MAX 4096
#define EPO_PROFILE_NAMES_MAX 262144
#define EPO_PROFILE_BINS 1200 /* of a timeline */

typedef struct epo_profile epo_profile;

typedef struct epo_profile_options {
    const epo_kernel_patterns *patterns; /* NULL: the built-in ones */
    const int64_t *pipeline_streams;     /* SendRecv there is pipeline traffic */
    size_t pipeline_stream_count;
    size_t budget; /* spans in memory; 0: EPO_SPAN_BUDGET */
    bool plain;    /* traces by the JSON parser alone: what the fast way is tested against */
    epo_progress *progress;
    void *progress_context;
} epo_profile_options;

typedef enum epo_profile_kind {
    EPO_PROFILE_NSIGHT, /* SQLite export of Nsight Systems */
    EPO_PROFILE_CHROME  /* PyTorch's profiler and our own recordings */
} epo_profile_kind;

/* Reads a file; its kind is told from its first bytes.  EPO_E_ARG: no profile,
 * with what to do about it; EPO_E_SYSTEM: cannot be read. */
epo_status epo_profile_read(const char *path, const epo_profile_options *options,
                            epo_profile **out);
void epo_profile_destroy(epo_profile *profile);

/* ---- what was found ------------------------------------------------------ */

typedef struct epo_profile_unit {
    int64_t process, device;
    uint64_t kernels, copies;
    uint64_t count[EPO_KERNEL_CLASSES];
    uint64_t send_recv_streams; /* streams whose SendRecv kernels count as expert traffic */
} epo_profile_unit;

typedef struct epo_profile_facts {
    epo_profile_kind kind;
    uint64_t kernels, copies, flex_kernels, skipped; /* skipped: without time or with end < start */
    uint64_t nameless;                               /* kernels whose name the file does not have */
    uint64_t graph_launches;  /* graphs recorded as one block: what ran inside is not seen */
    bool copies_unclassified; /* copies that may be communication, and nothing tells */
    char missing[256];        /* tables and columns that other versions have */
    char line[256];           /* what our recorder said of it; "": another wrote it */
    size_t units;
    size_t runs; /* written to the temporary file */
} epo_profile_facts;

epo_profile_facts epo_profile_tell(const epo_profile *profile);
/* Ordered by process and device. */
const epo_profile_unit *epo_profile_unit_at(const epo_profile *profile, size_t index);

typedef struct epo_profile_name {
    const char *name;
    epo_kernel_class kind;
    uint64_t count;
} epo_profile_name;
size_t epo_profile_name_count(const epo_profile *profile);
epo_profile_name epo_profile_name_at(const epo_profile *profile, size_t index);

/* All in nanoseconds; classes as unions. */
typedef struct epo_profile_times {
    uint64_t busy; /* |U(all)| */
    uint64_t of[EPO_KERNEL_CLASSES];
    uint64_t comm;           /* |U(expert communication)| */
    uint64_t gemm_attention; /* |U(GEMM u attention)| */
    uint64_t compute;        /* |U(every kernel that is no communication)| */
    uint64_t overlapped;     /* |U(comm) n U(GEMM u attention)| */
    uint64_t exposed;        /* |U(comm u GEMM u attention)| - |U(GEMM u attention)| */
    uint64_t overlapped_any; /* |U(comm) n U(compute)| */
} epo_profile_times;

/* Shares (0 .. 1) of each of EPO_PROFILE_BINS equal parts of [first, last) that a
 * class covers. */
typedef struct epo_profile_timeline {
    int64_t first, last;
    float covered[EPO_PROFILE_BINS][EPO_KERNEL_CLASSES];
} epo_profile_timeline;

/* Measures unit `index` inside [from, to); INT64_MIN and INT64_MAX: all of it.
 * `timeline` may be NULL; its first and last are given, the shares are filled. */
epo_status epo_profile_measure(epo_profile *profile, size_t index, int64_t from, int64_t to,
                               epo_profile_times *times, epo_profile_timeline *timeline);
/* First start and last end of all units; false: nothing was recorded. */
bool epo_profile_extent(const epo_profile *profile, int64_t *first, int64_t *last);

/* ---- for the readers and tests ------------------------------------------- */

epo_status epo_profile_create(const epo_profile_options *options, epo_profile_kind kind,
                              epo_profile **out);
/* A kernel; `name` decides its class.  *handle (0 at first) remembers the name. */
epo_status epo_profile_intern(epo_profile *profile, const char *name, uint32_t *handle);
epo_status epo_profile_kernel(epo_profile *profile, int64_t process, int64_t device, int64_t stream,
                              uint32_t name, int64_t start, int64_t end);

/* An interval whose class is known: of our own recordings. */
epo_status epo_profile_interval(epo_profile *profile, int64_t process, int64_t device,
                                int64_t stream, epo_kernel_class kind, const char *name,
                                int64_t start, int64_t end);

typedef enum epo_copy_kind {
    EPO_COPY_HOST,   /* from or to the host, memset */
    EPO_COPY_PEER,   /* between devices */
    EPO_COPY_LOCAL,  /* inside a device: communication on a stream that communicates */
    EPO_COPY_UNKNOWN /* the file does not tell */
} epo_copy_kind;
epo_status epo_profile_copy(epo_profile *profile, int64_t process, int64_t device, int64_t stream,
                            bool has_stream, epo_copy_kind kind, int64_t start, int64_t end);
void epo_profile_graph_launch(epo_profile *profile);
/* The file does not have the name of a kernel: what class it is nobody can tell. */
void epo_profile_nameless(epo_profile *profile);
void epo_profile_lacks(epo_profile *profile, const char *what);
void epo_profile_line(epo_profile *profile, const char *text, size_t length);
/* Sorts units, gives copies their class.  Call once. */
epo_status epo_profile_finish(epo_profile *profile);

epo_status epo_profile_read_nsight(const char *path, const epo_profile_options *options,
                                   epo_profile **out);
epo_status epo_profile_read_chrome(const char *path, const epo_profile_options *options,
                                   epo_profile **out);

#endif
