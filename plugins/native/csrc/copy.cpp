// Copies chunks between host memory of an engine and that of kvloom: many in one call, without the interpreter.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define KVLOOM_API extern "C" __attribute__((visibility("default")))

namespace kvloom {
namespace {

#if defined(__x86_64__)
// Past the cache: a cache line that is written as a whole need not be read first. For more than a cache holds.
void copy_past_cache(uint8_t* to, const uint8_t* from, uint64_t size) {
    uint64_t done = -reinterpret_cast<uintptr_t>(to) & 15;
    if (done > size) done = size;
    std::memcpy(to, from, done);
    for (; done + 64 <= size; done += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(from + done) + 1024, _MM_HINT_T0);  // may lie anywhere: no access
        const auto* source = reinterpret_cast<const __m128i*>(from + done);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        auto* target = reinterpret_cast<__m128i*>(to + done);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to + done, from + done, size - done);
}

void finish() { _mm_sfence(); }
#else
void copy_past_cache(uint8_t* to, const uint8_t* from, uint64_t size) { std::memcpy(to, from, size); }

void finish() {}
#endif

constexpr uint64_t CACHED_BYTES = 4 << 20;  // of a call: what is used next may still be in the cache

}  // namespace
}  // namespace kvloom

// -- what Python calls: kvloom/builtin/plain.py ---------------------------------------------------------------------

struct kvloom_chunk {
    uint8_t* memory;  // [rows, tokens] of `token_bytes` each, without gaps
    uint64_t start, tokens;
};

// Copies `count` chunks to their places in `kv`, or from there. kv: [rows, kv_tokens] of `token_bytes` each, without gaps.
// Returns 0, or -1, with nothing copied, if a chunk ends behind `kv`.
KVLOOM_API int kvloom_copy_chunks(uint8_t* kv, uint64_t rows, uint64_t kv_tokens, uint64_t token_bytes,
                                  const kvloom_chunk* chunks, uint64_t count, int to_kv) {
    uint64_t bytes = 0;
    for (uint64_t number = 0; number < count; ++number) {
        const kvloom_chunk& chunk = chunks[number];
        if (chunk.start > kv_tokens || chunk.tokens > kv_tokens - chunk.start) return -1;
        bytes += rows * chunk.tokens * token_bytes;
    }
    const auto copy = [past_cache = bytes > kvloom::CACHED_BYTES](uint8_t* to, const uint8_t* from, uint64_t size) {
        past_cache ? kvloom::copy_past_cache(to, from, size) : static_cast<void>(std::memcpy(to, from, size));
    };
    for (uint64_t number = 0; number < count; ++number) {
        const kvloom_chunk& chunk = chunks[number];
        const uint64_t size = chunk.tokens * token_bytes;
        for (uint64_t row = 0; row < rows; ++row) {
            uint8_t* in_kv = kv + (row * kv_tokens + chunk.start) * token_bytes;
            uint8_t* in_chunk = chunk.memory + row * size;
            to_kv ? copy(in_kv, in_chunk, size) : copy(in_chunk, in_kv, size);
        }
    }
    kvloom::finish();
    return 0;
}
