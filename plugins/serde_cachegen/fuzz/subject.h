// What all checks share: memory of exact size, and a stream decoded with every instruction set, which must agree.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "profile.h"

namespace fuzz {

using namespace kvz;

constexpr int kModes = 4;  // kStep to kKlt.
constexpr int kGap = 5;    // Elements between planes, which nobody may touch.

[[noreturn]] inline void fail(const char* file, int line, const char* condition) {
  fprintf(stderr, "%s:%d: not true: %s\n", file, line, condition);
  abort();
}
#define EXPECT(condition) ((condition) ? void() : ::fuzz::fail(__FILE__, __LINE__, #condition))

// `step` and `cachegen` need numbers, and `klt` pairs of channels.
inline bool encodes(int mode, const KvzGeometry& g) {
  return mode == kLossless || (g.dtype != kByte && (mode != kKlt || TestProfile::of(g.hidden) != nullptr));
}

// What some modes need beside geometry and settings, for either job.
template <typename Job>
void give_profile(const KvzGeometry& g, Job& job) {
  const TestProfile* profile = TestProfile::of(g.hidden);
  if (profile != nullptr) job.profile = profile->about(), job.bases = profile->bases();
}

// Exactly as many bytes, at an odd address if asked for, so that the address sanitizer sees the first one beyond.
class Exact {
 public:
  Exact(int64_t size, uint8_t fill, bool odd = false) : bytes_(new uint8_t[size_t(size) + odd]), begin_(bytes_.get() + odd), size_(size) {
    memset(begin_, fill, size_t(size));
  }
  uint8_t* begin() { return begin_; }
  int64_t size() const { return size_; }

 private:
  std::unique_ptr<uint8_t[]> bytes_;
  uint8_t* begin_;
  int64_t size_;
};

// Scratch memory of exactly this size, filled anew; it is kept, for as much is asked for again and again.
inline uint8_t* scratch(int64_t size, uint8_t fill) {
  static std::map<int64_t, Exact> known;
  if (known.size() > 32) known.clear();
  Exact& found = known.try_emplace(size, size, fill).first->second;
  memset(found.begin(), fill, size_t(size));
  return found.begin();
}

inline int64_t plane_elements(const KvzGeometry& g) { return int64_t(g.tokens) * g.hidden; }

// The planes of one layer one after the other, with a gap between them.
struct Planes {
  KvzGeometry g;
  Exact memory;
  Planes(const KvzGeometry& g, uint8_t fill)
      : g(g), memory((g.planes * plane_elements(g) + (g.planes - 1) * kGap) * element_bytes(g.dtype), fill) {}
  int64_t stride() const { return plane_elements(g) + kGap; }
  int64_t plane_bytes() const { return plane_elements(g) * element_bytes(g.dtype); }
  uint8_t* plane(int number) { return memory.begin() + number * stride() * element_bytes(g.dtype); }
  bool gap_is(uint8_t fill) {
    for (uint8_t* at = plane(0) + plane_bytes(); g.planes == 2 && at < plane(1); ++at)
      if (*at != fill) return false;
    return true;
  }
};

struct Outcome {
  int32_t error;
  int64_t offset;
  std::vector<uint8_t> values;  // Plane after plane, if there was no error.
  bool operator==(const Outcome& other) const {
    return error == other.error && offset == other.offset && values == other.values;
  }
};

// Whatever is not written differs from one set to the next, as scratch memory does at first.
inline Outcome decode_with(int set, const KvzGeometry& g, const uint8_t* stream, int64_t size) {
  const uint8_t fill = uint8_t(0x5b + 0x11 * set);
  const int32_t transformed = TestProfile::of(g.hidden) != nullptr;
  Exact bytes(size, 0, true);
  if (size > 0) memcpy(bytes.begin(), stream, size_t(size));
  Planes target(g, fill);
  KvzDecode job{};
  job.stream = bytes.begin(), job.size = size, job.target = target.plane(0), job.plane_stride = target.stride();
  give_profile(g, job);
  EXPECT(kvz_decode(&g, &job, 1, scratch(kvz_decode_workspace(&g, transformed), fill), transformed, 1, set) == job.error);
  EXPECT(target.gap_is(fill));
  Outcome outcome{job.error, 0, {}};
  if (job.error == kOk) {
    for (int plane = 0; plane < g.planes; ++plane)
      outcome.values.insert(outcome.values.end(), target.plane(plane), target.plane(plane) + target.plane_bytes());
  } else {
    outcome.offset = job.offset;
    EXPECT(job.offset >= 0 && job.offset <= size);
  }
  return outcome;
}

inline Outcome decode(const KvzGeometry& g, const uint8_t* stream, int64_t size) {
  Outcome first = decode_with(0, g, stream, size);
  for (int set = 1; set <= kvz_instructions(); ++set) EXPECT(decode_with(set, g, stream, size) == first);
  return first;
}

// How to encode, beside the settings.
struct More {
  const float* weights;
  int bins;
  int start;
};

inline std::vector<uint8_t> encode_with(int set, const KvzGeometry& g, const KvzSettings& s, Planes& source, const More& more) {
  const uint8_t fill = uint8_t(0x5b + 0x11 * set);
  Exact out(kvz_bound(&g, &s), fill, true);
  KvzEncode job{};
  job.source = source.plane(0), job.plane_stride = source.stride(), job.weights[0] = job.weights[1] = more.weights;
  job.bins[0] = job.bins[1] = more.bins, job.start = more.start, job.out = out.begin(), job.capacity = out.size();
  give_profile(g, job);
  EXPECT(kvz_encode(&g, &s, &job, 1, scratch(kvz_encode_workspace(&g, &s), fill), 1, set) == kOk);
  EXPECT(job.size >= kHeaderBytes && job.size <= out.size());
  return {out.begin(), out.begin() + job.size};
}

inline std::vector<uint8_t> encode(const KvzGeometry& g, const KvzSettings& s, Planes& source, const More& more) {
  std::vector<uint8_t> first = encode_with(0, g, s, source, more);
  for (int set = 1; set <= kvz_instructions(); ++set) EXPECT(encode_with(set, g, s, source, more) == first);
  return first;
}

}  // namespace fuzz
