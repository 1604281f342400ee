// Verifies the blobs of a file, each in memory of its own length, so that a sanitizer sees every byte that is read outside it.
// The file: for each blob its length, the most buffers and the step in which it arrives (32 bits each), and its bytes.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../csrc/verify.h"

int main(int count, char** names) {
    std::FILE* file = count == 2 ? std::fopen(names[1], "rb") : nullptr;
    if (!file) return 2;
    uint32_t numbers[3], blobs = 0, right = 0;
    while (std::fread(numbers, sizeof numbers, 1, file) == 1) {
        const uint32_t size = numbers[0], step = numbers[2] ? numbers[2] : 1;
        auto* data = static_cast<uint8_t*>(std::malloc(size ? size : 1));
        if (size && std::fread(data, size, 1, file) != 1) return 2;
        kvloom::Verifier verifier;
        verifier.begin(data, size, numbers[1]);
        for (uint64_t arrived = 0; arrived < size; arrived += step) verifier.filled(arrived);
        right += verifier.filled(size);
        ++blobs;
        std::free(data);
    }
    std::fclose(file);
    std::printf("%u of %u right\n", right, blobs);
    return 0;
}
