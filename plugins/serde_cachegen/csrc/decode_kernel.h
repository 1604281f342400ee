// Decoding on a GPU: a warp decodes a tile, a lane of it is a lane of the coder.
#pragma once
#include "transform_decode_kernel.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// The tables of the family in the memory of a block: the symbol of each slot, and each symbol's frequency and what is before it.
struct SharedFamily {
  uint8_t* symbols;  // [64][1024]
  uint32_t* slots;   // [64][kTableStride]
  static constexpr size_t kBytes = (size_t(kFamily) << kPrecision) + kFamily * kTableStride * 4;

  KVZ_DEVICE explicit SharedFamily(uint8_t* memory) : symbols(memory), slots(reinterpret_cast<uint32_t*>(memory + (size_t(kFamily) << kPrecision))) {
    for (int table = thread() / 32; table < kFamily; table += threads() / 32) {
      Frequencies of(table);
      uint32_t* own = slots + table * kTableStride;
      own[2 * lane()] = of.own[0] | of.before[0] << 16, own[2 * lane() + 1] = of.own[1] | of.before[1] << 16;
      sync_warp();
      constexpr int kTogether = (1 << kPrecision) / kLanes;
      uint32_t first = uint32_t(lane() * kTogether), symbol = 0;
      for (uint32_t step = 32; step > 0; step /= 2)
        if (own[symbol + step] >> 16 <= first) symbol += step;
      uint32_t end = own[symbol + 1] >> 16;  // The last symbol has no slots.
      for (uint32_t at = first; at < first + kTogether; at += 4) {
        uint32_t four = 0;
        for (uint32_t each = 0; each < 4; ++each) {
          while (at + each >= end) symbol += 1, end = own[symbol + 1] >> 16;
          four |= symbol << 8 * each;
        }
        memcpy(__builtin_assume_aligned(symbols + (table << kPrecision) + at, 4), &four, 4);
      }
    }
    sync_block();
  }
};

constexpr size_t kDecodeShared = SharedFamily::kBytes + kTileWarps * WarpWords::kBytes;

// Where a tile belongs.
struct TilePlace {
  int plane, token, column, rows, width;
  KVZ_DEVICE TilePlace(const KvzGeometry& g, const Header& h, int tile) {
    int bands = int(ceil_div(g.hidden, h.band)), blocks = int(ceil_div(g.tokens, h.tile_tokens));
    int band = tile % bands, block = tile / bands % blocks;
    plane = tile / bands / blocks, token = block * h.tile_tokens, column = band * h.band;
    rows = g.tokens - token < h.tile_tokens ? g.tokens - token : h.tile_tokens;
    width = g.hidden - column < h.band ? g.hidden - column : h.band;
  }
};

// What becomes of symbols: of the mode `step` ...
template <typename T>
struct StepTarget {
  using Bits = typename T::Bits;
  Bits* to;  // the first element of the tile
  int64_t stride;
  int step_count;
  const uint8_t* codes;  // then centres

  struct Channel {
    float step;
    uint32_t first;  // The bits of symbol 0, for whole_of.
  };
  using Row = int;
  KVZ_DEVICE Channel channel(int c) const { return {kSteps[codes[step_count == 1 ? 0 : c]], kRoundsBits + uint32_t(int8_t(codes[step_count + c]) + kFirst)}; }
  KVZ_DEVICE Row row(int) const { return 0; }
  KVZ_DEVICE Bits value(int symbol, const Channel& its, Row) const { return T::store(whole_of(its.first + uint32_t(symbol)) * its.step); }  // As value_of.
  KVZ_DEVICE Bits escaped(uint32_t bits, const Channel&) const { return Bits(bits); }
};

// ... and of `cachegen`.
template <typename T>
struct BinsTarget {
  using Bits = typename T::Bits;
  Bits* to;
  int64_t stride;
  float middle, inverse;
  const uint8_t* scales;  // of its tokens

  struct Channel {};
  using Row = uint32_t;  // As it is loaded: what is made of it would wait for it.
  KVZ_DEVICE Channel channel(int) const { return {}; }
  KVZ_DEVICE Row row(int row) const {
    Bits bits;
    memcpy(&bits, __builtin_assume_aligned(scales + row * int64_t(sizeof bits), sizeof bits), sizeof bits);
    return bits;
  }
  // The level divided by the middle: of all of either, what a product by the inverse is off is less than one correction takes away.
  KVZ_DEVICE Bits value(int symbol, const Channel&, Row scale) const {
    float level = whole_of(kRoundsBits + uint32_t(symbol + kFirst)), part = level * inverse;
    return T::store(fmaf(fmaf(-part, middle, level), inverse, part) * T::load(Bits(scale)));
  }
  KVZ_DEVICE Bits escaped(uint32_t bits, const Channel&) const { return Bits(bits); }
};

// A symbol of each lane that is active.
template <typename Target>
KVZ_DEVICE void decode_symbol(const Target& target, const SharedFamily& family, uint32_t table, const typename Target::Channel& channel,
                              typename Target::Row of_row, bool active, typename Target::Bits* to, uint32_t& x, WarpWords& words) {
  uint32_t at = x & ((1u << kPrecision) - 1), symbol = family.symbols[(table << kPrecision) + at], slot = family.slots[table * kTableStride + symbol];
  uint32_t after = (slot & 0xffff) * (x >> kPrecision) + at - (slot >> 16);
  x = active ? after : x;
  bool low = active && x < kLow, escapes = active && symbol == kEscape;
  uint32_t next = words.take(low), escaping = ballot(escapes);
  x = low ? x << 16 | next : x;
  if (active && !escapes) *to = target.value(int(symbol), channel, of_row);
  if (escaping != 0) {
    constexpr int kEach = sizeof(typename Target::Bits) == 4 ? 2 : 1;
    int number = words.at + kEach * count_ones(escaping & lanes_below());
    if (escapes) *to = target.escaped(words.word(number) | (kEach == 2 ? words.word(number + 1) << 16 : 0), channel);
    words.skip(kEach * count_ones(escaping));
  }
}

// of_steps: bytes of steps and centres between states and tables. What is known of the channels of a tile of the usual width is at
// hand; what is known of a row, before it is needed.
template <bool kUsual, typename Target>
KVZ_DEVICE int32_t decode_rows(const Target& target, const SharedFamily& family, int of_steps, const uint8_t* from, const uint8_t* end, int rows, int width) {
  int states = width < kLanes ? width : kLanes;
  int64_t side = int64_t(states) * 4 + of_steps + width;
  side += side & 1;
  if (end - from < side) return kBadDirectory;
  const uint8_t* chosen = from + states * 4 + of_steps;
  bool good = true;
  for (int c = lane(); c < width; c += kLanes) good = good && chosen[c] < kFamily;
  if (ballot(!good) != 0) return kBadTable;
  if (((of_steps + width) & 1) && chosen[width] != 0) return kBadReserved;
  uint32_t x = kLow;
  if (lane() < states) memcpy(&x, from + 4 * lane(), 4);
  if (ballot(x < kLow) != 0) return kBadWords;
  WarpWords words(shared_memory() + SharedFamily::kBytes, from + side, end);
  typename Target::Channel channels[kUsualGroups];
  uint32_t tables[kUsualGroups];
  KVZ_UNROLL
  for (int group = 0; group < (kUsual ? kUsualGroups : 0); ++group) {
    int c = group * kLanes + lane();
    channels[group] = target.channel(c), tables[group] = chosen[c];
  }
  typename Target::Bits* to = target.to + lane();
  typename Target::Row of_next = target.row(0);
  for (int row = 0; row < rows; ++row, to += target.stride) {
    typename Target::Row of_row = of_next;
    of_next = target.row(row + 1 < rows ? row + 1 : row);
    if constexpr (kUsual) {
      KVZ_UNROLL
      for (int group = 0; group < kUsualGroups; ++group) decode_symbol(target, family, tables[group], channels[group], of_row, true, to + group * kLanes, x, words);
    } else {
      for (int first = 0; first < width; first += kLanes) {
        bool active = first + lane() < width;
        int c = active ? first + lane() : 0;
        decode_symbol(target, family, chosen[c], target.channel(c), of_row, active, to + first, x, words);
      }
    }
  }
  bool through = words.through();
  return ballot(x != kLow || !through) == 0 ? kOk : kBadWords;
}

template <typename Target>
KVZ_DEVICE int32_t decode_symbols(const Target& target, const SharedFamily& family, int of_steps, const uint8_t* from, const uint8_t* end, int rows, int width) {
  return width == kUsualGroups * kLanes ? decode_rows<true>(target, family, of_steps, from, end, rows, width)
                                        : decode_rows<false>(target, family, of_steps, from, end, rows, width);
}

template <typename T, int kMode>
KVZ_DEVICE int32_t decode_tile(const KvzGeometry& g, const KvzDecode& job, const Stream& stream, const SharedFamily& family, const TilePlace& place, int tile,
                               int16_t* coefficients) {
  using Bits = typename T::Bits;
  const uint8_t *from = stream.tile_begin(tile), *end = stream.tile_end(tile);
  uint32_t kind = stream.kind(tile);
  int rows = place.rows, width = place.width;
  if constexpr (kMode == kKlt) {
    BlockHead head = head_of(stream, g, place.plane, place.token);
    if (head.code != 0) {
      if (kind != kCoefficients) return kBadDirectory;
      int components = head.used - place.column < width ? head.used - place.column : width;
      if (components <= 0) return from == end ? kOk : kBadDirectory;
      int16_t* to = coefficients + (int64_t(place.plane) * g.tokens + place.token) * g.hidden + place.column;
      return decode_symbols(ComponentTarget{to, g.hidden, job.bases + place.plane, place.column}, family, 0, from, end, rows, components);
    }
  }
  Bits* to = static_cast<Bits*>(job.target) + place.plane * job.plane_stride + int64_t(place.token) * g.hidden + place.column;
  if (kind == kRaw) return copy_raw(from, end, g.hidden, rows, width, to);
  if (kind == kConst) return fill_constant(from, end, g.hidden, rows, width, to);
  if constexpr (kMode == kCacheGen) {
    if (kind != kTokenScales) return kBadDirectory;
    uint32_t bins = stream.tables[2 * place.plane] | uint32_t(stream.tables[2 * place.plane + 1]) << 8;
    const uint8_t* scales = stream.tables + aligned(2 * g.planes) + (int64_t(place.plane) * g.tokens + place.token) * int64_t(sizeof(Bits));
    float middle = float(bins / 2 - 1);
    return decode_symbols(BinsTarget<T>{to, g.hidden, middle, 1.0f / middle, scales}, family, 0, from, end, rows, width);
  } else {
    if (kind != kChannelSteps && kind != kOneStep) return kBadDirectory;
    int step_count = kind == kOneStep ? 1 : width;
    return decode_symbols(StepTarget<T>{to, g.hidden, step_count, from + 4 * (width < kLanes ? width : kLanes)}, family, step_count + width, from, end, rows, width);
  }
}

template <typename T, int kMode>
KVZ_KERNEL KVZ_BOUNDS(kTileThreads, 2) decode_tiles(KvzGeometry g, KvzDecode* jobs, int32_t count, DecodeMemory memory) {
  SharedFamily family(shared_memory());
  DecodeWork* work = memory.work;
  for (int32_t ticket = first_ticket(); ticket < work->tiles; ticket = next_ticket(&work->next)) {
    int32_t number = stream_of(work, count, ticket);
    KvzDecode& job = jobs[number];
    if (from_lane(job.error, 0) != kOk) continue;
    Stream stream;
    int64_t offset = 0;
    parse_header(g, job.stream, job.size, stream, offset);
    int tile = ticket - work->before[number];
    TilePlace place(g, stream.header, tile);
    int16_t* coefficients = memory.coefficients + int64_t(number) * g.planes * g.tokens * g.hidden;
    int32_t error = decode_tile<T, kMode>(g, job, stream, family, place, tile, coefficients);
    if (lane() == 0 && error != kOk) blame(job, error, stream.tile_begin(tile) - job.stream);
  }
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
