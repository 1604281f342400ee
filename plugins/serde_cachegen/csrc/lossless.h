// The mode `lossless`: the part of each element that is worth coding, and the rest as it is.
#pragma once
#include "own_tables.h"
#include "writing.h"

namespace kvz {
namespace KVZ_NAMESPACE {

template <int kDtype>
struct SymbolsEncoder {
  using S = Split<kDtype>;
  using Bits = typename S::Bits;
  uint32_t *slots, *inverses, *bases;
  uint8_t* symbols;
  uint16_t* words_end;

  explicit SymbolsEncoder(Arena arena) {
    slots = arena.take<uint32_t>(256), inverses = arena.take<uint32_t>(256), bases = arena.take<uint32_t>(kLanes);
    std::fill(bases, bases + kLanes, 0u);
    symbols = arena.take<uint8_t>(kFlatTile);
    words_end = arena.take<uint16_t>(kFlatTile + 64) + kFlatTile + 64;
  }

  uint8_t* table(const Bits* from, int64_t count, uint8_t* out) {
    uint32_t counts[4][256] = {};
    int64_t at = 0;
    for (; at + 4 <= count; at += 4)
      for (int part = 0; part < 4; ++part) counts[part][S::symbol(from[at + part])] += 1;
    for (; at < count; ++at) counts[0][S::symbol(from[at])] += 1;
    for (int symbol = 0; symbol < 256; ++symbol) counts[0][symbol] += counts[1][symbol] + counts[2][symbol] + counts[3][symbol];
    uint16_t frequencies[256];
    int present = 0, largest = 0;
    for (int symbol = 0; symbol < 256; ++symbol) {
      present += counts[0][symbol] != 0;
      largest = counts[0][symbol] > counts[0][largest] ? symbol : largest;
    }
    for (int symbol = 0; symbol < 256; ++symbol) frequencies[symbol] = share_of(counts[0][symbol], uint64_t(count), present);
    settle(frequencies, largest);
    uint32_t before = 0;
    for (int symbol = 0; symbol < 256; ++symbol) {
      slots[symbol] = encode_slot(frequencies[symbol], before, false);
      inverses[symbol] = frequencies[symbol] ? inverse_of(frequencies[symbol]) : 0;
      before += frequencies[symbol];
    }
    return write_table(frequencies, out);
  }

  Kept tile(const Bits* from, int count, uint8_t* out) {
    if (is_constant(from, 0, 1, count)) return keep_constant(from, out);
    for (int i = 0; i < count; ++i) symbols[i] = S::symbol(from[i]);
    alignas(64) uint32_t x[kLanes];
    std::fill(x, x + kLanes, kLow);
    uint16_t* end = words_end;
    const EncodeTables coder{slots, inverses};
    auto never = [](uint32_t, uint16_t* before) { return before; };
    int whole = count / kLanes * kLanes;
    if (whole < count) end = put_some<kWidePrecision>(x, coder, symbols + whole, bases, count - whole, end, never);
    for (int at = whole - kLanes; at >= 0; at -= kLanes) end = put_row<kWidePrecision>(x, coder, symbols + at, bases, end, never);
    int states = std::min(count, kLanes);
    int64_t words = words_end - end, rest = aligned(int64_t(count) * S::kRest);
    if (aligned(states * 4 + 2 * words + rest) >= aligned(int64_t(count) * int64_t(sizeof(Bits)))) return keep_raw(from, 0, 1, count, out);
    uint8_t* to = out;
    write(to, x, states);
    uint8_t* after = to + rest;
    for (int i = 0; i < count; ++i, to += S::kRest) S::rest(from[i], to);
    while (to < after) *to++ = 0;
    write(to, end, words);
    return {kSymbols, pad(out, to - out)};
  }
};

template <int kDtype>
int64_t encode_symbols(const KvzGeometry& g, const KvzEncode& job, uint8_t* stream, int64_t tiles, uint32_t* tables_size, Arena arena) {
  using Bits = typename Split<kDtype>::Bits;
  int64_t elements = int64_t(g.tokens) * g.hidden;
  // Tables of all planes come first, and each plane's tiles need its own.
  uint8_t* to = stream + kHeaderBytes;
  SymbolsEncoder<kDtype> encoders[2] = {SymbolsEncoder<kDtype>(arena), SymbolsEncoder<kDtype>(arena)};
  uint32_t own[2][2][256];
  for (int plane = 0; plane < g.planes; ++plane) {
    encoders[plane].slots = own[plane][0], encoders[plane].inverses = own[plane][1];
    to = encoders[plane].table(static_cast<const Bits*>(job.source) + plane * job.plane_stride, elements, to);
  }
  *tables_size = uint32_t(pad(stream, to - stream) - kHeaderBytes);
  uint8_t *directory = stream + kHeaderBytes + *tables_size, *begin = directory + 4 * tiles, *out = begin;
  for (int plane = 0; plane < g.planes; ++plane) {
    const Bits* from = static_cast<const Bits*>(job.source) + plane * job.plane_stride;
    for (int64_t at = 0; at < elements; at += kFlatTile) {
      Kept kept = encoders[plane].tile(from + at, int(std::min<int64_t>(kFlatTile, elements - at)), out);
      out += kept.bytes;
      note_end(directory, kept, out - begin);
    }
  }
  return out - stream;
}

template <int kDtype>
int32_t restore_run(uint32_t kind, const uint8_t* from, const uint8_t* end, int count, const uint32_t* table, typename Split<kDtype>::Bits* to) {
  using S = Split<kDtype>;
  if (kind == kRaw) return restore_raw(from, end, 0, 1, count, to);
  if (kind == kConst) return restore_constant(from, end, 0, 1, count, to);
  if (kind != kSymbols) return kBadDirectory;
  int states = std::min(count, kLanes);
  int64_t rest_bytes = aligned(int64_t(count) * S::kRest);
  if (end - from < states * 4 + rest_bytes) return kBadDirectory;
  for (int64_t at = int64_t(count) * S::kRest; at < rest_bytes; ++at)
    if (from[states * 4 + at] != 0) return kBadReserved;
  alignas(64) uint32_t x[kLanes];
  memcpy(x, from, size_t(states) * 4);
  for (int lane = 0; lane < states; ++lane)
    if (x[lane] < kLow) return kBadWords;
  const uint8_t* rest = from + states * 4;
  Words words{rest + rest_bytes, end};
  static const uint32_t bases[kLanes] = {};
  for (int at = 0; at < count; at += kLanes) {
    alignas(64) uint8_t symbols[kLanes];
    int active = std::min(kLanes, count - at);
    if (active == kLanes) take_row<kWidePrecision>(x, table, bases, symbols, words);
    else take_some<kWidePrecision>(x, table, bases, active, symbols, words);
    for (int lane = 0; lane < active; ++lane) to[at + lane] = S::join(symbols[lane], rest + int64_t(at + lane) * S::kRest);
  }
  return ended_well(x, states, words) ? kOk : kBadWords;
}

template <int kDtype>
int32_t decode_runs(const KvzGeometry& g, const Stream& stream, const KvzDecode& job, Arena arena, int64_t& offset) {
  using Bits = typename Split<kDtype>::Bits;
  int64_t elements = int64_t(g.tokens) * g.hidden, tile = 0;
  uint32_t* tables = arena.take<uint32_t>(2 * kWideSlots);
  int32_t unread = read_tables(stream, g.planes, 0, 1, tables, offset);
  if (unread != kOk) return unread;
  for (int plane = 0; plane < g.planes; ++plane) {
    Bits* to = static_cast<Bits*>(job.target) + plane * job.plane_stride;
    for (int64_t begin = 0; begin < elements; begin += kFlatTile, ++tile) {
      const uint8_t *from = stream.tile_begin(tile), *end = stream.tile_end(tile);
      int count = int(std::min<int64_t>(kFlatTile, elements - begin));
      int32_t error = restore_run<kDtype>(stream.kind(tile), from, end, count, tables + plane * kWideSlots, to + begin);
      offset = from - job.stream;
      if (error != kOk) return error;
    }
  }
  return kOk;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
