// A stream as it is read: its header and directory, and what all tiles have in common.
#pragma once
#include "layout.h"
#include "rows.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// What a stream says of itself, once it was found to be consistent.
struct Stream {
  Header header{};
  const uint8_t *tables = nullptr, *directory = nullptr, *payload = nullptr, *end = nullptr;
  KVZ_BOTH uint32_t kind(int64_t tile) const { return entry(tile) >> 29; }
  KVZ_BOTH const uint8_t* tile_end(int64_t tile) const { return payload + 4 * int64_t(entry(tile) & 0x1fffffff); }
  KVZ_BOTH const uint8_t* tile_begin(int64_t tile) const { return tile == 0 ? payload : tile_end(tile - 1); }

 private:
  KVZ_BOTH uint32_t entry(int64_t tile) const {
    uint32_t value;
    memcpy(&value, directory + 4 * tile, 4);
    return value;
  }
};

// Takes as valid only what has the geometry that the caller expects, so that the size of what is written is the caller's.
KVZ_BOTH int32_t parse_header(const KvzGeometry& g, const uint8_t* bytes, int64_t size, Stream& stream, int64_t& offset) {
  offset = 0;
  if (size < kHeaderBytes) return kTruncated;
  Header& h = stream.header;
  memcpy(&h, bytes, sizeof h);
  if (h.magic != kMagic) return kBadMagic;
  offset = 4;
  if (h.version != kVersion) return kBadVersion;
  offset = 5;
  if (h.mode < kStep || h.mode > kKlt) return kBadGeometry;
  offset = 6;
  if (h.dtype != g.dtype || h.planes != g.planes || h.tokens != uint32_t(g.tokens) || h.hidden != uint32_t(g.hidden)) return kBadGeometry;
  offset = 16;
  bool flat = h.mode == kLossless;
  if (flat ? h.band != 0 || h.tile_tokens != 0 : h.band == 0 || h.band > kMaxBand || h.band > h.hidden || h.tile_tokens == 0 || h.tile_tokens > kMaxTileTokens) return kBadGeometry;
  offset = 20;
  Cut cut(h.mode, g.tokens, g.hidden, h.band, h.tile_tokens);
  if (int64_t(h.tiles) != g.planes * cut.per_plane) return kBadGeometry;
  offset = 24;
  int64_t most = table_bytes(h.mode, g.dtype, g.planes, g.tokens, h.tile_tokens);
  if ((h.table_bytes & 3) || (flat ? h.table_bytes > most : h.table_bytes != most)) return kBadGeometry;
  offset = 28;
  if (int64_t(h.total) != size) return kTruncated;
  int64_t fixed = kHeaderBytes + int64_t(h.table_bytes) + 4 * int64_t(h.tiles);
  if (fixed > size) return kTruncated;
  stream.tables = bytes + kHeaderBytes;
  stream.directory = stream.tables + h.table_bytes;
  stream.payload = stream.directory + 4 * int64_t(h.tiles);
  stream.end = bytes + size;
  return kOk;
}

// Tiles follow each other without gaps or overlaps, to the end. Looks at every `stride`th from `first` on.
KVZ_BOTH int32_t check_directory(const Stream& stream, int64_t first, int64_t stride, int64_t& bad) {
  int64_t tiles = stream.header.tiles;
  for (int64_t tile = first; tile < tiles; tile += stride) {
    const uint8_t *begin = stream.tile_begin(tile), *end = stream.tile_end(tile);
    bad = tile;
    if (end < begin || end > stream.end || (tile == tiles - 1 && end != stream.end)) return kBadDirectory;
  }
  return kOk;
}

inline int32_t parse(const KvzGeometry& g, const uint8_t* bytes, int64_t size, Stream& stream, int64_t& offset) {
  int32_t error = parse_header(g, bytes, size, stream, offset);
  if (error != kOk) return error;
  int64_t bad = 0;
  error = check_directory(stream, 0, 1, bad);
  offset = stream.directory - bytes + 4 * bad;
  return error;
}

template <typename Bits>
inline void take_escapes(uint32_t mask, Words& words, Bits* to) {
  for (; mask != 0; mask &= mask - 1) {
    uint32_t bits = words.take();
    if (sizeof(Bits) == 4) bits |= words.take() << 16;
    to[__builtin_ctz(mask)] = Bits(bits);
  }
}

inline uint32_t escapes_of(const uint8_t* symbols, int active) {
#if defined(KVZ_AVX512)
  if (active == kLanes) return _mm256_cmpeq_epu8_mask(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols)), _mm256_set1_epi8(kEscape));
#elif defined(KVZ_AVX2)
  if (active == kLanes) return uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols)), _mm256_set1_epi8(kEscape))));
#endif
  uint32_t mask = 0;
  for (int lane = 0; lane < active; ++lane) mask |= uint32_t(symbols[lane] == kEscape) << lane;
  return mask;
}

// All lanes are back where the encoder began, and every word was taken but the padding.
inline bool ended_well(const uint32_t* x, int states, const Words& words) {
  uint32_t wrong = words.short_of;
  for (int lane = 0; lane < states; ++lane) wrong |= x[lane] ^ kLow;
  if (words.end - words.at >= 4) return false;
  for (const uint8_t* at = words.at; at < words.end; ++at) wrong |= *at;
  return wrong == 0;
}

template <typename Bits>
int32_t restore_raw(const uint8_t* from, const uint8_t* end, int64_t stride, int rows, int width, Bits* to) {
  int64_t bytes = int64_t(rows) * width * int64_t(sizeof(Bits));
  if (end - from != aligned(bytes)) return kBadDirectory;
  for (int row = 0; row < rows; ++row) memcpy(to + row * stride, from + int64_t(row) * width * int64_t(sizeof(Bits)), size_t(width) * sizeof(Bits));
  for (const uint8_t* at = from + bytes; at < end; ++at)
    if (*at != 0) return kBadReserved;
  return kOk;
}

template <typename Bits>
int32_t restore_constant(const uint8_t* from, const uint8_t* end, int64_t stride, int rows, int width, Bits* to) {
  if (end - from != 4) return kBadDirectory;
  uint32_t all = 0;
  memcpy(&all, from, 4);
  if (sizeof(Bits) < 4 && all >> (8 * sizeof(Bits) % 32) != 0) return kBadReserved;
  for (int row = 0; row < rows; ++row) std::fill(to + row * stride, to + row * stride + width, Bits(all));
  return kOk;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
