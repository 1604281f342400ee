// Encoding in blocks of tokens on a GPU: a warp encodes a tile, then tiles are moved together.
#pragma once
#include "bins_kernel.h"
#include "step_kernel.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// The tables of the family in the memory of a block, as EncodeTables has them.
struct FamilyCoder {
  struct alignas(8) Entry {
    uint32_t slot, inverse;
    KVZ_DEVICE bool escapes() const { return slot >> 31 != 0; }
  };
  Entry* entries;  // [64][kTableStride]
  static constexpr size_t kBytes = sizeof(Entry) * kFamily * kTableStride;

  KVZ_DEVICE explicit FamilyCoder(uint8_t* memory) : entries(reinterpret_cast<Entry*>(memory)) {
    for (int table = thread() / 32; table < kFamily; table += threads() / 32) {
      Frequencies of(table);
      uint32_t escape = from_lane(of.own[0], kEscape / 2), before = from_lane(of.before[0], kEscape / 2);
      for (int each = 0; each < 2; ++each) {
        int symbol = 2 * lane() + each;
        bool escapes = symbol >= kEscape || of.own[each] == 0;
        uint32_t frequency = escapes ? escape : of.own[each];
        entries[table * kTableStride + symbol] = {encode_slot(frequency, escapes ? before : of.before[each], escapes), inverse_of(frequency)};
      }
    }
    sync_block();
  }
};

// Of a warp, in the memory of its block: how often each value is in each of 32 channels, up to 255 times, [16][32][4] with values in
// fours, as the matrix of bytes that they are multiplied as.
constexpr size_t kCountBytes = 64 * kLanes;
// The same of a warp: a factor for each row, where tokens have scales.
KVZ_BOTH constexpr size_t factor_bytes(int mode) { return mode == kCacheGen ? kMaxTileTokens * sizeof(float) : 0; }
KVZ_BOTH constexpr size_t encode_shared(int mode) { return FamilyCoder::kBytes + kTileWarps * (kCountBytes + factor_bytes(mode)); }

// One tile, of a warp.
template <typename Source>
struct TileEncoder {
  using Bits = typename Source::Bits;
  using Channel = typename Source::Channel;
  static constexpr int kEscapeWords = sizeof(Bits) == 4 ? 2 : 1;
  Source source;
  int rows, width;
  uint8_t* chosen;
  uint8_t* counts;

  KVZ_DEVICE void count(int first) const {
    constexpr int kTogether = 8;  // Rows that are on their way while those before them are counted.
    uint8_t* own = counts + 4 * lane();
    for (int four = 0; four < 16; ++four) memset(own + 4 * kLanes * four, 0, 4);
    int c = first + lane(), row = 0;
    if (c < width) {
      Channel channel = source.channel(c);
      auto count_one = [&](int row, Bits bits) {
        int symbol = source.symbol(row, bits, channel);
        uint8_t& counted = own[(symbol & 60) * (kLanes - 1) + symbol];
        // A channel of 256 equal symbols has no others: whatever is counted, the same table is the least.
        uint32_t more = counted + 1u;
        counted = uint8_t(more < 255 ? more : 255);
      };
      const Bits* next = source.from + c;
      Bits coming[kTogether] = {};
      KVZ_UNROLL
      for (int each = 0; each < kTogether; ++each)
        if (kTogether <= rows) coming[each] = *next, next += source.stride;
      for (; row + kTogether <= rows; row += kTogether) {
        KVZ_UNROLL
        for (int each = 0; each < kTogether; ++each) {
          count_one(row + each, coming[each]);
          if (row + 2 * kTogether <= rows) coming[each] = *next, next += source.stride;
        }
      }
      for (; row < rows; ++row) count_one(row, source.bits(row, c));
    }
    sync_warp();
  }

  // What each channel costs in each table, by products of matrices: costs in two bytes by counts.
  KVZ_DEVICE void choose(int first) const {
    static_assert(kFamily % 16 == 0 && kFamily <= 64, "tables are numbered in the lowest bits of what they cost");
    uint32_t counted[4][2][2], least[4][2];  // of 8 channels; of 32 values
    const uint8_t* own = counts + (lane() % 4 * kLanes + lane() / 4) * 4;
    KVZ_UNROLL
    for (int eight = 0; eight < 4; ++eight) {
      KVZ_UNROLL
      for (int each = 0; each < 4; ++each) memcpy(&counted[eight][each / 2][each % 2], __builtin_assume_aligned(own + (4 * each * kLanes + 8 * eight) * 4, 4), 4);
      least[eight][0] = least[eight][1] = ~0u;
    }
    for (int tables = 0; tables < kFamily; tables += 16) {
      int table = tables + lane() / 4;
      uint32_t low[2][4], high[2][4];
      KVZ_UNROLL
      for (int each = 0; each < 8; ++each) {
        uint64_t costs;
        const uint16_t* from = &kCosts[table + each % 2 * 8][each / 2 * 16 + lane() % 4 * 4];
        memcpy(&costs, __builtin_assume_aligned(from, 8), 8);
        low[each / 4][each % 4] = every_other_byte(costs, false), high[each / 4][each % 4] = every_other_byte(costs, true);
      }
      KVZ_UNROLL
      for (int eight = 0; eight < 4; ++eight) {
        uint32_t lows[4] = {}, highs[4] = {};
        KVZ_UNROLL
        for (int half = 0; half < 2; ++half) multiply_bytes(low[half], counted[eight][half], lows), multiply_bytes(high[half], counted[eight][half], highs);
        KVZ_UNROLL
        for (int each = 0; each < 4; ++each) {
          uint32_t cost = (lows[each] + (highs[each] << 8)) * 64 + uint32_t(table + each / 2 * 8);  // Of equal ones the first table.
          least[eight][each % 2] = cost < least[eight][each % 2] ? cost : least[eight][each % 2];
        }
      }
    }
    KVZ_UNROLL
    for (int eight = 0; eight < 4; ++eight) {
      KVZ_UNROLL
      for (int each = 0; each < 2; ++each) {
        for (int apart = 4; apart < kLanes; apart *= 2) least[eight][each] = least_of(least[eight][each], apart);
        int c = first + 8 * eight + lane() % 4 * 2 + each;
        if (lane() / 4 == eight && c < width) chosen[c] = uint8_t(least[eight][each] % 64);
      }
    }
    sync_warp();
  }

  // The original bits of what escapes.
  KVZ_DEVICE void put_escapes(bool escapes, Bits bits, uint16_t*& end) const {
    uint32_t escaping = ballot(escapes);
    end -= kEscapeWords * count_ones(escaping);
    uint16_t* to = end + kEscapeWords * count_ones(escaping & lanes_below());
    if (escapes) to[0] = uint16_t(bits);
    if (escapes && kEscapeWords == 2) to[1] = uint16_t(uint32_t(bits) >> 16);
  }

  // Encodes it backwards, to before `end`. False if there are not `most` words left before a row, from `begin` on, which is looked at once
  // a row: then it is not smaller than its elements, see EncodeWork.
  KVZ_DEVICE bool encode(const FamilyCoder& coder, const uint16_t* begin, int most, uint16_t*& end, uint32_t& x) const {
    for (int row = rows - 1; row >= 0; --row) {
      if (end - begin < most) return false;
      for (int first = (width - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
        int c = first + lane();
        bool active = c < width;
        Bits bits = active ? source.bits(row, c) : Bits(0);
        FamilyCoder::Entry entry{1, 0};
        if (active) entry = coder.entries[chosen[c] * kTableStride + source.symbol(row, bits, source.channel(c))];
        if (ballot(entry.escapes()) != 0) put_escapes(entry.escapes(), bits, end);
        put_symbols<kPrecision>(active, entry.slot, entry.inverse, end, x);
      }
    }
    return true;
  }

  // The same of tiles of the usual width: what is known of channels is at hand, and two rows are on their way while those after them
  // are coded; at the first row it stays there.
  KVZ_DEVICE bool encode_usual(const FamilyCoder& coder, const uint16_t* begin, int most, uint16_t*& end, uint32_t& x) const {
    constexpr int kAhead = 2;
    Channel channels[kUsualGroups];
    const FamilyCoder::Entry* tables[kUsualGroups];
    Bits coming[kAhead][kUsualGroups];
    KVZ_UNROLL
    for (int group = 0; group < kUsualGroups; ++group) {
      int c = group * kLanes + lane();
      channels[group] = source.channel(c), tables[group] = coder.entries + chosen[c] * kTableStride;
    }
    const Bits* next = source.from + int64_t(rows - 1) * source.stride + lane();
    KVZ_UNROLL
    for (int each = 0; each < kAhead; ++each) {
      KVZ_UNROLL
      for (int group = 0; group < kUsualGroups; ++group) coming[each][group] = next[group * kLanes];
      if (each + 1 < rows) next -= source.stride;
    }
    for (int last = rows - 1; last >= 0; last -= kAhead) {
      KVZ_UNROLL
      for (int each = 0; each < kAhead; ++each) {
        int row = last - each;
        if (row < 0) break;
        if (end - begin < most) return false;
        Bits bits[kUsualGroups];
        FamilyCoder::Entry entries[kUsualGroups];
        bool escapes = false;
        KVZ_UNROLL
        for (int group = 0; group < kUsualGroups; ++group) {
          bits[group] = coming[each][group], coming[each][group] = next[group * kLanes];
          entries[group] = tables[group][source.symbol(row, bits[group], channels[group])];
          escapes = escapes || entries[group].escapes();
        }
        if (row > kAhead) next -= source.stride;
        bool some = ballot(escapes) != 0;
        KVZ_UNROLL
        for (int group = kUsualGroups - 1; group >= 0; --group) {
          if (some) put_escapes(entries[group].escapes(), bits[group], end);
          put_symbols<kPrecision>(true, entries[group].slot, entries[group].inverse, end, x);
        }
      }
    }
    return true;
  }

  // A tile of that kind with so many bytes of steps and centres, or raw where that takes `raw` bytes and is not more.
  KVZ_DEVICE void keep(uint32_t kind, int64_t of_steps, int64_t raw, const FamilyCoder& coder, uint16_t* words, int room, TileDone& done) const {
    for (int first = 0; first < width; first += kLanes) count(first), choose(first);
    uint32_t x = kLow;
    uint16_t* end = words + room;
    int most = width * (1 + kEscapeWords);
    bool fits = width == kUsualGroups * kLanes ? encode_usual(coder, words, most, end, x) : encode(coder, words, most, end, x);
    int used = int(words + room - end);
    int64_t side = int64_t(width < kLanes ? width : kLanes) * 4 + of_steps + width, coded = aligned(side + (side & 1) + 2 * int64_t(used));
    bool smaller = fits && coded < raw;
    done.states[lane()] = x;
    if (lane() == 0) done.kind = smaller ? kind : kRaw, done.bytes = int32_t(smaller ? coded : raw), done.words = used;
  }
};

template <typename Bits>
KVZ_DEVICE bool is_constant(const Bits* from, int64_t stride, int rows, int width) {
  bool same = true;
  for (int row = 0; row < rows && ballot(!same) == 0; ++row)
    for (int c = lane(); c < width; c += kLanes) same = same && from[row * stride + c] == from[0];
  return ballot(!same) == 0;
}

template <typename T, int kMode>
KVZ_KERNEL KVZ_BOUNDS(kTileThreads, 2) encode_tiles(KvzGeometry g, KvzSettings s, const KvzEncode* jobs, int32_t all, EncodeWork work) {
  using Bits = typename T::Bits;
  FamilyCoder coder(shared_memory());
  uint8_t* counts = shared_memory() + FamilyCoder::kBytes + size_t(thread() / 32) * (kCountBytes + factor_bytes(kMode));
  int bands = int(ceil_div(g.hidden, s.band));
  for (int32_t ticket = first_ticket(); ticket < all; ticket = next_ticket(work.next)) {
    BlockPlace place(g, s, work.blocks, ticket / bands);
    int column = ticket % bands * s.band, width = g.hidden - column < s.band ? g.hidden - column : s.band;
    const KvzEncode& job = jobs[place.job];
    int64_t channel = int64_t(ticket / bands) * g.hidden + column;
    const Bits* from = static_cast<const Bits*>(job.source) + place.plane * job.plane_stride + int64_t(place.token) * g.hidden + column;
    int64_t raw = aligned(int64_t(place.rows) * width * int64_t(sizeof(Bits)));
    TileDone& done = work.done[ticket];
    uint16_t* words = work.words + ticket * work.room;
    if constexpr (kMode == kCacheGen) {
      const uint8_t* scales = scales_of(g, job) + (int64_t(place.plane) * g.tokens + place.token) * int64_t(sizeof(Bits));
      int bins = has_bins(g, job) ? job.bins[place.plane] : kLeastBins;
      float middle = float(bins / 2 - 1), *factors = reinterpret_cast<float*>(counts + kCountBytes);
      fill_factors<T>(scales, place.rows, middle, factors);
      TileEncoder<BinsSource<T>> tile{{from, g.hidden, factors, middle, uint32_t(2 * middle)}, place.rows, width, work.chosen + channel, counts};
      tile.keep(kTokenScales, 0, raw, coder, words, int(work.room), done);
    } else if (is_constant(from, g.hidden, place.rows, width)) {
      if (lane() == 0) done.kind = kConst, done.bytes = 4, done.words = 0;
    } else {
      bool one = column < (place.plane == 0 ? s.shared_from : job.weights[1] != nullptr ? 0 : g.hidden);
      int64_t of_stream = work.blocks / g.planes, searched = place.job * of_stream + place.number % of_stream;
      const uint8_t* sinks = g.planes == 2 && work.has_sinks[searched] ? work.sinks + searched * s.tile_tokens : nullptr;
      TileEncoder<StepSource<T>> tile{{from, g.hidden, work.codes + channel, work.centres + channel, sinks}, place.rows, width, work.chosen + channel, counts};
      tile.keep(one ? kOneStep : kChannelSteps, (one ? 1 : width) + width, raw, coder, words, int(work.room), done);
    }
  }
}

// A warp for each stream: its header, its directory, and what is left of its tables.
KVZ_KERNEL write_directories(KvzGeometry g, KvzSettings s, KvzEncode* jobs, EncodeWork work) {
  KvzEncode& job = jobs[block()];
  Header header = header_of(g, s.mode, work.tiles, table_bytes(s.mode, g.dtype, g.planes, g.tokens, s.tile_tokens));
  header.band = uint16_t(s.band), header.tile_tokens = uint16_t(s.tile_tokens);
  if (s.mode == kCacheGen) write_bins(g, job, header.table_bytes);
  finish_stream(header, work.done + block() * work.tiles, job);
  if (lane() == 0 && s.mode == kCacheGen && !has_bins(g, job)) job.error = kBadSettings;
}

// A warp for each tile: its bytes to where the directory says.
template <typename T>
KVZ_KERNEL place_tiles(KvzGeometry g, KvzSettings s, const KvzEncode* jobs, EncodeWork work) {
  using Bits = typename T::Bits;
  int bands = int(ceil_div(g.hidden, s.band));
  BlockPlace place(g, s, work.blocks, block() / bands);
  const KvzEncode& job = jobs[place.job];
  int column = int(block() % bands) * s.band, width = g.hidden - column < s.band ? g.hidden - column : s.band;
  const TileDone& done = work.done[block()];
  int64_t tile = block() % work.tiles, channel = block() / bands * g.hidden + column;
  uint8_t* out = place_of(job, tile, done.bytes);
  const Bits* from = static_cast<const Bits*>(job.source) + place.plane * job.plane_stride + int64_t(place.token) * g.hidden + column;
  int64_t written = 0;
  if (done.kind == kConst) {
    if (lane() == 0) memset(out, 0, 4), memcpy(out, from, sizeof(Bits));
    return;
  }
  if (done.kind == kRaw) {
    written = int64_t(place.rows) * width * int64_t(sizeof(Bits));
    for (int row = 0; row < place.rows; ++row)
      for (int c = lane(); c < width; c += kLanes) memcpy(out + (int64_t(row) * width + c) * int64_t(sizeof(Bits)), from + int64_t(row) * g.hidden + c, sizeof(Bits));
  } else {
    bool steps = done.kind == kOneStep || done.kind == kChannelSteps;
    int states = width < kLanes ? width : kLanes, step_count = done.kind == kOneStep ? 1 : steps ? width : 0, centre_count = steps ? width : 0;
    if (lane() < states) memcpy(out + 4 * lane(), done.states + lane(), 4);
    uint8_t *codes = out + states * 4, *centres = codes + step_count, *chosen = centres + centre_count;
    for (int c = lane(); c < width; c += kLanes) {
      if (c < step_count) codes[c] = work.codes[channel + c];
      if (c < centre_count) centres[c] = uint8_t(work.centres[channel + c]);
      chosen[c] = work.chosen[channel + c];
    }
    int64_t side = int64_t(states) * 4 + step_count + centre_count + width;
    if ((side & 1) && lane() == 0) out[side] = 0;
    side += side & 1;
    int count = done.words;
    const uint16_t* words = work.words + (block() + 1) * work.room - count;
    uint16_t* to = reinterpret_cast<uint16_t*>(out + side);
    constexpr int kTogether = 8;  // All read before any is written, that might be where others are.
    for (int first = lane(); first < count; first += kTogether * kLanes) {
      uint16_t some[kTogether];
      KVZ_UNROLL
      for (int each = 0; each < kTogether; ++each)
        if (first + each * kLanes < count) some[each] = words[first + each * kLanes];
      KVZ_UNROLL
      for (int each = 0; each < kTogether; ++each)
        if (first + each * kLanes < count) to[first + each * kLanes] = some[each];
    }
    written = side + 2 * int64_t(count);
  }
  for (int64_t at = written + lane(); at < done.bytes; at += kLanes) out[at] = 0;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
