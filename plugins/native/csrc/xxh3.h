// XXH3-128 without a seed, of a buffer that arrives in pieces and stays where it is.
//
// The algorithm is that of the xxHash specification (XXH3, 128 bits, default secret). Because the bytes stay in place,
// the state is eight numbers and a position: nothing is copied into a buffer of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvloom {

struct Digest {
    uint64_t low, high;
};

namespace xxh3 {

constexpr uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
                   P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t MX1 = 0x165667919E3779F9, MX2 = 0x9FB21C651E98DF25;
constexpr size_t STRIPE = 64, STRIPES_OF_A_BLOCK = 16, SECRET_BYTES = 192, MIDDLE_BYTES = 240;

alignas(64) constexpr uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71,
    0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3,
    0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8,
    0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa,
    0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b,
    0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95,
    0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline uint32_t read32(const uint8_t* at) {
    uint32_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
inline uint64_t read64(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
inline uint64_t secret(size_t at) { return read64(SECRET + at); }

inline Digest multiply(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}
inline uint64_t folded(uint64_t a, uint64_t b) {
    const Digest product = multiply(a, b);
    return product.low ^ product.high;
}
inline uint64_t avalanche(uint64_t h) {
    h = (h ^ (h >> 37)) * MX1;
    return h ^ (h >> 32);
}
inline uint64_t avalanche64(uint64_t h) {
    h = (h ^ (h >> 33)) * P64_2;
    h = (h ^ (h >> 29)) * P64_3;
    return h ^ (h >> 32);
}

// -- up to 240 bytes ------------------------------------------------------------------------------------------------

inline uint64_t mix16(const uint8_t* in, size_t at) {
    return folded(read64(in) ^ secret(at), read64(in + 8) ^ secret(at + 8));
}
inline Digest mix32(Digest acc, const uint8_t* a, const uint8_t* b, size_t at) {
    acc.low = (acc.low + mix16(a, at)) ^ (read64(b) + read64(b + 8));
    acc.high = (acc.high + mix16(b, at + 16)) ^ (read64(a) + read64(a + 8));
    return acc;
}
inline Digest finished(Digest acc, size_t size) {
    const uint64_t high = acc.low * P64_1 + acc.high * P64_4 + size * P64_2;
    return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

inline Digest hash_short(const uint8_t* in, size_t size) {
    if (size == 0) return {avalanche64(secret(64) ^ secret(72)), avalanche64(secret(80) ^ secret(88))};
    if (size < 4) {
        const uint32_t low = (uint32_t{in[0]} << 16) | (uint32_t{in[size >> 1]} << 24) | in[size - 1] | (uint32_t(size) << 8);
        const uint32_t swapped = __builtin_bswap32(low), high = (swapped << 13) | (swapped >> 19);
        return {avalanche64(low ^ uint64_t{read32(SECRET) ^ read32(SECRET + 4)}),
                avalanche64(high ^ uint64_t{read32(SECRET + 8) ^ read32(SECRET + 12)})};
    }
    if (size <= 8) {
        const uint64_t both = read32(in) + (uint64_t{read32(in + size - 4)} << 32);
        Digest h = multiply(both ^ secret(16) ^ secret(24), P64_1 + (size << 2));
        h.high += h.low << 1;
        h.low ^= h.high >> 3;
        h.low = (h.low ^ (h.low >> 35)) * MX2;
        return {h.low ^ (h.low >> 28), avalanche(h.high)};
    }
    if (size <= 16) {
        const uint64_t last = read64(in + size - 8);
        Digest h = multiply(read64(in) ^ last ^ secret(32) ^ secret(40), P64_1);
        h.low += uint64_t{size - 1} << 54;
        const uint64_t mixed = last ^ secret(48) ^ secret(56);
        h.high += mixed + uint64_t{static_cast<uint32_t>(mixed)} * (P32_2 - 1);
        h.low ^= __builtin_bswap64(h.high);
        Digest end = multiply(h.low, P64_2);
        end.high += h.high * P64_2;
        return {avalanche(end.low), avalanche(end.high)};
    }
    Digest acc = {size * P64_1, 0};
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;) acc = mix32(acc, in + 16 * i, in + size - 16 * (i + 1), 32 * i);
        return finished(acc, size);
    }
    for (size_t i = 0; i < 128; i += 32) acc = mix32(acc, in + i, in + i + 16, i);
    acc = {avalanche(acc.low), avalanche(acc.high)};
    for (size_t i = 128; i + 32 <= size; i += 32) acc = mix32(acc, in + i, in + i + 16, 3 + i - 128);
    return finished(mix32(acc, in + size - 16, in + size - 32, 136 - 17 - 16), size);
}

// -- more -----------------------------------------------------------------------------------------------------------

using Accumulators = uint64_t[8];
using Accumulate = void (*)(uint64_t* acc, const uint8_t* in, size_t first, size_t stripes);

inline void add_stripe(uint64_t* acc, const uint8_t* in, const uint8_t* with) {
    for (size_t i = 0; i < 8; ++i) {
        const uint64_t value = read64(in + 8 * i), key = value ^ read64(with + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += uint64_t{static_cast<uint32_t>(key)} * (key >> 32);
    }
}
inline void scramble(uint64_t* acc) {
    for (size_t i = 0; i < 8; ++i) acc[i] = ((acc[i] ^ (acc[i] >> 47)) ^ secret(SECRET_BYTES - STRIPE + 8 * i)) * P32_1;
}
// `first`: the number of the stripe at `in`, from the beginning of the buffer.
inline void accumulate_portable(uint64_t* acc, const uint8_t* in, size_t first, size_t stripes) {
    for (size_t s = first; s < first + stripes; ++s, in += STRIPE) {
        add_stripe(acc, in, SECRET + 8 * (s % STRIPES_OF_A_BLOCK));
        if (s % STRIPES_OF_A_BLOCK == STRIPES_OF_A_BLOCK - 1) scramble(acc);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void accumulate_avx2(uint64_t* acc, const uint8_t* in, size_t first, size_t stripes) {
    auto* out = reinterpret_cast<__m256i*>(acc);
    __m256i low = _mm256_loadu_si256(out), high = _mm256_loadu_si256(out + 1);
    const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(P32_1));
#define KVLOOM_LOAD(at) _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))
#define KVLOOM_ADD(sum, at, with)                                                                                   \
    do {                                                                                                           \
        const __m256i value = KVLOOM_LOAD(at), key = _mm256_xor_si256(value, KVLOOM_LOAD(with));                   \
        sum = _mm256_add_epi64(sum, _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2)));                         \
        sum = _mm256_add_epi64(sum, _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32)));                            \
    } while (0)
#define KVLOOM_SCRAMBLE(sum, with)                                                                                  \
    do {                                                                                                           \
        const __m256i key = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), KVLOOM_LOAD(with)); \
        const __m256i upper = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime), 32);          \
        sum = _mm256_add_epi64(_mm256_mul_epu32(key, prime), upper);                                               \
    } while (0)
    const uint8_t* end = SECRET + SECRET_BYTES - STRIPE;
    const size_t last = first + stripes;
    for (size_t s = first; s < last;) {
        const size_t in_block = s % STRIPES_OF_A_BLOCK, rest = STRIPES_OF_A_BLOCK - in_block;
        const size_t here = rest < last - s ? rest : last - s;
        if (here == STRIPES_OF_A_BLOCK) {
#pragma GCC unroll 16
            for (size_t i = 0; i < STRIPES_OF_A_BLOCK; ++i) {
                _mm_prefetch(reinterpret_cast<const char*>(in + STRIPE * i + 512), _MM_HINT_T0);
                KVLOOM_ADD(low, in + STRIPE * i, SECRET + 8 * i);
                KVLOOM_ADD(high, in + STRIPE * i + 32, SECRET + 8 * i + 32);
            }
        } else {
            for (size_t i = 0; i < here; ++i) {
                KVLOOM_ADD(low, in + STRIPE * i, SECRET + 8 * (in_block + i));
                KVLOOM_ADD(high, in + STRIPE * i + 32, SECRET + 8 * (in_block + i) + 32);
            }
        }
        if (here == rest) {
            KVLOOM_SCRAMBLE(low, end);
            KVLOOM_SCRAMBLE(high, end + 32);
        }
        s += here;
        in += STRIPE * here;
    }
#undef KVLOOM_LOAD
#undef KVLOOM_ADD
#undef KVLOOM_SCRAMBLE
    _mm256_storeu_si256(out, low);
    _mm256_storeu_si256(out + 1, high);
}
#endif

inline Accumulate best() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return accumulate_avx2;
#endif
    return accumulate_portable;
}
inline const Accumulate accumulate = best();

inline uint64_t merged(const uint64_t* acc, size_t at, uint64_t begin) {
    for (size_t i = 0; i < 4; ++i) begin += folded(acc[2 * i] ^ secret(at + 16 * i), acc[2 * i + 1] ^ secret(at + 16 * i + 8));
    return avalanche(begin);
}

}  // namespace xxh3

// The digest of `size` bytes at `data`, of which the first have arrived.
class Hash {
  public:
    void begin(const uint8_t* data, size_t size) {
        using namespace xxh3;
        const Accumulators initial = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
        std::memcpy(acc_, initial, sizeof acc_);
        data_ = data;
        size_ = size;
        stripes_ = 0;
    }
    // The first `arrived` bytes are there, of `size` at most.
    void update(size_t arrived) {
        using namespace xxh3;
        if (size_ <= MIDDLE_BYTES) return;
        const size_t all = (size_ - 1) / STRIPE, here = arrived / STRIPE < all ? arrived / STRIPE : all;
        if (here <= stripes_) return;
        accumulate(acc_, data_ + STRIPE * stripes_, stripes_, here - stripes_);
        stripes_ = here;
    }
    // What is not hashed yet is read from `data`, the beginning of the same bytes in another place.
    void move(const uint8_t* data) { data_ = data; }
    // Once all of them are there.
    Digest digest() {
        using namespace xxh3;
        if (size_ <= MIDDLE_BYTES) return hash_short(data_, size_);
        update(size_);
        add_stripe(acc_, data_ + size_ - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7);
        return {merged(acc_, 11, size_ * P64_1), merged(acc_, SECRET_BYTES - STRIPE - 11, ~(size_ * P64_2))};
    }

  private:
    xxh3::Accumulators acc_;
    const uint8_t* data_;
    size_t size_, stripes_;
};

}  // namespace kvloom
