/* SPDX-License-Identifier: Apache-2.0
 *
 * configs.h - the configurations of a buffer, a layer and a routing from their sizes.
 */
#ifndef EPO_TESTS_CONFIGS_H
#define EPO_TESTS_CONFIGS_H

#include "ep_overlap.h"

static inline epo_buffer_config config_buffer(int experts, int hidden, int top_k, int max_tokens) {
    epo_buffer_config config = EPO_BUFFER_CONFIG_INIT;
    config.experts = experts;
    config.hidden = hidden;
    config.top_k = top_k;
    config.max_tokens = max_tokens;
    return config;
}

static inline epo_layer_config config_layer(int experts, int hidden, int ffn, const void *w1,
                                            const void *w2) {
    epo_layer_config config = EPO_LAYER_CONFIG_INIT;
    config.experts = experts;
    config.hidden = hidden;
    config.ffn = ffn;
    config.w1 = w1;
    config.w2 = w2;
    return config;
}

static inline epo_routing config_routing(int tokens, int top_k, const int64_t *experts,
                                         const float *weights) {
    epo_routing routing = EPO_ROUTING_INIT;
    routing.tokens = tokens;
    routing.top_k = top_k;
    routing.experts = experts;
    routing.weights = weights;
    return routing;
}

#endif
