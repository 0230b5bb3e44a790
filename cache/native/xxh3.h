/* XXH3-128 of short messages, without a seed.
 *
 * Written after the specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) for the lengths
 * that a parent's hash and a block of a usual size have together. Knows bytes alone.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__SIZEOF_INT128__) || !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs a little-endian machine with integers of 128 bits; without this module hashes are the same"
#endif

enum {
    LANE_BYTES = 32,                  /* that are mixed in at a time */
    SHORT_BYTES = 128,                /* up to here both ends of a message are mixed in, towards its middle */
    XXH3_MOST_BYTES = 240,                 /* of a message; XXH3 goes on in another way */
    SECOND_SECRET = 3,                /* where the secret is begun anew, after the first SHORT_BYTES */
    LAST_SECRET = 136 - 17 - 16,      /* the secret of a message's last 32 bytes */
};

static const uint64_t PRIME_1 = 0x9E3779B185EBCA87, PRIME_2 = 0xC2B2AE3D27D4EB4F, PRIME_4 = 0x85EBCA77C2B2AE63;

/* As far as messages of this length need it. */
static const unsigned char SECRET[] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3,
};

typedef struct {
    uint64_t low, high;
} Lanes;

static inline uint64_t word(const unsigned char *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t folded_product(uint64_t one, uint64_t other) {
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t mixed(const unsigned char *half, const unsigned char *secret) {
    return folded_product(word(half) ^ word(secret), word(half + 8) ^ word(secret + 8));
}

/* 32 bytes go in, 16 of them from each place. */
static inline Lanes fed(Lanes lanes, const unsigned char *one, const unsigned char *other, const unsigned char *secret) {
    lanes.low = (lanes.low + mixed(one, secret)) ^ (word(other) + word(other + 8));
    lanes.high = (lanes.high + mixed(other, secret + 16)) ^ (word(one) + word(one + 8));
    return lanes;
}

static inline uint64_t avalanche(uint64_t value) {
    value ^= value >> 37;
    value *= 0x165667919E3779F9;
    return value ^ (value >> 32);
}

static inline Lanes fed_with_short(Lanes lanes, const unsigned char *message, size_t size) {
    for (size_t left = (size - 1) / LANE_BYTES + 1; left-- > 0;) {
        const unsigned char *from_end = message + size - 16 * (left + 1);
        lanes = fed(lanes, message + 16 * left, from_end, SECRET + LANE_BYTES * left);
    }
    return lanes;
}

static inline Lanes fed_with_long(Lanes lanes, const unsigned char *message, size_t size) {
    size_t done = 0;
    for (; done < SHORT_BYTES; done += LANE_BYTES)
        lanes = fed(lanes, message + done, message + done + 16, SECRET + done);
    lanes.low = avalanche(lanes.low);
    lanes.high = avalanche(lanes.high);
    for (; done + LANE_BYTES <= size; done += LANE_BYTES)
        lanes = fed(lanes, message + done, message + done + 16, SECRET + SECOND_SECRET + done - SHORT_BYTES);
    return fed(lanes, message + size - 16, message + size - 32, SECRET + LAST_SECRET);
}

/* The digest of a message of 17 to XXH3_MOST_BYTES bytes, 16 bytes as xxhash spells them: big-endian. */
static void xxh3_128(const unsigned char *message, size_t size, unsigned char *into) {
    Lanes lanes = {size * PRIME_1, 0};
    lanes = size <= SHORT_BYTES ? fed_with_short(lanes, message, size) : fed_with_long(lanes, message, size);
    uint64_t low = avalanche(lanes.low + lanes.high);
    uint64_t high = 0 - avalanche(lanes.low * PRIME_1 + lanes.high * PRIME_4 + size * PRIME_2);
    uint64_t spelled[] = {__builtin_bswap64(high), __builtin_bswap64(low)};
    memcpy(into, spelled, sizeof spelled);
}
