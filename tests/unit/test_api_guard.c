/* SPDX-License-Identifier: Apache-2.0
 *
 * The shared library as a program sees it, with the real host engine: every function with
 * NULL, structs of wrong sizes, calls in the wrong order, objects that are destroyed
 * twice over, several threads.
 */
#include "configs.h"
#include "ep_overlap.h"
#include "unit.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { E = 4, H = 8, F = 8, K = 2, T = 6 };

#define REFUSED(call, status, words)                                                               \
    do {                                                                                           \
        epo_status refused_ = (call);                                                              \
        if (refused_ != (status) || strstr(epo_error(), words) == NULL)                            \
            fprintf(stderr, "%s: %s: %s\n", #call, epo_status_name(refused_), epo_error());        \
        CU_ASSERT_EQUAL(refused_, status);                                                         \
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_error(), words));                                        \
    } while (0)

static epo_group_config group_config(epo_world *world, int rank, int ranks) {
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    config.engine = EPO_ENGINE_HOST;
    config.threads = world;
    config.rank = rank;
    config.ranks = ranks;
    config.timeout_s = 20;
    return config;
}

static epo_buffer_config buffer_config(void) { return config_buffer(E, H, K, T); }
static epo_layer_config layer_config(const float *w) { return config_layer(E, H, F, w, w); }

/* All that a rank of one has. */
typedef struct objects {
    epo_world *world;
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    epo_plan *plan;
    float weights[E * 2 * F * H], x[T * H], y[T * H];
    int64_t experts[T * K];
} objects;

static objects *make_objects(void) {
    objects *o = calloc(1, sizeof *o);
    CU_ASSERT_PTR_NOT_NULL_FATAL(o);
    epo_routing routing = EPO_ROUTING_INIT;
    routing.tokens = T;
    routing.top_k = K;
    routing.experts = o->experts;
    for (int i = 0; i < T * K; i++)
        o->experts[i] = i % E;
    CU_ASSERT_EQUAL_FATAL(epo_world_create_on(EPO_ENGINE_HOST, 1, &o->world), EPO_OK);
    epo_group_config g = group_config(o->world, 0, 1);
    epo_buffer_config b = buffer_config();
    epo_layer_config l = layer_config(o->weights);
    CU_ASSERT_EQUAL_FATAL(epo_group_create(&g, &o->group), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_buffer_create(o->group, &b, &o->buffer), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_layer_create(o->group, &l, &o->layer), EPO_OK);
    CU_ASSERT_EQUAL_FATAL(epo_plan_create(o->buffer, &routing, NULL, &o->plan), EPO_OK);
    return o;
}

static void drop_objects(objects *o) {
    epo_plan_release(o->plan);
    CU_ASSERT_EQUAL(epo_layer_destroy(o->layer), EPO_OK);
    CU_ASSERT_EQUAL(epo_buffer_destroy(o->buffer), EPO_OK);
    CU_ASSERT_EQUAL(epo_group_destroy(o->group), EPO_OK);
    epo_world_destroy(o->world);
    free(o);
}

/* ---- NULL -------------------------------------------------------------------- */

static void nothing_at_all(void) {
    uint64_t bytes = 7;
    const epo_interval *intervals;
    CU_ASSERT_PTR_NOT_NULL(epo_version());
    CU_ASSERT_PTR_NOT_NULL(epo_status_name((epo_status)99));
    CU_ASSERT_EQUAL(epo_dtype_size((epo_dtype)99), 0);
    REFUSED(epo_world_create(1, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_world_create_on(EPO_ENGINE_HOST, 1, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_create(NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_query(NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_async_error(NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_barrier(NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_allreduce(NULL, NULL, 1, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_buffer_bytes(NULL, NULL, &bytes), EPO_E_ARG, "NULL");
    REFUSED(epo_buffer_create(NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_plan_create(NULL, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_plan_rows(NULL, &bytes), EPO_E_ARG, "NULL");
    REFUSED(epo_plan_experts(NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_plan_query(NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_dispatch(NULL, NULL, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_combine(NULL, NULL, NULL, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_layer_create(NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_layer_bytes(NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_forward(NULL, NULL, NULL, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_backward(NULL, NULL, NULL, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_layer_wgrad_flush(NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_layer_wgrad_begin(NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_wgrad_flush(NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_schedule_run(NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_stats(NULL, NULL, 0), EPO_E_ARG, "NULL");
    REFUSED(epo_record_start(NULL, 1), EPO_E_ARG, "NULL");
    REFUSED(epo_record_stop(NULL, &intervals, &bytes, &bytes), EPO_E_ARG, "NULL");
    CU_ASSERT(epo_group_destroy(NULL) == EPO_OK && epo_buffer_destroy(NULL) == EPO_OK);
    CU_ASSERT(epo_layer_destroy(NULL) == EPO_OK && bytes == 7);
    epo_world_destroy(NULL);
    epo_plan_retain(NULL);
    epo_plan_release(NULL);
    epo_saved_release(NULL);
}

/* The object is there, its arguments are not. */
static void objects_without_arguments(void) {
    objects *o = make_objects();
    epo_buffer_config b = buffer_config();
    epo_layer_config l = layer_config(o->weights);
    REFUSED(epo_group_query(o->group, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_allreduce(o->group, NULL, 1, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_buffer_bytes(o->group, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_buffer_bytes(o->group, &b, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_buffer_create(o->group, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_buffer_create(o->group, &b, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_plan_create(o->buffer, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_plan_rows(o->plan, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_plan_query(o->plan, NULL), EPO_E_ARG, "NULL");
    CU_ASSERT_EQUAL(epo_plan_experts(o->plan, NULL, NULL), EPO_OK); /* either may be NULL */
    REFUSED(epo_dispatch(o->plan, NULL, o->y, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_combine(o->plan, o->x, NULL, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_layer_create(o->group, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_layer_create(o->group, &l, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_layer_bytes(o->layer, o->plan, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_forward(o->layer, NULL, o->x, o->y, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_forward(o->layer, o->plan, NULL, o->y, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_backward(o->layer, NULL, o->x, o->y, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_schedule_run(o->group, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(epo_group_stats(o->group, NULL, 0), EPO_E_ARG, "NULL");
    REFUSED(epo_record_stop(o->group, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    CU_ASSERT_EQUAL(epo_forward(o->layer, o->plan, o->x, o->y, NULL, NULL), EPO_OK); /* it lives */
    drop_objects(o);
}

static epo_status no_node(void *ctx, epo_node node, int layer, epo_step *step, epo_stream stream) {
    return (void)ctx, (void)node, (void)layer, (void)step, (void)stream, EPO_OK;
}

/* Steps' layers are looked at before anything is begun; what is taken over is, all the same. */
static void a_schedule_of_a_layer_that_is_gone(void) {
    objects *o = make_objects();
    epo_layer *gone = NULL;
    const epo_layer_config l = layer_config(o->weights);
    CU_ASSERT_EQUAL(epo_layer_create(o->group, &l, &gone), EPO_OK);
    epo_step back = {.layer = gone, .dy = o->x, .dx = o->y};
    epo_step on = {.layer = gone, .plan = o->plan, .x = o->x, .y = o->y};
    epo_schedule s = EPO_SCHEDULE_INIT;
    s.layers = 1;
    s.node = no_node;
    CU_ASSERT_EQUAL(epo_forward(o->layer, o->plan, o->x, o->y, &back.saved, NULL), EPO_OK);
    CU_ASSERT_EQUAL(epo_layer_destroy(gone), EPO_OK);
    s.backward = &back;
    REFUSED(epo_schedule_run(o->group, &s, NULL), EPO_E_ARG, "this layer does not exist");
    CU_ASSERT_PTR_NULL(back.saved);
    s.backward = NULL;
    s.forward = &on;
    REFUSED(epo_schedule_run(o->group, &s, NULL), EPO_E_ARG, "this layer does not exist");
    on.layer = o->layer;
    CU_ASSERT_EQUAL(epo_schedule_run(o->group, &s, NULL), EPO_OK); /* the group lives */
    epo_saved_release(on.saved);
    drop_objects(o);
}

/* ---- sizes --------------------------------------------------------------------- */

static void structs_of_no_size(void) {
    objects *o = make_objects();
    epo_group *group = NULL;
    epo_buffer *buffer = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan = NULL;
    uint64_t bytes;
    static const size_t sizes[] = {0, 1, 7};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        epo_group_config g = group_config(o->world, 0, 1);
        epo_buffer_config b = buffer_config();
        epo_layer_config l = layer_config(o->weights);
        epo_routing r = EPO_ROUTING_INIT;
        epo_schedule s = EPO_SCHEDULE_INIT;
        epo_group_info group_info = {.size = sizes[i]};
        epo_plan_info plan_info = {.size = sizes[i]};
        epo_stats stats = {.size = sizes[i]};
        g.size = b.size = l.size = r.size = s.size = sizes[i];
        REFUSED(epo_group_create(&g, &group), EPO_E_ARG, "size");
        REFUSED(epo_buffer_bytes(o->group, &b, &bytes), EPO_E_ARG, "size");
        REFUSED(epo_buffer_create(o->group, &b, &buffer), EPO_E_VERSION, "size");
        REFUSED(epo_layer_create(o->group, &l, &layer), EPO_E_ARG, "size");
        REFUSED(epo_plan_create(o->buffer, &r, NULL, &plan), EPO_E_VERSION, "size");
        REFUSED(epo_schedule_run(o->group, &s, NULL), EPO_E_VERSION, "size");
        REFUSED(epo_group_query(o->group, &group_info), EPO_E_ARG, "size");
        REFUSED(epo_plan_query(o->plan, &plan_info), EPO_E_ARG, "size");
        REFUSED(epo_group_stats(o->group, &stats, 0), EPO_E_ARG, "size");
    }
    CU_ASSERT(group == NULL && buffer == NULL && layer == NULL && plan == NULL);
    drop_objects(o);
}

/* A newer program's struct: what this library does not know must be zero. */
static void structs_of_tomorrow(void) {
    objects *o = make_objects();
    epo_layer *layer = NULL;
    struct {
        epo_layer_config config;
        uint64_t more[4];
    } l = {.config = layer_config(o->weights)};
    l.config.size = sizeof l;
    CU_ASSERT_EQUAL(epo_layer_create(o->group, &l.config, &layer), EPO_OK);
    CU_ASSERT_EQUAL(epo_layer_destroy(layer), EPO_OK);
    l.more[2] = 1;
    CU_ASSERT_NOT_EQUAL(epo_layer_create(o->group, &l.config, &layer), EPO_OK);
    struct {
        epo_stats stats;
        uint64_t more[4];
    } s = {.stats.size = sizeof s, .more = {9, 9, 9, 9}};
    CU_ASSERT_EQUAL(epo_group_stats(o->group, &s.stats, 0), EPO_OK);
    drop_objects(o);
}

/* ---- order ---------------------------------------------------------------------- */

static void wrong_order_is_told_and_harmless(void) {
    objects *o = make_objects();
    epo_saved *saved = NULL;
    REFUSED(epo_group_destroy(o->group), EPO_E_STATE, "buffer");
    REFUSED(epo_buffer_destroy(o->buffer), EPO_E_STATE, "plan");
    CU_ASSERT_EQUAL(epo_forward(o->layer, o->plan, o->x, o->y, &saved, NULL), EPO_OK);
    REFUSED(epo_layer_destroy(o->layer), EPO_E_STATE, "saved");
    CU_ASSERT_EQUAL(epo_backward(o->layer, saved, o->x, o->y, NULL, NULL), EPO_OK);
    REFUSED(epo_backward(o->layer, saved, o->x, o->y, NULL, NULL), EPO_E_STATE, "used before");
    epo_saved_release(saved); /* a second time */
    epo_plan_retain(o->plan);
    epo_plan_release(o->plan);
    const epo_interval *intervals = NULL;
    uint64_t count = 1, dropped = 1;
    epo_status stopped = epo_record_stop(o->group, &intervals, &count, &dropped);
    CU_ASSERT(stopped == EPO_E_STATE || (stopped == EPO_OK && count == 0));
    CU_ASSERT_EQUAL(epo_record_start(o->group, 10), EPO_OK);
    CU_ASSERT_EQUAL(epo_record_start(o->group, 10), EPO_OK); /* ends the earlier one */
    CU_ASSERT_EQUAL(epo_record_stop(o->group, &intervals, &count, &dropped), EPO_OK);
    CU_ASSERT_EQUAL(epo_group_wgrad_flush(o->group, NULL), EPO_OK); /* nothing is delayed */
    drop_objects(o);
}

static void twice_is_told_and_harmless(void) {
    objects *o = make_objects();
    epo_saved *saved = NULL;
    uint64_t rows;
    CU_ASSERT_EQUAL(epo_forward(o->layer, o->plan, o->x, o->y, &saved, NULL), EPO_OK);
    epo_plan_release(o->plan);
    epo_plan_release(o->plan); /* of the saved pass's reference nothing is taken */
    epo_plan_retain(o->plan);
    REFUSED(epo_plan_rows(o->plan, &rows), EPO_E_ARG, "this plan does not exist");
    REFUSED(epo_forward(o->layer, o->plan, o->x, o->y, NULL, NULL), EPO_E_ARG,
            "this plan does not exist");
    CU_ASSERT_EQUAL(epo_group_async_error(o->group), EPO_OK);
    CU_ASSERT_EQUAL(epo_backward(o->layer, saved, o->x, o->y, NULL, NULL), EPO_OK);
    CU_ASSERT_EQUAL(epo_layer_destroy(o->layer), EPO_OK);
    REFUSED(epo_layer_destroy(o->layer), EPO_E_ARG, "this layer does not exist");
    REFUSED(epo_layer_wgrad_flush(o->layer, NULL), EPO_E_ARG, "destroyed before");
    REFUSED(epo_layer_wgrad_begin(o->layer), EPO_E_ARG, "destroyed before");
    REFUSED(epo_backward(o->layer, NULL, o->x, o->y, NULL, NULL), EPO_E_ARG, "this layer");
    CU_ASSERT_EQUAL(epo_buffer_destroy(o->buffer), EPO_OK);
    REFUSED(epo_buffer_destroy(o->buffer), EPO_E_ARG, "this buffer does not exist");
    REFUSED(epo_buffer_destroy((epo_buffer *)o->group), EPO_E_ARG,
            "a group was given for a buffer");
    CU_ASSERT_EQUAL(epo_group_destroy(o->group), EPO_OK);
    REFUSED(epo_group_destroy(o->group), EPO_E_ARG, "this group does not exist");
    REFUSED(epo_group_barrier(o->group), EPO_E_ARG, "this group does not exist");
    epo_saved_release(saved); /* nor does what it had saved */
    REFUSED(epo_backward(NULL, saved, o->x, o->y, NULL, NULL), EPO_E_STATE, "used before");
    epo_world_destroy(o->world);
    epo_world_destroy(o->world);
    epo_group_config config = group_config(o->world, 0, 1);
    epo_group *group = NULL;
    REFUSED(epo_group_create(&config, &group), EPO_E_ARG, "this world does not exist");
    free(o);
}

/* Two threads end the same group: one does, the other is told. */
static void *end_group(void *group) {
    epo_status status = epo_group_destroy(group);
    return status == EPO_OK ? (void *)1 : status == EPO_E_ARG ? NULL : (void *)7;
}

static void twice_at_once(void) {
    for (int i = 0; i < 50; i++) {
        epo_world *world = NULL;
        epo_group *group = NULL;
        pthread_t thread[2];
        void *ended[2];
        CU_ASSERT_EQUAL_FATAL(epo_world_create_on(EPO_ENGINE_HOST, 1, &world), EPO_OK);
        epo_group_config config = group_config(world, 0, 1);
        CU_ASSERT_EQUAL_FATAL(epo_group_create(&config, &group), EPO_OK);
        for (int t = 0; t < 2; t++)
            CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[t], NULL, end_group, group), 0);
        for (int t = 0; t < 2; t++)
            pthread_join(thread[t], &ended[t]);
        CU_ASSERT_EQUAL((intptr_t)ended[0] + (intptr_t)ended[1], 1);
        epo_world_destroy(world);
    }
}

/* ---- threads -------------------------------------------------------------------- */

static void *whole_life(void *failed) {
    for (int i = 0; i < 20; i++) {
        epo_world *world = NULL;
        epo_group *group = NULL;
        epo_group_config config;
        float sum = 1;
        bool fine = epo_world_create_on(EPO_ENGINE_HOST, 1, &world) == EPO_OK;
        config = group_config(world, 0, 1);
        fine = fine && epo_group_create(&config, &group) == EPO_OK &&
               epo_group_allreduce(group, &sum, 1, NULL) == EPO_OK && sum == 1 &&
               epo_group_destroy(group) == EPO_OK;
        epo_world_destroy(world);
        if (!fine)
            *(int *)failed = 1;
    }
    return NULL;
}

static void groups_of_several_threads(void) {
    pthread_t thread[4];
    int failed[4] = {0};
    for (int i = 0; i < 4; i++)
        CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[i], NULL, whole_life, &failed[i]), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
        CU_ASSERT_EQUAL(failed[i], 0);
    }
}

typedef struct rank {
    epo_world *world;
    int rank;
    int failed;
} rank;

static void *rank_of_two(void *context) {
    rank *r = context;
    epo_group_config config = group_config(r->world, r->rank, 2);
    epo_group *group = NULL;
    float sum = (float)(r->rank + 1);
    r->failed = epo_group_create(&config, &group) != EPO_OK ||
                epo_group_allreduce(group, &sum, 1, NULL) != EPO_OK || sum != 3 ||
                epo_group_barrier(group) != EPO_OK || epo_group_destroy(group) != EPO_OK;
    return NULL;
}

static void two_ranks_of_one_process(void) {
    rank r[2] = {{.rank = 0}, {.rank = 1}};
    pthread_t thread[2];
    CU_ASSERT_EQUAL_FATAL(epo_world_create_on(EPO_ENGINE_HOST, 2, &r[0].world), EPO_OK);
    r[1].world = r[0].world;
    for (int i = 0; i < 2; i++)
        CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[i], NULL, rank_of_two, &r[i]), 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(thread[i], NULL);
        CU_ASSERT_EQUAL(r[i].failed, 0);
    }
    epo_world_destroy(r[0].world);
}

static void *fail_elsewhere(void *other) {
    *(int *)other = epo_error()[0] == '\0' && epo_group_barrier(NULL) == EPO_E_ARG &&
                    strstr(epo_error(), "group") != NULL;
    return NULL;
}

/* Whatever the first one answers there, the object is gone. */
static int destroy_twice(objects *o) {
    epo_plan_release(o->plan);
    const epo_status buffer = epo_buffer_destroy(o->buffer), layer = epo_layer_destroy(o->layer);
    return buffer == EPO_E_STATE || layer == EPO_E_STATE ||
           epo_buffer_destroy(o->buffer) != EPO_E_ARG || epo_layer_destroy(o->layer) != EPO_E_ARG;
}

static void twice_in_a_child(void) {
    objects *o = make_objects();
    int status = -1;
    const pid_t child = fork();
    if (child == 0)
        _exit(destroy_twice(o));
    CU_ASSERT_EQUAL(waitpid(child, &status, 0), child);
    CU_ASSERT_EQUAL(status, 0);
    drop_objects(o);
}

static void an_error_belongs_to_its_thread(void) {
    pthread_t thread;
    char before[512];
    int fine = 0;
    REFUSED(epo_world_create(-1, NULL), EPO_E_ARG, "NULL");
    snprintf(before, sizeof before, "%s", epo_error());
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, fail_elsewhere, &fine), 0);
    pthread_join(thread, NULL);
    CU_ASSERT_EQUAL(fine, 1);
    CU_ASSERT_STRING_EQUAL(epo_error(), before);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"every function with NULL", nothing_at_all},
        {"objects without arguments", objects_without_arguments},
        {"a schedule of a layer that is gone", a_schedule_of_a_layer_that_is_gone},
        {"structs of no size", structs_of_no_size},
        {"structs of tomorrow", structs_of_tomorrow},
        {"wrong order is told and harmless", wrong_order_is_told_and_harmless},
        {"twice is told and harmless", twice_is_told_and_harmless},
        {"twice at once", twice_at_once},
        {"twice in a child", twice_in_a_child},
        {"groups of several threads", groups_of_several_threads},
        {"two ranks of one process", two_ranks_of_one_process},
        {"an error belongs to its thread", an_error_belongs_to_its_thread},
        CU_TEST_INFO_NULL,
    };
    return unit_run("api_guard", tests);
}
