/* SPDX-License-Identifier: Apache-2.0
 *
 * test_policy.c - the precedence, by example and against a small reference model.
 */
#include "core/policy.h"
#include "core/text.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OV = EPO_OPT_OVERLAP, DI = EPO_OPT_DISPATCHER, WG = EPO_OPT_DELAY_WGRAD };

static struct epo_config *parse(const char *text) {
    struct epo_config *config = NULL;
    if (epo_config_parse(text, "/c", &config) != EPO_OK) {
        printf("\n  %s\n  %s\n", text, epo_fail_text());
        CU_FAIL_FATAL("the test's configuration");
    }
    return config;
}

static struct epo_policy_input input_of(const struct epo_config *config) {
    struct epo_policy_input input = {
        .config = config, .config_error = "/c:1: broken", .user = 1000};
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        input.command[id] = input.inherited[id] = input.environment[id] = EPO_UNSET;
    return input;
}

#define REFUSED(wanted, part)                                                                      \
    do {                                                                                           \
        CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), wanted);                                       \
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), (part)));                                   \
    } while (0)

static void sources_in_their_order(void) {
    struct epo_config *c = parse("version = 1; defaults = { overlap = \"on\"; };");
    struct epo_policy_input in = input_of(c);
    struct epo_decision d;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_TRUE(d.on);
    CU_ASSERT_FALSE(d.explicit_on);
    CU_ASSERT_EQUAL(d.choice[OV].source, EPO_FROM_SITE);
    in.environment[OV] = EPO_OVERLAP_OFF;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_FALSE(d.on);
    CU_ASSERT_STRING_EQUAL(d.reason, "SLURM_EP_OVERLAP=off in the environment");
    in.inherited[OV] = EPO_OVERLAP_ON;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_TRUE(d.on && d.explicit_on);
    in.command[OV] = EPO_OVERLAP_OFF;
    in.inherited[WG] = EPO_WGRAD_DELAYED;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_FALSE(d.on);
    epo_config_destroy(c);
}

static void companions_with_off_name_where_off_came_from(void) {
    struct epo_config *c = parse("version = 1;");
    struct epo_policy_input in = input_of(c);
    struct epo_decision d;
    in.command[WG] = EPO_WGRAD_DELAYED;
    REFUSED(EPO_E_ARG, "--delay-wgrad (the command line) needs --ep-overlap=on or auto, but "
                       "overlap is off (the built-in default)");
    in.environment[OV] = EPO_OVERLAP_OFF;
    REFUSED(EPO_E_ARG, "SLURM_EP_OVERLAP=off in the environment");
    in.inherited[OV] = EPO_OVERLAP_OFF;
    REFUSED(EPO_E_ARG, "--ep-overlap=off, inherited from sbatch or salloc");
    in.command[OV] = EPO_OVERLAP_AUTO;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_TRUE(d.automatic);
    in.command[OV] = EPO_OVERLAP_OFF;
    REFUSED(EPO_E_ARG, "--ep-overlap=off, the command line");
    in.command[WG] = EPO_WGRAD_INLINE; /* asks for nothing */
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    in.inherited[DI] = EPO_CHOICE_FLEX; /* dropped by the inner off */
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    in.command[OV] = EPO_UNSET;
    REFUSED(EPO_E_ARG, "--ep-dispatcher (inherited from sbatch or salloc)");
    in.lenient = true;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_FALSE(d.on);
    epo_config_destroy(c);
}

static void defaults_of_a_user_are_no_requests(void) {
    struct epo_config *c = parse("version = 1;");
    struct epo_policy_input in = input_of(c);
    struct epo_decision d;
    in.environment[DI] = EPO_CHOICE_FLEX;
    in.environment[WG] = EPO_WGRAD_DELAYED;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_FALSE(d.on || d.any_option);
    in.command[OV] = EPO_OVERLAP_ON;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_TRUE(d.on);
    CU_ASSERT_EQUAL(d.choice[DI].value, EPO_CHOICE_FLEX);
    CU_ASSERT_EQUAL(d.choice[WG].value, EPO_WGRAD_DELAYED);
    epo_config_destroy(c);
}

static void locks_bind_and_say_so(void) {
    struct epo_config *c =
        parse("version = 1;\npolicy = ( { match = { user = 1000; };\n"
              "action = \"lock\"; overlap = \"off\"; message = \"see wiki\"; },\n"
              "{ action = \"lock\"; dispatcher = \"flex\"; } );");
    struct epo_policy_input in = input_of(c);
    struct epo_decision d;
    in.environment[OV] = EPO_OVERLAP_ON;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_FALSE(d.on);
    CU_ASSERT_STRING_EQUAL(d.reason, "the site's lock, /c:2: see wiki");
    in.command[OV] = EPO_OVERLAP_AUTO; /* leaves it to the site */
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    in.command[OV] = EPO_OVERLAP_ON;
    REFUSED(EPO_E_STATE, "--ep-overlap=on is locked to another value by the site's policy (/c:2): "
                         "see wiki");
    in.user = 1001;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_TRUE(d.on);
    CU_ASSERT_EQUAL(d.choice[DI].value, EPO_CHOICE_FLEX);
    CU_ASSERT_EQUAL(d.choice[DI].source, EPO_FROM_LOCK);
    in.command[DI] = EPO_CHOICE_DEEPEP; /* flex, more exactly */
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_EQUAL(d.choice[DI].value, EPO_CHOICE_DEEPEP);
    in.command[DI] = EPO_CHOICE_ALLTOALL;
    REFUSED(EPO_E_STATE, "--ep-dispatcher=alltoall is locked");
    epo_config_destroy(c);
}

static void denied(void) {
    struct epo_config *c = parse("version = 1;\npolicy = ( { match = { group = 50; };\n"
                                 "action = \"deny\"; } );");
    struct epo_policy_input in = input_of(c);
    struct epo_decision d;
    gid_t groups[] = {7, 50};
    in.command[OV] = EPO_OVERLAP_ON;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    in.groups = groups;
    in.group_count = 2;
    REFUSED(EPO_E_STATE, "--ep-overlap=on is denied by the site's policy (/c:2)");
    in.command[OV] = EPO_UNSET;
    in.environment[OV] = EPO_OVERLAP_ON;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_FALSE(d.on);
    CU_ASSERT_PTR_NOT_NULL(strstr(d.reason, "denied by the site's policy"));
    epo_config_destroy(c);
}

static void the_strictest_of_the_nodes_rules(void) {
    struct epo_config *c =
        parse("version = 1; policy = (\n"
              "{ match = { node = \"a[1-2]\"; }; action = \"default\"; overlap = \"on\"; },\n"
              "{ match = { node = \"a3\"; }; action = \"deny\"; },\n"
              "{ match = { partition = \"p\"; }; action = \"default\"; overlap = \"on\"; } );");
    struct epo_policy_input in = input_of(c);
    struct epo_decision d;
    static const struct {
        const char *nodes, *partition;
        bool on;
    } cases[] = {{"a[1-2]", NULL, true}, {"a[1-4]", NULL, false},    {"a[1,4]", NULL, true},
                 {"a4", NULL, false},    {NULL, NULL, false},        {NULL, "p", true},
                 {"a4", "p", true},      {"not a [ list", "p", true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        in.nodes = cases[i].nodes;
        in.partition = cases[i].partition;
        CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
        CU_ASSERT_EQUAL(d.on, cases[i].on);
    }
    epo_config_destroy(c);
}

static const char *gres_of(void *context, const char *node) {
    (void)context;
    return node[0] == 'h' ? "gpu:h100:8(S:0-1),nic:2" : node[0] == 'x' ? NULL : "nic:1,gpu:h1000:2";
}

static void auto_by_the_class_of_the_nodes(void) {
    struct epo_config *c = parse(
        "version = 1; defaults = { dispatcher = \"alltoall\"; };\n"
        "node_classes = ( { class = \"h100\"; nodes = \"a[1-4]\"; overlap = \"on\"; dispatcher "
        "= \"flex\"; delay_wgrad = true; },\n"
        "{ class = \"l40s\"; nodes = \"b[1-4]\"; overlap = \"off\"; },\n"
        "{ class = \"h100\"; gres = \"gpu:h100\"; overlap = \"on\"; } );");
    struct epo_policy_input in = input_of(c);
    struct epo_decision d;
    static const struct {
        const char *nodes;
        bool on, pending;
        const char *reason;
    } cases[] = {
        {NULL, false, true, "auto: decided when the nodes are known"},
        {"a1", true, false, "auto: class h100, /c:2"},
        {"a[1-4]", true, false, "auto: class h100, /c:2"},
        {"b2", false, false, "auto: class l40s is off (/c:3)"},
        {"a1,b1", false, false, "auto: nodes of different classes, a1 (h100) and b1 (l40s)"},
        {"a1,z1", false, false, "auto: node z1 belongs to no class"},
        {"h[1-3],a1", true, false, "auto: class h100, /c:4"},
        {"x1", false, false, "auto: node x1 belongs to no class"},
        {"a[", false, false, "auto: \"a[\" is no list of nodes"},
    };
    in.command[OV] = EPO_OVERLAP_AUTO;
    in.gres_of = gres_of;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        in.nodes = cases[i].nodes;
        CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
        CU_ASSERT_EQUAL(d.on, cases[i].on);
        CU_ASSERT_EQUAL(d.pending, cases[i].pending);
        CU_ASSERT_STRING_EQUAL(d.reason, cases[i].reason);
        CU_ASSERT_TRUE(d.automatic);
    }
    in.nodes = "a1";
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_EQUAL(d.choice[DI].value, EPO_CHOICE_FLEX);
    CU_ASSERT_EQUAL(d.choice[WG].value, EPO_WGRAD_DELAYED);
    in.environment[DI] = EPO_CHOICE_ALLTOALL; /* a user's wish is stronger than the class */
    in.command[WG] = EPO_WGRAD_INLINE;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_EQUAL(d.choice[DI].value, EPO_CHOICE_ALLTOALL);
    CU_ASSERT_EQUAL(d.choice[WG].value, EPO_WGRAD_INLINE);
    epo_config_destroy(c);
    c = parse("version = 1;");
    in.config = c;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_STRING_EQUAL(d.reason, "auto: the site's configuration has no node_classes");
    epo_config_destroy(c);
}

static void a_broken_configuration(void) {
    struct epo_policy_input in = input_of(NULL);
    struct epo_decision d;
    in.environment[OV] = EPO_OVERLAP_ON;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_FALSE(d.on);
    CU_ASSERT_PTR_NOT_NULL(strstr(d.reason, "/c:1: broken"));
    static const int asks[][3] = {{EPO_OVERLAP_ON, -1, -1},
                                  {EPO_OVERLAP_AUTO, -1, -1},
                                  {-1, EPO_CHOICE_FLEX, -1},
                                  {-1, -1, EPO_WGRAD_DELAYED}};
    for (size_t i = 0; i < sizeof asks / sizeof asks[0]; i++) {
        memcpy(in.inherited, asks[i], sizeof in.inherited);
        REFUSED(EPO_E_STATE, "the site's configuration is broken: /c:1: broken");
    }
    in.command[OV] = EPO_OVERLAP_OFF;
    CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), EPO_OK);
    CU_ASSERT_FALSE(d.on);
    CU_ASSERT_STRING_EQUAL(d.reason, "--ep-overlap=off, the command line");
}

/* ---- the reference model: rules as plain data, one loop over ranks --------- */

struct model_rule {
    int user, partition; /* 0: any */
    int action;
    int values[3];
};
struct model {
    int defaults[3], given[3][3]; /* environment, inherited, command */
    struct model_rule rules[3];
    int rule_count, user, partition;
};
enum { FINE, CONTRADICTION, FORBIDDEN };
struct outcome {
    int kind, on, value[3], rank[3]; /* rank: 0 built in ... 6 lock */
};

static struct outcome model_decide(const struct model *m) {
    static const int builtin[3] = {0, 0, 0};
    struct outcome o = {FINE, 0, {0, 0, 0}, {0, 0, 0}};
    const struct model_rule *rule = NULL;
    for (int i = m->rule_count - 1; i >= 0; i--)
        if ((m->rules[i].user == 0 || m->rules[i].user == m->user) &&
            (m->rules[i].partition == 0 || m->rules[i].partition == m->partition))
            rule = &m->rules[i];
    for (int id = 0; id < 3; id++) {
        int by_rank[7] = {builtin[id],     m->defaults[id], -1, m->given[0][id],
                          m->given[1][id], m->given[2][id], -1};
        if (rule != NULL && rule->action == EPO_POLICY_DEFAULT)
            by_rank[2] = rule->values[id];
        if (rule != NULL && rule->action == EPO_POLICY_LOCK)
            by_rank[6] = rule->values[id];
        int asked = -1, rank = -1;
        for (int r = 0; r < 6; r++)
            if (by_rank[r] >= 0) {
                asked = by_rank[r];
                rank = r;
            }
        int lock = by_rank[6];
        if (lock >= 0) {
            int agrees = asked == lock || (id == 1 && lock == 1 && asked >= 1);
            int leaves_it = id == 0 && asked == EPO_OVERLAP_AUTO;
            if (rank >= 4 && !agrees && !leaves_it) {
                o.kind = FORBIDDEN;
                return o;
            }
            if (!agrees || rank < 4) {
                asked = agrees ? asked : lock;
                rank = 6;
            }
        }
        o.value[id] = asked;
        o.rank[id] = rank;
    }
    o.on = o.value[0] == EPO_OVERLAP_ON;
    if (rule != NULL && rule->action == EPO_POLICY_DENY) {
        if (o.on && (o.rank[0] == 4 || o.rank[0] == 5)) {
            o.kind = FORBIDDEN;
            return o;
        }
        o.on = 0;
    }
    if (!o.on && o.value[0] != EPO_OVERLAP_AUTO)
        for (int id = 1; id < 3; id++) {
            int asks = (o.rank[id] == 4 || o.rank[id] == 5) && (id == 1 || o.value[id] == 1);
            int dropped = o.rank[0] == 5 && o.rank[id] == 4;
            if (asks && !dropped)
                o.kind = CONTRADICTION;
        }
    return o;
}

static int maybe(int values) { return rand() % 2 ? rand() % values : -1; }

static const int counts[3] = {3, 5, 2};

static void random_model(struct model *m) {
    memset(m, 0, sizeof *m);
    for (int id = 0; id < 3; id++) {
        m->defaults[id] = maybe(counts[id]);
        for (int s = 0; s < 3; s++)
            m->given[s][id] = maybe(counts[id]);
    }
    m->user = 1000 + rand() % 2;
    m->partition = 1 + rand() % 2;
    m->rule_count = rand() % 4;
    for (int i = 0; i < m->rule_count; i++) {
        struct model_rule *rule = &m->rules[i];
        rule->user = rand() % 2 ? 1000 + rand() % 2 : 0;
        rule->partition = rand() % 2 ? 1 + rand() % 2 : 0;
        rule->action = rand() % 4;
        for (int id = 0; id < 3; id++)
            rule->values[id] = rule->action >= EPO_POLICY_DEFAULT ? maybe(counts[id]) : -1;
        if (rule->action >= EPO_POLICY_DEFAULT && rule->values[0] < 0 && rule->values[1] < 0)
            rule->values[0] = rand() % 3;
    }
}

static void add_values(struct epo_text *text, const int values[3]) {
    for (int id = 0; id < 3; id++)
        if (values[id] >= 0 && id < 2)
            epo_text_format(text, " %s = \"%s\";", epo_options[id].key,
                            epo_options[id].values[values[id]]);
        else if (values[id] >= 0)
            epo_text_format(text, " delay_wgrad = %s;", values[id] ? "true" : "false");
}

static struct epo_config *config_of(const struct model *m) {
    static const char *const actions[] = {"allow", "deny", "default", "lock"};
    struct epo_text text = EPO_TEXT_INIT;
    epo_text_format(&text, "version = 1; defaults = {");
    add_values(&text, m->defaults);
    epo_text_format(&text, " }; policy = (");
    for (int i = 0; i < m->rule_count; i++) {
        const struct model_rule *rule = &m->rules[i];
        epo_text_format(&text, "%s { action = \"%s\"; match = {", i ? "," : "",
                        actions[rule->action]);
        if (rule->user != 0)
            epo_text_format(&text, " user = %d;", rule->user);
        if (rule->partition != 0)
            epo_text_format(&text, " partition = \"p%d\";", rule->partition);
        epo_text_format(&text, " };");
        add_values(&text, rule->values);
        epo_text_format(&text, " }");
    }
    epo_text_format(&text, " );");
    struct epo_config *config = parse(text.data);
    epo_text_free(&text);
    return config;
}

static int rank_of(epo_source source) {
    switch (source) {
    case EPO_FROM_BUILTIN: return 0;
    case EPO_FROM_SITE: return 1;
    case EPO_FROM_RULE: return 2;
    case EPO_FROM_ENVIRONMENT: return 3;
    case EPO_FROM_INHERITED: return 4;
    case EPO_FROM_COMMAND: return 5;
    case EPO_FROM_LOCK: return 6;
    }
    return -1;
}

static void random_combinations_against_the_model(void) {
    int kinds[3] = {0, 0, 0}, on = 0, differs = 0;
    srand(20240);
    for (int round = 0; round < 20000; round++) {
        struct model m;
        random_model(&m);
        struct epo_config *config = config_of(&m);
        struct epo_policy_input in = input_of(config);
        struct epo_decision d;
        char partition[16];
        snprintf(partition, sizeof partition, "p%d", m.partition);
        in.user = (uid_t)m.user;
        in.partition = partition;
        memcpy(in.environment, m.given[0], sizeof in.environment);
        memcpy(in.inherited, m.given[1], sizeof in.inherited);
        memcpy(in.command, m.given[2], sizeof in.command);
        struct outcome want = model_decide(&m);
        epo_status got = epo_policy_decide(&in, &d);
        epo_status statuses[] = {EPO_OK, EPO_E_ARG, EPO_E_STATE};
        kinds[want.kind]++;
        bool same = got == statuses[want.kind];
        if (same && got == EPO_OK) {
            on += d.on;
            same = d.on == want.on && d.reason[0] != '\0';
            for (int id = 0; id < 3; id++)
                same = same && d.choice[id].value == want.value[id] &&
                       rank_of(d.choice[id].source) == want.rank[id];
        }
        differs += !same;
        in.lenient = true; /* on a node off wins instead of contradicting */
        CU_ASSERT_EQUAL(epo_policy_decide(&in, &d), want.kind == FORBIDDEN ? EPO_E_STATE : EPO_OK);
        epo_config_destroy(config);
    }
    CU_ASSERT_EQUAL(differs, 0);
    /* the sample reaches every kind of outcome */
    CU_ASSERT(kinds[FINE] > 1000 && kinds[CONTRADICTION] > 1000 && kinds[FORBIDDEN] > 1000);
    CU_ASSERT(on > 1000);
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(sources_in_their_order),
                                 TEST(companions_with_off_name_where_off_came_from),
                                 TEST(defaults_of_a_user_are_no_requests),
                                 TEST(locks_bind_and_say_so),
                                 TEST(denied),
                                 TEST(the_strictest_of_the_nodes_rules),
                                 TEST(auto_by_the_class_of_the_nodes),
                                 TEST(a_broken_configuration),
                                 TEST(random_combinations_against_the_model),
                                 CU_TEST_INFO_NULL};
    return unit_run("policy", tests);
}
