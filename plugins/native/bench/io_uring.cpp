// Reads files of one size by threads with `pread`, and by one thread with io_uring: warm, cold through the page cache,
// and cold past it. No liburing is needed.
//
//     g++ -O2 -std=c++17 -pthread -o io_uring plugins/native/bench/io_uring.cpp
//     ./io_uring DIRECTORY KIB_OF_A_FILE FILES ROUNDS
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr uint64_t STEP = 1 << 20;
constexpr size_t PLACES = 64;  // of files in memory, used in turn

std::vector<std::string> paths;
uint64_t file_bytes = 0;
bool direct = false;
uint8_t* memory = nullptr;

int flags() { return O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0); }

void check(bool good, const char* what) {
    if (good) return;
    std::perror(what);
    std::exit(1);
}

class Ring {
  public:
    explicit Ring(unsigned entries) {
        io_uring_params params = {};
        fd_ = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
        check(fd_ >= 0, "io_uring_setup");
        const size_t of_queue = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
        const size_t of_results = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        auto* rings = static_cast<uint8_t*>(mapped(std::max(of_queue, of_results), IORING_OFF_SQ_RING));
        entries_ = static_cast<io_uring_sqe*>(mapped(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
        const auto at = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(rings + offset); };
        tail_ = at(params.sq_off.tail), mask_ = *at(params.sq_off.ring_mask), numbers_ = at(params.sq_off.array);
        result_head_ = at(params.cq_off.head), result_tail_ = at(params.cq_off.tail);
        result_mask_ = *at(params.cq_off.ring_mask);
        results_ = reinterpret_cast<io_uring_cqe*>(rings + params.cq_off.cqes);
    }
    ~Ring() { close(fd_); }

    io_uring_sqe* add(uint8_t opcode, int fd, uint64_t user_data) {
        const uint32_t number = (*tail_ + added_++) & mask_;
        numbers_[number] = number;
        entries_[number] = {};
        entries_[number].opcode = opcode, entries_[number].fd = fd, entries_[number].user_data = user_data;
        return &entries_[number];
    }

    void submit_and_wait() {
        __atomic_store_n(tail_, *tail_ + added_, __ATOMIC_RELEASE);
        check(syscall(SYS_io_uring_enter, fd_, added_, 1, IORING_ENTER_GETEVENTS, nullptr, 0) >= 0, "io_uring_enter");
        added_ = 0;
    }

    bool next(io_uring_cqe& result) {
        const uint32_t head = *result_head_;
        if (head == __atomic_load_n(result_tail_, __ATOMIC_ACQUIRE)) return false;
        result = results_[head & result_mask_];
        __atomic_store_n(result_head_, head + 1, __ATOMIC_RELEASE);
        return true;
    }

  private:
    void* mapped(size_t size, uint64_t offset) const {
        const int shared = MAP_SHARED | MAP_POPULATE;
        void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, shared, fd_, static_cast<off_t>(offset));
        check(at != MAP_FAILED, "mmap");
        return at;
    }

    int fd_;
    uint32_t *tail_, *numbers_, *result_head_, *result_tail_;
    uint32_t mask_, result_mask_, added_ = 0;
    io_uring_sqe* entries_;
    io_uring_cqe* results_;
};

uint8_t* place(size_t number) { return memory + number % PLACES * file_bytes; }

void by_threads(unsigned count) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < count; ++thread) {
        threads.emplace_back([&] {
            for (size_t number; (number = next++) < paths.size();) {
                const int fd = open(paths[number].c_str(), flags());
                for (uint64_t at = 0; at < file_bytes;) {
                    const uint64_t most = std::min(STEP, file_bytes - at);
                    const ssize_t got = pread(fd, place(number) + at, most, static_cast<off_t>(at));
                    check(got > 0, "pread");
                    at += static_cast<uint64_t>(got);
                }
                close(fd);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// depth: reads of up to `STEP` bytes that are under way. ring_opens: files are opened and closed by the ring, too.
void by_ring(unsigned depth, bool ring_opens) {
    enum : uint64_t { READ, OPEN, CLOSE };
    struct File {
        int fd;
        uint64_t at;
        size_t number;
    };
    Ring ring(std::max(8U, 4 * depth));
    std::vector<File> files(depth);
    std::vector<uint32_t> idle;
    for (uint32_t slot = 0; slot < depth; ++slot) idle.push_back(slot);
    size_t next = 0, done = 0, under_way = 0;
    const auto read = [&](uint32_t slot) {
        const File& file = files[slot];
        io_uring_sqe* entry = ring.add(IORING_OP_READ, file.fd, slot | READ << 32);
        entry->addr = reinterpret_cast<uint64_t>(place(file.number) + file.at), entry->off = file.at;
        entry->len = static_cast<uint32_t>(std::min(STEP, file_bytes - file.at)), ++under_way;
    };
    while (done < paths.size() || under_way) {
        for (; !idle.empty() && next < paths.size(); idle.pop_back()) {
            File& file = files[idle.back()];
            file = {-1, 0, next++};
            const char* path = paths[file.number].c_str();
            if (ring_opens) {
                io_uring_sqe* entry = ring.add(IORING_OP_OPENAT, AT_FDCWD, idle.back() | OPEN << 32);
                entry->addr = reinterpret_cast<uint64_t>(path), entry->open_flags = static_cast<uint32_t>(flags());
                ++under_way;
            } else {
                file.fd = open(path, flags());
                read(idle.back());
            }
        }
        ring.submit_and_wait();
        for (io_uring_cqe result; ring.next(result);) {
            const auto slot = static_cast<uint32_t>(result.user_data);
            const uint64_t kind = result.user_data >> 32;
            errno = -result.res;
            check(result.res >= 0, "io_uring");
            --under_way;
            if (kind == CLOSE) continue;
            File& file = files[slot];
            if (kind == OPEN) file.fd = result.res;
            if (kind == READ) file.at += static_cast<uint64_t>(result.res);
            if (file.at < file_bytes) {
                read(slot);
                continue;
            }
            if (ring_opens) ring.add(IORING_OP_CLOSE, file.fd, slot | CLOSE << 32), ++under_way;
            else close(file.fd);
            idle.push_back(slot), ++done;
        }
    }
}

void drop() {
    for (const std::string& path : paths) {
        const int fd = open(path.c_str(), O_RDONLY);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

void make_files(const std::string& directory, size_t count) {
    std::vector<char> content(file_bytes);
    for (char& byte : content) byte = static_cast<char>(std::rand());
    for (size_t number = 0; number < count; ++number) {
        paths.push_back(directory + "/io_uring-" + std::to_string(number));
        const int fd = open(paths.back().c_str(), O_CREAT | O_WRONLY, 0600);
        for (uint64_t at = 0; at < file_bytes;) {
            const ssize_t wrote = write(fd, content.data() + at, file_bytes - at);
            check(wrote > 0, "write");
            at += static_cast<uint64_t>(wrote);
        }
        fsync(fd);
        close(fd);
    }
}

}  // namespace

int main(int count, char** words) {
    if (count != 5) return 2;
    file_bytes = std::strtoull(words[2], nullptr, 10) << 10;
    const size_t rounds = std::strtoull(words[4], nullptr, 10);
    make_files(words[1], std::strtoull(words[3], nullptr, 10));
    void* const room = mmap(nullptr, PLACES * file_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    check(room != MAP_FAILED, "mmap");
    memory = static_cast<uint8_t*>(room);
    const struct {
        const char* name;
        unsigned depth;
    } ways[] = {{"threads", 1}, {"threads", 2}, {"threads", 4}, {"threads", 8},     {"ring", 1},
                {"ring", 4},    {"ring", 8},    {"ring", 32},   {"ring opens", 8}, {"ring opens", 32}};
    for (const std::string state : {"warm", "cold, page cache", "cold, direct"}) {
        direct = state == "cold, direct";
        std::vector<std::vector<double>> speeds(std::size(ways));
        for (size_t round = 0; round < rounds; ++round) {
            for (size_t way = 0; way < std::size(ways); ++way) {
                state == "warm" ? by_threads(2) : drop();
                const auto began = std::chrono::steady_clock::now();
                const bool threads = std::string(ways[way].name) == "threads";
                threads ? by_threads(ways[way].depth) : by_ring(ways[way].depth, ways[way].name != std::string("ring"));
                const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
                speeds[way].push_back(static_cast<double>(paths.size() * file_bytes) / 1e9 / took.count());
            }
        }
        for (size_t way = 0; way < std::size(ways); ++way) {
            std::vector<double>& found = speeds[way];
            std::sort(found.begin(), found.end());
            std::printf("%-16s %-10s %2u: %.2f GB/s (%.2f to %.2f)\n", state.c_str(), ways[way].name, ways[way].depth,
                        found[found.size() / 2], found.front(), found.back());
        }
        std::fflush(stdout);
    }
    for (const std::string& path : paths) unlink(path.c_str());
    return 0;
}
