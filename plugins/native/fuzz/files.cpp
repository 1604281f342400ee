// Reads the files of a plan by `kvloom_files_open` and `kvloom_files_read`, each into memory of its own length, which
// the verifier looks at while it arrives. Prints the error of each, its size, and whether it is a right blob.
//
// The plan: a line for each file, with an empty line behind the files of one call. A line is: mode, how the memory is
// aligned, when the file is changed (0: never, 1: between the calls, 2: while it is read), its length then, its path.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "../csrc/verify.h"

struct File {  // that of files.cpp
    int32_t fd, error;
    uint64_t size;
    uint8_t* into;
    int (*filled)(void*, uint64_t);
    void* state;
};

extern "C" void kvloom_files_open(File*, uint32_t, const char*);
extern "C" void kvloom_files_read(File*, uint32_t, int32_t);

namespace {

struct Line {
    int32_t mode = 0;
    uint64_t alignment = 1;
    int when = 0;
    long length = 0;
    std::string path;
    kvloom::Verifier verifier{};
    uint64_t size = 0;
    bool right = false;
    uint8_t* memory = nullptr;

    void change() {
        if (truncate(path.c_str(), length) != 0) std::exit(3);
    }
};

int filled(void* state, uint64_t num_bytes) {
    auto* line = static_cast<Line*>(state);
    if (line->when == 2) line->change(), line->when = 0;
    const bool good = line->verifier.filled(num_bytes);
    line->right = good && num_bytes == line->size;
    return good ? 0 : 1;
}

void read_together(std::vector<Line>& lines) {
    std::string paths;
    for (const Line& line : lines) paths += line.path + '\0';
    std::vector<char> exact(paths.begin(), paths.end());
    std::vector<File> files(lines.size());
    kvloom_files_open(files.data(), static_cast<uint32_t>(files.size()), exact.data());
    for (size_t at = 0; at < lines.size(); ++at) {
        Line& line = lines[at];
        if (files[at].error) continue;
        const uint64_t size = line.size = files[at].size;
        void* memory = nullptr;
        if (line.alignment == 1) memory = std::malloc(size ? size : 1);
        else if (posix_memalign(&memory, line.alignment, size ? size : 1) != 0) std::exit(3);
        line.memory = static_cast<uint8_t*>(memory);
        line.verifier.begin(line.memory, size, 4096);
        files[at].into = line.memory, files[at].filled = filled, files[at].state = &line;
        if (line.when == 1) line.change();
    }
    kvloom_files_read(files.data(), static_cast<uint32_t>(files.size()), lines[0].mode);
    for (size_t at = 0; at < lines.size(); ++at) {
        const bool right = !files[at].error && lines[at].right;
        std::printf("%d %llu %d\n", files[at].error, static_cast<unsigned long long>(lines[at].size), right);
        std::free(lines[at].memory);
    }
    lines.clear();
}

}  // namespace

int main(int count, char** names) {
    std::ifstream plan(count == 2 ? names[1] : "");
    if (!plan) return 2;
    std::vector<Line> lines;
    for (std::string text; std::getline(plan, text);) {
        if (text.empty()) {
            if (!lines.empty()) read_together(lines);
            continue;
        }
        Line line;
        std::istringstream words(text);
        words >> line.mode >> line.alignment >> line.when >> line.length >> std::ws;
        std::getline(words, line.path);
        lines.push_back(line);
    }
    if (!lines.empty()) read_together(lines);
    return 0;
}
