/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank_decide.c - the hooks of srun, sbatch and slurmstepd, through the seam: what is
 * decided, refused and handed on.
 */
#include "spank_box.h"

#include "core/names.h"
#include "core/policy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

static void a_job_does_not_hand_on_to_those_it_submits(void) {
    static const char *const names[] = {
        "SLURM_SPANK__SLURM_SPANK_OPTION_ep_overlap_ep_overlap",
        "SLURM_SPANK__SLURM_SPANK_OPTION_ep_overlap_ep_dispatcher",
        "SLURM_SPANK__SLURM_SPANK_OPTION_ep_overlap_delay_wgrad",
        "SLURM_SPANK__SLURM_SPANK_OPTION_ep_overlap_no_delay_wgrad"};
    static const spank_context_t where[] = {S_CTX_ALLOCATOR, S_CTX_LOCAL, S_CTX_REMOTE};
    for (size_t w = 0; w < 3; w++) {
        fake_begin(where[w]);
        for (size_t i = 0; i < 4; i++)
            fake_put(&fake.own, names[i], "on");
        fake_put(&fake.own, "SLURM_SPANK__SLURM_SPANK_OPTION_other_ep_overlap", "on");
        begin(where[w]);
        ep_options_forget(&plugin);
        for (size_t i = 0; i < 4; i++)
            CU_ASSERT_EQUAL(fake_get(&fake.own, names[i]) != NULL, w > 0);
        CU_ASSERT_PTR_NOT_NULL(
            fake_get(&fake.own, "SLURM_SPANK__SLURM_SPANK_OPTION_other_ep_overlap"));
        fake_end();
    }
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
    CU_ASSERT_EQUAL(submit(NULL), -1);
    HAS(fake.log, "SLURM_EP_OVERLAP: found \"yes\"");
    fake_put(&fake.own, "SLURM_EP_OVERLAP", "");
    CU_ASSERT_EQUAL(submit(NULL), 0);
    fake_end();
}

static void a_broken_configuration_refuses_requests_only(void) {
    fake_begin(S_CTX_LOCAL);
    write_file(conf, "version = 1;\nmistake = 3;\n");
    CU_ASSERT_EQUAL(submit(give_on), -1);
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
    srun(give_on);
    write_file(conf, "version = 2;\n");
    node("n1", give_on);
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
    CU_ASSERT_EQUAL(submit(give_on), -1);
    HAS(fake.log, "writable by group or others");
    unlink(conf);
    CU_ASSERT_EQUAL(symlink("/etc/passwd", conf), 0);
    CU_ASSERT_EQUAL(submit(give_on), -1);
    HAS(fake.log, "symbolic link");
    unlink(conf);
    fake_end();
}

static void no_file_means_builtin_unless_it_was_named(void) {
    fake_begin(S_CTX_LOCAL);
    unlink(conf);
    CU_ASSERT_EQUAL(submit(give_on), 0);
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
    srun(give_on);
    configure("policy = ( { match = { node = \"n[1-2]\"; }; action = \"lock\"; overlap = \"off\";\n"
              "message = \"being repaired\"; } );");
    node("n2", give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "n2: --ep-overlap=on is locked");
    HAS(fake.said, "being repaired");
    fake_put(&fake.task, EPO_STEP_RECORD, fake_get(&fake.own, EPO_STEP_RECORD));
    node("n3", give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    fake_end();
}

static void nodes_known_after_allocation_decide(void) {
    fake_begin(S_CTX_LOCAL);
    configure("policy = ( { match = { node = \"n2\"; }; action = \"deny\"; } );");
    CU_ASSERT_EQUAL(submit(give_on), 0);
    fake_put(&fake.own, "SLURM_NODELIST", "n[1-2]");
    CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
    carry();
    node("n1", give_on);
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
                                         "1 7 0 1 1 1 0 +1 1 0 5 5 5 forged",
                                         "1 7 0 1 1 1 0  1 1 0 5 5 5 forged",
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
    node("n1", NULL);
    CU_ASSERT_FALSE(plugin.decision.on);
    HAS(fake.log, "it is ignored");
    CU_ASSERT_EQUAL(lines(fake.log), 2);
    fake_end();
}

static void without_a_record_policy_still_binds(void) {
    fake_begin(S_CTX_REMOTE);
    configure("policy = ( { match = { user = 1000; }; action = \"deny\"; } );");
    node("n1", give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "denied by the site's policy");
    fake_end();
}

/* What a user's own srun may say of the step. */
static void a_forged_list_of_nodes_costs_nothing(void) {
    static const char *const forged[] = {"x[0-999999999]", "x[", "x[0-9][0-999999999]"};
    for (size_t i = 0; i < sizeof forged / sizeof forged[0]; i++) {
        fake_begin(S_CTX_REMOTE);
        configure("policy = ( { match = { node = \"n1\"; }; action = \"deny\"; } );");
        fake_put(&fake.task, "SLURM_STEP_NODELIST", forged[i]);
        node("n1", give_on);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
        HAS(fake.said, "denied by the site's policy");
        configure(
            "node_classes = ( { class = \"h100\"; nodes = \"x[1-2]\"; overlap = \"on\"; } );");
        fake_put(&fake.task, "SLURM_STEP_NODELIST", forged[i]);
        node("n1", give_auto);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_FALSE(plugin.decision.on);
        fake_end();
    }
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
    srun(give_auto);
    configure("node_classes = ( { class = \"old\"; nodes = \"n1\"; overlap = \"off\"; } );");
    node("n1", give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "this node's class old is off");
    fake_end();
}

static void components_of_a_job_share_one_decision(void) {
    fake_begin(S_CTX_LOCAL);
    configure(CLASSES);
    CU_ASSERT_EQUAL(submit(give_off), 0);
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

static int end_of_component(void) { return ep_submit_check(&plugin, NULL); }

/* sbatch and salloc hand on differently, and both set the job's variables between components. */
static void of_a_job_of_components_sbatch_hands_on_the_first_ones_options(void) {
    fake_begin(S_CTX_ALLOCATOR);
    configure("");
    fake.own_program = "sbatch";
    begin(S_CTX_ALLOCATOR);
    give_on();
    CU_ASSERT_EQUAL(end_of_component(), 0);
    CU_ASSERT_STRING_EQUAL(fake.log, "");
    fake_put(&fake.own, "SLURM_SPANK__SLURM_SPANK_OPTION_ep_overlap_ep_overlap", "on");
    give_off();
    give_on(); /* the first one's, once more */
    CU_ASSERT_EQUAL(end_of_component(), 0);
    HAS(fake.log, "they run as one step, and what the first one gives counts");
    CU_ASSERT_EQUAL(plugin.command[EPO_OPT_OVERLAP], EPO_OVERLAP_ON);
    CU_ASSERT_EQUAL(plugin.inherited[EPO_OPT_OVERLAP], EPO_UNSET);

    fake.own_program = "salloc";
    begin(S_CTX_ALLOCATOR);
    give_off();
    CU_ASSERT_EQUAL(end_of_component(), 0);
    give_on();
    CU_ASSERT_EQUAL(end_of_component(), 0);
    HAS(fake.log, "and the last value of each counts");
    CU_ASSERT_EQUAL(plugin.command[EPO_OPT_OVERLAP], EPO_OVERLAP_ON);
    fake_end();
}

static void what_sbatch_would_drop_behind_the_first_component_is_refused(void) {
    fake_begin(S_CTX_ALLOCATOR);
    configure("");
    fake.own_program = "sbatch.real"; /* behind a wrapper */
    begin(S_CTX_ALLOCATOR);
    CU_ASSERT_EQUAL(end_of_component(), 0);
    give_all();
    CU_ASSERT_EQUAL(end_of_component(), -1);
    CU_ASSERT_EQUAL(fake.exit_submission, 1);
    CU_ASSERT_EQUAL(lines(fake.log), 3);
    HAS(fake.log, "--ep-overlap stands behind the first component");
    HAS(fake.log, "--delay-wgrad stands behind the first component");
    fake.own_program = "salloc"; /* which hands them on */
    begin(S_CTX_ALLOCATOR);
    CU_ASSERT_EQUAL(end_of_component(), 0);
    give_all();
    CU_ASSERT_EQUAL(end_of_component(), 0);
    CU_ASSERT_STRING_EQUAL(fake.log, "");
    fake_end();
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {
        TEST(options_are_registered_with_short_help),
        TEST(a_bad_value_is_refused_at_once),
        TEST(a_bad_value_on_a_node_waits_for_the_task),
        TEST(the_last_of_two_wins),
        TEST(inherited_is_told_from_given),
        TEST(a_job_does_not_hand_on_to_those_it_submits),
        TEST(a_companion_without_overlap_is_refused),
        TEST(a_bad_default_in_the_environment_is_refused),
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
        TEST(a_forged_list_of_nodes_costs_nothing),
        TEST(auto_is_decided_when_the_nodes_are_known),
        TEST(auto_asks_for_gres_once_and_only_if_needed),
        TEST(a_node_of_another_class_refuses),
        TEST(components_of_a_job_share_one_decision),
        TEST(of_a_job_of_components_sbatch_hands_on_the_first_ones_options),
        TEST(what_sbatch_would_drop_behind_the_first_component_is_refused),
        CU_TEST_INFO_NULL};
    return box_run("spank decides", tests);
}
