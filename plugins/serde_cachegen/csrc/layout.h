// How planes are cut into tiles, and the scratch memory that it takes to code them.
#pragma once
#include <algorithm>

#include "kvz.h"
#include "kvz_api.h"

namespace kvz {

KVZ_BOTH int64_t aligned(int64_t bytes) { return (bytes + 3) & ~int64_t(3); }
KVZ_BOTH int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a plane is cut into tiles.
struct Cut {
  int64_t bands, blocks;  // of `step` and `cachegen`
  int64_t runs;           // of `lossless`
  int64_t per_plane;
  KVZ_BOTH Cut(int mode, int64_t tokens, int64_t hidden, int band, int tile_tokens) {
    bands = blocks = runs = 0;
    if (mode == kLossless) {
      per_plane = runs = ceil_div(tokens * hidden, kFlatTile);
    } else {
      bands = ceil_div(hidden, band), blocks = ceil_div(tokens, tile_tokens);
      per_plane = bands * blocks;
    }
  }
};

constexpr int64_t kColumnsTogether = 2048, kBandsTogether = 32;  // At most, that are decoded side by side.
constexpr int kMaxBand = 1024;
constexpr int kMaxReaders = 64;  // Bands of components.
constexpr int kMaxTileTokens = 256;
constexpr int kMaxTables = 2 * 256 + 4;  // Bytes of one plane's own table.

KVZ_BOTH int64_t table_bytes(int mode, int dtype, int planes, int64_t tokens, int tile_tokens) {
  if (mode == kLossless) return planes * int64_t(kMaxTables);  // At most.
  if (mode == kCacheGen) return aligned(2 * planes) + aligned(planes * tokens * element_bytes(dtype));
  if (mode == kKlt) return kProfileBytes + 4 + 4 * planes * ceil_div(tokens, tile_tokens);
  return 0;
}

// Scratch memory of one thread, cut into arrays.
struct Arena {
  uint8_t* at;
  template <typename V>
  V* take(int64_t count) {
    at = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t(63));
    V* begin = reinterpret_cast<V*>(at);
    at += count * int64_t(sizeof(V));
    return begin;
  }
};

constexpr int64_t kWideSlots = 1 << kWidePrecision;
// For each column, and the lanes that a band does not fill, three arrays; for each band a reader and what is aligned.
constexpr int64_t kDecodeWorkspace =
    3 * 4 * (kColumnsTogether + kBandsTogether * kLanes) + kBandsTogether * (320 + 16 + 3 * 64) + 8192;
static_assert(kDecodeWorkspace > 2 * kWideSlots * 4 + 128, "there is room for the tables of `lossless` too");

// Tokens that are transformed at a time, and the columns and bytes of the basis that stay in the nearest cache meanwhile.
constexpr int kTogether = 64, kColumnsOfPanel = 128, kPanelBytes = 32768;
constexpr int kMostRests = 64;  // Of a token, on average: pairs of numbers that are multiplied beside the others, since they are large.

KVZ_BOTH int64_t sums_of_token(int hidden) { return ceil_div(hidden, kColumnsOfPanel) * kColumnsOfPanel; }

// Of the mode `klt`, beside the above: there is at most one component for each channel.
inline int64_t transform_workspace(const KvzGeometry& g) {
  int64_t entries = 8 * (g.hidden + 2 + g.hidden / 64), each = 4 * sums_of_token(g.hidden) + entries + g.hidden / 64 + 16;
  return kTogether * each + kPanelBytes + int64_t(g.hidden) * (12 + 4) + (kMaxReaders + 1) * (512 + 4 * kLanes) + 4096;
}

inline int64_t encode_workspace(const KvzGeometry& g, const KvzSettings& s) {
  int64_t elements = s.mode == kLossless ? kFlatTile : int64_t(kMaxTileTokens) * (s.band + kLanes);
  int64_t words = elements * (1 + escape_words(g.dtype)) + 64;
  int64_t transform = s.mode == kKlt ? int64_t(g.hidden) * (2 * kMaxTileTokens + 3 * kTogether + 20) + kTogether * (4 * sums_of_token(g.hidden) + 16 * kMostRests) + kPanelBytes + 4096 : 0;
  return transform + 2 * words + elements + 6 * 4 * int64_t(g.hidden) + s.band * 64 * 2 + 4 * 4 * (s.band + kLanes) + 65536;
}

}  // namespace kvz
