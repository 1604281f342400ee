// Reads many files by two calls: open them all, then read each into memory that was reserved in between.
#include <cerrno>
#include <cstdint>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#define KVLOOM_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t BLOCK_BYTES = 4096;         // what O_DIRECT wants addresses, offsets and lengths to be multiples of
constexpr uint64_t CACHED_STEP_BYTES = 256 << 10;  // of the page cache: stays in L2 until it was verified
constexpr uint64_t DIRECT_STEP_BYTES = 1 << 20;    // past the page cache: enough to keep a disk busy
constexpr uint64_t SMALL_BLOB_BYTES = 1 << 20;     // up to this, through the page cache: see transfer.py
constexpr uint32_t FILES_AHEAD = 16;

enum Mode : int32_t { NEVER = 0, AUTO = 1, ALWAYS = 2, SEQUENTIAL = 3 };
constexpr int32_t NOT_A_FILE = -1, TOO_SHORT = -2;

using Filled = int (*)(void* state, uint64_t num_bytes);

// One file. The same in kvloom_native/files.py.
struct File {
    int32_t fd;     // of `open`, and -1 once it is closed
    int32_t error;  // errno, NOT_A_FILE or TOO_SHORT; 0 if there was none
    uint64_t size;  // of `open`
    uint8_t* into;  // where it is to be read to; null: not at all
    Filled filled;  // told of what has arrived; may be null
    void* state;
};

#ifdef O_NOATIME
constexpr int NO_ATIME = O_NOATIME;
#else
constexpr int NO_ATIME = 0;
#endif
#ifdef O_DIRECT
constexpr int DIRECT = O_DIRECT;
#else
constexpr int DIRECT = 0;
#endif

int open_to_read(const char* path) {
    // Without O_NONBLOCK, opening a FIFO would wait for its writer. A read is no use of a blob: `touch_many` says that.
    const int flags = O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC;
    for (int extra = NO_ATIME;; extra = 0) {
        const int fd = open(path, flags | extra);
        if (fd >= 0) return fd;
        if (errno == EINTR) continue;
        if (!extra || (errno != EPERM && errno != EACCES)) return -1;  // only a file's owner may read without a trace
    }
}

bool set_direct(int fd, bool direct) {
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, direct ? flags | DIRECT : flags & ~DIRECT) == 0;
}

// Whether the page cache holds the file, or nearly all of it; no where the kernel cannot be asked (before Linux 6.5).
bool is_cached(int fd, uint64_t size) {
#if defined(__linux__)
    constexpr long CACHESTAT = 451;  // the same on every architecture
    const struct { uint64_t offset, length; } part = {0, size};
    struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } found = {};
    if (syscall(CACHESTAT, fd, &part, &found, 0) != 0) return false;
    return found.cached * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) >= size - size / 10;
#else
    (void)fd, (void)size;
    return true;
#endif
}

// A small blob is read as fast through the page cache, which has it the next time.
bool reads_directly(const File& file, Mode mode) {
    if (!DIRECT || reinterpret_cast<uintptr_t>(file.into) % BLOCK_BYTES != 0) return false;
    return mode == ALWAYS || (mode == AUTO && file.size > SMALL_BLOB_BYTES && !is_cached(file.fd, file.size));
}

int32_t read_until(File& file, uint64_t& at, uint64_t end, uint64_t step) {
    while (at < end) {
        const ssize_t got = pread(file.fd, file.into + at, step < end - at ? step : end - at, static_cast<off_t>(at));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return TOO_SHORT;
        at += static_cast<uint64_t>(got);
        if (file.filled && file.filled(file.state, at) != 0) file.filled = nullptr;  // all of it is read all the same
    }
    return 0;
}

int32_t read_file(File& file, Mode mode) {
    uint64_t at = 0;
    if (reads_directly(file, mode)) {
        if (!set_direct(file.fd, true)) return errno;
        const int32_t error = read_until(file, at, file.size - file.size % BLOCK_BYTES, DIRECT_STEP_BYTES);
        if (error) return error;
        if (at < file.size && !set_direct(file.fd, false)) return errno;
    }
#if defined(POSIX_FADV_SEQUENTIAL)
    if (mode == SEQUENTIAL && file.size > CACHED_STEP_BYTES) posix_fadvise(file.fd, 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
    return read_until(file, at, file.size, CACHED_STEP_BYTES);
}

// Has the disk read a small file while others are read. Within a larger one the kernel reads ahead by itself.
void read_ahead(const File& file) {
#if defined(POSIX_FADV_WILLNEED)
    const bool small = file.fd >= 0 && file.into && file.size <= SMALL_BLOB_BYTES;
    if (small && !is_cached(file.fd, file.size)) posix_fadvise(file.fd, 0, 0, POSIX_FADV_WILLNEED);
#else
    (void)file;
#endif
}

void close_file(File& file) {
    if (file.fd >= 0) close(file.fd);
    file.fd = -1;
}

}  // namespace

// paths: `count` texts, each ended by a zero byte.
KVLOOM_API void kvloom_files_open(File* files, uint32_t count, const char* paths) {
    for (File* file = files; file < files + count; ++file) {
        file->error = 0;
        file->fd = open_to_read(paths);
        while (*paths++) {
        }
        struct stat status;
        if (file->fd < 0 || fstat(file->fd, &status) != 0) {
            file->error = errno;
        } else if (!S_ISREG(status.st_mode)) {
            file->error = NOT_A_FILE;
        } else {
            file->size = static_cast<uint64_t>(status.st_size);
        }
        if (file->error) close_file(*file);
    }
}

// Reads those that are open and have memory, and closes all.
KVLOOM_API void kvloom_files_read(File* files, uint32_t count, int32_t mode) {
    uint32_t ahead = 1;
    for (File* file = files; file < files + count; ++file) {
        for (; mode == SEQUENTIAL && ahead < count && files + ahead <= file + FILES_AHEAD; ++ahead) {
            read_ahead(files[ahead]);
        }
        if (file->fd >= 0 && file->into) file->error = read_file(*file, static_cast<Mode>(mode));
        close_file(*file);
    }
}
