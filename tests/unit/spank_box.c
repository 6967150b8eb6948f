/* SPDX-License-Identifier: Apache-2.0 */
#include "spank_box.h"

#include "core/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct ep_plugin plugin;
const char *box_preload_keys = "";
char folder[256], conf[300], library[300], probe_program[300];

int callback(int value, const char *argument, int remote) {
    (void)remote;
    return ep_option_take(&plugin, value, argument);
}

int lines(const char *text) {
    int count = 0;
    for (; *text != '\0'; text++)
        count += *text == '\n';
    return count;
}

void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fputs(text, file);
    fclose(file);
    chmod(path, 0644);
}

/* A configuration of these lines, the test's own library among them. */
void configure(const char *lines_of_it) {
    char text[2048];
    snprintf(text, sizeof text,
             "version = 1; preload = { path = \"%s\"; %s }; probe = { path = \"%s\"; };\n%s",
             library, box_preload_keys, probe_program, lines_of_it);
    write_file(conf, text);
}

/* A copy of some shared object: the plugin looks at its head only. */
void make_library(void) {
    FILE *from = fopen("/proc/self/maps", "r"), *to = NULL;
    char line[1024], path[1024] = "";
    while (from != NULL && fgets(line, sizeof line, from) != NULL)
        if (strstr(line, "libcunit") != NULL && strchr(line, '/') != NULL)
            sscanf(strchr(line, '/'), "%1023[^\n]", path);
    if (from != NULL)
        fclose(from);
    from = fopen(path, "r");
    to = fopen(library, "w");
    if (from == NULL || to == NULL)
        abort();
    size_t got;
    while ((got = fread(line, 1, sizeof line, from)) > 0)
        fwrite(line, 1, got, to);
    fclose(from);
    fclose(to);
    chmod(library, 0644);
}

/* The first hook of a process in the box. */
void begin(spank_context_t context) {
    fake_next(context);
    fake.own_user = geteuid();
    ep_plugin_end(&plugin);
    ep_plugin_begin(&plugin, &wrap_spank_fake, conf);
    CU_ASSERT_EQUAL(ep_options_register(&plugin, NULL, callback), 0);
}

int give(const char *name, const char *argument) {
    for (int i = 0; i < fake.option_count; i++)
        if (strcmp(fake.options[i].name, name) == 0)
            return fake.options[i].cb(fake.options[i].val, argument, fake.context == S_CTX_REMOTE);
    CU_FAIL("no such option");
    return -1;
}

/* Of srun's environment only the record is new in the task's. */
void carry(void) {
    const char *record = fake_get(&fake.own, EPO_STEP_RECORD);
    CU_ASSERT_PTR_NOT_NULL_FATAL(record);
    fake_put(&fake.task, EPO_STEP_RECORD, record);
}

int submit(void (*options)(void)) {
    begin(S_CTX_LOCAL);
    if (options != NULL)
        options();
    return ep_submit_check(&plugin, NULL);
}

void srun(void (*options)(void)) {
    CU_ASSERT_EQUAL(submit(options), 0);
    CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
    carry();
}

void node(const char *name, void (*options)(void)) {
    fake_put(&fake.own, "SLURMD_NODENAME", name);
    begin(S_CTX_REMOTE);
    if (options != NULL)
        options();
    ep_step_decide(&plugin, NULL);
}

/* srun and then one task on a node with what `options` give in both places. */
void srun_to_task(void (*options)(void)) {
    srun(options);
    node("n1", options);
}

void give_on(void) { CU_ASSERT_EQUAL(give("ep-overlap", "on"), 0); }
void give_off(void) { CU_ASSERT_EQUAL(give("ep-overlap", "off"), 0); }
void give_auto(void) { CU_ASSERT_EQUAL(give("ep-overlap", "auto"), 0); }
void give_all(void) {
    give_on();
    CU_ASSERT_EQUAL(give("ep-dispatcher", "flex:deepep"), 0);
    CU_ASSERT_EQUAL(give("delay-wgrad", "(null)"), 0);
}

int box_run(const char *name, const CU_TestInfo *tests) {
    static const char *const files[] = {"libep_overlap_intercept.so",
                                        "ep_overlap.conf",
                                        "libep_overlap.so",
                                        "script",
                                        "program",
                                        "probe"};
    const char *top = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/epo-spank.XXXXXX", top != NULL ? top : "/tmp");
    if (mkdtemp(folder) == NULL || chmod(folder, 0755) != 0)
        return 2;
    snprintf(conf, sizeof conf, "%.250s/ep_overlap.conf", folder);
    snprintf(library, sizeof library, "%.250s/libep_overlap.so", folder);
    snprintf(probe_program, sizeof probe_program, "%.250s/probe", folder);
    FILE *file = fopen(probe_program, "w"); /* never run: the seam answers */
    if (file == NULL || fclose(file) != 0 || chmod(probe_program, 0755) != 0)
        return 2;
    make_library();
    int status = unit_run(name, tests);
    ep_plugin_end(&plugin);
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        unlink(path);
    }
    rmdir(folder);
    return status;
}
