// Streams: one layer of one chunk, encoded and decoded by one thread. Included once for each instruction set.
#pragma once
#include "bands.h"
#include "bins.h"
#include "lossless.h"
#include "step.h"
#include "transform.h"

namespace kvz {
namespace KVZ_NAMESPACE {

template <typename T>
void encode_step(const KvzGeometry& g, const KvzSettings& s, const KvzEncode& job, uint8_t* directory, uint8_t* out, uint8_t** end, Arena arena) {
  StepEncoder<T> encoder(g, s, job, arena);
  uint8_t* begin = out;
  auto note = [&](uint32_t kind, uint8_t* at) { note_end(directory, {kind, 0}, at - begin); };
  for (int plane = 0; plane < g.planes; ++plane) {
    const typename T::Bits* from = static_cast<const typename T::Bits*>(job.source) + plane * job.plane_stride;
    for (int token = 0; token < g.tokens; token += s.tile_tokens)
      out = encoder.block(plane, from + int64_t(token) * g.hidden, std::min(s.tile_tokens, g.tokens - token), out, note);
  }
  *end = out;
}

template <typename T>
void encode_bins(const KvzGeometry& g, const KvzSettings& s, const KvzEncode& job, uint8_t* tables, uint8_t* directory, uint8_t* out, uint8_t** end, Arena arena) {
  BinsEncoder<T> encoder(g, s, job, arena);
  uint8_t* begin = out;
  auto note = [&](uint32_t kind, uint8_t* at) { note_end(directory, {kind, 0}, at - begin); };
  memset(tables, 0, size_t(table_bytes(kCacheGen, g.dtype, g.planes, g.tokens, s.tile_tokens)));
  for (int plane = 0; plane < g.planes; ++plane) {
    uint16_t bins = uint16_t(job.bins[plane]);
    memcpy(tables + 2 * plane, &bins, 2);
  }
  uint8_t* scales = tables + aligned(2 * g.planes);
  for (int plane = 0; plane < g.planes; ++plane) {
    encoder.scales(plane, scales);
    const typename T::Bits* from = static_cast<const typename T::Bits*>(job.source) + plane * job.plane_stride;
    for (int token = 0; token < g.tokens; token += s.tile_tokens) {
      const uint8_t* of_block = scales + (int64_t(plane) * g.tokens + token) * int64_t(sizeof(typename T::Bits));
      out = encoder.block(plane, from + int64_t(token) * g.hidden, std::min(s.tile_tokens, g.tokens - token), of_block, out, note);
    }
  }
  *end = out;
}

// Blocks that cannot be transformed have the tiles of `step`.
template <typename T>
void encode_klt(const KvzGeometry& g, const KvzSettings& s, const KvzEncode& job, uint8_t* tables, uint8_t* directory, uint8_t* out, uint8_t** end, Arena arena) {
  uint8_t* begin = out;
  auto note = [&](uint32_t kind, uint8_t* at) { note_end(directory, {kind, 0}, at - begin); };
  memset(tables, 0, size_t(table_bytes(kKlt, g.dtype, g.planes, g.tokens, s.tile_tokens)));
  memcpy(tables, job.profile->id, kProfileBytes);
  memcpy(tables + kProfileBytes, &job.start, 4);
  uint8_t* table = tables + kProfileBytes + 4;
  for (int plane = 0; plane < g.planes; ++plane) {
    const typename T::Bits* from = static_cast<const typename T::Bits*>(job.source) + plane * job.plane_stride;
    for (int token = 0; token < g.tokens; token += s.tile_tokens, table += 4) {
      const typename T::Bits* at = from + int64_t(token) * g.hidden;
      int rows = std::min(s.tile_tokens, g.tokens - token);
      uint8_t* before = directory;
      uint8_t* after = TransformEncoder<T>(g, s, job, arena).block(plane, token, at, rows, table, out, note);
      if (after == nullptr) {
        directory = before;
        memset(table, 0, 4);
        after = StepEncoder<T>(g, s, job, arena).block(plane, at, rows, out, note);
      }
      out = after;
    }
  }
  *end = out;
}

inline int32_t encode_stream(const KvzGeometry& g, const KvzSettings& s, KvzEncode& job, uint8_t* workspace) {
  Cut cut(s.mode, g.tokens, g.hidden, s.band, s.tile_tokens);
  int64_t tiles = g.planes * cut.per_plane;
  if (job.capacity < kvz_bound(&g, &s)) return kNoRoom;
  Arena arena{workspace};
  Header header{};
  header.magic = kMagic, header.version = kVersion, header.mode = uint8_t(s.mode), header.dtype = uint8_t(g.dtype);
  header.planes = uint8_t(g.planes), header.tokens = uint32_t(g.tokens), header.hidden = uint32_t(g.hidden);
  header.tiles = uint32_t(tiles);
  if (s.mode == kLossless) {
    switch (g.dtype) {
      case kBF16: job.size = encode_symbols<kBF16>(g, job, job.out, tiles, &header.table_bytes, arena); break;
      case kFP16: job.size = encode_symbols<kFP16>(g, job, job.out, tiles, &header.table_bytes, arena); break;
      case kFP32: job.size = encode_symbols<kFP32>(g, job, job.out, tiles, &header.table_bytes, arena); break;
      default: job.size = encode_symbols<kByte>(g, job, job.out, tiles, &header.table_bytes, arena);
    }
  } else {
    header.band = uint16_t(s.band), header.tile_tokens = uint16_t(s.tile_tokens);
    header.table_bytes = uint32_t(table_bytes(s.mode, g.dtype, g.planes, g.tokens, s.tile_tokens));
    uint8_t* tables = job.out + kHeaderBytes;
    uint8_t *directory = tables + header.table_bytes, *begin = directory + 4 * tiles, *end = begin;
    auto run = [&](auto element) {
      using T = decltype(element);
      if (s.mode == kStep) encode_step<T>(g, s, job, directory, begin, &end, arena);
      else if (s.mode == kKlt) encode_klt<T>(g, s, job, tables, directory, begin, &end, arena);
      else encode_bins<T>(g, s, job, tables, directory, begin, &end, arena);
    };
    switch (g.dtype) {
      case kBF16: run(BF16{}); break;
      case kFP16: run(FP16{}); break;
      case kFP32: run(FP32{}); break;
      case kE4M3: run(E4M3{}); break;
      case kE5M2: run(E5M2{}); break;
      default: return kBadSettings;
    }
    job.size = end - job.out;
  }
  header.total = uint32_t(job.size);
  memcpy(job.out, &header, sizeof header);
  return kOk;
}

inline int32_t decode_stream(const KvzGeometry& g, KvzDecode& job, uint8_t* workspace) {
  Stream stream;
  int32_t error = parse(g, job.stream, job.size, stream, job.offset);
  if (error != kOk) return error;
  Arena arena{workspace};
  if (stream.header.mode == kLossless) {
    switch (g.dtype) {
      case kBF16: return decode_runs<kBF16>(g, stream, job, arena, job.offset);
      case kFP16: return decode_runs<kFP16>(g, stream, job, arena, job.offset);
      case kFP32: return decode_runs<kFP32>(g, stream, job, arena, job.offset);
      default: return decode_runs<kByte>(g, stream, job, arena, job.offset);
    }
  }
  switch (g.dtype) {
    case kBF16: return decode_bands<BF16>(g, stream, job, arena, job.offset);
    case kFP16: return decode_bands<FP16>(g, stream, job, arena, job.offset);
    case kFP32: return decode_bands<FP32>(g, stream, job, arena, job.offset);
    case kE4M3: return decode_bands<E4M3>(g, stream, job, arena, job.offset);
    case kE5M2: return decode_bands<E5M2>(g, stream, job, arena, job.offset);
    default: return kBadGeometry;
  }
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
