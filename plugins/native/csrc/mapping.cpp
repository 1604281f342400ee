// Maps files of a memory file system, and keeps the process alive if one of them becomes shorter while it is read.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/vfs.h>
#endif

#define KVLOOM_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t NOT_A_FILE = -1, NO_SLOT = -3, TOO_LONG = -4;
constexpr uint32_t MOST_MAPPINGS = 1 << 14;  // of a process, for which the kernel has 65530 by default

// One mapped file. The same in kvloom_native/mapping.py.
struct Mapping {
    void* at;
    uint64_t size;
    uint64_t device, inode;
    int64_t changed_seconds, changed_nanoseconds;
    int32_t slot;
    int32_t error;    // errno, NOT_A_FILE, NO_SLOT or TOO_LONG; 0 if there was none
    int64_t process;  // that made it: a forked child does not have it
    const char* path;
};

// What the signal handler knows. `begin` is 0 in a slot that is free, and is written last and cleared first.
struct Slot {
    std::atomic<uintptr_t> begin{0};
    std::atomic<uintptr_t> end{0};
    std::atomic<bool> damaged{false};
};

Slot slots[MOST_MAPPINGS];
std::atomic<uint32_t> slots_used{0};
uint32_t free_slots[MOST_MAPPINGS];
uint32_t free_count = 0;
std::mutex changing;

struct sigaction before = {};
uintptr_t page_bytes = 4096;

// The kernel signals whoever reads behind the end of a file. The rest of the mapping becomes zeros, and the reader goes
// on: that it has read something else than the blob is found by `kvloom_mappings_are_current`.
void on_bus_error(int number, siginfo_t* info, void* context) {
    const int saved = errno;
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    // Sent by a process, as some handlers do that pass it on: the instruction is run again, and says where it was.
    if (info->si_code <= 0 && slots_used.load() != 0) return;
    for (uint32_t slot = 0; slot < slots_used.load(); ++slot) {
        const uintptr_t begin = slots[slot].begin.load(), end = slots[slot].end.load();
        if (!begin || address < begin || address >= end) continue;
        if (slots[slot].begin.load() != begin) continue;  // taken anew in between: `end` may be another's
        const uintptr_t page = address & ~(page_bytes - 1);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        slots[slot].damaged.store(true);
        void* const memory = reinterpret_cast<void*>(page);
        if (mmap(memory, end - page, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED) {
            errno = saved;
            return;
        }
    }
    static std::atomic<uintptr_t> passed_on{0};
    if (passed_on.exchange(address | 1) == (address | 1)) {
        signal(number, SIG_DFL);  // whoever had it the last time did nothing about it: now it ends the process
    } else if ((before.sa_flags & SA_SIGINFO) && before.sa_sigaction) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN && before.sa_handler) {
        before.sa_handler(number);
    } else {
        signal(number, SIG_DFL);  // run again, the instruction ends the process
    }
    errno = saved;
}

// Again before each use of a mapping: others install handlers, too.
bool has_another_handler(struct sigaction& present) {
    if (sigaction(SIGBUS, nullptr, &present) != 0) return false;
    return !(present.sa_flags & SA_SIGINFO) || present.sa_sigaction != on_bus_error;
}

void install_handler() {
    struct sigaction present = {};
    if (!has_another_handler(present)) return;
    const std::lock_guard<std::mutex> lock(changing);
    if (!has_another_handler(present)) return;
    before = present;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

// A child has no mappings (MADV_DONTFORK) and a lock that nobody holds.
void before_fork() { changing.lock(); }
void after_fork_in_parent() { changing.unlock(); }
void after_fork_in_child() {
    for (uint32_t slot = 0; slot < slots_used.load(); ++slot) slots[slot].begin.store(0);
    slots_used.store(0);
    free_count = 0;
    changing.unlock();
}
[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

int32_t take_slot(uintptr_t begin, uintptr_t end) {
    const std::lock_guard<std::mutex> lock(changing);
    uint32_t slot = slots_used.load();
    if (free_count) {
        slot = free_slots[--free_count];
    } else if (slot == MOST_MAPPINGS) {
        return NO_SLOT;
    }
    slots[slot].damaged.store(false);
    slots[slot].end.store(end);
    slots[slot].begin.store(begin);
    if (slot == slots_used.load()) slots_used.store(slot + 1);
    return static_cast<int32_t>(slot);
}

const struct timespec& changed(const struct stat& status) {
#if defined(__APPLE__)
    return status.st_mtimespec;
#else
    return status.st_mtim;
#endif
}

int32_t map_file(int fd, Mapping& mapping, uint64_t most_bytes) {
    struct stat status;
    if (fstat(fd, &status) != 0) return errno;
    if (!S_ISREG(status.st_mode) || status.st_size <= 0) return NOT_A_FILE;
    mapping.size = static_cast<uint64_t>(status.st_size);
    // Before any of it is touched: a page of a hole that is read through a mapping takes memory like any other.
    if (mapping.size > most_bytes) return TOO_LONG;
    mapping.device = static_cast<uint64_t>(status.st_dev);
    mapping.inode = static_cast<uint64_t>(status.st_ino);
    mapping.changed_seconds = changed(status).tv_sec, mapping.changed_nanoseconds = changed(status).tv_nsec;
    // Private and writable: torch wants writable memory, and what is written by mistake stays this process's own.
    void* const at = mmap(nullptr, mapping.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) return errno;
#if defined(MADV_DONTFORK)
    madvise(at, mapping.size, MADV_DONTFORK);  // a child would keep evicted files in memory for as long as it lives
#endif
#if defined(MADV_POPULATE_READ)
    madvise(at, mapping.size, MADV_POPULATE_READ);  // in one go, rather than by a fault for each few pages
#endif
    const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
    mapping.slot = take_slot(begin, (begin + mapping.size + page_bytes - 1) & ~(page_bytes - 1));
    if (mapping.slot < 0) {
        munmap(at, mapping.size);
        return NO_SLOT;
    }
    mapping.at = at;
    mapping.process = getpid();
    return 0;
}

bool is_current(const Mapping& mapping) {
    struct stat status;
    if (slots[mapping.slot].damaged.load() || lstat(mapping.path, &status) != 0) return false;
    return static_cast<uint64_t>(status.st_dev) == mapping.device &&
           static_cast<uint64_t>(status.st_ino) == mapping.inode &&
           static_cast<uint64_t>(status.st_size) == mapping.size && changed(status).tv_sec == mapping.changed_seconds &&
           changed(status).tv_nsec == mapping.changed_nanoseconds;
}

}  // namespace

// Whether files in this directory are memory, so that to read a mapped page never waits for a device.
KVLOOM_API int32_t kvloom_is_memory(const char* directory) {
#if defined(__linux__)
    struct statfs about;
    if (statfs(directory, &about) != 0) return 0;
    const auto kind = static_cast<uint32_t>(about.f_type);
    return kind == 0x01021994 || kind == 0x858458f6;  // tmpfs, ramfs
#else
    (void)directory;
    return 0;
#endif
}

// Maps as many files. paths: texts, each ended by a zero byte, held as long as the mappings. Nothing is mapped of a file with
// more bytes than `most_bytes` has in its place.
KVLOOM_API void kvloom_map(Mapping* mappings, uint32_t count, const char* paths, const uint64_t* most_bytes) {
    page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    install_handler();
    for (uint32_t number = 0; number < count; ++number) {
        Mapping& mapping = mappings[number];
        mapping = {};
        mapping.path = paths;
        while (*paths++) {
        }
        const int fd = open(mapping.path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0) {
            mapping.error = errno;
            continue;
        }
        mapping.error = map_file(fd, mapping, most_bytes[number]);
        close(fd);
    }
}

// Of each mapping, whether the file still lies at its path as it was mapped, and nothing else than it was read. Ask before
// and after reading.
KVLOOM_API void kvloom_mappings_are_current(const Mapping* const* mappings, uint32_t count, uint8_t* current) {
    install_handler();
    const int64_t process = getpid();
    for (uint32_t number = 0; number < count; ++number) {
        const Mapping& mapping = *mappings[number];
        current[number] = mapping.process == process && is_current(mapping);
    }
}

KVLOOM_API void kvloom_unmap(Mapping* mapping) {
    if (!mapping->at || mapping->process != getpid()) return;
    slots[mapping->slot].begin.store(0);
    munmap(mapping->at, mapping->size);
    mapping->at = nullptr;
    const std::lock_guard<std::mutex> lock(changing);
    free_slots[free_count++] = static_cast<uint32_t>(mapping->slot);
}
