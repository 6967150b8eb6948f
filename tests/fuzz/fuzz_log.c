/* SPDX-License-Identifier: Apache-2.0
 *
 * Training logs: iterations, configuration dumps, symptoms, statistics.
 */
#include "fuzz.h"

#include "core/facts.h"
#include "rules/settings.h"
#include "trace/log_stats.h"
#include "trace/symptoms.h"

static epo_status put(void *context, const char *path, const char *value, uint64_t line) {
    (void)line;
    return epo_setting_put(context, path, value, "fuzz", NULL);
}

static void use(epo_log *log) {
    epo_window_stats stats;
    epo_loss_comparison loss;
    epo_log_finish(log);
    (void)epo_log_stats(log, epo_log_steady_window(log), &stats);
    epo_log_compare_losses(log, log, &loss);
    if (loss.common != loss.identical && loss.lost == 0)
        abort(); /* a log is identical to itself */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char path[64];
    int fd = fuzz_file(data, size, path, sizeof path);
    epo_lines *lines = NULL;
    static epo_symptom_scan *scan; /* its matcher is made once */
    epo_facts *facts = epo_facts_create();
    epo_log *log = epo_log_create();
    size_t length;
    epo_status status = fd < 0 ? EPO_E_SYSTEM : epo_lines_open(path, "fuzz", NULL, NULL, &lines);
    if (status == EPO_OK && scan == NULL)
        status = epo_symptom_scan_create(&scan);
    for (const char *line; status == EPO_OK && (line = epo_lines_next(lines, &length)) != NULL;) {
        epo_symptom_scan_line(scan, line, length, epo_lines_number(lines));
        status = epo_log_feed(log, line, epo_lines_number(lines), put, facts);
    }
    if (status == EPO_OK)
        use(log);
    (void)epo_settings_derive(facts);
    epo_log_destroy(log);
    epo_facts_destroy(facts);
    epo_lines_close(lines);
    if (fd >= 0)
        close(fd);
    return 0;
}
