/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank.c - every hook, driven through the seam.
 */
#include "fake_spank.h"
#include "unit.h"

#include "core/names.h"
#include "core/policy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct ep_plugin plugin;
static char folder[256], conf[300], library[300];

static int callback(int value, const char *argument, int remote) {
    (void)remote;
    return ep_option_take(&plugin, value, argument);
}

#define HAS(text, part) CU_ASSERT_PTR_NOT_NULL_FATAL(strstr((text), (part)))
#define HAS_NOT(text, part) CU_ASSERT_PTR_NULL(strstr((text), (part)))

static int lines(const char *text) {
    int count = 0;
    for (; *text != '\0'; text++)
        count += *text == '\n';
    return count;
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fputs(text, file);
    fclose(file);
    chmod(path, 0644);
}

/* A configuration of these lines, the test's own library among them. */
static void configure(const char *lines_of_it) {
    char text[2048];
    snprintf(text, sizeof text, "version = 1; preload = { path = \"%s\"; };\n%s", library,
             lines_of_it);
    write_file(conf, text);
}

/* A copy of some shared object: the plugin looks at its head only. */
static void make_library(void) {
    FILE *from = fopen("/proc/self/maps", "r"), *to = NULL;
    char line[1024], path[1024] = "";
    while (from != NULL && fgets(line, sizeof line, from) != NULL)
        if (strstr(line, "libcunit") != NULL && strchr(line, '/') != NULL)
            sscanf(strchr(line, '/'), "%1023[^\n]", path);
    if (from != NULL)
        fclose(from);
    from = fopen(path, "r");
    to = fopen(library, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(from);
    CU_ASSERT_PTR_NOT_NULL_FATAL(to);
    size_t got;
    while ((got = fread(line, 1, sizeof line, from)) > 0)
        fwrite(line, 1, got, to);
    fclose(from);
    fclose(to);
    chmod(library, 0644);
}

/* The first hook of a process in the box. */
static void begin(spank_context_t context) {
    fake_next(context);
    fake.own_user = geteuid();
    ep_plugin_end(&plugin);
    ep_plugin_begin(&plugin, &wrap_spank_fake, conf);
    CU_ASSERT_EQUAL(ep_options_register(&plugin, NULL, callback), 0);
}

static int give(const char *name, const char *argument) {
    for (int i = 0; i < fake.option_count; i++)
        if (strcmp(fake.options[i].name, name) == 0)
            return fake.options[i].cb(fake.options[i].val, argument, fake.context == S_CTX_REMOTE);
    CU_FAIL("no such option");
    return -1;
}

/* Of srun's environment only the record is new in the task's. */
static void carry(void) {
    const char *record = fake_get(&fake.own, EPO_STEP_RECORD);
    CU_ASSERT_PTR_NOT_NULL_FATAL(record);
    fake_put(&fake.task, EPO_STEP_RECORD, record);
}

/* srun and then one task on a node with what `options` give in both places. */
static void srun_to_task(void (*options)(void)) {
    begin(S_CTX_LOCAL);
    if (options != NULL)
        options();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
    carry();
    fake_put(&fake.own, "SLURMD_NODENAME", "n1");
    begin(S_CTX_REMOTE);
    if (options != NULL)
        options();
    ep_step_decide(&plugin, NULL);
}

static void give_on(void) { CU_ASSERT_EQUAL(give("ep-overlap", "on"), 0); }
static void give_off(void) { CU_ASSERT_EQUAL(give("ep-overlap", "off"), 0); }
static void give_auto(void) { CU_ASSERT_EQUAL(give("ep-overlap", "auto"), 0); }
static void give_all(void) {
    give_on();
    CU_ASSERT_EQUAL(give("ep-dispatcher", "flex:deepep"), 0);
    CU_ASSERT_EQUAL(give("delay-wgrad", "(null)"), 0);
}

static void options_are_registered_with_short_help(void) {
    fake_begin(S_CTX_LOCAL);
    begin(S_CTX_LOCAL);
    CU_ASSERT_EQUAL(fake.option_count, EP_FLAG_COUNT);
    for (int i = 0; i < fake.option_count; i++) {
        const struct spank_option *option = &fake.options[i];
        size_t width = strlen(option->usage) + (option->arginfo ? strlen(option->arginfo) : 0) +
                       strlen(option->name) + sizeof "      --=    ";
        CU_ASSERT(width <= 80);
        CU_ASSERT_EQUAL(strncmp(option->usage, "[ep] ", 5), 0);
        CU_ASSERT_EQUAL(option->has_arg, option->arginfo != NULL);
    }
    fake_next(S_CTX_LOCAL);
    fake.refuse_options = true;
    CU_ASSERT_EQUAL(ep_options_register(&plugin, NULL, callback), -1);
    HAS(fake.log, "--ep-overlap cannot be offered");
    fake_end();
}

static void a_bad_value_is_refused_at_once(void) {
    fake_begin(S_CTX_LOCAL);
    begin(S_CTX_LOCAL);
    CU_ASSERT_EQUAL(give("ep-overlap", "maybe"), -1);
    CU_ASSERT_EQUAL(lines(fake.log), 1);
    HAS(fake.log, "--ep-overlap: found \"maybe\", allowed off, on, auto");
    fake_next(S_CTX_LOCAL);
    begin(S_CTX_LOCAL);
    CU_ASSERT_EQUAL(give("ep-dispatcher", ""), -1);
    HAS(fake.log, "--ep-dispatcher: found \"\"");
    CU_ASSERT_EQUAL(give("ep-dispatcher", NULL), -1);
    CU_ASSERT_EQUAL(give("ep-overlap", "on\n\033[31mERROR"), -1);
    HAS_NOT(fake.log, "\033");
    HAS(fake.log, "on??[31mERROR");
    fake_end();
}

static void a_bad_value_on_a_node_waits_for_the_task(void) {
    fake_begin(S_CTX_REMOTE);
    configure("");
    begin(S_CTX_REMOTE);
    CU_ASSERT_EQUAL(give("ep-overlap", "maybe"), 0);
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    HAS(fake.said, "found \"maybe\"");
    fake_end();
}

static void the_last_of_two_wins(void) {
    fake_begin(S_CTX_LOCAL);
    begin(S_CTX_LOCAL);
    give("ep-overlap", "off");
    give("ep-overlap", "on");
    give("delay-wgrad", NULL);
    give("no-delay-wgrad", "");
    CU_ASSERT_EQUAL(plugin.command[EPO_OPT_OVERLAP], EPO_OVERLAP_ON);
    CU_ASSERT_EQUAL(plugin.command[EPO_OPT_DELAY_WGRAD], EPO_WGRAD_INLINE);
    ep_options_hand_on(&plugin, NULL);
    CU_ASSERT_STRING_EQUAL(fake.unset, "_SLURM_SPANK_OPTION_ep_overlap_delay_wgrad\n");
    begin(S_CTX_ALLOCATOR);
    give("no-delay-wgrad", NULL);
    give("delay-wgrad", NULL);
    ep_options_hand_on(&plugin, NULL);
    CU_ASSERT_EQUAL(plugin.command[EPO_OPT_DELAY_WGRAD], EPO_WGRAD_DELAYED);
    CU_ASSERT_STRING_EQUAL(fake.unset, "_SLURM_SPANK_OPTION_ep_overlap_no_delay_wgrad\n");
    fake_end();
}

static void inherited_is_told_from_given(void) {
    fake_begin(S_CTX_LOCAL);
    fake_put(&fake.own, "SLURM_SPANK__SLURM_SPANK_OPTION_ep_overlap_ep_overlap", "on");
    fake_put(&fake.own, "SLURM_SPANK__SLURM_SPANK_OPTION_ep_overlap_delay_wgrad", "(null)");
    begin(S_CTX_LOCAL);
    give("ep-overlap", "on");
    give("delay-wgrad", "(null)");
    CU_ASSERT_EQUAL(plugin.inherited[EPO_OPT_OVERLAP], EPO_OVERLAP_ON);
    CU_ASSERT_EQUAL(plugin.inherited[EPO_OPT_DELAY_WGRAD], EPO_WGRAD_DELAYED);
    CU_ASSERT_EQUAL(plugin.command[EPO_OPT_OVERLAP], EPO_UNSET);
    give("ep-overlap", "off");
    CU_ASSERT_EQUAL(plugin.command[EPO_OPT_OVERLAP], EPO_OVERLAP_OFF);
    CU_ASSERT_EQUAL(plugin.inherited[EPO_OPT_OVERLAP], EPO_OVERLAP_ON);
    /* off on the line drops the inherited companion */
    configure("");
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    CU_ASSERT_FALSE(plugin.decision.on);
    fake_end();
}

static void a_companion_without_overlap_is_refused(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    begin(S_CTX_LOCAL);
    give("delay-wgrad", NULL);
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_submission, 1);
    CU_ASSERT_EQUAL(lines(fake.log), 1);
    HAS(fake.log, "--delay-wgrad");
    HAS(fake.log, "the built-in default");
    begin(S_CTX_ALLOCATOR);
    give("ep-overlap", "off");
    give("ep-dispatcher", "flex");
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    HAS(fake.log, "--ep-dispatcher");
    HAS(fake.log, "--ep-overlap=off, the command line");
    fake_end();
}

static void a_bad_default_in_the_environment_is_refused(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.own, "SLURM_EP_OVERLAP", "yes");
    begin(S_CTX_LOCAL);
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    HAS(fake.log, "SLURM_EP_OVERLAP: found \"yes\"");
    fake_put(&fake.own, "SLURM_EP_OVERLAP", "");
    begin(S_CTX_LOCAL);
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    fake_end();
}

static void on_reaches_the_task(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "LD_PRELOAD", "libjemalloc.so ");
    srun_to_task(give_all);
    HAS(fake.log, "step 7.0: on, dispatcher flex:deepep, delayed wgrad (");
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    char want[512];
    snprintf(want, sizeof want, "libjemalloc.so:%s", library);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), want);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DISPATCHER), "flex");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_FLEX_BACKEND), "deepep");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DELAY_WGRAD), "1");
    CU_ASSERT_PTR_NOT_NULL(fake_get(&fake.task, EPO_OUT_REASON));
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, EPO_STEP_RECORD));
    CU_ASSERT_STRING_EQUAL(fake.said, "ep-overlap: on, dispatcher flex:deepep, delayed wgrad "
                                      "(--ep-overlap=on, the command line)\n");
    fake_end();
}

static void only_the_first_task_tells(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_on);
    fake.task_id = 1;
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    fake_end();
}

static void without_option_nothing_is_set(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "LD_PRELOAD", "a.so::b.so ");
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.task.count, 1);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), "a.so::b.so ");
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    fake_end();
}

static void auto_says_why_it_is_off(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    HAS(fake_get(&fake.task, EPO_OUT_REASON), "auto: ");
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    HAS(fake.said, "ep-overlap: off (auto: ");
    fake_end();
}

/* The task's environment as text. */
static char *snapshot(void) {
    static char text[2][FAKE_TEXT];
    static int turn;
    char *into = text[turn ^= 1];
    into[0] = '\0';
    for (int i = 0; i < fake.task.count; i++) {
        size_t used = strlen(into);
        snprintf(into + used, FAKE_TEXT - used, "%s=%s\n", fake.task.names[i], fake.task.values[i]);
    }
    return into;
}

static void nested_off_leaves_no_trace(void) {
    static const char *const preloads[] = {NULL, "", "libjemalloc.so", "a.so::b.so ", " "};
    for (size_t i = 0; i < sizeof preloads / sizeof preloads[0]; i++) {
        fake_begin(S_CTX_LOCAL);
        configure("environment = ( { name = \"X\"; value = \"1\"; } );");
        fake_put(&fake.task, "HOME", "/root");
        if (preloads[i] != NULL)
            fake_put(&fake.task, "LD_PRELOAD", preloads[i]);
        fake_put(&fake.task, EPO_OUT_DECISION, "the user's own");
        char *before = snapshot();
        srun_to_task(give_all);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_PTR_NOT_NULL(fake_get(&fake.task, EPO_OUT_SET));
        srun_to_task(give_off);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_STRING_EQUAL(snapshot(), before);
        fake_end();
    }
}

static void nested_on_has_the_library_once(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "LD_PRELOAD", "libjemalloc.so");
    for (int depth = 0; depth < 3; depth++) {
        srun_to_task(give_on);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    }
    char want[512];
    snprintf(want, sizeof want, "libjemalloc.so:%s", library);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), want);
    /* the user changed the list in between: only ours goes */
    snprintf(want, sizeof want, "new.so:libjemalloc.so:%s", library);
    fake_put(&fake.task, "LD_PRELOAD", want);
    srun_to_task(give_off);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), "new.so:libjemalloc.so");
    fake_end();
}

static void a_missing_library_ends_the_step_once(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    unlink(library);
    fake_put(&fake.own, "SLURM_CONF", "/etc/slurm/other.conf");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    CU_ASSERT_EQUAL(lines(fake.said), 1);
    HAS(fake.said, "ep-overlap: n1: the library cannot be preloaded: ");
    HAS(fake.ran, "\n7.0\n");
    HAS(fake.ran, "SLURM_CONF=/etc/slurm/other.conf");
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, EPO_OUT_DECISION));
    /* the next task of the node */
    fake_next(S_CTX_REMOTE);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    CU_ASSERT_STRING_EQUAL(fake.ran, "");
    make_library();
    fake_end();
}

static void a_step_of_one_task_needs_no_scancel(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    unlink(library);
    fake.tasks = 1;
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    CU_ASSERT_STRING_EQUAL(fake.ran, "");
    make_library();
    fake_end();
}

static void a_failing_scancel_is_told(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    unlink(library);
    fake.run_status = 1;
    srun_to_task(give_on);
    ep_task_start(&plugin, NULL);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    HAS(fake.said, "failed; other tasks may wait");
    make_library();
    fake_end();
}

static void a_missing_library_leaves_a_default_off(void) {
    fake_begin(S_CTX_LOCAL);
    configure("defaults = { overlap = \"on\"; };");
    unlink(library);
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.exit_task, -1);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    HAS(fake_get(&fake.task, EPO_OUT_REASON), "cannot be preloaded");
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    make_library();
    fake_end();
}

static void on_failed_request_warn_goes_on_as_off(void) {
    fake_begin(S_CTX_LOCAL);
    configure("on_failed_request = \"warn\";");
    unlink(library);
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.exit_task, -1);
    HAS(fake.said, "off instead of on");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    make_library();
    fake_end();
}

static void a_broken_configuration_refuses_requests_only(void) {
    fake_begin(S_CTX_LOCAL);
    write_file(conf, "version = 1;\nmistake = 3;\n");
    begin(S_CTX_LOCAL);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_submission, 1);
    HAS(fake.log, "ep_overlap.conf:2: unknown key \"mistake\"");
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(lines(fake.log), 1);
    HAS(fake.log, "off: ");
    HAS(fake.log, "unknown key");
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.task.count, 0);
    srun_to_task(give_off);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.exit_task, -1);
    fake_end();
}

static void a_configuration_broken_on_the_node_fails_the_task(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    begin(S_CTX_LOCAL);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
    carry();
    write_file(conf, "version = 2;\n");
    begin(S_CTX_REMOTE);
    give_on();
    ep_step_decide(&plugin, NULL);
    HAS(fake.log, "refused: ");
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    HAS(fake.said, "ep_overlap.conf:1: version: found 2, allowed 1 to 1");
    fake_end();
}

static void an_untrusted_configuration_counts_as_broken(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    chmod(conf, 0666);
    begin(S_CTX_LOCAL);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    HAS(fake.log, "writable by group or others");
    unlink(conf);
    CU_ASSERT_EQUAL(symlink("/etc/passwd", conf), 0);
    begin(S_CTX_LOCAL);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    HAS(fake.log, "symbolic link");
    unlink(conf);
    fake_end();
}

static void no_file_means_builtin_unless_it_was_named(void) {
    fake_begin(S_CTX_LOCAL);
    unlink(conf);
    begin(S_CTX_LOCAL);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    char argument[400];
    snprintf(argument, sizeof argument, "conf=%s", conf);
    char *arguments[] = {argument};
    begin(S_CTX_LOCAL);
    CU_ASSERT_EQUAL(ep_settings_arguments(&plugin, 1, arguments), 0);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    HAS(fake.log, "No such file");
    char *unknown[] = {argument + 1};
    begin(S_CTX_LOCAL);
    CU_ASSERT_EQUAL(ep_settings_arguments(&plugin, 1, unknown), -1);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    HAS(fake.log, "allowed is conf=FILE");
    fake_end();
}

static void a_denied_request_is_refused_at_submission(void) {
    fake_begin(S_CTX_LOCAL);
    configure("policy = ( { match = { user = 1000; }; action = \"deny\";\n"
              "message = \"ask hpc-support\"; } );");
    fake.own_user = 1000;
    begin(S_CTX_LOCAL);
    plugin.trust.owners[0] = geteuid();
    fake.own_user = 1000;
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), -1);
    HAS(fake.log, "denied by the site's policy");
    HAS(fake.log, "ask hpc-support");
    fake_end();
}

static void a_node_that_forbids_it_refuses(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    begin(S_CTX_LOCAL);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
    carry();
    configure("policy = ( { match = { node = \"n[1-2]\"; }; action = \"lock\"; overlap = \"off\";\n"
              "message = \"being repaired\"; } );");
    fake_put(&fake.own, "SLURMD_NODENAME", "n2");
    begin(S_CTX_REMOTE);
    give_on();
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "n2: --ep-overlap=on is locked");
    HAS(fake.said, "being repaired");
    fake_put(&fake.own, "SLURMD_NODENAME", "n3");
    fake_put(&fake.task, EPO_STEP_RECORD, fake_get(&fake.own, EPO_STEP_RECORD));
    begin(S_CTX_REMOTE);
    give_on();
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    fake_end();
}

static void nodes_known_after_allocation_decide(void) {
    fake_begin(S_CTX_LOCAL);
    configure("policy = ( { match = { node = \"n2\"; }; action = \"deny\"; } );");
    begin(S_CTX_LOCAL);
    give_on();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    fake_put(&fake.own, "SLURM_NODELIST", "n[1-2]");
    CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
    carry();
    fake_put(&fake.own, "SLURMD_NODENAME", "n1");
    begin(S_CTX_REMOTE);
    give_on();
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "n1: --ep-overlap=on is denied");
    fake_end();
}

static void a_record_of_another_step_counts_for_nothing(void) {
    static const char *const forged[] = {"1 7 1 1 1 1 0 1 1 0 5 5 5 forged",
                                         "1 8 0 1 1 1 0 1 1 0 5 5 5 forged",
                                         "2 7 0 1 1 1 0 1 1 0 5 5 5 forged",
                                         "1 7 0 1 1 1 0 1 9 0 5 5 5 forged",
                                         "1 7 0 5 1 1 0 1 1 0 5 5 5 forged",
                                         "1 7 0 1 1 1 0 1 1 0 5 5 5",
                                         "1 7 0 1 1 1 0 1 -1 0 5 5 5 forged",
                                         "1 7 0 1 1 1 0 1 1 0 5 5 9 forged",
                                         "1 0 0 1 1 1 0 1 1 0 5 5 5 not het",
                                         "1 7 0 1 1 1 0 9999999999999999999999 0 0 5 5 5 x",
                                         "",
                                         "on"};
    for (size_t i = 0; i < sizeof forged / sizeof forged[0]; i++) {
        fake_begin(S_CTX_REMOTE);
        configure("");
        fake_put(&fake.task, EPO_STEP_RECORD, forged[i]);
        begin(S_CTX_REMOTE);
        ep_step_decide(&plugin, NULL);
        CU_ASSERT_FALSE(plugin.decision.on);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_EQUAL(fake.task.count, 0);
        fake_end();
    }
}

static void without_a_record_the_node_decides(void) {
    fake_begin(S_CTX_REMOTE);
    configure("");
    begin(S_CTX_REMOTE);
    give_off();
    CU_ASSERT_EQUAL(give("delay-wgrad", ""), 0);
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0); /* off wins, no error on a node */
    CU_ASSERT_FALSE(plugin.decision.on);
    begin(S_CTX_REMOTE);
    fake_put(&fake.task, "SLURM_EP_OVERLAP", "on");
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_TRUE(plugin.decision.on);
    fake_put(&fake.task, "SLURM_EP_OVERLAP", "sure\nthing");
    begin(S_CTX_REMOTE);
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_FALSE(plugin.decision.on);
    HAS(fake.log, "it is ignored");
    CU_ASSERT_EQUAL(lines(fake.log), 2);
    fake_end();
}

static void without_a_record_policy_still_binds(void) {
    fake_begin(S_CTX_REMOTE);
    configure("policy = ( { match = { user = 1000; }; action = \"deny\"; } );");
    begin(S_CTX_REMOTE);
    give_on();
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "denied by the site's policy");
    fake_end();
}

#define CLASSES                                                                                    \
    "node_classes = ( { class = \"h100\"; nodes = \"n[1-2]\"; overlap = \"on\"; dispatcher = "     \
    "\"flex\"; }, { class = \"h100\"; gres = \"gpu:h100\"; overlap = \"on\"; } );"

static void auto_is_decided_when_the_nodes_are_known(void) {
    fake_begin(S_CTX_LOCAL);
    configure(CLASSES);
    fake_put(&fake.own, "SLURM_NODELIST", "n[1-2]");
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DISPATCHER), "flex");
    HAS(fake.said, "on, dispatcher flex (auto: class h100, ");
    CU_ASSERT_EQUAL(fake.node_requests, 0);
    fake_end();
}

static void auto_asks_for_gres_once_and_only_if_needed(void) {
    fake_begin(S_CTX_LOCAL);
    configure(CLASSES);
    fake.nodes[0] = "n7", fake.gres[0] = "gpu:h100:8";
    fake.nodes[1] = "n8", fake.gres[1] = NULL;
    fake.node_count = 2;
    fake_put(&fake.own, "SLURM_NODELIST", "n7");
    srun_to_task(give_auto);
    CU_ASSERT_TRUE(plugin.decision.on);
    CU_ASSERT_EQUAL(fake.node_requests, 1);
    fake_put(&fake.own, "SLURM_NODELIST", "n[7-8]");
    srun_to_task(give_auto);
    CU_ASSERT_FALSE(plugin.decision.on);
    HAS(plugin.decision.reason, "node n8 belongs to no class");
    fake.node_count = 0;
    srun_to_task(give_auto);
    HAS(plugin.decision.reason, "the controller did not tell");
    fake_end();
}

static void a_node_of_another_class_refuses(void) {
    fake_begin(S_CTX_LOCAL);
    configure(CLASSES);
    fake_put(&fake.own, "SLURM_NODELIST", "n1");
    begin(S_CTX_LOCAL);
    give_auto();
    ep_submit_check(&plugin, NULL);
    ep_submit_record(&plugin, NULL);
    carry();
    configure("node_classes = ( { class = \"old\"; nodes = \"n1\"; overlap = \"off\"; } );");
    fake_put(&fake.own, "SLURMD_NODENAME", "n1");
    begin(S_CTX_REMOTE);
    give_auto();
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "this node's class old is off");
    fake_end();
}

static void components_of_a_job_share_one_decision(void) {
    fake_begin(S_CTX_LOCAL);
    configure(CLASSES);
    begin(S_CTX_LOCAL);
    give_off();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake.log, "");
    give_auto();
    CU_ASSERT_EQUAL(ep_submit_check(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(lines(fake.log), 1);
    HAS(fake.log, "components of this heterogeneous job differ");
    fake_put(&fake.own, "SLURM_HET_SIZE", "2");
    fake_put(&fake.own, "SLURM_NODELIST", "n2"); /* the last component's */
    CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
    for (int node = 1; node <= 3; node++) {
        char name[8];
        snprintf(name, sizeof name, "n%d", node);
        carry();
        fake_put(&fake.task, "SLURM_HET_SIZE", "2");
        fake_put(&fake.task, "SLURM_STEP_NODELIST", node < 3 ? "n[1-2]" : "n[1-3]");
        fake_put(&fake.own, "SLURMD_NODENAME", name);
        fake.job = 6 + (uint32_t)node;
        begin(S_CTX_REMOTE);
        give_auto();
        ep_step_decide(&plugin, NULL);
        CU_ASSERT_EQUAL(plugin.decision.on, node < 3);
        CU_ASSERT_TRUE(plugin.decision.any_option);
        if (node < 3)
            CU_ASSERT_EQUAL(plugin.decision.choice[EPO_OPT_DISPATCHER].value, EPO_CHOICE_FLEX);
    }
    fake_end();
}

static void special_steps_are_left_alone(void) {
    static const uint32_t steps[] = {0xfffffffb, 0xfffffffc, 0xfffffffa, 0xfffffff0};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        fake_begin(S_CTX_REMOTE);
        configure("");
        fake.step = steps[i];
        begin(S_CTX_REMOTE);
        give_all();
        ep_step_decide(&plugin, NULL);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_EQUAL(fake.task.count, 0);
        CU_ASSERT_STRING_EQUAL(fake.log, "");
        /* and srun's side writes no record for them */
        fake_put(&fake.own, EPO_STEP_RECORD, "old");
        begin(S_CTX_LOCAL);
        CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
        CU_ASSERT_PTR_NULL(fake_get(&fake.own, EPO_STEP_RECORD));
        fake_end();
    }
}

static void a_batch_script_without_srun_is_told(void) {
    static const struct {
        const char *script;
        bool told;
    } cases[] = {{"#!/bin/sh\npython train.py\n", true},
                 {"#!/bin/sh\nsrun python train.py\n", false},
                 {"#!/bin/sh\n/usr/bin/srun -n4 x\n", false},
                 {"#!/bin/sh\n./mysrun.sh\n", true},
                 {"", true}};
    char script[320];
    snprintf(script, sizeof script, "%s/script", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fake_begin(S_CTX_REMOTE);
        write_file(script, cases[i].script);
        fake.step = 0xfffffffb;
        fake.arguments[0] = script;
        fake.argument_count = 1;
        begin(S_CTX_REMOTE);
        give_on();
        ep_step_decide(&plugin, NULL);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_EQUAL(lines(fake.said), cases[i].told);
        if (cases[i].told)
            HAS(fake.said, "applies to srun's steps");
        fake_end();
    }
}

static void numbers_that_slurm_lacks_change_nothing(void) {
    fake_begin(S_CTX_REMOTE);
    configure("");
    fake.no_numbers = true;
    begin(S_CTX_REMOTE);
    give_on();
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.task.count, 0);
    fake_end();
}

static void an_environment_that_cannot_be_set_fails_a_request(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_on);
    fake.fail_setenv = true;
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    HAS(fake.said, "cannot be set");
    fake_end();
}

static void what_speaks_against_a_preload_is_told(void) {
    static const char elf32[] = "\177ELF\001\001\001";
    char program[320], text[64] = "";
    snprintf(program, sizeof program, "%s/program", folder);
    fake_begin(S_CTX_LOCAL);
    configure("");
    FILE *file = fopen(program, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    memcpy(text, elf32, sizeof elf32);
    fwrite(text, 1, sizeof text, file);
    fclose(file);
    fake.arguments[0] = program;
    fake.argument_count = 1;
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    HAS(fake.said, "not preloaded: the program is built for another kind of machine (32-bit");
    /* a script leads to its interpreter, which is this machine's */
    write_file(program, "#! /bin/sh -e\n");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_PTR_NOT_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    /* a script that runs itself ends nowhere */
    char self[400];
    snprintf(self, sizeof self, "#!%s\n", program);
    write_file(program, self);
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    fake_end();
}

static int set_up(void) {
    snprintf(folder, sizeof folder, "%s/epo-spank.XXXXXX",
             getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    if (mkdtemp(folder) == NULL)
        return -1;
    chmod(folder, 0755);
    snprintf(conf, sizeof conf, "%s/ep_overlap.conf", folder);
    snprintf(library, sizeof library, "%s/libep_overlap.so", folder);
    return 0;
}

static void tear_down(void) {
    static const char *const files[] = {"ep_overlap.conf", "libep_overlap.so", "script", "program"};
    ep_plugin_end(&plugin);
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        unlink(path);
    }
    rmdir(folder);
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(make_library),
                                 TEST(options_are_registered_with_short_help),
                                 TEST(a_bad_value_is_refused_at_once),
                                 TEST(a_bad_value_on_a_node_waits_for_the_task),
                                 TEST(the_last_of_two_wins),
                                 TEST(inherited_is_told_from_given),
                                 TEST(a_companion_without_overlap_is_refused),
                                 TEST(a_bad_default_in_the_environment_is_refused),
                                 TEST(on_reaches_the_task),
                                 TEST(only_the_first_task_tells),
                                 TEST(without_option_nothing_is_set),
                                 TEST(auto_says_why_it_is_off),
                                 TEST(nested_off_leaves_no_trace),
                                 TEST(nested_on_has_the_library_once),
                                 TEST(a_missing_library_ends_the_step_once),
                                 TEST(a_step_of_one_task_needs_no_scancel),
                                 TEST(a_failing_scancel_is_told),
                                 TEST(a_missing_library_leaves_a_default_off),
                                 TEST(on_failed_request_warn_goes_on_as_off),
                                 TEST(a_broken_configuration_refuses_requests_only),
                                 TEST(a_configuration_broken_on_the_node_fails_the_task),
                                 TEST(an_untrusted_configuration_counts_as_broken),
                                 TEST(no_file_means_builtin_unless_it_was_named),
                                 TEST(a_denied_request_is_refused_at_submission),
                                 TEST(a_node_that_forbids_it_refuses),
                                 TEST(nodes_known_after_allocation_decide),
                                 TEST(a_record_of_another_step_counts_for_nothing),
                                 TEST(without_a_record_the_node_decides),
                                 TEST(without_a_record_policy_still_binds),
                                 TEST(auto_is_decided_when_the_nodes_are_known),
                                 TEST(auto_asks_for_gres_once_and_only_if_needed),
                                 TEST(a_node_of_another_class_refuses),
                                 TEST(components_of_a_job_share_one_decision),
                                 TEST(special_steps_are_left_alone),
                                 TEST(a_batch_script_without_srun_is_told),
                                 TEST(numbers_that_slurm_lacks_change_nothing),
                                 TEST(an_environment_that_cannot_be_set_fails_a_request),
                                 TEST(what_speaks_against_a_preload_is_told),
                                 CU_TEST_INFO_NULL};
    if (set_up() != 0)
        return 2;
    int status = unit_run("spank", tests);
    tear_down();
    return status;
}
