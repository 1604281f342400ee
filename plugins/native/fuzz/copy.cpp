// Copies chunks as a plan says, between memory of exactly the length that is needed, and compares with a copy byte by
// byte.
// The plan: for each case a line with rows, tokens of the KV, bytes of a token, and start and tokens of each chunk.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

struct Chunk {  // kvloom_chunk of copy.cpp
    uint8_t* memory;
    uint64_t start, tokens;
};

extern "C" int kvloom_copy_chunks(uint8_t*, uint64_t, uint64_t, uint64_t, const Chunk*, uint64_t, int);

namespace {

using Bytes = std::unique_ptr<uint8_t[]>;

struct Case {
    uint64_t rows, kv_tokens, token_bytes;
    std::vector<Chunk> chunks;

    uint64_t kv_bytes() const { return rows * kv_tokens * token_bytes; }
    uint64_t bytes(const Chunk& chunk) const { return rows * chunk.tokens * token_bytes; }
    bool fits() const {
        for (const Chunk& chunk : chunks) {
            if (chunk.start > kv_tokens || chunk.tokens > kv_tokens - chunk.start) return false;
        }
        return true;
    }
};

uint8_t value(uint64_t at, uint64_t of) { return static_cast<uint8_t>((at * 31 + of * 17 + (at >> 8)) % 251); }

Bytes filled(uint64_t size, uint64_t of) {
    Bytes memory(new uint8_t[size ? size : 1]);
    for (uint64_t at = 0; at < size; ++at) memory[at] = value(at, of);
    return memory;
}

const char* outcome(Case& it, bool to_kv) {
    const bool fits = it.fits();
    Bytes kv = filled(it.kv_bytes(), 0), expected = filled(it.kv_bytes(), 0);
    std::vector<Bytes> memory, expected_chunks;
    for (size_t number = 0; number < it.chunks.size(); ++number) {
        const uint64_t size = fits ? it.bytes(it.chunks[number]) : 1;
        memory.push_back(filled(size, number + 1)), expected_chunks.push_back(filled(size, number + 1));
        it.chunks[number].memory = memory.back().get();
    }
    const int said = kvloom_copy_chunks(kv.get(), it.rows, it.kv_tokens, it.token_bytes, it.chunks.data(),
                                        it.chunks.size(), to_kv);
    if (said == 0 && !fits) return "not refused";
    if (said == 0) {
        for (size_t number = 0; number < it.chunks.size(); ++number) {
            const Chunk& chunk = it.chunks[number];
            for (uint64_t row = 0; row < it.rows; ++row) {
                for (uint64_t at = 0; at < chunk.tokens * it.token_bytes; ++at) {
                    uint8_t& in_kv = expected[(row * it.kv_tokens + chunk.start) * it.token_bytes + at];
                    uint8_t& in_chunk = expected_chunks[number][row * chunk.tokens * it.token_bytes + at];
                    (to_kv ? in_kv : in_chunk) = to_kv ? in_chunk : in_kv;
                }
            }
        }
    }
    for (uint64_t at = 0; at < it.kv_bytes(); ++at) {
        if (kv[at] != expected[at]) return "another KV";
    }
    for (size_t number = 0; number < it.chunks.size(); ++number) {
        const uint64_t size = fits ? it.bytes(it.chunks[number]) : 1;
        for (uint64_t at = 0; at < size; ++at) {
            if (memory[number][at] != expected_chunks[number][at]) return "another chunk";
        }
    }
    return said == 0 ? "copied" : "refused";
}

}  // namespace

int main(int count, char** names) {
    std::ifstream plan(count == 2 ? names[1] : "");
    if (!plan) return 2;
    for (std::string text; std::getline(plan, text);) {
        std::istringstream numbers(text);
        Case it{};
        numbers >> it.rows >> it.kv_tokens >> it.token_bytes;
        for (Chunk chunk{}; numbers >> chunk.start >> chunk.tokens;) it.chunks.push_back(chunk);
        std::printf("%s %s\n", outcome(it, true), outcome(it, false));
    }
    return 0;
}
