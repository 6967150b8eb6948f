/* SPDX-License-Identifier: Apache-2.0
 *
 * hmac.c - SHA-256 as FIPS 180-4 has it, HMAC as RFC 2104.
 */
#include "core/hmac.h"

#include <string.h>

#define BLOCK 64

typedef struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    uint8_t block[BLOCK];
} sha256;

static const uint32_t rounds[BLOCK] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turned(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void put32(uint8_t *at, uint32_t v) {
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(v >> (24 - 8 * i));
}

static void schedule(const uint8_t *block, uint32_t w[BLOCK]) {
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < BLOCK; i++) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) +
               (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
}

static void compress(uint32_t state[8], const uint8_t *block) {
    uint32_t w[BLOCK], s[8];
    schedule(block, w);
    memcpy(s, state, sizeof s);
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
        const uint32_t most = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        const uint32_t t = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) + choice +
                           rounds[i] + w[i];
        const uint32_t u = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) + most;
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t;
        s[0] = t + u;
    }
    for (int i = 0; i < 8; i++)
        state[i] += s[i];
}

static void sha256_begin(sha256 *h) {
    static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, first, sizeof first);
    h->bytes = 0;
}

static void sha256_add(sha256 *h, const void *data, size_t bytes) {
    for (const uint8_t *from = data; bytes > 0;) {
        const size_t used = h->bytes % BLOCK, room = BLOCK - used;
        const size_t some = bytes < room ? bytes : room;
        memcpy(h->block + used, from, some);
        h->bytes += some;
        if (some == room)
            compress(h->state, h->block);
        from += some;
        bytes -= some;
    }
}

static void sha256_end(sha256 *h, uint8_t out[EPO_HMAC_BYTES]) {
    static const uint8_t pad[BLOCK] = {0x80};
    const uint64_t bits = 8 * h->bytes;
    uint8_t length[8];
    put32(length, (uint32_t)(bits >> 32));
    put32(length + 4, (uint32_t)bits);
    sha256_add(h, pad, 1 + (BLOCK + 55 - h->bytes % BLOCK) % BLOCK);
    sha256_add(h, length, sizeof length);
    for (int i = 0; i < 8; i++)
        put32(out + 4 * i, h->state[i]);
}

void epo_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t bytes,
                     uint8_t out[EPO_HMAC_BYTES]) {
    uint8_t inner[BLOCK] = {0}, outer[BLOCK];
    sha256 h;
    memcpy(inner, key, key_bytes < BLOCK ? key_bytes : BLOCK);
    for (int i = 0; i < BLOCK; i++) {
        outer[i] = inner[i] ^ 0x5c;
        inner[i] ^= 0x36;
    }
    sha256_begin(&h);
    sha256_add(&h, inner, BLOCK);
    sha256_add(&h, data, bytes);
    sha256_end(&h, out);
    sha256_begin(&h);
    sha256_add(&h, outer, BLOCK);
    sha256_add(&h, out, EPO_HMAC_BYTES);
    sha256_end(&h, out);
}

bool epo_hmac_same(const uint8_t a[EPO_HMAC_BYTES], const uint8_t b[EPO_HMAC_BYTES]) {
    uint8_t differ = 0;
    for (int i = 0; i < EPO_HMAC_BYTES; i++)
        differ |= (uint8_t)(a[i] ^ b[i]);
    return differ == 0;
}
