// Reads the replies of a file as kvloom_backend_redis/stream.py does, and prints what each was.
// The file: for each connection its length, replies, largest blob and greatest step in which it arrives (32 bits each),
// and its bytes. Memory has the very size of a blob, so that a sanitizer sees every byte that is written outside it.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <sys/socket.h>

namespace {
std::vector<uint8_t> arriving;
uint64_t at, turn, step;
}  // namespace

// In place of the system's. Now and then a signal comes first.
extern "C" ssize_t recvmsg(int, msghdr* message, int) {
    turn = turn * 6364136223846793005u + 1442695040888963407u;
    if (turn >> 61 == 0) return errno = EINTR, -1;
    uint64_t left = std::min<uint64_t>(1 + (turn >> 33) % step, arriving.size() - at), got = 0;
    for (size_t place = 0; place < message->msg_iovlen; ++place) {
        const uint64_t part = std::min<uint64_t>(left - got, message->msg_iov[place].iov_len);
        std::memcpy(message->msg_iov[place].iov_base, arriving.data() + at, part);
        at += part, got += part;
    }
    return static_cast<ssize_t>(got);
}

#include "../csrc/resp.cpp"

namespace {

int count_bytes(void* state, uint64_t arrived) {
    auto& told = *static_cast<uint64_t*>(state);
    if (arrived <= told) std::abort();
    return told = arrived, arrived > 5000;
}

int64_t next(Connection& link) {
    int64_t said;
    do said = kvloom_resp_next(&link, nullptr, 0, 32);
    while (said == -EINTR);
    return said;
}

// Returns whether another reply can follow.
bool read_reply(Connection& link, uint64_t largest) {
    const int64_t size = next(link);
    if (size == A_LINE) {
        const int64_t length = line_in(link);
        std::printf("line %lld ", static_cast<long long>(length));
        link.start += static_cast<uint32_t>(length) + END_BYTES;
        return true;
    }
    if (size < 0 || static_cast<uint64_t>(size) > largest) {
        return std::printf("%lld ", static_cast<long long>(size)), false;
    }
    const std::unique_ptr<uint8_t[]> memory(new uint8_t[static_cast<uint64_t>(size)]);
    uint64_t told = 0;
    Blob blob = {memory.get(), 0, static_cast<uint64_t>(size), count_bytes, &told};
    int64_t said;
    do said = kvloom_resp_fill(&link, &blob, 1, 32);
    while (said == -EINTR);
    uint64_t sum = 0;
    for (uint64_t byte = 0; byte < blob.done; ++byte) sum = sum * 31 + memory[byte];
    if (said < 0) return std::printf("%lld ", static_cast<long long>(said)), false;
    std::printf("blob %lld %llu ", static_cast<long long>(size), static_cast<unsigned long long>(sum));
    return true;
}

}  // namespace

int main(int count, char** names) {
    std::FILE* file = count == 2 ? std::fopen(names[1], "rb") : nullptr;
    if (!file) return 2;
    uint32_t numbers[4];
    while (std::fread(numbers, sizeof numbers, 1, file) == 1) {
        arriving.assign(numbers[0], 0);
        if (numbers[0] && std::fread(arriving.data(), numbers[0], 1, file) != 1) return 2;
        at = 0, turn = numbers[0], step = std::max<uint64_t>(1, numbers[3]);
        const std::unique_ptr<uint8_t[]> buffer(new uint8_t[16 << 10]);
        Connection link = {};
        link.capacity = 16 << 10, link.buffer = buffer.get(), link.timeout = 1e6, link.slowest = 1e6;
        for (uint32_t reply = 0; reply < numbers[1] && read_reply(link, numbers[2]); ++reply) {
        }
        std::printf("\n");
    }
    std::fclose(file);
    return 0;
}
