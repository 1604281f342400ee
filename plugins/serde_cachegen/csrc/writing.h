// Tiles as they are written: raw, constant, or symbols in the tables of the family.
#pragma once
#include "layout.h"
#include "rows.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// -- tables of the family, made once ------------------------------------------------------------------------------------

struct Family {
  uint32_t slots[kFamily * 64], inverses[kFamily * 64];
  uint32_t decode[kFamily << kPrecision];
  Family() {
    for (int table = 0; table < kFamily; ++table) {
      uint32_t before[64], sum = 0;
      for (int symbol = 0; symbol < 64; ++symbol) before[symbol] = sum, sum += kFrequencies[table][symbol];
      for (int symbol = 0; symbol < 64; ++symbol) {
        uint32_t frequency = kFrequencies[table][symbol];
        bool escapes = symbol >= kEscape || frequency == 0;
        int as = escapes ? kEscape : symbol;
        slots[table * 64 + symbol] = encode_slot(kFrequencies[table][as], before[as], escapes);
        inverses[table * 64 + symbol] = inverse_of(kFrequencies[table][as]);
        for (uint32_t above = 0; above < frequency; ++above)
          decode[(table << kPrecision) + before[symbol] + above] = decode_slot(uint32_t(symbol), frequency, above);
      }
    }
  }
};
inline const Family& family() {
  static const Family it;
  return it;
}

// The table in which a channel costs the least; the first of several.
inline int best_table(const uint16_t* counts) {
  uint32_t least = ~0u;
  int best = 0;
  for (int table = 0; table < kFamily; ++table) {
    int32_t cost = 0;
    for (int symbol = 0; symbol < 64; ++symbol) cost += int32_t(int16_t(counts[symbol])) * int16_t(kCosts[table][symbol]);
    if (uint32_t(cost) < least) least = uint32_t(cost), best = table;
  }
  return best;
}

// -- writing -----------------------------------------------------------------------------------------------------------

template <typename V>
inline void write(uint8_t*& to, const V* values, int64_t count) {
  if (count > 0) memcpy(to, values, size_t(count) * sizeof(V));
  to += count * int64_t(sizeof(V));
}

template <typename Bits>
inline uint16_t* push_escapes(const Bits* from, uint32_t mask, uint16_t* end) {
  uint16_t* begin = end - __builtin_popcount(mask) * (sizeof(Bits) == 4 ? 2 : 1);
  uint16_t* to = begin;
  for (; mask != 0; mask &= mask - 1) {
    uint32_t bits = from[__builtin_ctz(mask)];
    *to++ = uint16_t(bits);
    if (sizeof(Bits) == 4) *to++ = uint16_t(bits >> 16);
  }
  return begin;
}

// What became of a tile: how it is kept, and its bytes, which are a multiple of 4.
struct Kept {
  uint32_t kind;
  int64_t bytes;
};

// Where a tile ends, in the directory; a stream may begin at any address.
inline void note_end(uint8_t*& directory, Kept kept, int64_t end) {
  uint32_t entry = kept.kind << 29 | uint32_t(end / 4);
  write(directory, &entry, 1);
}

inline int64_t pad(uint8_t* out, int64_t bytes) {
  while (bytes & 3) out[bytes++] = 0;
  return bytes;
}

template <typename Bits>
Kept keep_raw(const Bits* from, int64_t stride, int rows, int width, uint8_t* out) {
  for (int row = 0; row < rows; ++row) memcpy(out + int64_t(row) * width * int64_t(sizeof(Bits)), from + row * stride, size_t(width) * sizeof(Bits));
  return {kRaw, pad(out, int64_t(rows) * width * int64_t(sizeof(Bits)))};
}

template <typename Bits>
bool is_constant(const Bits* from, int64_t stride, int rows, int width) {
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < width; ++column)
      if (from[row * stride + column] != from[0]) return false;
  return true;
}

template <typename Bits>
Kept keep_constant(const Bits* from, uint8_t* out) {
  memset(out, 0, 4);
  memcpy(out, from, sizeof(Bits));
  return {kConst, 4};
}

// Places and arrays for one tile of symbols.
struct Scratch {
  uint8_t* symbols;   // [rows][lanes]
  uint16_t* words_end;
  uint16_t* counts;   // [band][64]
  uint32_t* bases;    // [band + 32]

  // escape_words: of one value.
  Scratch(Arena& arena, int band, int escape_words) {
    int64_t lanes = ceil_div(band, kLanes) * kLanes, words = kMaxTileTokens * lanes * (1 + escape_words) + 32;
    counts = arena.take<uint16_t>(int64_t(band) * 64), bases = arena.take<uint32_t>(lanes);
    symbols = arena.take<uint8_t>(kMaxTileTokens * lanes);
    words_end = arena.take<uint16_t>(words) + words;
  }
};

// A tile of channels whose symbols stand in `scratch`, `lanes` bytes to a token. centres: null if there are none. What would take
// `limit` bytes or more is not written: its kind is raw, and it has none.
template <typename Bits>
Kept keep_symbols(uint32_t kind, const Bits* from, int64_t stride, int rows, int width, int lanes,
                  const Scratch& scratch, const uint8_t* steps, int step_count, const int8_t* centres, int64_t limit, uint8_t* out) {
  const Family& tables = family();
  uint8_t chosen[kMaxBand];
  memset(scratch.counts, 0, size_t(width) * 64 * sizeof(uint16_t));
  for (int row = 0; row < rows; ++row)
    for (int c = 0; c < width; ++c) scratch.counts[c * 64 + scratch.symbols[int64_t(row) * lanes + c]] += 1;
  for (int c = 0; c < width; ++c) chosen[c] = uint8_t(best_table(scratch.counts + c * 64)), scratch.bases[c] = chosen[c] * 64u;
  for (int c = width; c < lanes; ++c) scratch.bases[c] = 0;
  alignas(64) uint32_t x[kLanes];
  std::fill(x, x + kLanes, kLow);
  uint16_t* end = scratch.words_end;
  const EncodeTables coder{tables.slots, tables.inverses};
  for (int row = rows - 1; row >= 0; --row) {
    for (int c = (width - 1) / kLanes * kLanes; c >= 0; c -= kLanes) {
      const Bits* bits = from + row * stride + c;
      auto escape = [bits](uint32_t mask, uint16_t* before) { return push_escapes(bits, mask, before); };
      const uint8_t* symbols = scratch.symbols + int64_t(row) * lanes + c;
      end = width - c >= kLanes ? put_row<kPrecision>(x, coder, symbols, scratch.bases + c, end, escape)
                                : put_some<kPrecision>(x, coder, symbols, scratch.bases + c, width - c, end, escape);
    }
  }
  int states = std::min(width, kLanes);
  int64_t words = scratch.words_end - end, centre_count = centres == nullptr ? 0 : width;
  int64_t side = states * 4 + step_count + centre_count + width;
  int64_t bytes = aligned(side + (side & 1) + 2 * words);
  if (bytes >= limit) return {kRaw, 0};
  uint8_t* to = out;
  write(to, x, states);
  write(to, steps, step_count);
  write(to, centres, centre_count);
  write(to, chosen, width);
  if (side & 1) *to++ = 0;
  write(to, end, words);
  return {kind, pad(out, to - out)};
}

// The same, or its elements as they are, where that is not more.
template <typename Bits>
Kept keep_smaller(uint32_t kind, const Bits* from, int64_t stride, int rows, int width, int lanes, const Scratch& scratch,
                  const uint8_t* steps, int step_count, const int8_t* centres, uint8_t* out) {
  int64_t raw = aligned(int64_t(rows) * width * int64_t(sizeof(Bits)));
  Kept kept = keep_symbols(kind, from, stride, rows, width, lanes, scratch, steps, step_count, centres, raw, out);
  return kept.kind == kRaw ? keep_raw(from, stride, rows, width, out) : kept;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
