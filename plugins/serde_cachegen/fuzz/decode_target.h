// How an input of the decode target is read.
#pragma once
#include <algorithm>

#include "subject.h"

namespace fuzz {

// Of what sizes tiles, runs and lanes begin to differ: planes, tokens, elements of a token.
constexpr int kShapes[][3] = {
    {2, 1, 1}, {2, 3, 5}, {1, 3, 40}, {2, 3, 40}, {1, 20, 33}, {2, 7, 64}, {2, 5, 96}, {1, 260, 3}, {1, 2, 2100}, {1, 260, 130}, {2, 40, 70},
};
constexpr int kShapeCount = sizeof kShapes / sizeof *kShapes;

inline KvzGeometry expected(uint8_t choice) {
  const int* shape = kShapes[choice / 6 % kShapeCount];
  return {1 + choice % 6, shape[0], shape[1], shape[2]};
}

inline uint8_t choice_of(int dtype, int shape) { return uint8_t(shape * 6 + dtype - 1); }

enum Mend : uint8_t { kNothing = 0, kGeometry = 1, kSizes = 2, kEnd = 4 };

// Random bytes are refused at the first of a dozen numbers that must agree. What is mended lets them further in.
inline void mend(const KvzGeometry& g, uint8_t what, std::vector<uint8_t>& stream) {
  if (stream.size() < sizeof(Header)) return;
  Header h;
  memcpy(&h, stream.data(), sizeof h);
  if (what & kGeometry) {
    h.magic = kMagic, h.version = kVersion, h.mode = uint8_t(1 + (h.mode - 1u) % kModes);
    h.dtype = uint8_t(g.dtype), h.planes = uint8_t(g.planes), h.tokens = uint32_t(g.tokens), h.hidden = uint32_t(g.hidden);
    h.total = uint32_t(stream.size());
  }
  const bool flat = h.mode == kLossless;
  if (what & kSizes) {
    const int64_t tokens = g.tokens, hidden = g.hidden;
    if (flat) {
      h.band = h.tile_tokens = 0;
      h.tiles = uint32_t(g.planes * ((tokens * hidden + kFlatTile - 1) / kFlatTile));
    } else {
      h.band = uint16_t(1 + (h.band - 1u) % uint32_t(std::min(g.hidden, 1024))), h.tile_tokens = uint16_t(1 + (h.tile_tokens - 1u) % 256);
      h.tiles = uint32_t(g.planes * ((hidden + h.band - 1) / h.band) * ((tokens + h.tile_tokens - 1) / h.tile_tokens));
      h.table_bytes = 0;
      if (h.mode == kCacheGen) h.table_bytes = uint32_t((2 * g.planes + 3) / 4 * 4 + (g.planes * tokens * element_bytes(g.dtype) + 3) / 4 * 4);
      if (h.mode == kKlt) h.table_bytes = uint32_t(kProfileBytes + 4 + 4 * g.planes * ((tokens + h.tile_tokens - 1) / h.tile_tokens));
    }
  }
  memcpy(stream.data(), &h, sizeof h);
  const TestProfile* profile = TestProfile::of(g.hidden);
  if ((what & kSizes) && h.mode == kKlt && profile != nullptr && stream.size() >= sizeof h + kProfileBytes)
    memcpy(stream.data() + sizeof h, profile->about()->id, kProfileBytes);
  const int64_t payload = int64_t(sizeof h) + h.table_bytes + 4 * int64_t(h.tiles), size = int64_t(stream.size());
  if ((what & kEnd) && h.tiles > 0 && payload <= size) {  // The last tile ends where the stream does.
    stream.resize(size_t(size - (size - payload) % 4));
    h.total = uint32_t(stream.size());
    memcpy(stream.data(), &h, sizeof h);
    uint32_t entry;
    memcpy(&entry, stream.data() + payload - 4, 4);
    entry = (entry & 0xe0000000u) | uint32_t(int64_t(stream.size()) - payload) / 4;
    memcpy(stream.data() + payload - 4, &entry, 4);
  }
}

}  // namespace fuzz
