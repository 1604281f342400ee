// Maps the files of a plan, changes their lengths, and reads every byte of each. Prints the error of each, its size,
// and whether it is said to be current before and after it was read. Then it fills every slot there is, forks, and lets
// threads map one file while another thread changes its length.
//
// The plan: for each file a line with its length from then on (-1: as it is, -2: deleted, -3: empty while it is read, and
// with its length and times again afterwards, -4: as it is, and a byte longer than may be mapped) and its path.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

struct Mapping {  // that of mapping.cpp
    void* at;
    uint64_t size, device, inode;
    int64_t changed_seconds, changed_nanoseconds;
    int32_t slot, error;
    int64_t process;
    const char* path;
};

extern "C" void kvloom_map(Mapping*, uint32_t, const char*, const uint64_t*);
extern "C" void kvloom_unmap(Mapping*);
extern "C" void kvloom_mappings_are_current(const Mapping* const*, uint32_t, uint8_t*);

namespace {

constexpr uint64_t ANY_BYTES = UINT64_MAX;

void map(Mapping* mapping, const std::string& path, uint64_t most = ANY_BYTES) {
    kvloom_map(mapping, 1, path.c_str(), &most);
}

uint64_t sum(const Mapping& mapping) {
    uint64_t found = 0;
    for (uint64_t at = 0; at < mapping.size; ++at) found += static_cast<volatile uint8_t*>(mapping.at)[at];
    return found;
}

int is_current(const Mapping& mapping) {
    const Mapping* const twice[] = {&mapping, &mapping};
    uint8_t current[] = {2, 2};
    kvloom_mappings_are_current(twice, 2, current);
    if (current[0] != current[1]) std::exit(4);
    return current[0];
}

void restore(const Mapping& mapping, const std::string& path) {
    const timespec changed{mapping.changed_seconds, mapping.changed_nanoseconds};
    const timespec times[] = {changed, changed};
    if (truncate(path.c_str(), static_cast<off_t>(mapping.size)) != 0) std::exit(3);
    if (utimensat(AT_FDCWD, path.c_str(), times, 0) != 0) std::exit(3);
}

void one(const std::string& path, long length) {
    Mapping mapping;
    const uint64_t most = length == -4 ? std::filesystem::file_size(path) - 1 : ANY_BYTES;
    map(&mapping, path, most);
    int before = 0, after = 0;
    if (!mapping.error) {
        before = is_current(mapping);
        if ((length >= 0 || length == -3) && truncate(path.c_str(), length >= 0 ? length : 0) != 0) std::exit(3);
        if (length == -2 && unlink(path.c_str()) != 0) std::exit(3);
        sum(mapping);
        if (length == -3) restore(mapping, path);
        after = is_current(mapping);
    }
    const uint64_t size = mapping.error ? 0 : mapping.size;
    std::printf("%d %llu %d %d\n", mapping.error, static_cast<unsigned long long>(size), before, after);
    kvloom_unmap(&mapping);
    kvloom_unmap(&mapping);
}

void every_slot(const std::string& path) {
    std::vector<Mapping> mappings((1 << 14) + 1);
    for (int round = 0; round < 2; ++round) {
        int refused = 0;
        for (Mapping& mapping : mappings) map(&mapping, path), refused += mapping.error == -3;
        std::printf("%d refused\n", refused);
        for (Mapping& mapping : mappings) kvloom_unmap(&mapping);
    }
}

void in_a_child(const std::string& path) {
    Mapping mapping;
    map(&mapping, path);
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const int inherited = is_current(mapping);
        kvloom_unmap(&mapping);
        Mapping own;
        map(&own, path);
        const bool usable = !own.error && is_current(own);
        _exit(!inherited && usable ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    std::printf("child %d, parent %d\n", status, is_current(mapping));
    kvloom_unmap(&mapping);
}

void while_it_changes(const std::string& path, long size) {
    std::atomic<bool> ended{false};
    std::thread changer([&] {
        for (int times = 0; !ended; ++times) {
            if (truncate(path.c_str(), times % 2 ? size : times % 3 * 4096) != 0) std::exit(3);
        }
    });
    std::vector<std::thread> readers;
    for (int number = 0; number < 3; ++number) {
        readers.emplace_back([&] {
            for (int times = 0; times < 200; ++times) {
                Mapping mapping;
                map(&mapping, path);
                if (!mapping.error) sum(mapping);
                kvloom_unmap(&mapping);
            }
        });
    }
    for (std::thread& reader : readers) reader.join();
    ended = true;
    changer.join();
    std::printf("alive\n");
}

}  // namespace

int main(int count, char** names) {
    std::ifstream plan(count == 4 ? names[1] : "");
    if (!plan) return 2;
    for (std::string text; std::getline(plan, text);) {
        long length = 0;
        std::string path;
        std::istringstream words(text);
        words >> length >> std::ws;
        std::getline(words, path);
        one(path, length);
    }
    every_slot(names[2]);
    in_a_child(names[2]);
    while_it_changes(names[2], std::atol(names[3]));
    return 0;
}
