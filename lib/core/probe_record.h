/* SPDX-License-Identifier: Apache-2.0
 *
 * probe_record.h - what the probe says about a node and a process, as one record
 * of fixed size on a pipe.  Whoever reads it takes it for a stranger's word: the
 * probe runs as the user.
 */
#ifndef EPO_CORE_PROBE_RECORD_H
#define EPO_CORE_PROBE_RECORD_H

#include "core/facts.h"
#include "core/status.h"

#include <stdint.h>

#define EPO_PROBE_MAGIC UINT64_C(0x65706f70726f6265) /* "epoprobe" */
#define EPO_PROBE_VERSION 1u
#define EPO_PROBE_BYTES 32768
#define EPO_PROBE_FACTS_MAX 128
#define EPO_PROBE_KEY_MAX 64 /* bytes with the NUL, and so below */
#define EPO_PROBE_VALUE_MAX 1024
#define EPO_PROBE_SOURCE_MAX 256

/* Not known: why the probe ended early ("while it asked NVML").  Absent otherwise. */
#define EPO_PROBE_STOPPED "probe.stopped"

struct epo_probe_record {
    uint64_t magic;
    uint32_t version, size; /* EPO_PROBE_VERSION, EPO_PROBE_BYTES */
    uint32_t count, used;   /* facts, and bytes of `text` that they take */
    uint64_t checksum;      /* FNV-1a of count, used and `text` */
    /* Facts one behind the other: a letter for the kind (u unknown, n null, v as
     * people write it, t text), then key, value and source, each with its NUL.  The
     * rest is 0. */
    char text[EPO_PROBE_BYTES - 32];
};

/* True for a name that the probe may speak of: it cannot put words into a
 * configuration's mouth. */
int epo_probe_key_allowed(const char *key);

/* Every byte of a value or source that is not printable ASCII becomes '?'.  What
 * is too long becomes unknown.  EPO_E_OVERFLOW: too many facts for a record. */
epo_status epo_probe_record_write(const epo_facts *facts, struct epo_probe_record *record);
/* Checks all of the record, then puts its facts into `facts`.  EPO_E_VERSION: of
 * another release; EPO_E_ARG: no record; nothing is put then. */
epo_status epo_probe_record_read(const struct epo_probe_record *record, epo_facts *facts);

#endif
