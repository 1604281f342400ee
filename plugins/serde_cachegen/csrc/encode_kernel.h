// Encoding in blocks of tokens on a GPU: a warp encodes a tile, then tiles are moved together.
#pragma once
#include "bins_kernel.h"
#include "step_kernel.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// The tables of the family in the memory of a block, as EncodeTables has them; what escapes has no slot.
struct FamilyCoder {
  uint32_t *slots, *inverses;  // [64][64]
  static constexpr size_t kBytes = 2 * kFamily * 64 * 4;

  KVZ_DEVICE explicit FamilyCoder(uint8_t* memory) : slots(reinterpret_cast<uint32_t*>(memory)), inverses(slots + kFamily * 64) {
    for (int which = thread(); which < kFamily * 64; which += threads()) {
      uint32_t before = 0, frequency = kFrequencies[which / 64][which % 64];
      for (int each = 0; each < which % 64; ++each) before += kFrequencies[which / 64][each];
      slots[which] = encode_slot(frequency, before, false), inverses[which] = frequency == 0 ? 0 : inverse_of(frequency);
    }
    sync_block();
  }
};
constexpr size_t kEncodeShared = FamilyCoder::kBytes + size_t(kWarps) * 64 * kLanes * 2;

// One tile, of a warp.
template <typename Source>
struct TileEncoder {
  using Bits = typename Source::Bits;
  Source source;
  int rows, width;
  uint8_t* chosen;
  uint16_t* counts;  // [64][32], in the memory of the block

  // The table in which each channel costs the least, of 32 channels at a time.
  KVZ_DEVICE void choose_tables() const {
    for (int first = 0; first < width; first += kLanes) {
      int c = first + lane();
      for (int value = 0; value < 64; ++value) counts[value * kLanes + lane()] = 0;
      if (c < width) {
        auto channel = source.channel(c);
        for (int row = 0; row < rows; ++row) counts[source.symbol(row, c, channel) * kLanes + lane()] += 1;
        uint32_t least = ~0u;
        int best = 0;
        for (int table = 0; table < kFamily; ++table) {
          uint32_t cost = 0;
          for (int value = 0; value < 64; ++value) cost += uint32_t(counts[value * kLanes + lane()]) * kCosts[table][value];
          if (cost < least) least = cost, best = table;
        }
        chosen[c] = uint8_t(best);
      }
    }
    sync_warp();
  }

  // Encodes it backwards, to the end of `words`, which has room for `room` of them; how many there are, or -1 if they do not fit.
  KVZ_DEVICE int encode(const FamilyCoder& coder, uint16_t* words, int room, uint32_t& x) const {
    int at = room;
    x = kLow;
    for (int row = rows - 1; row >= 0; --row) {
      for (int first = (width - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
        int c = first + lane();
        bool active = c < width;
        uint32_t slot = 1, place = 0;
        int symbol = 0;
        if (active) {
          symbol = source.symbol(row, c, source.channel(c));
          place = chosen[c] * 64u + uint32_t(symbol);
          if ((coder.slots[place] & 0xffff) == 0) symbol = kEscape, place = chosen[c] * 64u + kEscape;
          slot = coder.slots[place];
        }
        uint32_t escaping = ballot(active && symbol == kEscape);
        if (escaping != 0) {
          constexpr int kEach = sizeof(Bits) == 4 ? 2 : 1;
          if (kEach * count_ones(escaping) > at) return -1;
          at -= kEach * count_ones(escaping);
          if (active && symbol == kEscape) {
            uint32_t bits = source.bits(row, c);
            uint16_t* to = words + at + kEach * count_ones(escaping & lanes_below());
            to[0] = uint16_t(bits);
            if (kEach == 2) to[1] = uint16_t(bits >> 16);
          }
        }
        if (!put_symbols<kPrecision>(active, slot, coder.inverses[place], words, at, x)) return -1;
      }
    }
    return room - at;
  }

  // A tile of that kind with so many bytes of steps and centres, or raw where that takes `raw` bytes and is not more.
  KVZ_DEVICE void keep(uint32_t kind, int64_t of_steps, int64_t raw, const FamilyCoder& coder, uint16_t* words, int room, TileDone& done) const {
    choose_tables();
    uint32_t x;
    int count = encode(coder, words, room, x);
    int64_t side = int64_t(width < kLanes ? width : kLanes) * 4 + of_steps + width, coded = aligned(side + (side & 1) + 2 * int64_t(count));
    bool smaller = count >= 0 && coded < raw;
    done.states[lane()] = x;
    if (lane() == 0) done.kind = smaller ? kind : kRaw, done.bytes = int32_t(smaller ? coded : raw), done.words = count;
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
KVZ_KERNEL encode_tiles(KvzGeometry g, KvzSettings s, const KvzEncode* jobs, int32_t all, EncodeWork work) {
  using Bits = typename T::Bits;
  FamilyCoder coder(shared_memory());
  uint16_t* counts = reinterpret_cast<uint16_t*>(shared_memory() + FamilyCoder::kBytes) + thread() / 32 * 64 * kLanes;
  int bands = int(ceil_div(g.hidden, s.band));
  for (int32_t ticket = next_ticket(work.next); ticket < all; ticket = next_ticket(work.next)) {
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
      TileEncoder<BinsSource<T>> tile{{from, g.hidden, scales, float(bins / 2 - 1)}, place.rows, width, work.chosen + channel, counts};
      tile.keep(kTokenScales, 0, raw, coder, words, int(work.room), done);
    } else if (is_constant(from, g.hidden, place.rows, width)) {
      if (lane() == 0) done.kind = kConst, done.bytes = 4, done.words = 0;
    } else {
      bool one = column < (place.plane == 0 ? s.shared_from : g.hidden);
      TileEncoder<StepSource<T>> tile{{from, g.hidden, work.codes + channel, work.centres + channel}, place.rows, width, work.chosen + channel, counts};
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
    const uint16_t* words = work.words + (block() + 1) * work.room - done.words;
    uint16_t* to = reinterpret_cast<uint16_t*>(out + side);
    for (int word = lane(); word < done.words; word += kLanes) to[word] = words[word];
    written = side + 2 * int64_t(done.words);
  }
  for (int64_t at = written + lane(); at < done.bytes; at += kLanes) out[at] = 0;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
