// What `lossless` codes of each element, and the tables of a stream's own: for processors and for kernels.
#pragma once
#include "reading.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// The symbol of an element, and what is left of it: exponents of bf16 and float32, the upper byte of fp16, all of a byte.
template <int kDtype>
struct Split;
template <>
struct Split<kBF16> {
  using Bits = uint16_t;
  static constexpr int kRest = 1;
  static KVZ_BOTH uint8_t symbol(Bits bits) { return uint8_t(bits >> 7); }
  static KVZ_BOTH void rest(Bits bits, uint8_t* to) { to[0] = uint8_t((bits >> 8 & 0x80) | (bits & 0x7f)); }
  static KVZ_BOTH Bits join(uint8_t symbol, const uint8_t* rest) { return Bits((rest[0] & 0x80) << 8 | symbol << 7 | (rest[0] & 0x7f)); }
};
template <>
struct Split<kFP16> {
  using Bits = uint16_t;
  static constexpr int kRest = 1;
  static KVZ_BOTH uint8_t symbol(Bits bits) { return uint8_t(bits >> 8); }
  static KVZ_BOTH void rest(Bits bits, uint8_t* to) { to[0] = uint8_t(bits); }
  static KVZ_BOTH Bits join(uint8_t symbol, const uint8_t* rest) { return Bits(symbol << 8 | rest[0]); }
};
template <>
struct Split<kFP32> {
  using Bits = uint32_t;
  static constexpr int kRest = 3;
  static KVZ_BOTH uint8_t symbol(Bits bits) { return uint8_t(bits >> 23); }
  static KVZ_BOTH void rest(Bits bits, uint8_t* to) { to[0] = uint8_t(bits), to[1] = uint8_t(bits >> 8), to[2] = uint8_t((bits >> 24 & 0x80) | (bits >> 16 & 0x7f)); }
  static KVZ_BOTH Bits join(uint8_t symbol, const uint8_t* rest) {
    return uint32_t(rest[2] & 0x80) << 24 | uint32_t(symbol) << 23 | uint32_t(rest[2] & 0x7f) << 16 | uint32_t(rest[1]) << 8 | rest[0];
  }
};
template <>
struct Split<kByte> {
  using Bits = uint8_t;
  static constexpr int kRest = 0;
  static KVZ_BOTH uint8_t symbol(Bits bits) { return bits; }
  static KVZ_BOTH void rest(Bits, uint8_t*) {}
  static KVZ_BOTH Bits join(uint8_t symbol, const uint8_t*) { return symbol; }
};

// What a symbol has of 4096 slots before they are settled: at least 1 where there is anything. present: of how many symbols.
KVZ_BOTH uint16_t share_of(uint32_t count, uint64_t total, int present) {
  return uint16_t(count == 0 ? 0 : 1 + (uint64_t(count) * uint64_t(kWideSlots - present) + total / 2) / total);
}

// What rounding took or left goes to the largest, and from the next ones if it is not large enough.
KVZ_BOTH void settle(uint16_t* frequencies, int largest) {
  int left = int(kWideSlots);
  for (int symbol = 0; symbol < 256; ++symbol) left -= frequencies[symbol];
  for (int symbol = largest; left != 0; symbol = (symbol + 1) & 255) {
    if (frequencies[symbol] == 0) continue;
    int change = left < 1 - frequencies[symbol] ? 1 - frequencies[symbol] : left;
    frequencies[symbol] = uint16_t(frequencies[symbol] + change);
    left -= change;
  }
}

// A table: its first and last symbol, then frequencies of one byte below 128, else two, the upper one first.
KVZ_BOTH uint8_t* write_table(const uint16_t* frequencies, uint8_t* out) {
  int first = 0, last = 255;
  while (first < 255 && frequencies[first] == 0) ++first;
  while (last > first && frequencies[last] == 0) --last;
  *out++ = uint8_t(first), *out++ = uint8_t(last);
  for (int symbol = first; symbol <= last; ++symbol) {
    if (frequencies[symbol] >= 128) *out++ = uint8_t(0x80 | frequencies[symbol] >> 8);
    *out++ = uint8_t(frequencies[symbol]);
  }
  return out;
}

// Reads one plane's own table; where it ends, or null. Of each symbol it fills every `stride`th slot from `first` on.
KVZ_BOTH const uint8_t* read_table(const uint8_t* from, const uint8_t* end, int first, int stride, uint32_t* table) {
  if (end - from < 2 || from[0] > from[1]) return nullptr;
  int symbol = from[0], last = from[1];
  uint32_t before = 0;
  for (from += 2; symbol <= last; ++symbol) {
    if (from == end) return nullptr;
    uint32_t frequency = *from++;
    if (frequency & 0x80) {
      if (from == end) return nullptr;
      frequency = (frequency & 0x7f) << 8 | *from++;
    }
    if (before + frequency > uint32_t(kWideSlots)) return nullptr;
    for (uint32_t above = uint32_t(first); above < frequency; above += uint32_t(stride)) table[before + above] = decode_slot(uint32_t(symbol), frequency, above);
    before += frequency;
  }
  return before == uint32_t(kWideSlots) ? from : nullptr;
}

// Reads those of all planes, [planes][4096]. offset: of what is wrong, in the stream.
KVZ_BOTH int32_t read_tables(const Stream& stream, int planes, int first, int stride, uint32_t* tables, int64_t& offset) {
  const uint8_t *at = stream.tables, *begin = stream.tables - kHeaderBytes;
  for (int plane = 0; plane < planes; ++plane) {
    offset = at - begin;
    at = read_table(at, stream.directory, first, stride, tables + plane * kWideSlots);
    if (at == nullptr) return kBadTable;
  }
  if (stream.directory - at >= 4) return kBadTable;
  for (; at < stream.directory; ++at)
    if (*at != 0) return kBadReserved;
  return kOk;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
