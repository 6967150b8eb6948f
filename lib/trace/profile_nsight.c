/* SPDX-License-Identifier: Apache-2.0
 *
 * SQLite exports of Nsight Systems.  Tables and columns come and go by version:
 * what is there is asked, what is missing is told.
 */
#include "trace/profile.h"

#include "core/status.h"

#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_ROWS 1048576

typedef struct name_slot {
    int64_t id;
    uint32_t handle; /* 0: free */
} name_slot;

typedef struct nsight {
    const char *path;
    sqlite3 *db;
    epo_profile *profile;
    const epo_profile_options *options;
    sqlite3_stmt *string;
    name_slot *names; /* StringIds.id -> handle */
    size_t name_count, name_room;
    uint64_t rows;
} nsight;

static epo_status database_failed(const nsight *n) {
    return epo_fail(EPO_E_ARG, "%s: the database cannot be read after %llu rows: %s", n->path,
                    (unsigned long long)n->rows, sqlite3_errmsg(n->db));
}

static epo_status prepare(nsight *n, const char *sql, sqlite3_stmt **statement) {
    return sqlite3_prepare_v2(n->db, sql, -1, statement, NULL) == SQLITE_OK ? EPO_OK
                                                                            : database_failed(n);
}

/* Tables only: a view of that name could compute anything. */
static bool has_table(nsight *n, const char *table) {
    sqlite3_stmt *s = NULL;
    bool found = false;
    if (prepare(n, "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?1", &s) ==
        EPO_OK) {
        sqlite3_bind_text(s, 1, table, -1, SQLITE_STATIC);
        found = sqlite3_step(s) == SQLITE_ROW;
    }
    sqlite3_finalize(s);
    return found;
}

static bool has_column(nsight *n, const char *table, const char *column) {
    char sql[128];
    sqlite3_stmt *s = NULL;
    bool found = false;
    snprintf(sql, sizeof sql, "PRAGMA table_info(%s)", table);
    if (prepare(n, sql, &s) == EPO_OK)
        while (!found && sqlite3_step(s) == SQLITE_ROW) {
            const char *name = (const char *)sqlite3_column_text(s, 1);
            found = name != NULL && strcmp(name, column) == 0;
        }
    sqlite3_finalize(s);
    return found;
}

/* The first of `columns` that the table has; NULL: none. */
static const char *first_column(nsight *n, const char *table, const char *const *columns) {
    for (; *columns != NULL; columns++)
        if (has_column(n, table, *columns))
            return *columns;
    return NULL;
}

static size_t slot_of(const nsight *n, int64_t id) {
    size_t slot = ((uint64_t)id * 0x9E3779B97F4A7C15u >> 32) & (n->name_room - 1);
    while (n->names[slot].handle != 0 && n->names[slot].id != id)
        slot = (slot + 1) & (n->name_room - 1);
    return slot;
}

static epo_status grow_names(nsight *n) {
    if (n->name_count * 2 < n->name_room)
        return EPO_OK;
    nsight bigger = *n;
    bigger.name_room = n->name_room == 0 ? 1024 : n->name_room * 2;
    bigger.names = calloc(bigger.name_room, sizeof *bigger.names);
    if (bigger.names == NULL)
        return epo_fail(EPO_E_NOMEM, "%s: no memory for names", n->path);
    for (size_t i = 0; i < n->name_room; i++)
        if (n->names[i].handle != 0)
            bigger.names[slot_of(&bigger, n->names[i].id)] = n->names[i];
    free(n->names);
    n->names = bigger.names;
    n->name_room = bigger.name_room;
    return EPO_OK;
}

/* `text` NULL: a kernel without a name. */
static epo_status intern(nsight *n, const char *text, uint32_t *handle) {
    if (text == NULL)
        epo_profile_nameless(n->profile);
    return epo_profile_intern(n->profile, text == NULL ? "(no name)" : text, handle);
}

/* Looks a name up once; one that is missing each time, so that its kernels are counted. */
static epo_status name_by_id(nsight *n, int64_t id, uint32_t *handle) {
    const char *text = NULL;
    epo_status status = grow_names(n);
    if (status != EPO_OK)
        return status;
    size_t slot = slot_of(n, id);
    if (n->names[slot].handle != 0) {
        *handle = n->names[slot].handle;
        return EPO_OK;
    }
    if (n->string != NULL) {
        sqlite3_reset(n->string);
        sqlite3_bind_int64(n->string, 1, id);
        int step = sqlite3_step(n->string);
        if (step == SQLITE_ROW)
            text = (const char *)sqlite3_column_text(n->string, 0);
        else if (step != SQLITE_DONE)
            return database_failed(n);
    }
    status = intern(n, text, handle);
    if (status == EPO_OK && text != NULL) {
        n->names[slot] = (name_slot){id, *handle};
        n->name_count++;
    }
    return status;
}

static epo_status name_of(nsight *n, sqlite3_stmt *s, int column, uint32_t *handle) {
    if (sqlite3_column_type(s, column) == SQLITE_INTEGER)
        return name_by_id(n, sqlite3_column_int64(s, column), handle);
    return intern(n, (const char *)sqlite3_column_text(s, column), handle);
}

static int64_t process_of(sqlite3_stmt *s, int column) {
    return sqlite3_column_int64(s, column) >> 24 & 0xFFFFFF;
}

static void tell(nsight *n) {
    if (++n->rows % PROGRESS_ROWS == 0 && n->options->progress != NULL)
        n->options->progress(n->options->progress_context, n->rows, 0);
}

/* A row counts if start and end are integers. */
static bool has_times(sqlite3_stmt *s) {
    return sqlite3_column_type(s, 0) == SQLITE_INTEGER &&
           sqlite3_column_type(s, 1) == SQLITE_INTEGER;
}

static const char kernels[] = "CUPTI_ACTIVITY_KIND_KERNEL";
static const char copies[] = "CUPTI_ACTIVITY_KIND_MEMCPY";

static epo_status read_kernels(nsight *n) {
    static const char *const names[] = {"demangledName", "shortName", "mangledName", "name", NULL};
    char sql[256];
    sqlite3_stmt *s = NULL;
    const char *name = first_column(n, kernels, names);
    bool has_process = has_column(n, kernels, "globalPid");
    bool has_stream = has_column(n, kernels, "streamId");
    if (name == NULL)
        return epo_fail(EPO_E_ARG, "%s: %s has no column with the kernels' names", n->path,
                        kernels);
    if (!has_process)
        epo_profile_lacks(n->profile, "globalPid (all kernels count as one process)");
    if (!has_stream)
        epo_profile_lacks(n->profile, "streamId");
    snprintf(sql, sizeof sql, "SELECT start, \"end\", deviceId, %s, %s, %s FROM %s",
             has_stream ? "streamId" : "0", has_process ? "globalPid" : "0", name, kernels);
    epo_status status = prepare(n, sql, &s);
    int step = SQLITE_ROW;
    while (status == EPO_OK && (step = sqlite3_step(s)) == SQLITE_ROW) {
        uint32_t handle = 0;
        bool counts = has_times(s);
        tell(n);
        if (counts)
            status = name_of(n, s, 5, &handle);
        if (status == EPO_OK && counts)
            status = epo_profile_kernel(n->profile, process_of(s, 4), sqlite3_column_int64(s, 2),
                                        sqlite3_column_int64(s, 3), handle,
                                        sqlite3_column_int64(s, 0), sqlite3_column_int64(s, 1));
        else if (status == EPO_OK)
            status = epo_profile_kernel(n->profile, 0, 0, 0, handle, 1, 0); /* counts as skipped */
    }
    if (status == EPO_OK && step != SQLITE_DONE)
        status = database_failed(n);
    sqlite3_finalize(s);
    return status;
}

/* CUPTI's CUpti_ActivityMemcpyKind: 8 inside a device (or between, if it tells
 * two devices), 10 between devices, the others touch the host. */
static epo_copy_kind copy_kind(sqlite3_stmt *s, bool has_kind, bool has_devices) {
    if (!has_kind || sqlite3_column_type(s, 5) != SQLITE_INTEGER)
        return EPO_COPY_UNKNOWN;
    int64_t kind = sqlite3_column_int64(s, 5);
    if (kind == 10)
        return EPO_COPY_PEER;
    if (kind != 8)
        return EPO_COPY_HOST;
    bool told = has_devices && sqlite3_column_type(s, 6) == SQLITE_INTEGER &&
                sqlite3_column_type(s, 7) == SQLITE_INTEGER;
    return told && sqlite3_column_int64(s, 6) != sqlite3_column_int64(s, 7) ? EPO_COPY_PEER
                                                                            : EPO_COPY_LOCAL;
}

static epo_status read_copies(nsight *n) {
    char sql[320];
    sqlite3_stmt *s = NULL;
    bool has_stream = has_column(n, copies, "streamId");
    bool has_kind = has_column(n, copies, "copyKind");
    bool has_devices = has_column(n, copies, "srcDeviceId") && has_column(n, copies, "dstDeviceId");
    if (!has_kind)
        epo_profile_lacks(n->profile, "copyKind");
    snprintf(sql, sizeof sql, "SELECT start, \"end\", deviceId, %s, %s, %s, %s FROM %s",
             has_stream ? "streamId" : "0", has_column(n, copies, "globalPid") ? "globalPid" : "0",
             has_kind ? "copyKind" : "0", has_devices ? "srcDeviceId, dstDeviceId" : "0, 0",
             copies);
    epo_status status = prepare(n, sql, &s);
    int step = SQLITE_ROW;
    while (status == EPO_OK && (step = sqlite3_step(s)) == SQLITE_ROW) {
        tell(n);
        if (has_times(s))
            status = epo_profile_copy(n->profile, process_of(s, 4), sqlite3_column_int64(s, 2),
                                      sqlite3_column_int64(s, 3), has_stream,
                                      copy_kind(s, has_kind, has_devices),
                                      sqlite3_column_int64(s, 0), sqlite3_column_int64(s, 1));
        else /* counts as skipped */
            status = epo_profile_copy(n->profile, 0, 0, 0, has_stream, EPO_COPY_HOST, 1, 0);
    }
    if (status == EPO_OK && step != SQLITE_DONE)
        status = database_failed(n);
    sqlite3_finalize(s);
    return status;
}

static epo_status count_graphs(nsight *n) {
    sqlite3_stmt *s = NULL;
    epo_status status = prepare(n, "SELECT 1 FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE", &s);
    int step = SQLITE_ROW;
    while (status == EPO_OK && (step = sqlite3_step(s)) == SQLITE_ROW)
        epo_profile_graph_launch(n->profile);
    if (status == EPO_OK && step != SQLITE_DONE)
        status = database_failed(n);
    sqlite3_finalize(s);
    return status;
}

static epo_status read_tables(nsight *n) {
    epo_status status = EPO_OK;
    bool has_graphs = has_table(n, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE");
    if (has_table(n, "StringIds"))
        status = prepare(n, "SELECT value FROM StringIds WHERE id = ?1", &n->string);
    else
        epo_profile_lacks(n->profile, "StringIds (names of kernels)");
    if (status == EPO_OK && !has_table(n, kernels) && !has_graphs)
        return epo_fail(EPO_E_ARG,
                        "%s: no table %s: no CUDA kernel was recorded, or this is no export of "
                        "Nsight Systems (nsys profile --trace=cuda,nvtx)",
                        n->path, kernels);
    if (status == EPO_OK && has_table(n, kernels))
        status = read_kernels(n);
    if (status == EPO_OK && has_table(n, copies))
        status = read_copies(n);
    else if (status == EPO_OK)
        epo_profile_lacks(n->profile, "CUPTI_ACTIVITY_KIND_MEMCPY (copies)");
    if (status == EPO_OK && has_graphs)
        status = count_graphs(n);
    return status;
}

static epo_status open_database(nsight *n) {
    if (sqlite3_open_v2(n->path, &n->db, SQLITE_OPEN_READONLY, NULL) != SQLITE_OK)
        return n->db == NULL ? epo_fail(EPO_E_NOMEM, "%s: no memory to read it", n->path)
                             : epo_fail(EPO_E_ARG, "%s: %s", n->path, sqlite3_errmsg(n->db));
#ifdef SQLITE_DBCONFIG_DEFENSIVE
    sqlite3_db_config(n->db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
#endif
#ifdef SQLITE_DBCONFIG_TRUSTED_SCHEMA
    sqlite3_db_config(n->db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL);
#endif
    sqlite3_limit(n->db, SQLITE_LIMIT_LENGTH, 16 << 20); /* bytes of a string or row */
    sqlite3_stmt *s = NULL;
    epo_status status = prepare(n, "SELECT count(*) FROM sqlite_master", &s);
    if (status == EPO_OK && sqlite3_step(s) != SQLITE_ROW)
        status = database_failed(n);
    sqlite3_finalize(s);
    return status;
}

epo_status epo_profile_read_nsight(const char *path, const epo_profile_options *options,
                                   epo_profile **out) {
    nsight n = {.path = path, .options = options};
    epo_status status = epo_profile_create(options, EPO_PROFILE_NSIGHT, &n.profile);
    if (status == EPO_OK)
        status = open_database(&n);
    if (status == EPO_OK)
        status = read_tables(&n);
    if (status == EPO_OK)
        status = epo_profile_finish(n.profile);
    sqlite3_finalize(n.string);
    sqlite3_close(n.db);
    free(n.names);
    if (status != EPO_OK) {
        epo_profile_destroy(n.profile);
        return status;
    }
    *out = n.profile;
    return EPO_OK;
}
