// Streams to begin from: of every mode and type, of values like those of KV with some that no model should make.
#pragma once
#include <algorithm>

#include "decode_target.h"

namespace fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state_ >> 32);
  }
  uint32_t below(uint32_t bound) { return uint32_t(uint64_t(next()) * bound >> 32); }
  float normal() {  // Nearly.
    float sum = 0.0f;
    for (int i = 0; i < 6; ++i) sum += float(next() >> 8) * 0x1p-24f;
    return (sum - 3.0f) * 1.414f;
  }

 private:
  uint64_t state_;
};

template <typename T>
void fill(Planes& planes, Random& random) {
  const KvzGeometry& g = planes.g;
  for (int plane = 0; plane < g.planes; ++plane) {
    for (int64_t i = 0; i < plane_elements(g); ++i) {
      const int channel = int(i % g.hidden);
      const float value = random.normal() * (0.1f + float(channel * 37 % 11)) + float(channel * 53 % 17 - 8);
      const typename T::Bits bits = random.below(200) == 0 ? typename T::Bits(random.next()) : T::store(value);
      memcpy(planes.plane(plane) + i * int64_t(sizeof bits), &bits, sizeof bits);
    }
  }
}

inline void fill(Planes& planes, Random& random) {
  switch (planes.g.dtype) {
    case kBF16: return fill<BF16>(planes, random);
    case kFP16: return fill<FP16>(planes, random);
    case kFP32: return fill<FP32>(planes, random);
    case kE5M2: return fill<E5M2>(planes, random);
    default: return fill<E4M3>(planes, random);
  }
}

// Calls with(geometry, choice of the decode target, mode, a stream) for every mode, type and shape.
template <typename With>
void examples(With&& with) {
  Random random(1);
  for (int shape = 0; shape < kShapeCount; ++shape) {
    for (int dtype = kBF16; dtype <= kByte; ++dtype) {
      const uint8_t choice = choice_of(dtype, shape);
      const KvzGeometry g = expected(choice);
      Planes source(g, 0);
      fill(source, random);
      for (int mode = kStep; mode <= kModes; ++mode) {
        if (!encodes(mode, g)) continue;
        KvzSettings s{};
        s.mode = mode, s.band = std::min(g.hidden, 40), s.tile_tokens = 256, s.step = 0.5f;
        with(g, choice, mode, encode(g, s, source, {nullptr, 32, 1000}));
      }
    }
  }
}

}  // namespace fuzz
