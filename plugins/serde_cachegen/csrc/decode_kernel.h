// Decoding on a GPU: a warp decodes a tile, a lane of it is a lane of the coder.
#pragma once
#include "transform_decode_kernel.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// The tables of the family in the memory of a block: the symbol of each slot, and each symbol's frequency and what is before it.
struct SharedFamily {
  uint8_t* symbols;  // [64][1024]
  uint32_t* slots;   // [64][64]
  static constexpr size_t kBytes = (size_t(kFamily) << kPrecision) + kFamily * 64 * 4;

  KVZ_DEVICE explicit SharedFamily(uint8_t* memory) : symbols(memory), slots(reinterpret_cast<uint32_t*>(memory + (size_t(kFamily) << kPrecision))) {
    for (int which = thread(); which < kFamily * 64; which += threads()) {
      int table = which / 64, symbol = which % 64;
      uint32_t before = 0, frequency = kFrequencies[table][symbol];
      for (int each = 0; each < symbol; ++each) before += kFrequencies[table][each];
      slots[which] = frequency | before << 16;
      for (uint32_t above = 0; above < frequency; ++above) symbols[(table << kPrecision) + before + above] = uint8_t(symbol);
    }
    sync_block();
  }
};

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
    float step, centre;
  };
  using Row = int;
  KVZ_DEVICE Channel channel(int c) const { return {kSteps[codes[step_count == 1 ? 0 : c]], float(int8_t(codes[step_count + c]))}; }
  KVZ_DEVICE Row row(int) const { return 0; }
  KVZ_DEVICE void put(int row, int c, int symbol, const Channel& its, Row) const { to[row * stride + c] = value_of<T>(symbol, its.step, its.centre); }
  KVZ_DEVICE void restore(int row, int c, uint32_t bits, const Channel&) const { to[row * stride + c] = Bits(bits); }
};

// ... and of `cachegen`.
template <typename T>
struct BinsTarget {
  using Bits = typename T::Bits;
  Bits* to;
  int64_t stride;
  float middle;
  const uint8_t* scales;  // of its tokens

  struct Channel {};
  using Row = float;
  KVZ_DEVICE Channel channel(int) const { return {}; }
  KVZ_DEVICE Row row(int row) const {
    Bits bits;
    memcpy(&bits, scales + row * int64_t(sizeof bits), sizeof bits);
    return T::load(bits);
  }
  KVZ_DEVICE void put(int row, int c, int symbol, const Channel&, Row scale) const { to[row * stride + c] = T::store(float(symbol + kFirst) / middle * scale); }
  KVZ_DEVICE void restore(int row, int c, uint32_t bits, const Channel&) const { to[row * stride + c] = Bits(bits); }
};

// What is known of a lane's channels, of which most tiles have at most four: those are kept at hand.
constexpr int kFewGroups = 4;

// of_steps: bytes of steps and centres between states and tables.
template <bool kFew, typename Target>
KVZ_DEVICE int32_t decode_rows(const Target& target, const SharedFamily& family, int of_steps, const uint8_t* from, const uint8_t* end, int rows, int width) {
  using Bits = typename Target::Bits;
  using Channel = typename Target::Channel;
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
  WarpWords words(from + side, end);
  Channel channels[kFewGroups] = {};
  uint32_t tables[kFewGroups] = {};
  KVZ_UNROLL
  for (int group = 0; group < kFewGroups; ++group) {
    int c = group * kLanes + lane();
    if (c < width) channels[group] = target.channel(c), tables[group] = chosen[c];
  }
  int groups = kFew ? kFewGroups : int(ceil_div(width, kLanes));
  for (int row = 0; row < rows; ++row) {
    typename Target::Row of_row = target.row(row);
    KVZ_UNROLL
    for (int group = 0; group < (kFew ? kFewGroups : groups); ++group) {
      if (kFew && group * kLanes >= width) break;
      int c = group * kLanes + lane();
      bool active = c < width;
      Channel channel{};
      uint32_t slot = 0, symbol = 0, table = 0;
      if constexpr (kFew) channel = channels[group], table = tables[group];
      else if (active) channel = target.channel(c), table = chosen[c];
      if (active) {
        uint32_t at = x & ((1u << kPrecision) - 1);
        symbol = family.symbols[(table << kPrecision) + at];
        slot = family.slots[table * 64 + symbol];
        x = (slot & 0xffff) * (x >> kPrecision) + at - (slot >> 16);
      }
      bool low = active && x < kLow;
      uint32_t next = words.take(low);
      if (low) x = x << 16 | next;
      bool escapes = active && symbol == kEscape;
      uint32_t escaping = ballot(escapes);
      if (active && !escapes) target.put(row, c, int(symbol), channel, of_row);
      if (escaping != 0) {
        constexpr int kEach = sizeof(Bits) == 4 ? 2 : 1;
        int number = words.at + words.taken + kEach * count_ones(escaping & lanes_below());
        if (escapes) target.restore(row, c, words.word(number) | (kEach == 2 ? words.word(number + 1) << 16 : 0), channel);
        words.skip(kEach * count_ones(escaping));
      }
    }
  }
  return ballot(x != kLow || !words.through()) == 0 ? kOk : kBadWords;
}

template <typename Target>
KVZ_DEVICE int32_t decode_symbols(const Target& target, const SharedFamily& family, int of_steps, const uint8_t* from, const uint8_t* end, int rows, int width) {
  return width <= kFewGroups * kLanes ? decode_rows<true>(target, family, of_steps, from, end, rows, width)
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
    return decode_symbols(BinsTarget<T>{to, g.hidden, float(bins / 2 - 1), scales}, family, 0, from, end, rows, width);
  } else {
    if (kind != kChannelSteps && kind != kOneStep) return kBadDirectory;
    int step_count = kind == kOneStep ? 1 : width;
    return decode_symbols(StepTarget<T>{to, g.hidden, step_count, from + 4 * (width < kLanes ? width : kLanes)}, family, step_count + width, from, end, rows, width);
  }
}

template <typename T, int kMode>
KVZ_KERNEL decode_tiles(KvzGeometry g, KvzDecode* jobs, int32_t count, DecodeMemory memory) {
  SharedFamily family(shared_memory());
  DecodeWork* work = memory.work;
  for (int32_t ticket = next_ticket(&work->next); ticket < work->tiles; ticket = next_ticket(&work->next)) {
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
