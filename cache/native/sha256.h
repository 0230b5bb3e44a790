/* SHA-256 (FIPS 180-4) of one message, by the processor's own instructions where it has them.
 *
 * Knows bytes alone.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { CHUNK_BYTES = 64 };

static const uint32_t ROUND_KEYS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

typedef void (*Compression)(uint32_t state[8], const unsigned char *chunk);

static inline uint32_t turned(uint32_t word, int by) {
    return word >> by | word << (32 - by);
}

static void compress_plainly(uint32_t state[8], const unsigned char *chunk) {
    uint32_t words[64], s[8];
    for (int i = 0; i < 16; i++) {
        memcpy(&words[i], chunk + 4 * i, 4);
        words[i] = __builtin_bswap32(words[i]);
    }
    for (int i = 16; i < 64; i++) {
        uint32_t before_15 = words[i - 15], before_2 = words[i - 2];
        words[i] = words[i - 16] + words[i - 7] + (turned(before_15, 7) ^ turned(before_15, 18) ^ before_15 >> 3) +
                   (turned(before_2, 17) ^ turned(before_2, 19) ^ before_2 >> 10);
    }
    memcpy(s, state, sizeof s);
    for (int first = 0; first < 64; first += 8) {
/* a to h are not moved on: each round finds a one place before that of the last one, and after eight all are back. */
#define OF(place) s[((place) - i) & 7]
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            uint32_t a = OF(0), b = OF(1), c = OF(2), e = OF(4), f = OF(5), g = OF(6);
            uint32_t one = OF(7) + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + (g ^ (e & (f ^ g)));
            one += ROUND_KEYS[first + i] + words[first + i];
            OF(3) += one;
            OF(7) = one + (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) | (c & (a | b)));
        }
#undef OF
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("sha,sse4.1"))) static void compress_by_instructions(
    uint32_t state[8], const unsigned char *chunk
) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i words[4];
    for (int i = 0; i < 4; i++)
        words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(chunk + 16 * i)), big_endian);
    /* The instructions take the state's words a to h as two fours: a b e f, and c d g h. */
    __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
    const __m128i abef = _mm_alignr_epi8(abcd, efgh, 8), cdgh = _mm_blend_epi16(efgh, abcd, 0xF0);
    __m128i one = abef, other = cdgh;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        __m128i now = words[i % 4], last = words[(i + 3) % 4];
        __m128i keyed = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)(ROUND_KEYS + 4 * i)));
        other = _mm_sha256rnds2_epu32(other, one, keyed);
        one = _mm_sha256rnds2_epu32(one, other, _mm_shuffle_epi32(keyed, 0x0E));
        if (i < 12) { /* the four words that are next but three */
            __m128i begun = _mm_sha256msg1_epu32(now, words[(i + 1) % 4]);
            begun = _mm_add_epi32(begun, _mm_alignr_epi8(last, words[(i + 2) % 4], 4));
            words[i % 4] = _mm_sha256msg2_epu32(begun, last);
        }
    }
    one = _mm_shuffle_epi32(_mm_add_epi32(one, abef), 0x1B);
    other = _mm_shuffle_epi32(_mm_add_epi32(other, cdgh), 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(one, other, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(other, one, 8));
}

static Compression best_compression(void) {
    const unsigned int has_them = 1u << 29; /* bit_SHA, which not every compiler's <cpuid.h> names */
    unsigned int eax, ebx, ecx, edx;
    int is_told = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
    return is_told && (ebx & has_them) ? compress_by_instructions : compress_plainly;
}
#else
static Compression best_compression(void) {
    return compress_plainly;
}
#endif

/* The first 16 bytes of the digest. */
static void sha256(Compression compress, const unsigned char *message, size_t size, unsigned char *into) {
    uint32_t state[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    const unsigned char *end = message + size;
    for (; end - message >= CHUNK_BYTES; message += CHUNK_BYTES) compress(state, message);
    unsigned char last[2 * CHUNK_BYTES] = {0};
    size_t left = end - message, padded = left < CHUNK_BYTES - 8 ? CHUNK_BYTES : 2 * CHUNK_BYTES;
    uint64_t bits = __builtin_bswap64(8 * (uint64_t)size);
    memcpy(last, message, left);
    last[left] = 0x80;
    memcpy(last + padded - sizeof bits, &bits, sizeof bits);
    for (size_t done = 0; done < padded; done += CHUNK_BYTES) compress(state, last + done);
    for (int i = 0; i < 4; i++) {
        uint32_t word = __builtin_bswap32(state[i]);
        memcpy(into + 4 * i, &word, sizeof word);
    }
}
