/* SPDX-License-Identifier: Apache-2.0
 *
 * What ep-train leaves behind, and what it knows before it starts: files are whole
 * or as they were, nothing is waited for, memory is counted before it is taken.
 */
#include "config.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "need.h"
#include "optim.h"
#include "output.h"
#include "unit.h"

static char folder[] = "/tmp/epo-output.XXXXXX";

static const char *in_folder(const char *name) {
    static char path[4][128];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", folder, name);
    return path[next];
}

static void put(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    if (f == NULL || fputs(text, f) < 0 || fclose(f) != 0)
        abort();
}

static bool holds(const char *path, const char *text) {
    char found[64] = "";
    FILE *f = fopen(path, "r");
    size_t n = f != NULL ? fread(found, 1, sizeof found - 1, f) : 0;
    if (f != NULL)
        fclose(f);
    return f != NULL && n == strlen(text) && memcmp(found, text, n) == 0;
}

static int entries(void) {
    int n = -2;
    DIR *d = opendir(folder);
    while (d != NULL && readdir(d) != NULL)
        n++;
    if (d != NULL)
        closedir(d);
    return n;
}

static epo_status write_it(const char *path, const char *text, epo_status status) {
    output o;
    epo_status opened = output_open(path, &o);
    if (opened != EPO_OK)
        return opened;
    fputs(text, o.file);
    return output_close(&o, status);
}

static void whole_or_as_before(void) {
    const char *path = in_folder("new");
    CU_ASSERT_EQUAL(write_it(path, "one", EPO_OK), EPO_OK);
    CU_ASSERT_TRUE(holds(path, "one"));
    CU_ASSERT_EQUAL(chmod(path, 0640), 0);
    CU_ASSERT_EQUAL(write_it(path, "two", EPO_OK), EPO_OK);
    CU_ASSERT_TRUE(holds(path, "two"));
    struct stat st;
    CU_ASSERT_TRUE(stat(path, &st) == 0 && (st.st_mode & 0777) == 0640);
    CU_ASSERT_EQUAL(write_it(path, "three", EPO_E_PEER), EPO_E_PEER); /* the run failed */
    CU_ASSERT_TRUE(holds(path, "two"));
    CU_ASSERT_EQUAL(write_it(in_folder("never"), "x", EPO_E_PEER), EPO_E_PEER);
    CU_ASSERT_EQUAL(entries(), 1); /* nothing beside it */
    CU_ASSERT_EQUAL(output_check(path), EPO_OK);
    CU_ASSERT_EQUAL(output_check(in_folder("later")), EPO_OK);
    CU_ASSERT_TRUE(holds(path, "two"));
    CU_ASSERT_EQUAL(entries(), 1);
    unlink(path);
}

/* A limit on the size of files stands for a full disk. */
static void no_room(void) {
    const char *path = in_folder("kept");
    struct rlimit before, small;
    char *text = malloc(100001);
    memset(text, 'x', 100000);
    text[100000] = '\0';
    put(path, "kept");
    CU_ASSERT_EQUAL(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 5000;
    signal(SIGXFSZ, SIG_IGN);
    CU_ASSERT_EQUAL(setrlimit(RLIMIT_FSIZE, &small), 0);
    CU_ASSERT_EQUAL(write_it(path, text, EPO_OK), EPO_E_SYSTEM);
    CU_ASSERT_EQUAL(setrlimit(RLIMIT_FSIZE, &before), 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "kept cannot be written"));
    CU_ASSERT_TRUE(holds(path, "kept"));
    CU_ASSERT_EQUAL(entries(), 1);
    unlink(path);
    free(text);
}

static void not_a_file(void) {
    const char *pipe = in_folder("pipe"), *link = in_folder("link"), *target = in_folder("target");
    CU_ASSERT_EQUAL(mkfifo(pipe, 0600), 0);
    CU_ASSERT_EQUAL(write_it(pipe, "x", EPO_OK), EPO_E_SYSTEM); /* and comes back at once */
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "nobody reads this pipe"));
    int reader = open(pipe, O_RDONLY | O_NONBLOCK);
    CU_ASSERT_EQUAL(write_it(pipe, "x", EPO_OK), EPO_OK);
    char c = 0;
    CU_ASSERT_TRUE(read(reader, &c, 1) == 1 && c == 'x');
    close(reader);
    CU_ASSERT_EQUAL(symlink("target", link), 0);
    CU_ASSERT_EQUAL(write_it(link, "through", EPO_OK), EPO_OK);
    CU_ASSERT_TRUE(holds(target, "through"));
    struct stat st;
    CU_ASSERT_TRUE(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
    CU_ASSERT_EQUAL(write_it(folder, "x", EPO_OK), EPO_E_SYSTEM);
    CU_ASSERT_EQUAL(output_check(folder), EPO_E_SYSTEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), strerror(EISDIR)));
    CU_ASSERT_EQUAL(output_check(in_folder("no/such")), EPO_E_SYSTEM);
    CU_ASSERT_EQUAL(output_check(pipe), EPO_OK);
    CU_ASSERT_EQUAL(write_it("/dev/full", "x", EPO_OK), EPO_E_SYSTEM);
    unlink(pipe);
    unlink(link);
    unlink(target);
    CU_ASSERT_EQUAL(entries(), 0);
}

static void memory_is_counted_first(void) {
    const char *info = in_folder("meminfo");
    options o = {.layers = 2, .hidden = 64, .ffn = 128, .experts = 8, .optimizer = OPTIM_SGD};
    CU_ASSERT_EQUAL(need_experts(&o, 4), 2 * 4 * 3.0 * 64 * 128 * 8);
    o.optimizer = OPTIM_ADAMW;
    CU_ASSERT_EQUAL(need_experts(&o, 4), 2 * 4 * 3.0 * 64 * 128 * 16);
    o.dtype = EPO_BF16;
    CU_ASSERT_EQUAL(need_experts(&o, 4), 2 * 4 * 3.0 * 64 * 128 * 18);
    put(info, "MemTotal:  9 kB\nMemAvailable:    10000 kB\n");
    CU_ASSERT_EQUAL(need_check(&o, 4, 2, 1e6, info), EPO_OK); /* 2 * (3.54 + 1) MB of 10.24 */
    CU_ASSERT_EQUAL(need_check(&o, 4, 2, 2e6, info), EPO_E_NOMEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "needs 6 MB a rank, 11 MB for 2"));
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "has 10 MB"));
    o = (options){.layers = 1024, .hidden = 1 << 16, .ffn = 1 << 18, .experts = 1 << 14};
    CU_ASSERT_EQUAL(need_check(&o, 1 << 14, 1024, 0, info), EPO_E_NOMEM); /* beyond 2^64 */
    put(info, "nothing\n");
    CU_ASSERT_EQUAL(need_check(&o, 1 << 14, 1024, 0, info), EPO_OK);
    CU_ASSERT_EQUAL(need_check(&o, 1 << 14, 1024, 0, in_folder("none")), EPO_OK);
    unlink(info);
}

int main(void) {
    if (mkdtemp(folder) == NULL)
        return 99;
    const CU_TestInfo tests[] = {
        {"a file is whole or as it was", whole_or_as_before},
        {"no room", no_room},
        {"pipes, links, folders, devices", not_a_file},
        {"memory is counted before it is taken", memory_is_counted_first},
        CU_TEST_INFO_NULL,
    };
    int failed = unit_run("train output", tests);
    rmdir(folder);
    return failed;
}
