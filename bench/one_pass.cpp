// Chunks of 32 MiB from files in the page cache into the rows of an engine's KV, in three passes over memory or in one.
//
//     g++ -O3 -std=c++17 -pthread -Iplugins/native/csrc bench/one_pass.cpp -o one_pass && ./one_pass
//
// Three passes: read all, hash all, copy all. Two (what kvloom does): read and hash piece by piece, then copy all. One: each
// piece is read, hashed and copied while it is in L2. "No pool": and read into memory that is used again for each piece. The
// files are made in the working directory. Where others use the machine, look at the processor's time.
#include <algorithm>
#include <chrono>
#include <ctime>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "copy.cpp"
#include "xxh3.h"

constexpr size_t CHUNK = 32 << 20, CHUNKS = 8, ROWS = 64, ROW = CHUNK / ROWS;  // a row: a plane of a layer, 512 KiB

uint8_t *kv, *pool;
int fds[CHUNKS];

void copy(size_t chunk, size_t from, size_t to, const uint8_t* data, bool past_cache) {  // bytes [from, to) of a chunk
    while (from < to) {
        const size_t row = from / ROW, end = std::min(to, (row + 1) * ROW);
        uint8_t* into = kv + (row * CHUNKS + chunk) * ROW + from % ROW;
        past_cache ? kvloom::copy_past_cache(into, data, end - from) : (void)std::memcpy(into, data, end - from);
        data += end - from;
        from = end;
    }
}

void read(size_t chunk, size_t from, size_t to, uint8_t* into) {
    while (from < to) {
        const ssize_t got = pread(fds[chunk], into, to - from, from);
        if (got <= 0) std::abort();
        from += got, into += got;
    }
}

uint64_t sink;
double processor;

void load(size_t chunk, int passes, size_t piece, bool past_cache, bool pooled, uint8_t* scratch) {
    uint8_t* base = pool + chunk * CHUNK;
    kvloom::Hash hash;
    hash.begin(base, CHUNK);
    if (passes == 3) {
        read(chunk, 0, CHUNK, base);
        sink += hash.digest().low;
        copy(chunk, 0, CHUNK, base, past_cache);
    } else {
        for (size_t at = 0; at < CHUNK; at += piece) {
            uint8_t* into = pooled ? base + at : scratch;
            read(chunk, at, at + piece, into);
            if (!pooled) hash.move(scratch - at);
            hash.update(at + piece);
            if (passes == 1) copy(chunk, at, at + piece, into, past_cache);
        }
        if (passes == 2) copy(chunk, 0, CHUNK, base, past_cache);
    }
    kvloom::finish();
}

double run(int threads, const std::function<void(size_t, uint8_t*)>& one) {
    const auto began = std::chrono::steady_clock::now();
    const clock_t busy = std::clock();
    std::vector<std::thread> all;
    for (int first = 0; first < threads; ++first)
        all.emplace_back([&, first] {
            static thread_local std::vector<uint8_t> scratch(1 << 20);
            for (size_t chunk = first; chunk < CHUNKS; chunk += threads) one(chunk, scratch.data());
        });
    for (auto& thread : all) thread.join();
    processor = double(std::clock() - busy) / CLOCKS_PER_SEC;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

int main() {
    const auto memory = [] {
        void* at = mmap(nullptr, CHUNKS * CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        madvise(at, CHUNKS * CHUNK, MADV_HUGEPAGE);
        std::memset(at, 1, CHUNKS * CHUNK);
        return static_cast<uint8_t*>(at);
    };
    kv = memory(), pool = memory();
    for (int& fd : fds) {
        char name[] = "one_pass_XXXXXX";
        fd = mkstemp(name);
        unlink(name);
        if (write(fd, pool, CHUNK) != static_cast<ssize_t>(CHUNK)) return 1;
    }
    // bytes: moved from and to memory for each byte of KV, if only what was touched within a piece is still in the cache,
    // and a line that is written through the cache is read first.
    struct Way {
        std::string name;
        int passes;
        size_t piece;
        bool past_cache, pooled;
        double bytes;
    };
    const std::vector<Way> ways = {
        {"three passes", 3, 0, true, true, 6}, {"two passes, 256 KiB", 2, 256 << 10, true, true, 5},
        {"one pass, 256 KiB", 1, 256 << 10, true, true, 4}, {"one pass, 512 KiB", 1, 512 << 10, true, true, 4},
        {"one pass, 256 KiB, cached stores", 1, 256 << 10, false, true, 5},
        {"one pass, 256 KiB, no pool", 1, 256 << 10, true, false, 2},
    };
    for (int threads : {1, 2}) {
        std::vector<std::vector<double>> taken(ways.size()), busy(ways.size());
        for (int round = 0; round < 16; ++round)
            for (size_t way = 0; way < ways.size(); ++way) {
                const Way& it = ways[way];
                const double seconds = run(threads, [&](size_t chunk, uint8_t* scratch) {
                    load(chunk, it.passes, it.piece, it.past_cache, it.pooled, scratch);
                });
                if (round) taken[way].push_back(seconds), busy[way].push_back(processor);
            }
        for (size_t way = 0; way < ways.size(); ++way) {
            auto& some = taken[way];
            std::sort(some.begin(), some.end());
            auto& used = busy[way];
            std::sort(used.begin(), used.end());
            const double ms = some[some.size() / 2] * 1e3 / CHUNKS;
            std::printf("%d threads, %-34s %6.2f ms a chunk (%.2f to %.2f), processor %.2f (%.2f); about %.0f bytes moved for each\n", threads,
                        ways[way].name.c_str(), ms, some.front() * 1e3 / CHUNKS, some.back() * 1e3 / CHUNKS,
                        used[used.size() / 2] * 1e3 / CHUNKS, used.front() * 1e3 / CHUNKS, ways[way].bytes);
        }
    }
    return sink == 42;
}
