/* SPDX-License-Identifier: Apache-2.0
 *
 * test_config.c - the option table, the configuration file, the trust rule.
 */
#define _GNU_SOURCE
#include "core/config.h"
#include "core/trust.h"
#include "unit.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void words_of_options(void) {
    int value = -2;
    CU_ASSERT_EQUAL(epo_option_parse(EPO_OPT_OVERLAP, "auto", "x", &value), EPO_OK);
    CU_ASSERT_EQUAL(value, EPO_OVERLAP_AUTO);
    CU_ASSERT_EQUAL(epo_option_parse(EPO_OPT_DISPATCHER, "flex:hybridep", "x", &value), EPO_OK);
    CU_ASSERT_EQUAL(value, EPO_CHOICE_HYBRIDEP);
    CU_ASSERT_STRING_EQUAL(epo_dispatcher_kind(value), "flex");
    CU_ASSERT_STRING_EQUAL(epo_dispatcher_backend(value), "hybridep");
    CU_ASSERT_PTR_NULL(epo_dispatcher_backend(EPO_CHOICE_FLEX));
    CU_ASSERT_EQUAL(epo_option_parse(EPO_OPT_DELAY_WGRAD, "1", "x", &value), EPO_OK);
    CU_ASSERT_EQUAL(value, EPO_WGRAD_DELAYED);
    static const char *const wrong[] = {"", "ON", " on", "on ", "1", "maybe", "o"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        value = -2;
        CU_ASSERT_EQUAL(epo_option_parse(EPO_OPT_OVERLAP, wrong[i], "--here", &value), EPO_E_ARG);
        CU_ASSERT_EQUAL(value, -2);
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "--here: found \""));
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "allowed off, on, auto"));
    }
    CU_ASSERT_STRING_EQUAL(epo_option_word(EPO_OPT_OVERLAP, 99), "-");
    CU_ASSERT_STRING_EQUAL(epo_option_word(EPO_OPT_OVERLAP, EPO_UNSET), "-");
}

static const char everything[] =
    "version = 1;\n"
    "defaults = { overlap = \"auto\"; dispatcher = \"flex\"; delay_wgrad = true; };\n"
    "policy = (\n"
    " { match = { user = [ 1000, 1001 ]; group = 200; partition = \"gpu\"; account = ( \"a\", "
    "\"b\" ); node = \"n[1-4]\"; }; action = \"deny\"; message = \"no\"; },\n"
    " { action = \"lock\"; overlap = \"off\"; },\n"
    " { match = { partition = [ \"debug\" ]; }; action = \"default\"; dispatcher = \"alltoall\"; "
    "delay_wgrad = false; },\n"
    " { action = \"allow\"; } );\n"
    "node_classes = ( { class = \"h100\"; nodes = \"g[1-8]\"; overlap = \"on\"; dispatcher = "
    "\"flex\"; },\n"
    " { class = \"a100\"; gres = \"gpu:a100\"; overlap = \"off\"; } );\n"
    "checks = { timeout_ms = 2000; minimum = { driver = \"550\"; cuda = \"12.4\"; nccl = "
    "\"2.18\"; torch = \"2.4\"; te = \"1.9\"; }; on_unknown = \"fail\"; require_gpu = true; "
    "nvml_path = \"/x/libnvidia-ml.so.1\"; };\n"
    "environment = ( { name = \"A\"; value = \"1\"; when = \"always\"; },\n"
    " { name = \"B\"; value = \"2\"; } );\n"
    "preload = { path = \"/l/libep_overlap.so\"; interpose = true; record = true; };\n"
    "probe = { path = \"/l/probe\"; };\n"
    "log = { step_line = false; };\n"
    "on_failed_request = \"warn\";\n";

static void every_key_is_read(void) {
    struct epo_config *c = NULL;
    CU_ASSERT_EQUAL_FATAL(epo_config_parse(everything, "/etc/x.conf", &c), EPO_OK);
    CU_ASSERT_EQUAL(c->defaults[EPO_OPT_OVERLAP], EPO_OVERLAP_AUTO);
    CU_ASSERT_EQUAL(c->defaults[EPO_OPT_DISPATCHER], EPO_CHOICE_FLEX);
    CU_ASSERT_EQUAL(c->defaults[EPO_OPT_DELAY_WGRAD], EPO_WGRAD_DELAYED);
    CU_ASSERT_EQUAL_FATAL(c->rule_count, 4);
    CU_ASSERT_EQUAL(c->rules[0].line, 4);
    CU_ASSERT_EQUAL(c->rules[0].action, EPO_POLICY_DENY);
    CU_ASSERT_EQUAL(c->rules[0].user.count, 2);
    CU_ASSERT_EQUAL(c->rules[0].user.items[1], 1001);
    CU_ASSERT_EQUAL(c->rules[0].group.items[0], 200);
    CU_ASSERT_STRING_EQUAL(c->rules[0].partition.items[0], "gpu");
    CU_ASSERT_STRING_EQUAL(c->rules[0].account.items[1], "b");
    CU_ASSERT_STRING_EQUAL(c->rules[0].node, "n[1-4]");
    CU_ASSERT_STRING_EQUAL(c->rules[0].message, "no");
    CU_ASSERT_EQUAL(c->rules[1].values[EPO_OPT_OVERLAP], EPO_OVERLAP_OFF);
    CU_ASSERT_EQUAL(c->rules[1].values[EPO_OPT_DISPATCHER], EPO_UNSET);
    CU_ASSERT_EQUAL(c->rules[2].values[EPO_OPT_DELAY_WGRAD], EPO_WGRAD_INLINE);
    CU_ASSERT_EQUAL(c->rules[3].action, EPO_POLICY_ALLOW);
    CU_ASSERT_EQUAL_FATAL(c->class_count, 2);
    CU_ASSERT_STRING_EQUAL(c->classes[0].name, "h100");
    CU_ASSERT_EQUAL(c->classes[0].overlap, 1);
    CU_ASSERT_STRING_EQUAL(c->classes[1].gres, "gpu:a100");
    CU_ASSERT_EQUAL(c->checks.timeout_ms, 2000);
    CU_ASSERT_STRING_EQUAL(c->checks.te, "1.9");
    CU_ASSERT_EQUAL(c->checks.on_unknown, EPO_UNKNOWN_FAIL);
    CU_ASSERT_TRUE(c->checks.require_gpu);
    CU_ASSERT_EQUAL_FATAL(c->environment_count, 2);
    CU_ASSERT_EQUAL(c->environment[0].when, EPO_WHEN_ALWAYS);
    CU_ASSERT_EQUAL(c->environment[1].when, EPO_WHEN_UNSET);
    CU_ASSERT_STRING_EQUAL(c->preload_path, "/l/libep_overlap.so");
    CU_ASSERT_STRING_EQUAL(c->probe_path, "/l/probe");
    CU_ASSERT_TRUE(c->interpose && c->record);
    CU_ASSERT_FALSE(c->step_line);
    CU_ASSERT_EQUAL(c->on_failed_request, EPO_FAILED_WARN);
    CU_ASSERT_STRING_EQUAL(c->path, "/etc/x.conf");
    epo_config_destroy(c);
    epo_config_destroy(NULL);
}

/* Each text is one mistake; the message begins with file and line and says what
 * is wrong. */
static void every_mistake_has_its_line(void) {
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "f:1: the file does not say its version"},
        {"version = 2;", "f:1: version: found 2, allowed 1 to 1"},
        {"version = \"1\";", "f:1: version: a number is expected"},
        {"version = 1;\nverison = 1;", "f:2: unknown key \"verison\", allowed here: version"},
        {"version = 1;\n\ndefaults = { overlap = \"yes\"; };",
         "f:3: overlap: found \"yes\", allowed \"off\", \"on\", \"auto\""},
        {"version = 1;\ndefaults = { overlap = true; };", "f:2: overlap: found no string"},
        {"version = 1;\ndefaults = { overlaps = \"on\"; };", "f:2: unknown key \"overlaps\""},
        {"version = 1;\ndefaults = ( );", "f:2: defaults: a group is expected"},
        {"version = 1;\ndefaults = { delay_wgrad = 1; };",
         "f:2: delay_wgrad: allowed are true and false"},
        {"version = 1;\npolicy = { };", "f:2: policy: a list is expected"},
        {"version = 1;\npolicy = ( { } );", "f:2: a policy rule without action"},
        {"version = 1;\npolicy = ( { action = \"lock\"; } );", "f:2: a lock rule says which value"},
        {"version = 1;\npolicy = ( { action = \"deny\"; overlap = \"on\"; } );",
         "f:2: a deny rule has no values"},
        {"version = 1;\npolicy = ( { action = \"kill\"; } );", "f:2: action: found \"kill\""},
        {"version = 1;\npolicy = (\n{ action = \"deny\";\nmatch = { user = \"alice\"; }; } );",
         "f:4: user: a numeric id is expected"},
        {"version = 1;\npolicy = ( { action = \"deny\"; match = { user = -1; }; } );",
         "f:2: user: a numeric id"},
        {"version = 1;\npolicy = ( { action = \"deny\"; match = { user = [ ]; }; } );",
         "f:2: user: one value or a list"},
        {"version = 1;\npolicy = ( { action = \"deny\"; match = { host = \"a\"; }; } );",
         "f:2: unknown key \"host\""},
        {"version = 1;\npolicy = ( { action = \"deny\"; match = { node = \"n[\"; }; } );",
         "f:2: \"n[\" is no list of nodes"},
        {"version = 1;\npolicy = ( { action = \"deny\"; match = { node = \"ALL\"; }; } );",
         "f:2: \"ALL\" is a name like others here; a rule without node is for all nodes"},
        {"version = 1;\nnode_classes = ( { class = \"a\"; overlap = \"on\"; } );",
         "f:2: a node class is told by nodes or by gres"},
        {"version = 1;\nnode_classes = ( { class = \"a\"; nodes = \"n1\"; } );",
         "f:2: a node class says what auto means"},
        {"version = 1;\nnode_classes = ( { nodes = \"n1\"; overlap = \"on\"; } );",
         "f:2: a node class without a name"},
        {"version = 1;\nchecks = { timeout_ms = 1; };", "f:2: timeout_ms: found 1, allowed 100"},
        {"version = 1;\nchecks = { minimum = { driver = \"new\"; }; };",
         "f:2: driver: found \"new\", a version is expected"},
        {"version = 1;\nchecks = { minimum = { torch = 2; }; };", "f:2: torch: a non-empty string"},
        {"version = 1;\nchecks = { nvml_path = \"x\"; };", "f:2: nvml_path: found \"x\""},
        {"version = 1;\nenvironment = ( { name = \"A\"; } );", "f:2: a variable needs name"},
        {"version = 1;\nenvironment = ( { name = \"LD_PRELOAD\"; value = \"x\"; } );",
         "f:2: name: LD_PRELOAD is never set from here"},
        {"version = 1;\nenvironment = ( { name = \"EP_OVERLAP_X\"; value = \"x\"; } );",
         "f:2: name: EP_OVERLAP_X is never"},
        {"version = 1;\nenvironment = ( { name = \"A=B\"; value = \"x\"; } );",
         "f:2: name: \"A=B\" is no name"},
        {"version = 1;\npreload = { path = \"lib.so\"; };", "f:2: path: found \"lib.so\""},
        {"version = 1;\npreload = { path = \"/a b.so\"; };", "f:2: path: found \"/a b.so\", which"},
        {"version = 1;\npreload = { path = \"\"; };", "f:2: path: a non-empty string"},
        {"version = 1;\npreload = { path = \"/a\\x1b\"; };", "f:2: path: a non-empty string"},
        {"version = 1;\non_failed_request = \"ignore\";", "f:2: on_failed_request: found"},
        {"version = 1;\n  @include \"/etc/shadow\"\n", "f:2: @include is not allowed"},
        {"@include \"x\"", "f:1: @include is not allowed"},
        {"\nversion = 1\ndefaults = {", "f:3: syntax error"},
        {"version = 1;\nversion = 1;", "f:2: duplicate setting name"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct epo_config *config = NULL;
        CU_ASSERT_EQUAL(epo_config_parse(cases[i].text, "f", &config), EPO_E_ARG);
        CU_ASSERT_PTR_NULL(config);
        if (strncmp(epo_fail_text(), cases[i].message, strlen(cases[i].message)) != 0) {
            printf("\n  want %s\n  have %s\n", cases[i].message, epo_fail_text());
            CU_FAIL("another message");
        }
    }
}

/* Cut anywhere, the file is an error with a line or a smaller file, never a crash. */
static void every_prefix_is_survived(void) {
    char text[sizeof everything];
    for (size_t length = 0; length < sizeof everything - 1; length++) {
        struct epo_config *config = NULL;
        memcpy(text, everything, length);
        text[length] = '\0';
        if (epo_config_parse(text, "f", &config) != EPO_OK)
            CU_ASSERT_EQUAL(strncmp(epo_fail_text(), "f:", 2), 0);
        epo_config_destroy(config);
    }
}

/* The text of a file of the tree. */
static char *read_tree(const char *name) {
    char path[1024];
    const char *top = getenv("EPO_SRC_DIR");
    snprintf(path, sizeof path, "%s/%s", top != NULL ? top : ".", name);
    FILE *source = fopen(path, "r");
    if (source == NULL)
        return NULL;
    char *text = calloc(1, 65536);
    if (text != NULL && fread(text, 1, 65535, source) == 0)
        text[0] = '\0';
    fclose(source);
    return text;
}

/* Takes the '#' away from lines that hold settings and no sentence. */
static void uncomment(char *text) {
    for (char *line = text; line != NULL && *line != '\0';) {
        char *next = strchr(line, '\n');
        if (strncmp(line, "#  ", 3) == 0 && strstr(line, "  match  ") == NULL) {
            char *equals = strchr(line, '=');
            if (equals != NULL && (next == NULL || equals < next) &&
                strchr(";,{}", next[-1]) != NULL)
                line[0] = ' ';
        }
        line = next != NULL ? next + 1 : NULL;
    }
}

static void the_sample_has_every_key(void) {
    static const char *const keys[] = {
        "version",   "defaults",   "overlap",      "dispatcher", "delay_wgrad",
        "policy",    "match",      "user",         "group",      "partition",
        "account",   "node",       "action",       "message",    "class",
        "nodes",     "gres",       "node_classes", "checks",     "timeout_ms",
        "minimum",   "driver",     "cuda",         "nccl",       "torch",
        "te",        "on_unknown", "require_gpu",  "nvml_path",  "environment",
        "name",      "value",      "when",         "preload",    "path",
        "interpose", "record",     "log",          "step_line",  "on_failed_request",
        "probe"};
    char *text = read_tree("etc/ep_overlap.conf");
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    struct epo_config *sample = NULL, *builtin = NULL, *full = NULL;
    CU_ASSERT_EQUAL_FATAL(epo_config_parse(text, "sample", &sample), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_config_builtin(&builtin), EPO_OK);
    /* as it lies there, it changes nothing */
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        CU_ASSERT_EQUAL(sample->defaults[id], epo_options[id].preset);
    CU_ASSERT_EQUAL(sample->checks.timeout_ms, builtin->checks.timeout_ms);
    CU_ASSERT_EQUAL(sample->checks.on_unknown, builtin->checks.on_unknown);
    CU_ASSERT_EQUAL(sample->step_line, builtin->step_line);
    CU_ASSERT_EQUAL(sample->on_failed_request, builtin->on_failed_request);
    CU_ASSERT_EQUAL(sample->rule_count + sample->class_count + sample->environment_count, 0);
    /* and what it shows in comments is right */
    uncomment(text);
    if (epo_config_parse(text, "sample", &full) != EPO_OK) {
        printf("\n  %s\n", epo_fail_text());
        CU_FAIL_FATAL("the sample's comments");
    }
    CU_ASSERT_EQUAL(full->rule_count, 4);
    CU_ASSERT_EQUAL(full->class_count, 2);
    CU_ASSERT_EQUAL(full->environment_count, 1);
    CU_ASSERT_PTR_NOT_NULL(full->checks.nvml_path);
    CU_ASSERT_PTR_NOT_NULL(full->checks.te);
    CU_ASSERT_PTR_NOT_NULL(full->probe_path);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        char assignment[64];
        snprintf(assignment, sizeof assignment, "%s = ", keys[i]);
        if (strstr(text, assignment) == NULL) {
            printf("\n  %s\n", keys[i]);
            CU_FAIL("a key that the sample does not show");
        }
    }
    epo_config_destroy(sample);
    epo_config_destroy(builtin);
    epo_config_destroy(full);
    free(text);
}

static char folder[256], file[300];
static struct epo_trust nobody_else;

static void put_file(const char *text, mode_t mode) {
    unlink(file);
    int fd = open(file, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    CU_ASSERT_FATAL(fd >= 0);
    CU_ASSERT_EQUAL(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    CU_ASSERT_EQUAL(chmod(file, mode), 0);
}

static epo_status load(bool required) {
    struct epo_config *config = NULL;
    epo_status status = epo_config_load(file, required, &nobody_else, &config);
    CU_ASSERT_EQUAL(config != NULL, status == EPO_OK);
    epo_config_destroy(config);
    return status;
}

#define REFUSED(part)                                                                              \
    do {                                                                                           \
        CU_ASSERT_NOT_EQUAL(load(false), EPO_OK);                                                  \
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), (part)));                                   \
    } while (0)

static void a_trusted_file_is_read(void) {
    put_file("version = 1;", 0644);
    CU_ASSERT_EQUAL(load(true), EPO_OK);
    put_file("version = 1;", 0400);
    CU_ASSERT_EQUAL(load(true), EPO_OK);
}

/* As a user's srun meets a file that only root reads. */
static void a_file_that_users_cannot_read_is_told(void) {
    bool root = geteuid() == 0;
    put_file("version = 1;", root ? 0600 : 0);
    if (root)
        CU_ASSERT_EQUAL(seteuid(65534), 0);
    REFUSED("Permission denied; every user has to read it: chmod a+r");
    if (root)
        CU_ASSERT_EQUAL(seteuid(0), 0);
}

static void a_file_others_can_write_is_refused(void) {
    put_file("version = 1;", 0664);
    REFUSED("writable by group or others (mode 0664)");
    put_file("version = 1;", 0646);
    REFUSED("chmod go-w");
    put_file("version = 1;", 0644);
    CU_ASSERT_EQUAL(chmod(folder, 0777), 0);
    REFUSED("is writable by group or others (mode 0777)");
    CU_ASSERT_EQUAL(chmod(folder, 01777), 0); /* sticky does not help the file's own folder */
    REFUSED("(mode 1777)");
    CU_ASSERT_EQUAL(chmod(folder, 0755), 0);
    CU_ASSERT_EQUAL(load(true), EPO_OK);
}

static void a_folder_above_that_others_can_write_is_refused(void) {
    char inner[320];
    snprintf(inner, sizeof inner, "%s/inner", folder);
    CU_ASSERT_EQUAL(mkdir(inner, 0755), 0);
    snprintf(file, sizeof file, "%.250s/inner/x.conf", folder);
    put_file("version = 1;", 0644);
    CU_ASSERT_EQUAL(load(true), EPO_OK);
    CU_ASSERT_EQUAL(chmod(folder, 0775), 0);
    REFUSED("(mode 0775)");
    CU_ASSERT_EQUAL(chmod(folder, 01777), 0); /* as /tmp */
    CU_ASSERT_EQUAL(load(true), EPO_OK);
    CU_ASSERT_EQUAL(chmod(folder, 0755), 0);
    unlink(file);
    rmdir(inner);
    snprintf(file, sizeof file, "%.250s/x.conf", folder);
}

static atomic_bool replacing, stuck;

/* As administrators do it: another file, by rename, again and again. */
static void *replace(void *unused) {
    const struct timespec pause = {0, 100000};
    char from[2][320], next[320];
    snprintf(next, sizeof next, "%.250s/next", folder);
    for (int i = 0; i < 2; i++) {
        snprintf(from[i], sizeof from[i], "%.250s/from%d", folder, i);
        close(open(from[i], O_CREAT | O_WRONLY, 0644));
    }
    for (int i = 0; atomic_load(&replacing) && !atomic_load(&stuck); i = !i) {
        atomic_store(&stuck, link(from[i], next) != 0 || rename(next, file) != 0);
        nanosleep(&pause, NULL);
    }
    unlink(from[0]);
    unlink(from[1]);
    return unused;
}

static void a_file_that_is_replaced_is_one_of_both(void) {
    pthread_t thread;
    struct epo_trust trust = {{geteuid()}, 1};
    put_file("version = 1;", 0644);
    atomic_store(&replacing, true);
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, replace, NULL), 0);
    int opened = 0, fd = -1;
    bool absent = false;
    for (int i = 0; i < 5000; i++)
        if (epo_trust_open(file, &trust, &fd, &absent) == EPO_OK) {
            opened++;
            close(fd);
        }
    CU_ASSERT_EQUAL(opened, 5000);
    atomic_store(&replacing, false);
    pthread_join(thread, NULL);
    CU_ASSERT_FALSE(atomic_load(&stuck));
    unlink(file);
}

static void links_and_strange_files_are_refused(void) {
    char other[320];
    put_file("version = 1;", 0644);
    snprintf(other, sizeof other, "%s/other", folder);
    CU_ASSERT_EQUAL(rename(file, other), 0);
    CU_ASSERT_EQUAL(symlink(other, file), 0);
    REFUSED("symbolic link");
    unlink(file);
    unlink(other);
    CU_ASSERT_EQUAL(mkfifo(file, 0644), 0);
    REFUSED("not a regular file"); /* and does not wait for a writer */
    unlink(file);
    CU_ASSERT_EQUAL(mkdir(file, 0755), 0);
    REFUSED("not a regular file");
    rmdir(file);
    CU_ASSERT_EQUAL(symlink(folder, other), 0);
    snprintf(file, sizeof file, "%.250s/other/x.conf", folder);
    REFUSED("symbolic link");
    unlink(other);
    snprintf(file, sizeof file, "%.250s/x.conf", folder);
}

static void a_foreign_owner_is_refused(void) {
    struct stat info;
    put_file("version = 1;", 0644);
    if (geteuid() == 0)
        CU_ASSERT_EQUAL(chown(file, 12345, (gid_t)-1), 0);
    if (geteuid() != 0)
        nobody_else.count = 0; /* then we are the foreigner */
    CU_ASSERT_EQUAL(stat(file, &info), 0);
    REFUSED("belongs to user id");
    nobody_else.owners[0] = info.st_uid;
    nobody_else.count = 1;
    CU_ASSERT_EQUAL(load(true), EPO_OK);
    nobody_else.owners[0] = geteuid();
    nobody_else.count = 1;
}

static void an_absent_file_is_builtin_unless_required(void) {
    unlink(file);
    CU_ASSERT_EQUAL(load(false), EPO_OK);
    CU_ASSERT_NOT_EQUAL(load(true), EPO_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "No such file"));
    snprintf(file, sizeof file, "%.250s/none/x.conf", folder);
    CU_ASSERT_EQUAL(load(false), EPO_OK);
    CU_ASSERT_NOT_EQUAL(load(true), EPO_OK);
    snprintf(file, sizeof file, "%.250s/x.conf", folder);
}

static void odd_paths_and_contents_are_refused(void) {
    static const char *const paths[] = {"",  "x.conf", "/etc/../etc/x", "/etc/./x", "/etc/",
                                        "/", "/.."};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        int fd = -1;
        bool absent = true;
        CU_ASSERT_EQUAL(epo_trust_open(paths[i], &nobody_else, &fd, &absent), EPO_E_ARG);
        CU_ASSERT_EQUAL(fd, -1);
        CU_ASSERT_FALSE(absent);
    }
    put_file("version = 1;", 0644);
    CU_ASSERT_EQUAL(truncate(file, 20), 0); /* NUL bytes behind the text */
    REFUSED("NUL byte at offset 12");
    CU_ASSERT_EQUAL(truncate(file, (off_t)EPO_CONFIG_BYTES_MAX + 1), 0);
    REFUSED("allowed at most 1048576");
    unlink(file);
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(words_of_options),
                                 TEST(every_key_is_read),
                                 TEST(every_mistake_has_its_line),
                                 TEST(every_prefix_is_survived),
                                 TEST(the_sample_has_every_key),
                                 TEST(a_trusted_file_is_read),
                                 TEST(a_file_that_users_cannot_read_is_told),
                                 TEST(a_file_others_can_write_is_refused),
                                 TEST(a_folder_above_that_others_can_write_is_refused),
                                 TEST(links_and_strange_files_are_refused),
                                 TEST(a_file_that_is_replaced_is_one_of_both),
                                 TEST(a_foreign_owner_is_refused),
                                 TEST(an_absent_file_is_builtin_unless_required),
                                 TEST(odd_paths_and_contents_are_refused),
                                 CU_TEST_INFO_NULL};
    const char *top = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/epo-config.XXXXXX", top != NULL ? top : "/tmp");
    if (mkdtemp(folder) == NULL || chmod(folder, 0755) != 0)
        return 2;
    snprintf(file, sizeof file, "%.250s/x.conf", folder);
    nobody_else.owners[0] = geteuid();
    nobody_else.count = 1;
    int status = unit_run("config", tests);
    rmdir(folder);
    return status;
}
