/* SPDX-License-Identifier: Apache-2.0
 *
 * hmac.h - HMAC-SHA256 (RFC 2104, FIPS 180-4), for a proof that one holds a key.  No
 * library that has it goes by one name on all nodes and in all containers.
 */
#ifndef EPO_CORE_HMAC_H
#define EPO_CORE_HMAC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EPO_HMAC_BYTES 32
#define EPO_HMAC_KEY_MAX 64

/* key_bytes: EPO_HMAC_KEY_MAX at most; a longer key's rest is not looked at. */
void epo_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t bytes,
                     uint8_t out[EPO_HMAC_BYTES]);
/* Takes as long whatever differs. */
bool epo_hmac_same(const uint8_t a[EPO_HMAC_BYTES], const uint8_t b[EPO_HMAC_BYTES]);

#endif
