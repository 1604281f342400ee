// Encoding in the mode `step` on a GPU: a warp encodes a tile, then tiles are moved together.
#pragma once
#include "encode_work.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// Scratch memory of all jobs, cut into arrays.
struct EncodeWork : TileWork {
  int64_t blocks, channels;         // of one stream: blocks of tokens of all planes, channels of all of those
  float *means, *sigmas;            // [jobs][blocks][hidden]
  uint8_t *codes, *chosen;          // [jobs][blocks][hidden]
  int8_t* centres;
  int64_t bytes;

  EncodeWork(const KvzGeometry& g, const KvzSettings& s, int64_t jobs, void* memory) {
    Cut cut(kStep, g.tokens, g.hidden, s.band, s.tile_tokens);
    tiles = g.planes * cut.per_plane, blocks = g.planes * cut.blocks, channels = blocks * g.hidden;
    int64_t rows = g.tokens < s.tile_tokens ? g.tokens : s.tile_tokens;
    room = (rows * s.band * element_bytes(g.dtype) / 2 + 8 + 7) & ~int64_t(7);
    Arena arena{static_cast<uint8_t*>(memory)};
    take(arena, jobs);
    means = arena.take<float>(jobs * channels), sigmas = arena.take<float>(jobs * channels);
    codes = arena.take<uint8_t>(jobs * channels), chosen = arena.take<uint8_t>(jobs * channels), centres = arena.take<int8_t>(jobs * channels);
    bytes = arena.at - static_cast<uint8_t*>(memory) + 64;
  }
};

// One block of tokens of one plane of one stream.
struct BlockPlace {
  int64_t job, number;  // of the job; of the block in its stream
  int plane, token, rows;
  KVZ_DEVICE BlockPlace(const KvzGeometry& g, const KvzSettings& s, int64_t blocks, int64_t which) {
    int per_plane = int(ceil_div(g.tokens, s.tile_tokens));
    job = which / blocks, number = which % blocks;
    plane = int(number) / per_plane, token = int(number) % per_plane * s.tile_tokens;
    rows = g.tokens - token < s.tile_tokens ? g.tokens - token : s.tile_tokens;
  }
};

// A thread for each channel of each block of tokens: means and standard deviations, in the order of tokens.
template <typename T>
KVZ_KERNEL measure_channels(KvzGeometry g, KvzSettings s, const KvzEncode* jobs, EncodeWork work) {
  if (block() == 0 && thread() == 0) *work.next = 0;
  int64_t parts = ceil_div(g.hidden, threads());
  BlockPlace place(g, s, work.blocks, block() / parts);
  int c = int(block() % parts) * threads() + thread();
  if (c >= g.hidden) return;
  const KvzEncode& job = jobs[place.job];
  const typename T::Bits* from = static_cast<const typename T::Bits*>(job.source) + place.plane * job.plane_stride + int64_t(place.token) * g.hidden + c;
  float first = T::load(from[0]), sum = 0.0f, squares = 0.0f;
  first = is_finite(first) ? first : 0.0f;
  for (int row = 1; row < place.rows; ++row) {
    float value = T::load(from[int64_t(row) * g.hidden]), off = is_finite(value) ? value - first : 0.0f;
    sum += off;
    squares += off * off;
  }
  Moments it = moments(first, sum, squares, place.rows);
  int64_t at = (place.job * work.blocks + place.number) * g.hidden + c;
  work.means[at] = it.mean, work.sigmas[at] = it.sigma;
}

// A warp for each block of tokens: steps and centres, as `StepEncoder` has them.
KVZ_KERNEL choose_steps(KvzGeometry g, KvzSettings s, const KvzEncode* jobs, EncodeWork work) {
  BlockPlace place(g, s, work.blocks, block());
  int64_t at = block() * g.hidden;
  const float *means = work.means + at, *sigmas = work.sigmas + at;
  uint8_t* codes = work.codes + at;
  int8_t* centres = work.centres + at;
  int shared_to = place.plane == 0 ? s.shared_from : g.hidden, counted = shared_to > 0 ? shared_to : g.hidden;
  float partial = 0.0f, sum = 0.0f;
  for (int c = lane(); c < counted; c += kLanes) partial += sigmas[c];
  for (int each = 0; each < kLanes; ++each) sum += from_lane(partial, each);
  float shared = s.step * (sum / float(counted));
  const float* weights = place.plane == 0 ? jobs[place.job].weights : nullptr;
  int least = 0, mean = 0;
  if (weights == nullptr) {
    int top = 0, total = 0, known = 0;
    for (int c = shared_to + lane(); c < g.hidden; c += kLanes) {
      int code = step_code(s.step * sigmas[c]);
      top = code > top ? code : top;
    }
    top = largest_of(top);
    least = top > kCodesBelowTop ? top - kCodesBelowTop : 0;
    for (int c = shared_to + lane(); c < g.hidden; c += kLanes) {
      int code = step_code(s.step * sigmas[c]);
      if (sigmas[c] > 0.0f) total += code > least ? code : least, known += 1;
    }
    total = sum_of(total), known = sum_of(known);
    mean = known > 0 ? (total + known / 2) / known : 0;
  }
  for (int begin = 0; begin < g.hidden; begin += s.band) {
    int width = g.hidden - begin < s.band ? g.hidden - begin : s.band;
    bool one = begin < shared_to;
    float farthest = 0.0f;
    for (int c = begin + lane(); c < begin + width; c += kLanes) farthest = fabsf(means[c]) > farthest ? fabsf(means[c]) : farthest;
    farthest = as_float(uint32_t(largest_of(int(as_bits(farthest)))));  // Of numbers that are not negative the bits are in order.
    for (int c = begin + lane(); c < begin + width; c += kLanes) {
      float wanted = shared;
      if (!one && weights != nullptr) wanted = shared * weights[c];
      if (!one && weights == nullptr) {
        int own = step_code(s.step * sigmas[c]);
        wanted = kSteps[((own > least ? own : least) + mean + 1) / 2];
      }
      int code = channel_step(wanted, one ? farthest : means[c]);
      codes[c] = uint8_t(code);
      centres[c] = int8_t(channel_centre(means[c], code));
    }
  }
}

// One tile, of a warp.
template <typename T>
struct TileEncoder {
  using Bits = typename T::Bits;
  const Bits* from;      // its first element
  int64_t stride;
  int rows, width;
  const uint8_t* codes;
  const int8_t* centres;
  uint8_t* chosen;
  uint16_t *counts;      // [64][32], in the memory of the block

  KVZ_DEVICE int symbol(int row, int c) const {
    int code = codes[c];
    return symbol_of<T>(T::load(from[row * stride + c]), kInverseSteps[code], kSteps[code], float(centres[c]));
  }

  KVZ_DEVICE bool constant() const {
    bool same = true;
    for (int row = 0; row < rows && ballot(!same) == 0; ++row)
      for (int c = lane(); c < width; c += kLanes) same = same && from[row * stride + c] == from[0];
    return ballot(!same) == 0;
  }

  // The table in which each channel costs the least, of 32 channels at a time.
  KVZ_DEVICE void choose_tables() const {
    for (int first = 0; first < width; first += kLanes) {
      int c = first + lane();
      for (int value = 0; value < 64; ++value) counts[value * kLanes + lane()] = 0;
      if (c < width) {
        int code = codes[c];
        float inverse = kInverseSteps[code], step = kSteps[code], centre = float(centres[c]);
        for (int row = 0; row < rows; ++row) counts[symbol_of<T>(T::load(from[row * stride + c]), inverse, step, centre) * kLanes + lane()] += 1;
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
  KVZ_DEVICE int encode(const uint32_t* slots, const uint32_t* inverses, uint16_t* words, int room, uint32_t& x) const {
    int at = room;
    x = kLow;
    for (int row = rows - 1; row >= 0; --row) {
      for (int first = (width - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
        int c = first + lane();
        bool active = c < width;
        uint32_t slot = 1, place = 0;
        int symbol_here = 0;
        if (active) {
          symbol_here = symbol(row, c);
          place = chosen[c] * 64u + uint32_t(symbol_here);
          if ((slots[place] & 0xffff) == 0) symbol_here = kEscape, place = chosen[c] * 64u + kEscape;
          slot = slots[place];
        }
        uint32_t escaping = ballot(active && symbol_here == kEscape);
        if (escaping != 0) {
          constexpr int kEach = sizeof(Bits) == 4 ? 2 : 1;
          if (kEach * count_ones(escaping) > at) return -1;
          at -= kEach * count_ones(escaping);
          if (active && symbol_here == kEscape) {
            uint32_t bits = from[row * stride + c];
            uint16_t* to = words + at + kEach * count_ones(escaping & lanes_below());
            to[0] = uint16_t(bits);
            if (kEach == 2) to[1] = uint16_t(bits >> 16);
          }
        }
        if (!put_symbols<kPrecision>(active, slot, inverses[place], words, at, x)) return -1;
      }
    }
    return room - at;
  }
};

template <typename T>
KVZ_KERNEL encode_tiles(KvzGeometry g, KvzSettings s, const KvzEncode* jobs, int32_t all, EncodeWork work) {
  uint32_t* slots = reinterpret_cast<uint32_t*>(shared_memory());  // [64][64]
  uint32_t* inverses = slots + kFamily * 64;                        // the same
  uint16_t* counts = reinterpret_cast<uint16_t*>(inverses + kFamily * 64) + thread() / 32 * 64 * kLanes;
  for (int which = thread(); which < kFamily * 64; which += threads()) {
    uint32_t before = 0;
    for (int each = 0; each < which % 64; ++each) before += kFrequencies[which / 64][each];
    uint32_t frequency = kFrequencies[which / 64][which % 64];
    slots[which] = frequency | before << 16;
    inverses[which] = frequency == 0 ? 0 : 0xffffffffu / frequency;
  }
  sync_block();
  int bands = int(ceil_div(g.hidden, s.band));
  for (int32_t ticket = next_ticket(work.next); ticket < all; ticket = next_ticket(work.next)) {
    BlockPlace place(g, s, work.blocks, ticket / bands);
    int column = ticket % bands * s.band, width = g.hidden - column < s.band ? g.hidden - column : s.band;
    const KvzEncode& job = jobs[place.job];
    int64_t channel = int64_t(ticket / bands) * g.hidden + column;
    TileEncoder<T> tile{static_cast<const typename T::Bits*>(job.source) + place.plane * job.plane_stride + int64_t(place.token) * g.hidden + column,
                        g.hidden, place.rows, width, work.codes + channel, work.centres + channel, work.chosen + channel, counts};
    TileDone& done = work.done[ticket];
    bool one = column < (place.plane == 0 ? s.shared_from : g.hidden);
    int64_t raw = aligned(int64_t(place.rows) * width * int64_t(sizeof(typename T::Bits)));
    uint32_t kind = kConst;
    int32_t bytes = 4, words = 0;
    if (!tile.constant()) {
      tile.choose_tables();
      uint32_t x;
      words = tile.encode(slots, inverses, work.words + ticket * work.room, int(work.room), x);
      int states = width < kLanes ? width : kLanes;
      int64_t side = int64_t(states) * 4 + (one ? 1 : width) + 2 * width, coded = aligned(side + (side & 1) + 2 * int64_t(words));
      bool smaller = words >= 0 && coded < raw;
      kind = !smaller ? kRaw : one ? kOneStep : kChannelSteps;
      bytes = int32_t(smaller ? coded : raw);
      done.states[lane()] = x;
    }
    if (lane() == 0) done.kind = kind, done.bytes = bytes, done.words = words;
  }
}

// A warp for each stream: its header and directory.
KVZ_KERNEL write_directories(KvzGeometry g, KvzSettings s, KvzEncode* jobs, EncodeWork work) {
  Header header = header_of(g, kStep, work.tiles, 0);
  header.band = uint16_t(s.band), header.tile_tokens = uint16_t(s.tile_tokens);
  finish_stream(header, work.done + block() * work.tiles, jobs[block()]);
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
    int states = width < kLanes ? width : kLanes, step_count = done.kind == kOneStep ? 1 : width;
    if (lane() < states) memcpy(out + 4 * lane(), done.states + lane(), 4);
    uint8_t *codes = out + states * 4, *centres = codes + step_count, *chosen = centres + width;
    for (int c = lane(); c < width; c += kLanes) {
      if (c < step_count) codes[c] = work.codes[channel + c];
      centres[c] = uint8_t(work.centres[channel + c]), chosen[c] = work.chosen[channel + c];
    }
    int64_t side = int64_t(states) * 4 + step_count + 2 * width;
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
