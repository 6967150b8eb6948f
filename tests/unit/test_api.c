/* SPDX-License-Identifier: Apache-2.0
 *
 * test_api - every entry point: NULL, the call that reaches the engine, the
 * engine's error text; structs of older and newer programs.
 */
#include "fake_engine.h"
#include "unit.h"

#include "preload/alive.h"

#include <stdlib.h>
#include <stdbool.h>
#include <string.h>

static void forget_environment(void) {
    static const char *const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "PMIX_RANK",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "SLURM_PROCID",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_NTASKS",
                                        "EP_OVERLAP_DECISION",
                                        "EP_OVERLAP_DISPATCHER",
                                        "EP_OVERLAP_DELAY_WGRAD"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        unsetenv(names[i]);
}

static void start(void) {
    forget_environment();
    memset(&fake, 0, sizeof fake);
}

/* The library refuses what it has not made: the fake's objects, each call anew. */
static void alive_all(void) {
    (void)epo_alive_add(EPO_KIND_WORLD, fake_world());
    (void)epo_alive_add(EPO_KIND_GROUP, fake_group());
    (void)epo_alive_add(EPO_KIND_BUFFER, fake_buffer());
    (void)epo_alive_add(EPO_KIND_PLAN, fake_plan());
    (void)epo_alive_add(EPO_KIND_LAYER, fake_layer());
}

static void library_facts(void) {
    CU_ASSERT_PTR_NOT_NULL(epo_version());
    CU_ASSERT_STRING_EQUAL(epo_status_name(EPO_E_TIMEOUT), "EPO_E_TIMEOUT");
    CU_ASSERT_STRING_EQUAL(epo_status_name((epo_status)77), "EPO_E_?");
    CU_ASSERT_EQUAL(epo_dtype_size(EPO_F32), 4);
    CU_ASSERT_EQUAL(epo_dtype_size(EPO_BF16), 2);
    CU_ASSERT_EQUAL(epo_dtype_size(EPO_F16), 2);
    CU_ASSERT_EQUAL(epo_dtype_size((epo_dtype)9), 0);
}

/* `call` is refused with EPO_E_ARG, names `name`, and the engine is not called. */
#define REFUSED(call, name)                                                                        \
    do {                                                                                           \
        int before_ = fake.calls;                                                                  \
        alive_all();                                                                               \
        CU_ASSERT_EQUAL((call), EPO_E_ARG);                                                        \
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_error(), name));                                         \
        CU_ASSERT_EQUAL(fake.calls, before_);                                                      \
    } while (0)
#define REACHES(call, op)                                                                          \
    do {                                                                                           \
        fake.last = "";                                                                            \
        alive_all();                                                                               \
        CU_ASSERT_EQUAL((call), EPO_OK);                                                           \
        CU_ASSERT_STRING_EQUAL(fake.last, op);                                                     \
        fake.fail = EPO_E_PEER;                                                                    \
        alive_all();                                                                               \
        CU_ASSERT_EQUAL((call), EPO_E_PEER);                                                       \
        CU_ASSERT_STRING_EQUAL(epo_error(), "the engine's own words");                             \
        fake.fail = EPO_OK;                                                                        \
    } while (0)

static void group_calls(void) {
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    epo_group *group = NULL;
    epo_group_info info = {.size = sizeof info};
    epo_stats stats = {.size = sizeof stats};
    const epo_interval *intervals;
    epo_world *world = NULL;
    uint64_t count, dropped;
    float data[2] = {0, 0};
    start();
    REFUSED(epo_world_create(2, NULL), "out");
    REFUSED(epo_world_create(0, &world), "found 0");
    CU_ASSERT_PTR_NULL(world);
    REACHES(epo_world_create(2, &world), "world_create");
    REFUSED(epo_world_create_on((epo_engine_kind)9, 2, &world), "engine: found 9");
    REACHES(epo_world_create_on(EPO_ENGINE_HOST, 2, &world), "world_create");
    CU_ASSERT_EQUAL(epo_world_create_on(EPO_ENGINE_CUDA, 2, &world), EPO_E_VERSION);
    epo_world_destroy(NULL);
    epo_world_destroy(fake_world());
    CU_ASSERT_STRING_EQUAL(fake.last, "world_destroy");
    REFUSED(epo_group_create(NULL, &group), "epo_group_config");
    REFUSED(epo_group_create(&config, NULL), "out");
    CU_ASSERT_PTR_NULL(group);
    REACHES(epo_group_create(&config, &group), "group_create");
    CU_ASSERT_PTR_EQUAL(group, fake_group());
    CU_ASSERT_EQUAL(epo_group_destroy(NULL), EPO_OK);
    REACHES(epo_group_destroy(group), "group_destroy");
    REFUSED(epo_group_query(NULL, &info), "group");
    REFUSED(epo_group_query(group, NULL), "epo_group_info");
    REACHES(epo_group_query(group, &info), "group_query");
    CU_ASSERT_EQUAL(info.ranks, 7);
    REFUSED(epo_group_async_error(NULL), "group");
    REACHES(epo_group_async_error(group), "group_async_error");
    REFUSED(epo_group_barrier(NULL), "group");
    REACHES(epo_group_barrier(group), "group_barrier");
    REFUSED(epo_group_allreduce(NULL, data, 2, NULL), "group");
    REACHES(epo_group_allreduce(group, NULL, 2, NULL), "group_allreduce");
    REACHES(epo_group_allreduce(group, NULL, 0, NULL), "group_allreduce");
    REACHES(epo_group_allreduce(group, data, 2, NULL), "group_allreduce");
    REFUSED(epo_group_wgrad_flush(NULL, NULL), "group");
    REACHES(epo_group_wgrad_flush(group, NULL), "group_wgrad_flush");
    REFUSED(epo_group_stats(NULL, &stats, 0), "group");
    REFUSED(epo_group_stats(group, NULL, 0), "epo_stats");
    REACHES(epo_group_stats(group, &stats, 0), "group_stats");
    CU_ASSERT_EQUAL(stats.forward_calls, 11);
    REFUSED(epo_record_start(NULL, 5), "group");
    REACHES(epo_record_start(group, 5), "record_start");
    REFUSED(epo_record_stop(NULL, &intervals, &count, &dropped), "group");
    REFUSED(epo_record_stop(group, NULL, &count, &dropped), "intervals");
    REFUSED(epo_record_stop(group, &intervals, NULL, &dropped), "count");
    REACHES(epo_record_stop(group, &intervals, &count, NULL), "record_stop");
}

static void buffer_and_plan_calls(void) {
    epo_buffer_config config = EPO_BUFFER_CONFIG_INIT;
    epo_routing routing = EPO_ROUTING_INIT;
    epo_buffer *buffer = NULL;
    epo_plan *plan = NULL;
    int64_t experts[1] = {0};
    uint64_t n = 0;
    char row[8];
    start();
    REFUSED(epo_buffer_bytes(NULL, &config, &n), "group");
    REFUSED(epo_buffer_bytes(fake_group(), NULL, &n), "epo_buffer_config");
    REFUSED(epo_buffer_bytes(fake_group(), &config, NULL), "bytes");
    REACHES(epo_buffer_bytes(fake_group(), &config, &n), "buffer_bytes");
    REFUSED(epo_buffer_create(NULL, &config, &buffer), "group");
    REACHES(epo_buffer_create(fake_group(), NULL, &buffer), "buffer_create");
    REACHES(epo_buffer_create(fake_group(), &config, NULL), "buffer_create");
    REACHES(epo_buffer_create(fake_group(), &config, &buffer), "buffer_create");
    CU_ASSERT_EQUAL(epo_buffer_destroy(NULL), EPO_OK);
    REACHES(epo_buffer_destroy(buffer), "buffer_destroy");
    REFUSED(epo_plan_create(NULL, &routing, NULL, &plan), "buffer");
    REACHES(epo_plan_create(buffer, NULL, NULL, &plan), "plan_create");
    REACHES(epo_plan_create(buffer, &routing, NULL, NULL), "plan_create");
    REACHES(epo_plan_create(buffer, &routing, NULL, &plan), "plan_create");
    routing.tokens = 1;
    REACHES(epo_plan_create(buffer, &routing, NULL, &plan), "plan_create");
    routing.experts = experts;
    REACHES(epo_plan_create(buffer, &routing, NULL, &plan), "plan_create");
    CU_ASSERT_PTR_EQUAL(fake.routing.experts, experts);
    epo_plan_retain(NULL);
    epo_plan_retain(plan);
    CU_ASSERT_STRING_EQUAL(fake.last, "plan_retain");
    epo_plan_release(NULL);
    CU_ASSERT_STRING_EQUAL(fake.last, "plan_retain");
    epo_plan_release(plan);
    CU_ASSERT_STRING_EQUAL(fake.last, "plan_release");
    REFUSED(epo_plan_rows(NULL, &n), "plan");
    REFUSED(epo_plan_rows(plan, NULL), "rows");
    REACHES(epo_plan_rows(plan, &n), "plan_rows");
    REFUSED(epo_plan_experts(NULL, &n, &n), "plan");
    REACHES(epo_plan_experts(plan, NULL, NULL), "plan_experts");
    epo_plan_info info = {.size = sizeof info};
    REFUSED(epo_plan_query(NULL, &info), "plan");
    REFUSED(epo_plan_query(plan, NULL), "epo_plan_info");
    REACHES(epo_plan_query(plan, &info), "plan_query");
    CU_ASSERT_EQUAL(info.pad_rows, 14);
    REFUSED(epo_dispatch(NULL, row, row, NULL, NULL), "plan");
    REACHES(epo_dispatch(plan, row, row, NULL, NULL), "dispatch");
    REFUSED(epo_combine(NULL, row, row, NULL, NULL, NULL), "plan");
    REACHES(epo_combine(plan, row, row, NULL, NULL, NULL), "combine");
    epo_layer_memory memory = {.size = sizeof memory};
    REFUSED(epo_layer_bytes(NULL, plan, &memory), "layer");
    REFUSED(epo_layer_bytes(fake_layer(), NULL, &memory), "plan");
    REACHES(epo_layer_bytes(fake_layer(), plan, &memory), "layer_bytes");
    CU_ASSERT_EQUAL(memory.saved, 21);
    epo_schedule schedule = EPO_SCHEDULE_INIT;
    REFUSED(epo_schedule_run(NULL, &schedule, NULL), "group");
    REACHES(epo_schedule_run(fake_group(), &schedule, NULL), "schedule_run");
}

static void layer_calls(void) {
    epo_layer_config config = EPO_LAYER_CONFIG_INIT;
    epo_layer *layer = NULL;
    epo_saved *saved = NULL;
    char row[8];
    start();
    REFUSED(epo_layer_create(NULL, &config, &layer), "group");
    REFUSED(epo_layer_create(fake_group(), NULL, &layer), "epo_layer_config");
    REFUSED(epo_layer_create(fake_group(), &config, NULL), "out");
    REACHES(epo_layer_create(fake_group(), &config, &layer), "layer_create");
    CU_ASSERT_EQUAL(epo_layer_destroy(NULL), EPO_OK);
    REACHES(epo_layer_destroy(layer), "layer_destroy");
    REFUSED(epo_forward(NULL, NULL, row, row, NULL, NULL), "layer");
    REACHES(epo_forward(NULL, fake_plan(), row, row, NULL, NULL), "forward");
    REACHES(epo_forward(layer, NULL, row, row, NULL, NULL), "forward");
    REACHES(epo_forward(layer, fake_plan(), row, row, NULL, NULL), "forward");
    REFUSED(epo_backward(NULL, NULL, row, row, NULL, NULL), "saved");
    REACHES(epo_backward(layer, NULL, row, row, NULL, NULL), "backward");
    for (int i = 0; i < 3; i++) {
        REACHES(epo_forward(layer, fake_plan(), row, row, &saved, NULL), "forward");
        CU_ASSERT_PTR_EQUAL_FATAL(saved, fake_saved());
        if (i == 2)
            break;
        CU_ASSERT_EQUAL(epo_backward(i == 0 ? NULL : layer, saved, row, row, NULL, NULL), EPO_OK);
        CU_ASSERT_STRING_EQUAL(fake.last, "backward");
    }
    fake.last = "";
    epo_saved_release(NULL);
    CU_ASSERT_STRING_EQUAL(fake.last, "");
    epo_saved_release(saved);
    CU_ASSERT_STRING_EQUAL(fake.last, "saved_release");
    fake.last = "";
    epo_saved_release(saved); /* which is no more */
    CU_ASSERT_STRING_EQUAL(fake.last, "");
    CU_ASSERT_EQUAL(epo_backward(NULL, saved, row, row, NULL, NULL), EPO_E_STATE);
    CU_ASSERT_STRING_EQUAL(fake.last, "");
    CU_ASSERT_EQUAL(epo_backward(layer, saved, row, row, NULL, NULL), EPO_E_STATE);
    CU_ASSERT_STRING_EQUAL(fake.last, "backward"); /* which tells the peers */
    REFUSED(epo_layer_wgrad_flush(NULL, NULL), "layer");
    REACHES(epo_layer_wgrad_flush(layer, NULL), "layer_wgrad_flush");
    REFUSED(epo_layer_wgrad_begin(NULL), "layer");
    REACHES(epo_layer_wgrad_begin(layer), "layer_wgrad_begin");
}

/* An older program's struct ends earlier: the rest has its defaults, and nothing
 * beyond its size is read or written. */
static void older_structs(void) {
    epo_group *group = NULL;
    epo_buffer *buffer = NULL;
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    epo_buffer_config shape = EPO_BUFFER_CONFIG_INIT;
    epo_group_info info;
    start();
    config.size = offsetof(epo_group_config, chunks);
    config.chunks = -5; /* not part of the older struct */
    config.warn_s = -5;
    config.overlap = EPO_ON;
    CU_ASSERT_EQUAL(epo_group_create(&config, &group), EPO_OK);
    CU_ASSERT_EQUAL(fake.group.config.chunks, 0);
    CU_ASSERT_EQUAL(fake.group.config.warn_s, 30);
    CU_ASSERT_EQUAL(fake.group.config.size, sizeof(epo_group_config));
    shape.size = offsetof(epo_buffer_config, chunks);
    shape.hidden = 8;
    shape.chunks = 99;
    CU_ASSERT_EQUAL(epo_buffer_create(group, &shape, &buffer), EPO_OK);
    CU_ASSERT_EQUAL(fake.buffer.hidden, 8);
    CU_ASSERT_EQUAL(fake.buffer.chunks, 0);
    memset(&info, 0x55, sizeof info);
    info.size = offsetof(epo_group_info, overlap);
    CU_ASSERT_EQUAL(epo_group_query(group, &info), EPO_OK);
    CU_ASSERT_EQUAL(info.ranks, 7);
    CU_ASSERT_EQUAL(info.overlap, 0x55555555);
    CU_ASSERT_EQUAL(info.size, offsetof(epo_group_info, overlap));
}

static void newer_structs(void) {
    struct {
        epo_group_config known;
        uint64_t beyond;
    } config = {EPO_GROUP_CONFIG_INIT, 0};
    struct {
        epo_stats known;
        uint64_t beyond;
    } stats;
    epo_group *group = NULL;
    start();
    config.known.size = sizeof config;
    CU_ASSERT_EQUAL(epo_group_create(&config.known, &group), EPO_OK);
    config.beyond = 1;
    CU_ASSERT_EQUAL(epo_group_create(&config.known, &group), EPO_E_VERSION);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_error(), "newer"));
    memset(&stats, 0x55, sizeof stats);
    stats.known.size = sizeof stats;
    CU_ASSERT_EQUAL(epo_group_stats(group, &stats.known, 0), EPO_OK);
    CU_ASSERT_EQUAL(stats.known.call_s, 1.5);
    CU_ASSERT_EQUAL(stats.beyond, 0);
}

static void structs_without_a_size(void) {
    epo_group_config config;
    epo_group *group = NULL;
    epo_stats stats;
    start();
    memset(&config, 0, sizeof config);
    REFUSED(epo_group_create(&config, &group), "size");
    memset(&config, 0xff, sizeof config);
    REFUSED(epo_group_create(&config, &group), "size");
    stats.size = 3;
    REFUSED(epo_group_stats(fake_group(), &stats, 0), "size");
}

static int gather_nothing(void *ctx, const void *mine, size_t bytes, void *all) {
    return (void)ctx, (void)mine, (void)bytes, (void)all, 0;
}

static int meet_nobody(void *ctx) { return (void)ctx, 0; }

/* What a refusing rank tells, copied; the others' places stay empty. */
typedef struct told {
    int calls;
    char card[512];
} told;

static int note_card(void *ctx, const void *mine, size_t bytes, void *all) {
    told *t = ctx;
    t->calls++;
    memcpy(t->card, mine, bytes < sizeof t->card ? bytes : sizeof t->card);
    return (void)all, 0;
}

static bool card_says(const told *t, const char *word) {
    for (size_t i = 0; i + strlen(word) <= sizeof t->card; i++)
        if (memcmp(t->card + i, word, strlen(word)) == 0)
            return true;
    return false;
}

/* The others are waiting in the bootstrap's allgather: they must hear of it. */
static void a_refusal_is_told(void) {
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    const int members[] = {3, 1};
    told t = {0};
    epo_bootstrap bootstrap = {sizeof bootstrap, &t, note_card, meet_nobody};
    epo_group *group = NULL;
    start();
    config.rank = 1;
    config.ranks = 4;
    config.bootstrap = &bootstrap;
    config.chunks = -7;
    REFUSED(epo_group_create(&config, &group), "found -7");
    CU_ASSERT_EQUAL(t.calls, 1);
    CU_ASSERT(card_says(&t, "found -7"));
    config.chunks = 0;
    config.members = members;
    config.nmembers = 2;
    REFUSED(epo_group_create(&config, NULL), "out");
    CU_ASSERT_EQUAL(t.calls, 2);
    config.members = NULL;
    config.nmembers = 0;
    config.rank = 9; /* nobody's place: nothing can be told */
    REFUSED(epo_group_create(&config, &group), "rank");
    CU_ASSERT_EQUAL(t.calls, 2);
}

/* Without a bootstrap the engine knows the way. */
static void a_refusal_is_told_by_the_engine(void) {
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    epo_group *group = NULL;
    start();
    config.rank = 1;
    config.ranks = 4;
    config.chunks = -7;
    config.timeout_s = 5;
    REFUSED(epo_group_create(&config, &group), "found -7");
    CU_ASSERT_EQUAL(fake.refusals, 1);
    CU_ASSERT_EQUAL(fake.refused, EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(fake.reason, "found -7"));
    CU_ASSERT(fake.group.config.rank == 1 && fake.group.config.ranks == 4);
    CU_ASSERT_EQUAL(fake.group.config.timeout_s, 5);
    config.chunks = 0;
    config.timeout_s = -1;
    config.threads = fake_world();
    REFUSED(epo_group_create(&config, &group), "timeout_s");
    CU_ASSERT_EQUAL(fake.refusals, 2);
    CU_ASSERT_EQUAL(fake.group.config.timeout_s, 600);
    CU_ASSERT_PTR_EQUAL(fake.group.config.threads, fake_world());
    config.timeout_s = 0;
    REFUSED(epo_group_create(&config, NULL), "out");
    CU_ASSERT_EQUAL(fake.refusals, 3);
    setenv("EP_OVERLAP_CHUNKS", "abc", 1);
    setenv("EP_OVERLAP_TIMEOUT", "7", 1);
    REFUSED(epo_group_create(&config, &group), "EP_OVERLAP_CHUNKS");
    CU_ASSERT_EQUAL(fake.refusals, 4);
    CU_ASSERT_EQUAL(fake.group.config.timeout_s, 7);
    unsetenv("EP_OVERLAP_CHUNKS");
    unsetenv("EP_OVERLAP_TIMEOUT");
    config.rank = 9; /* nobody's place: nothing can be told */
    REFUSED(epo_group_create(&config, &group), "rank");
    config.rank = 0;
    config.ranks = 1; /* nobody waits */
    config.chunks = -7;
    REFUSED(epo_group_create(&config, &group), "found -7");
    CU_ASSERT_EQUAL(fake.refusals, 4);
}

static void a_communicator_comes_alone(void) {
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    epo_bootstrap bootstrap = {sizeof bootstrap, NULL, gather_nothing, meet_nobody};
    const int members[] = {0};
    epo_group *group = NULL;
    int something;
    start();
    config.nccl_comm = &something;
    CU_ASSERT_EQUAL(epo_group_create(&config, &group), EPO_E_VERSION); /* wants CUDA's engine */
    config.members = members;
    config.nmembers = 1;
    REFUSED(epo_group_create(&config, &group), "members beside it");
    config.members = NULL;
    config.nmembers = 0;
    config.threads = fake_world();
    REFUSED(epo_group_create(&config, &group), "threads beside it");
    config.threads = NULL;
    config.engine = EPO_ENGINE_HOST;
    REFUSED(epo_group_create(&config, &group), "host engine");
    config.engine = EPO_ENGINE_AUTO;
    config.bootstrap = &bootstrap;
    REFUSED(epo_group_create(&config, &group), "a bootstrap beside it");
}

static void engine_choice_and_bootstrap(void) {
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    epo_bootstrap bootstrap = {sizeof bootstrap, NULL, gather_nothing, NULL};
    epo_group *group = NULL;
    start();
    config.engine = (epo_engine_kind)9;
    REFUSED(epo_group_create(&config, &group), "found 9");
    config.engine = EPO_ENGINE_CUDA; /* the engine linked in is another one */
    CU_ASSERT_EQUAL(epo_group_create(&config, &group), EPO_E_VERSION);
    config.engine = EPO_ENGINE_AUTO;
    config.bootstrap = &bootstrap;
    REFUSED(epo_group_create(&config, &group), "barrier is NULL");
    bootstrap.barrier = meet_nobody;
    CU_ASSERT_EQUAL(epo_group_create(&config, &group), EPO_OK);
    CU_ASSERT_PTR_EQUAL(fake.bootstrap.allgather, gather_nothing);
    CU_ASSERT_EQUAL(fake.group.config.engine, EPO_ENGINE_HOST);
    CU_ASSERT_PTR_NOT_NULL(strstr(fake.reason, "host engine: no CUDA engine installed"));
    bootstrap.size = 1;
    REFUSED(epo_group_create(&config, &group), "bootstrap");
    config.bootstrap = NULL;
    config.threads = fake_world();
    REFUSED(epo_group_create(&config, &group), "threads");
    config.rank = 1;
    config.ranks = 2;
    alive_all();
    CU_ASSERT_EQUAL(epo_group_create(&config, &group), EPO_OK);
    CU_ASSERT_PTR_EQUAL(fake.group.config.threads, fake_world());
}

/* The table of objects beside a plain list: addresses collide, go, and come back. */
static void what_is_alive_is_known(void) {
    enum { OBJECTS = 300, ROUNDS = 20000 };
    static char memory[OBJECTS][16];
    static int references[OBJECTS];
    unsigned state = 7, wrong = 0;
    for (int i = 0; i < ROUNDS; i++) {
        state = state * 1664525U + 1013904223U;
        const unsigned o = (state >> 12) % OBJECTS, what = (state >> 8) % 8;
        const bool was = references[o] > 0;
        if (what < 2) {
            wrong += !epo_alive_add(EPO_KIND_PLAN, memory[o]);
            references[o] = 1;
        } else if (what == 2) {
            wrong += epo_alive_retain(EPO_KIND_PLAN, memory[o]) != was;
            references[o] += was;
        } else if (what < 7) {
            wrong += epo_alive_drop(EPO_KIND_PLAN, memory[o]) != was;
            references[o] -= was;
        } else {
            wrong += epo_alive_drop(EPO_KIND_LAYER, memory[o]);
        }
        for (int k = 0; k < OBJECTS && i % 50 == 0; k++)
            wrong +=
                (epo_alive_check(EPO_KIND_PLAN, memory[k], "f") == EPO_OK) != (references[k] > 0);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    for (int k = 0; k < OBJECTS; k++)
        while (epo_alive_drop(EPO_KIND_PLAN, memory[k])) {
        }
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"version, status names, type sizes", library_facts},
        {"world, group and figures: NULL, engine called, its error", group_calls},
        {"buffer and plan: NULL, engine called, its error", buffer_and_plan_calls},
        {"layer: NULL, engine called, its error", layer_calls},
        {"structs of older programs", older_structs},
        {"structs of newer programs", newer_structs},
        {"structs that were not initialised", structs_without_a_size},
        {"choice of the engine, bootstrap, threads", engine_choice_and_bootstrap},
        {"a refusal is told to those that wait", a_refusal_is_told},
        {"a refusal is told by the engine", a_refusal_is_told_by_the_engine},
        {"a communicator comes alone", a_communicator_comes_alone},
        {"what is alive is known", what_is_alive_is_known},
        CU_TEST_INFO_NULL,
    };
    return unit_run("api", tests);
}
