/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "measure/rows.h"

#include <math.h>
#include <stdbool.h>

void measure_rows_to(const int64_t *chosen, int tokens, int top_k, int local, int rank,
                     float *rows) {
    for (int i = 0; i < tokens; i++, chosen += top_k)
        for (int k = 0; k < top_k; k++) {
            if (chosen[k] < 0)
                continue;
            int64_t peer = chosen[k] / local;
            bool seen = peer == rank;
            for (int j = 0; j < k; j++)
                seen = seen || (chosen[j] >= 0 && chosen[j] / local == peer);
            rows[peer] += seen ? 0 : 1;
        }
}

double measure_rows_least_ms(const float *rows, int ranks, double row_bytes,
                             const epo_group_info *info, double gbs) {
    double pair = 0, busiest = 0;
    for (int r = 0; r < ranks; r++) {
        double out = 0, in = 0;
        for (int p = 0; p < ranks; p++) {
            out += (double)rows[r * ranks + p];
            in += (double)rows[p * ranks + r];
            pair = fmax(pair, (double)rows[r * ranks + p]);
        }
        busiest = fmax(busiest, fmax(out, in));
    }
    if (!(gbs > 0))
        return 0;
    if (info->link_gbs > 0)
        return pair * row_bytes / (gbs * 1e6) + (pair > 0 ? info->link_us * 1e-3 : 0);
    return busiest * row_bytes / (gbs * 1e6);
}
