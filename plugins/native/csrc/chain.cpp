// Chained digests of token ids: kvloom/keys.py says what is hashed. SHA-256 (FIPS 180-4) with the instructions that
// processors have for it. Where there are none, there is no chain here, and Python's hashlib is as fast.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define KVLOOM_API extern "C" __attribute__((visibility("default")))

namespace kvloom {
namespace {

constexpr uint64_t BLOCK = 64, DIGEST = 32;
constexpr uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

#if defined(__x86_64__)
alignas(16) constexpr uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

bool available() {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool sha = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_SHA);
    return sha && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

__attribute__((target("sha,sse4.1,ssse3"))) void compress(uint32_t state[8], const uint8_t* data, uint64_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    // The instructions keep the eight words as (a, b, e, f) and (c, d, g, h), the first one highest.
    const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
    const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
    const __m128i badc = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    __m128i abef = _mm_alignr_epi8(badc, efgh, 8), cdgh = _mm_blend_epi16(efgh, badc, 0xf0);

    for (; blocks > 0; --blocks, data += BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i words[4];
#pragma GCC unroll 16
        for (int four = 0; four < 16; ++four) {
            __m128i& now = words[four % 4];
            if (four < 4) {
                now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * four)), big_endian);
            } else {  // of the words 16, 15, 7 and 2 before each
                const __m128i last = words[(four + 3) % 4];
                const __m128i seven = _mm_alignr_epi8(last, words[(four + 2) % 4], 4);
                now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, words[(four + 1) % 4]), seven), last);
            }
            const __m128i added = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(ROUND + 4 * four)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }

    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#else
bool available() { return false; }

void compress(uint32_t*, const uint8_t*, uint64_t) {}
#endif

// Bytes that come in portions.
class Sha256 {
  public:
    void update(const uint8_t* data, uint64_t size) {
        total_ += size;
        if (waiting_ > 0) {
            const uint64_t taken = size < BLOCK - waiting_ ? size : BLOCK - waiting_;
            std::memcpy(block_ + waiting_, data, taken);
            waiting_ += taken;
            data += taken;
            size -= taken;
            if (waiting_ < BLOCK) return;
            compress(state_, block_, 1);
        }
        compress(state_, data, size / BLOCK);
        waiting_ = size % BLOCK;
        std::memcpy(block_, data + (size - waiting_), waiting_);
    }

    void finish(uint8_t digest[DIGEST]) {
        block_[waiting_++] = 0x80;
        if (waiting_ > BLOCK - 8) {
            std::memset(block_ + waiting_, 0, BLOCK - waiting_);
            compress(state_, block_, 1);
            waiting_ = 0;
        }
        std::memset(block_ + waiting_, 0, BLOCK - 8 - waiting_);
        const uint64_t bits = __builtin_bswap64(8 * total_);
        std::memcpy(block_ + BLOCK - 8, &bits, sizeof bits);
        compress(state_, block_, 1);
        for (int word = 0; word < 8; ++word) {
            const uint32_t value = __builtin_bswap32(state_[word]);
            std::memcpy(digest + 4 * word, &value, sizeof value);
        }
    }

  private:
    uint32_t state_[8] = {INITIAL[0], INITIAL[1], INITIAL[2], INITIAL[3], INITIAL[4], INITIAL[5], INITIAL[6], INITIAL[7]};
    uint64_t total_ = 0, waiting_ = 0;
    uint8_t block_[BLOCK];
};

// Hashes tokens of 8 bytes as the 4 that they fit into.
void update_narrowed(Sha256& hash, const int64_t* tokens, uint64_t count) {
    int32_t narrow[256];
    while (count > 0) {
        const uint64_t now = count < 256 ? count : 256;
        for (uint64_t token = 0; token < now; ++token) narrow[token] = static_cast<int32_t>(tokens[token]);
        hash.update(reinterpret_cast<const uint8_t*>(narrow), 4 * now);
        tokens += now;
        count -= now;
    }
}

bool fits(const int64_t* tokens, uint64_t count) {
    uint64_t beyond = 0;
    for (uint64_t token = 0; token < count; ++token) {
        beyond |= (static_cast<uint64_t>(tokens[token]) + (uint64_t{1} << 31)) >> 32;
    }
    return beyond == 0;
}

}  // namespace
}  // namespace kvloom

// -- what Python calls: kvloom/keys.py ------------------------------------------------------------------------------

// The digests of `count` tokens, as many whole chunks as there are: 32 bytes each, to `digests`. `wide`: the tokens have 8
// bytes, else 4. `before`: the digest before the first chunk. Returns 0, or -1 where a token does not fit into 4 bytes.
KVLOOM_API int kvloom_chain(const uint8_t* before, const void* tokens, uint64_t count, int wide, uint64_t chunk_tokens,
                            uint8_t* digests) {
    if (wide && !kvloom::fits(static_cast<const int64_t*>(tokens), count)) return -1;
    for (uint64_t chunk = 0; chunk < count / chunk_tokens; ++chunk) {
        kvloom::Sha256 hash;
        hash.update(before, kvloom::DIGEST);
        if (wide) {
            kvloom::update_narrowed(hash, static_cast<const int64_t*>(tokens) + chunk * chunk_tokens, chunk_tokens);
        } else {
            hash.update(static_cast<const uint8_t*>(tokens) + 4 * chunk * chunk_tokens, 4 * chunk_tokens);
        }
        hash.finish(digests);
        before = digests;
        digests += kvloom::DIGEST;
    }
    return 0;
}

// Whether this processor can.
KVLOOM_API int kvloom_has_chain() { return kvloom::available() ? 1 : 0; }
