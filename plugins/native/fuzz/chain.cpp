// Hashes the chains of a file, each in memory of its own length, and prints the last digest of each.
// The file: for each chain the number of tokens, bytes of a token and tokens of a chunk (32 bits each), and its tokens.
#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" int kvloom_chain(const uint8_t*, const void*, uint64_t, int, uint64_t, uint8_t*);

int main(int count, char** names) {
    std::FILE* file = count == 2 ? std::fopen(names[1], "rb") : nullptr;
    if (!file) return 2;
    uint32_t numbers[3];
    while (std::fread(numbers, sizeof numbers, 1, file) == 1) {
        std::vector<int64_t> aligned((uint64_t{numbers[0]} * numbers[1] + 7) / 8);
        if (numbers[0] && std::fread(aligned.data(), uint64_t{numbers[0]} * numbers[1], 1, file) != 1) return 2;
        std::vector<uint8_t> digests(32 * (numbers[0] / numbers[2]));
        const std::vector<uint8_t> before(32, 7);
        const int said = kvloom_chain(before.data(), aligned.data(), numbers[0], numbers[1] == 8, numbers[2], digests.data());
        if (said == 0 && digests.size()) {
            for (uint64_t byte = digests.size() - 32; byte < digests.size(); ++byte) std::printf("%02x", digests[byte]);
        }
        std::printf(said == 0 ? "\n" : "refused\n");
    }
    std::fclose(file);
    return 0;
}
