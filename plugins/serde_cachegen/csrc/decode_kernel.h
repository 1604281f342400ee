// Decoding on a GPU: a warp decodes a tile, a lane of it is a lane of the coder.
#pragma once
#include "decode_work.h"

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

// What is known of a lane's channels, of which most tiles have at most four: those are kept at hand.
constexpr int kFewGroups = 4;

template <typename T, bool kFew>
KVZ_DEVICE int32_t decode_symbols(const KvzGeometry& g, const Stream& stream, const SharedFamily& family, uint32_t kind, const uint8_t* from,
                                  const uint8_t* end, const TilePlace& place, typename T::Bits* to) {
  using Bits = typename T::Bits;
  int width = place.width, states = width < kLanes ? width : kLanes;
  int step_count = kind == kTokenScales ? 0 : kind == kOneStep ? 1 : width;
  int centre_count = kind == kTokenScales ? 0 : width;
  int64_t side = int64_t(states) * 4 + step_count + centre_count + width;
  side += side & 1;
  if (end - from < side) return kBadDirectory;
  const uint8_t *codes = from + states * 4, *centres = codes + step_count, *chosen = centres + centre_count;
  bool good = true;
  for (int c = lane(); c < width; c += kLanes) good = good && chosen[c] < kFamily;
  if (ballot(!good) != 0) return kBadTable;
  if (((step_count + centre_count + width) & 1) && chosen[width] != 0) return kBadReserved;
  uint32_t x = kLow;
  if (lane() < states) memcpy(&x, from + 4 * lane(), 4);
  if (ballot(x < kLow) != 0) return kBadWords;
  WarpWords words(from + side, end);
  float middle = 0.0f;
  const uint8_t* scales = nullptr;
  if (kind == kTokenScales) {
    uint32_t bins = stream.tables[2 * place.plane] | uint32_t(stream.tables[2 * place.plane + 1]) << 8;
    middle = float(bins / 2 - 1);
    scales = stream.tables + aligned(2 * g.planes) + (int64_t(place.plane) * g.tokens + place.token) * int64_t(sizeof(Bits));
  }
  float step_of[kFewGroups], centre_of[kFewGroups];
  uint32_t table_of[kFewGroups];
  auto channel = [&](int c, float& step, float& centre, uint32_t& table) {
    bool there = c < width;
    table = there ? chosen[c] : 0;
    step = there && kind != kTokenScales ? kSteps[codes[kind == kOneStep ? 0 : c]] : 1.0f;
    centre = there && kind != kTokenScales ? float(int8_t(centres[c])) : 0.0f;
  };
  KVZ_UNROLL
  for (int group = 0; group < kFewGroups; ++group) channel(group * kLanes + lane(), step_of[group], centre_of[group], table_of[group]);
  int groups = kFew ? kFewGroups : int(ceil_div(width, kLanes));
  for (int row = 0; row < place.rows; ++row) {
    float scale = 0.0f;
    if (scales != nullptr) {
      Bits bits;
      memcpy(&bits, scales + row * int64_t(sizeof bits), sizeof bits);
      scale = T::load(bits);
    }
    Bits* out = to + int64_t(row) * g.hidden;
    KVZ_UNROLL
    for (int group = 0; group < (kFew ? kFewGroups : groups); ++group) {
      if (kFew && group * kLanes >= width) break;
      int c = group * kLanes + lane();
      bool active = c < width;
      float step, centre;
      uint32_t slot = 0, symbol = 0, table;
      if constexpr (kFew) step = step_of[group], centre = centre_of[group], table = table_of[group];
      else channel(c, step, centre, table);
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
      if (active && !escapes)
        out[c] = kind == kTokenScales ? T::store(float(int(symbol) + kFirst) / middle * scale) : value_of<T>(int(symbol), step, centre);
      if (escaping != 0) {
        constexpr int kEach = sizeof(Bits) == 4 ? 2 : 1;
        int number = words.at + words.taken + kEach * count_ones(escaping & lanes_below());
        if (escapes) out[c] = Bits(words.word(number) | (kEach == 2 ? words.word(number + 1) << 16 : 0));
        words.skip(kEach * count_ones(escaping));
      }
    }
  }
  return ballot(x != kLow || !words.through()) == 0 ? kOk : kBadWords;
}

template <typename T>
KVZ_KERNEL decode_tiles(KvzGeometry g, KvzDecode* jobs, int32_t count, DecodeWork* work) {
  SharedFamily family(shared_memory());
  for (int32_t ticket = next_ticket(&work->next); ticket < work->tiles; ticket = next_ticket(&work->next)) {
    int32_t number = stream_of(work, count, ticket);
    KvzDecode& job = jobs[number];
    if (from_lane(job.error, 0) != kOk) continue;
    Stream stream;
    int64_t offset = 0;
    parse_header(g, job.stream, job.size, stream, offset);
    const Header& h = stream.header;
    int tile = ticket - work->before[number];
    TilePlace place(g, h, tile);
    const uint8_t *from = stream.tile_begin(tile), *end = stream.tile_end(tile);
    typename T::Bits* to = static_cast<typename T::Bits*>(job.target) + place.plane * job.plane_stride + int64_t(place.token) * g.hidden + place.column;
    uint32_t kind = stream.kind(tile);
    int32_t error = kBadDirectory;
    if (kind == kRaw) error = copy_raw(from, end, g.hidden, place.rows, place.width, to);
    else if (kind == kConst) error = fill_constant(from, end, g.hidden, place.rows, place.width, to);
    else if (h.mode == kCacheGen ? kind == kTokenScales : kind == kChannelSteps || kind == kOneStep)
      error = place.width <= kFewGroups * kLanes ? decode_symbols<T, true>(g, stream, family, kind, from, end, place, to)
                                                 : decode_symbols<T, false>(g, stream, family, kind, from, end, place, to);
    if (lane() == 0 && error != kOk) blame(job, error, from - job.stream);
  }
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
