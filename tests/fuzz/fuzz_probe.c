/* SPDX-License-Identifier: Apache-2.0
 *
 * The probe's record, which is a stranger's word: as it comes, and with everything set
 * right that a forger would set right (magic, sizes, checksum).
 */
#include "fuzz.h"

#include "core/probe_record.h"

static uint64_t hash(uint64_t sum, const void *bytes, size_t length) {
    const uint8_t *at = bytes;
    for (size_t i = 0; i < length; i++)
        sum = (sum ^ at[i]) * UINT64_C(1099511628211);
    return sum;
}

static void forge(struct epo_probe_record *r) {
    r->magic = EPO_PROBE_MAGIC;
    r->version = EPO_PROBE_VERSION;
    r->size = EPO_PROBE_BYTES;
    r->count %= EPO_PROBE_FACTS_MAX + 2;
    r->checksum = hash(UINT64_C(14695981039346656037), &r->count, sizeof r->count);
    r->checksum = hash(r->checksum, &r->used, sizeof r->used);
    r->checksum = hash(r->checksum, r->text, sizeof r->text);
}

/* What was taken has names that it may have, and can be written and read again. */
static void use(const epo_facts *facts) {
    static struct epo_probe_record again;
    epo_facts *back = epo_facts_create();
    for (size_t i = 0; i < epo_facts_count(facts); i++)
        if (!epo_probe_key_allowed(epo_facts_at(facts, i)->key))
            abort();
    if (epo_probe_record_write(facts, &again) == EPO_OK &&
        (epo_probe_record_read(&again, back) != EPO_OK ||
         epo_facts_count(back) != epo_facts_count(facts)))
        abort();
    epo_facts_destroy(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct epo_probe_record record;
    memset(&record, 0, sizeof record);
    memcpy(&record, data, size < sizeof record ? size : sizeof record);
    for (int forged = 0; forged < 2; forged++) {
        epo_facts *facts = epo_facts_create();
        if (epo_probe_record_read(&record, facts) == EPO_OK)
            use(facts);
        else if (epo_facts_count(facts) != 0)
            abort();
        epo_facts_destroy(facts);
        forge(&record);
    }
    return 0;
}
