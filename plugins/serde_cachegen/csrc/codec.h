// Streams: one layer of one chunk, encoded and decoded by one thread. Included once for each instruction set.
#pragma once
#include <algorithm>

#include "kvz_api.h"
#include "rows.h"

namespace kvz {

inline int64_t aligned(int64_t bytes) { return (bytes + 3) & ~int64_t(3); }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a plane is cut into tiles.
struct Cut {
  int64_t bands, blocks;  // of `step` and `cachegen`
  int64_t runs;           // of `lossless`
  int64_t per_plane;
  Cut(int mode, int64_t tokens, int64_t hidden, int band, int tile_tokens) {
    bands = blocks = runs = 0;
    if (mode == kLossless) {
      per_plane = runs = ceil_div(tokens * hidden, kFlatTile);
    } else {
      bands = ceil_div(hidden, band), blocks = ceil_div(tokens, tile_tokens);
      per_plane = bands * blocks;
    }
  }
};

constexpr int64_t kColumnsTogether = 2048, kBandsTogether = 32;  // At most, that are decoded side by side.
constexpr int kMaxBand = 1024;
constexpr int kMaxTileTokens = 256;
constexpr int kMaxTables = 2 * 256 + 4;  // Bytes of one plane's own table.

inline int64_t table_bytes(int mode, int dtype, int planes, int64_t tokens) {
  if (mode == kLossless) return planes * int64_t(kMaxTables);  // At most.
  if (mode == kCacheGen) return aligned(2 * planes) + aligned(planes * tokens * element_bytes(dtype));
  return 0;
}

// Scratch memory of one thread, cut into arrays.
struct Arena {
  uint8_t* at;
  template <typename V>
  V* take(int64_t count) {
    at = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t(63));
    V* begin = reinterpret_cast<V*>(at);
    at += count * int64_t(sizeof(V));
    return begin;
  }
};

constexpr int64_t kWideSlots = 1 << kWidePrecision;
// For each column, and the lanes that a band does not fill, three arrays; for each band a reader and what is aligned.
constexpr int64_t kDecodeWorkspace =
    3 * 4 * (kColumnsTogether + kBandsTogether * kLanes) + kBandsTogether * (320 + 16 + 3 * 64) + 8192;
static_assert(kDecodeWorkspace > 2 * kWideSlots * 4 + 128, "there is room for the tables of `lossless` too");

inline int64_t encode_workspace(const KvzGeometry& g, const KvzSettings& s) {
  int64_t elements = s.mode == kLossless ? kFlatTile : int64_t(kMaxTileTokens) * (s.band + kLanes);
  int64_t words = elements * (1 + escape_words(g.dtype)) + 64;
  return 2 * words + elements + 6 * 4 * int64_t(g.hidden) + s.band * 64 * 2 + 4 * 4 * (s.band + kLanes) + 65536;
}

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
};

// A tile of channels whose symbols stand in `scratch`, `lanes` bytes to a token. side: what goes before the words.
template <typename T>
Kept keep_symbols(uint32_t kind, const typename T::Bits* from, int64_t stride, int rows, int width, int lanes,
                  const Scratch& scratch, const uint8_t* steps, int step_count, const int8_t* centres, uint8_t* out) {
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
      const typename T::Bits* bits = from + row * stride + c;
      auto escape = [bits](uint32_t mask, uint16_t* before) { return push_escapes(bits, mask, before); };
      const uint8_t* symbols = scratch.symbols + int64_t(row) * lanes + c;
      end = width - c >= kLanes ? put_row<kPrecision>(x, coder, symbols, scratch.bases + c, end, escape)
                                : put_some<kPrecision>(x, coder, symbols, scratch.bases + c, width - c, end, escape);
    }
  }
  int states = std::min(width, kLanes);
  int64_t words = scratch.words_end - end, side = states * 4 + step_count + 2 * width;
  int64_t bytes = aligned(side + (side & 1) + 2 * words);
  if (bytes >= aligned(int64_t(rows) * width * int64_t(sizeof(typename T::Bits)))) return keep_raw(from, stride, rows, width, out);
  uint8_t* to = out;
  write(to, x, states);
  write(to, steps, step_count);
  write(to, centres, width);
  write(to, chosen, width);
  if (side & 1) *to++ = 0;
  write(to, end, words);
  return {kind, pad(out, to - out)};
}

// -- `step` ------------------------------------------------------------------------------------------------------------

// Means and standard deviations of all channels of a block of tokens, in the order of its tokens.
template <typename T>
void measure(const typename T::Bits* from, int rows, int hidden, float* first, float* sum, float* squares) {
  for (int c = 0; c < hidden; ++c) {
    float value = T::load(from[c]);
    first[c] = is_finite(value) ? value : 0.0f, sum[c] = 0.0f, squares[c] = 0.0f;
  }
  for (int row = 1; row < rows; ++row) {
    const typename T::Bits* at = from + int64_t(row) * hidden;
    for (int c = 0; c < hidden; ++c) {
      float value = T::load(at[c]), off = is_finite(value) ? value - first[c] : 0.0f;
      sum[c] += off;
      squares[c] += off * off;
    }
  }
}

// Codes of the steps that channels have for themselves, each moved half the way to the mean of all: noise in a channel
// does the more harm the more the model makes of it, of which its own scale tells half at most. Measured in
// docs/design/kvz.md.
inline void blend_codes(const float* sigmas, float step, int count, uint8_t* codes) {
  int top = 0, sum = 0, known = 0;
  for (int c = 0; c < count; ++c) {
    codes[c] = uint8_t(step_code(step * sigmas[c]));
    top = std::max<int>(top, codes[c]);
  }
  int least = std::max(top - kCodesBelowTop, 0);
  for (int c = 0; c < count; ++c) {
    codes[c] = uint8_t(std::max<int>(codes[c], least));
    if (sigmas[c] > 0.0f) sum += codes[c], known += 1;
  }
  int mean = known > 0 ? (sum + known / 2) / known : 0;
  for (int c = 0; c < count; ++c) codes[c] = uint8_t((codes[c] + mean + 1) / 2);
}

// The mean of a quantity over channels: 32 sums, each in the order of channels, then those in order.
inline float mean_of(const float* values, int count) {
  float sums[kLanes] = {};
  for (int c = 0; c < count; ++c) sums[c % kLanes] += values[c];
  float sum = 0.0f;
  for (float each : sums) sum += each;
  return sum / float(count);
}

template <typename T>
void quantise(const typename T::Bits* from, int64_t stride, int rows, int width, int lanes, const float* inverses,
              const float* steps, const float* centres, uint8_t* symbols) {
  for (int row = 0; row < rows; ++row) {
    const typename T::Bits* at = from + row * stride;
    uint8_t* to = symbols + int64_t(row) * lanes;
    for (int c = 0; c < width; ++c) to[c] = uint8_t(symbol_of<T>(T::load(at[c]), inverses[c], steps[c], centres[c]));
  }
}

template <typename T>
struct StepEncoder {
  const KvzGeometry& g;
  const KvzSettings& s;
  const KvzEncode& job;
  float *first, *sum, *squares, *steps, *inverses, *centre_steps;
  uint8_t* blended;
  Scratch scratch;
  int lanes;

  StepEncoder(const KvzGeometry& g, const KvzSettings& s, const KvzEncode& job, Arena arena) : g(g), s(s), job(job) {
    lanes = int(ceil_div(s.band, kLanes)) * kLanes;
    first = arena.take<float>(g.hidden), sum = arena.take<float>(g.hidden), squares = arena.take<float>(g.hidden);
    blended = arena.take<uint8_t>(g.hidden);
    steps = arena.take<float>(lanes), inverses = arena.take<float>(lanes), centre_steps = arena.take<float>(lanes);
    scratch.counts = arena.take<uint16_t>(int64_t(s.band) * 64);
    scratch.bases = arena.take<uint32_t>(lanes);
    scratch.symbols = arena.take<uint8_t>(int64_t(kMaxTileTokens) * lanes);
    int64_t words = int64_t(kMaxTileTokens) * lanes * (1 + escape_words(T::kDtype)) + 32;
    scratch.words_end = arena.take<uint16_t>(words) + words;
  }

  // Writes the tiles of one block of tokens of one plane; gives how each is kept and where it ends to `note`.
  template <typename Note>
  uint8_t* block(int plane, const typename T::Bits* from, int rows, uint8_t* out, Note&& note) {
    measure<T>(from, rows, g.hidden, first, sum, squares);
    float *means = first, *sigmas = sum;
    for (int c = 0; c < g.hidden; ++c) {
      Moments it = moments(first[c], sum[c], squares[c], rows);
      means[c] = it.mean, sigmas[c] = it.sigma;
    }
    int shared_to = plane == 0 ? s.shared_from : g.hidden;
    float shared = s.step * mean_of(sigmas, shared_to > 0 ? shared_to : g.hidden);
    const float* weights = plane == 0 ? job.weights : nullptr;
    if (weights == nullptr) blend_codes(sigmas + shared_to, s.step, g.hidden - shared_to, blended + shared_to);
    for (int begin = 0; begin < g.hidden; begin += s.band) {
      int width = std::min(s.band, g.hidden - begin);
      bool one = begin < shared_to;
      uint8_t codes[kMaxBand];
      int8_t centres[kMaxBand];
      float farthest = 0.0f;
      for (int c = 0; c < width; ++c) farthest = std::max(farthest, fabsf(means[begin + c]));
      for (int c = 0; c < width; ++c) {
        float mean = means[begin + c];
        float wanted = one ? shared : weights != nullptr ? shared * weights[begin + c] : kSteps[blended[begin + c]];
        codes[c] = uint8_t(channel_step(wanted, one ? farthest : mean));
        centres[c] = int8_t(channel_centre(mean, codes[c]));
        steps[c] = kSteps[codes[c]], inverses[c] = kInverseSteps[codes[c]], centre_steps[c] = float(centres[c]);
      }
      const typename T::Bits* at = from + begin;
      Kept kept;
      if (is_constant(at, g.hidden, rows, width)) {
        kept = keep_constant(at, out);
      } else {
        quantise<T>(at, g.hidden, rows, width, lanes, inverses, steps, centre_steps, scratch.symbols);
        kept = keep_symbols<T>(one ? kOneStep : kChannelSteps, at, g.hidden, rows, width, lanes, scratch, codes,
                               one ? 1 : width, centres, out);
      }
      out += kept.bytes;
      note(kept.kind, out);
    }
    return out;
  }
};

// -- `cachegen`: a scale for each token, bins for each layer -------------------------------------------------------------

template <typename T>
struct BinsEncoder {
  const KvzGeometry& g;
  const KvzSettings& s;
  const KvzEncode& job;
  Scratch scratch;
  int lanes;

  BinsEncoder(const KvzGeometry& g, const KvzSettings& s, const KvzEncode& job, Arena arena) : g(g), s(s), job(job) {
    lanes = int(ceil_div(s.band, kLanes)) * kLanes;
    scratch.counts = arena.take<uint16_t>(int64_t(s.band) * 64);
    scratch.bases = arena.take<uint32_t>(lanes);
    scratch.symbols = arena.take<uint8_t>(int64_t(kMaxTileTokens) * lanes);
    int64_t words = int64_t(kMaxTileTokens) * lanes * (1 + escape_words(T::kDtype)) + 32;
    scratch.words_end = arena.take<uint16_t>(words) + words;
  }

  // The largest finite magnitude of each token, in the type of the values.
  void scales(int plane, uint8_t* out) const {
    const typename T::Bits* from = static_cast<const typename T::Bits*>(job.source) + plane * job.plane_stride;
    for (int token = 0; token < g.tokens; ++token) {
      float most = 0.0f;
      for (int c = 0; c < g.hidden; ++c) {
        float value = T::load(from[int64_t(token) * g.hidden + c]);
        most = is_finite(value) && fabsf(value) > most ? fabsf(value) : most;
      }
      typename T::Bits bits = T::store(most);
      memcpy(out + (int64_t(plane) * g.tokens + token) * int64_t(sizeof bits), &bits, sizeof bits);
    }
  }

  template <typename Note>
  uint8_t* block(int plane, const typename T::Bits* from, int rows, const uint8_t* block_scales, uint8_t* out, Note&& note) {
    float middle = float(job.bins[plane] / 2 - 1);
    for (int begin = 0; begin < g.hidden; begin += s.band) {
      int width = std::min(s.band, g.hidden - begin);
      const typename T::Bits* at = from + begin;
      int8_t centres[kMaxBand];
      std::fill(centres, centres + width, int8_t(middle));
      for (int row = 0; row < rows; ++row) {
        typename T::Bits bits;
        memcpy(&bits, block_scales + int64_t(row) * int64_t(sizeof bits), sizeof bits);
        float most = T::load(bits), factor = most > 0.0f ? middle / most : 0.0f;
        for (int c = 0; c < width; ++c) {
          float value = T::load(at[int64_t(row) * g.hidden + c]), level = rintf(value * factor + middle);
          bool in = level >= 0.0f && level <= 2.0f * middle;
          scratch.symbols[int64_t(row) * lanes + c] = uint8_t(in ? int(level - middle) - kFirst : kEscape);
        }
      }
      Kept kept = keep_symbols<T>(kTokenScales, at, g.hidden, rows, width, lanes, scratch, nullptr, 0, centres, out);
      out += kept.bytes;
      note(kept.kind, out);
    }
    return out;
  }
};

// -- `lossless`: the part of each element that is worth coding, and the rest as it is -------------------------------------

// The symbol of an element, and what is left of it: exponents of bf16 and float32, the upper byte of fp16, all of a byte.
template <int kDtype>
struct Split;
template <>
struct Split<kBF16> {
  using Bits = uint16_t;
  static constexpr int kRest = 1;
  static uint8_t symbol(Bits bits) { return uint8_t(bits >> 7); }
  static void rest(Bits bits, uint8_t* to) { to[0] = uint8_t((bits >> 8 & 0x80) | (bits & 0x7f)); }
  static Bits join(uint8_t symbol, const uint8_t* rest) { return Bits((rest[0] & 0x80) << 8 | symbol << 7 | (rest[0] & 0x7f)); }
};
template <>
struct Split<kFP16> {
  using Bits = uint16_t;
  static constexpr int kRest = 1;
  static uint8_t symbol(Bits bits) { return uint8_t(bits >> 8); }
  static void rest(Bits bits, uint8_t* to) { to[0] = uint8_t(bits); }
  static Bits join(uint8_t symbol, const uint8_t* rest) { return Bits(symbol << 8 | rest[0]); }
};
template <>
struct Split<kFP32> {
  using Bits = uint32_t;
  static constexpr int kRest = 3;
  static uint8_t symbol(Bits bits) { return uint8_t(bits >> 23); }
  static void rest(Bits bits, uint8_t* to) { to[0] = uint8_t(bits), to[1] = uint8_t(bits >> 8), to[2] = uint8_t((bits >> 24 & 0x80) | (bits >> 16 & 0x7f)); }
  static Bits join(uint8_t symbol, const uint8_t* rest) {
    return uint32_t(rest[2] & 0x80) << 24 | uint32_t(symbol) << 23 | uint32_t(rest[2] & 0x7f) << 16 | uint32_t(rest[1]) << 8 | rest[0];
  }
};
template <>
struct Split<kByte> {
  using Bits = uint8_t;
  static constexpr int kRest = 0;
  static uint8_t symbol(Bits bits) { return bits; }
  static void rest(Bits, uint8_t*) {}
  static Bits join(uint8_t symbol, const uint8_t*) { return symbol; }
};

// Whole numbers that add up to 4096, at least 1 where there is anything.
inline void normalise(const uint32_t* counts, uint64_t total, uint16_t* frequencies) {
  int64_t left = kWideSlots, present = 0;
  for (int symbol = 0; symbol < 256; ++symbol) present += counts[symbol] != 0;
  int most = 0;
  for (int symbol = 0; symbol < 256; ++symbol) {
    uint64_t share = counts[symbol] == 0 ? 0 : 1 + (uint64_t(counts[symbol]) * uint64_t(kWideSlots - present) + total / 2) / total;
    frequencies[symbol] = uint16_t(share);
    left -= int64_t(share);
    if (counts[symbol] > counts[most]) most = symbol;
  }
  // What rounding took or left goes to the largest, and from the next ones if it is not large enough.
  for (int symbol = most; left != 0; symbol = (symbol + 1) & 255) {
    if (frequencies[symbol] == 0) continue;
    int64_t change = std::max<int64_t>(left, 1 - int64_t(frequencies[symbol]));
    frequencies[symbol] = uint16_t(frequencies[symbol] + change);
    left -= change;
  }
}

// A table: its first and last symbol, then frequencies of one byte below 128, else two, the upper one first.
inline uint8_t* write_table(const uint16_t* frequencies, uint8_t* out) {
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
    normalise(counts[0], uint64_t(count), frequencies);
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

// -- a stream ----------------------------------------------------------------------------------------------------------

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
  memset(tables, 0, size_t(table_bytes(kCacheGen, g.dtype, g.planes, g.tokens)));
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
    header.table_bytes = uint32_t(table_bytes(s.mode, g.dtype, g.planes, g.tokens));
    uint8_t* tables = job.out + kHeaderBytes;
    uint8_t *directory = tables + header.table_bytes, *begin = directory + 4 * tiles, *end = begin;
    auto run = [&](auto element) {
      using T = decltype(element);
      if (s.mode == kStep) encode_step<T>(g, s, job, directory, begin, &end, arena);
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

// -- decoding ----------------------------------------------------------------------------------------------------------

// What a stream says of itself, once it was found to be consistent.
struct Stream {
  Header header;
  const uint8_t *tables, *directory, *payload, *end;
  uint32_t kind(int64_t tile) const { return entry(tile) >> 29; }
  const uint8_t* tile_end(int64_t tile) const { return payload + 4 * int64_t(entry(tile) & 0x1fffffff); }
  const uint8_t* tile_begin(int64_t tile) const { return tile == 0 ? payload : tile_end(tile - 1); }

 private:
  uint32_t entry(int64_t tile) const {
    uint32_t value;
    memcpy(&value, directory + 4 * tile, 4);
    return value;
  }
};

// Takes as valid only what has the geometry that the caller expects, so that the size of what is written is the caller's.
inline int32_t parse(const KvzGeometry& g, const uint8_t* bytes, int64_t size, Stream& stream, int64_t& offset) {
  offset = 0;
  if (size < kHeaderBytes) return kTruncated;
  Header& h = stream.header;
  memcpy(&h, bytes, sizeof h);
  if (h.magic != kMagic) return kBadMagic;
  offset = 4;
  if (h.version != kVersion) return kBadVersion;
  offset = 5;
  if (h.mode < kStep || h.mode > kCacheGen) return kBadGeometry;
  offset = 6;
  if (h.dtype != g.dtype || h.planes != g.planes || h.tokens != uint32_t(g.tokens) || h.hidden != uint32_t(g.hidden)) return kBadGeometry;
  offset = 16;
  bool flat = h.mode == kLossless;
  if (flat ? h.band != 0 || h.tile_tokens != 0 : h.band == 0 || h.band > kMaxBand || h.band > h.hidden || h.tile_tokens == 0 || h.tile_tokens > kMaxTileTokens) return kBadGeometry;
  offset = 20;
  Cut cut(h.mode, g.tokens, g.hidden, h.band, h.tile_tokens);
  if (int64_t(h.tiles) != g.planes * cut.per_plane) return kBadGeometry;
  offset = 24;
  int64_t most = table_bytes(h.mode, g.dtype, g.planes, g.tokens);
  if ((h.table_bytes & 3) || (flat ? h.table_bytes > most : h.table_bytes != most)) return kBadGeometry;
  offset = 28;
  if (int64_t(h.total) != size) return kTruncated;
  int64_t fixed = kHeaderBytes + int64_t(h.table_bytes) + 4 * int64_t(h.tiles);
  if (fixed > size) return kTruncated;
  stream.tables = bytes + kHeaderBytes;
  stream.directory = stream.tables + h.table_bytes;
  stream.payload = stream.directory + 4 * int64_t(h.tiles);
  stream.end = bytes + size;
  const uint8_t* before = stream.payload;
  for (int64_t tile = 0; tile < int64_t(h.tiles); ++tile) {
    offset = stream.directory - bytes + 4 * tile;
    const uint8_t* at = stream.tile_end(tile);
    if (at < before || at > stream.end) return kBadDirectory;
    before = at;
  }
  return before == stream.end ? kOk : kBadDirectory;
}

template <typename Bits>
inline void take_escapes(uint32_t mask, Words& words, Bits* to) {
  for (; mask != 0; mask &= mask - 1) {
    uint32_t bits = words.take();
    if (sizeof(Bits) == 4) bits |= words.take() << 16;
    to[__builtin_ctz(mask)] = Bits(bits);
  }
}

inline uint32_t escapes_of(const uint8_t* symbols, int active) {
#if defined(KVZ_AVX512)
  if (active == kLanes) return _mm256_cmpeq_epu8_mask(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols)), _mm256_set1_epi8(kEscape));
#endif
  uint32_t mask = 0;
  for (int lane = 0; lane < active; ++lane) mask |= uint32_t(symbols[lane] == kEscape) << lane;
  return mask;
}

// All lanes are back where the encoder began, and every word was taken but the padding.
inline bool ended_well(const uint32_t* x, int states, const Words& words) {
  uint32_t wrong = words.short_of;
  for (int lane = 0; lane < states; ++lane) wrong |= x[lane] ^ kLow;
  if (words.end - words.at >= 4) return false;
  for (const uint8_t* at = words.at; at < words.end; ++at) wrong |= *at;
  return wrong == 0;
}

template <typename Bits>
int32_t restore_raw(const uint8_t* from, const uint8_t* end, int64_t stride, int rows, int width, Bits* to) {
  int64_t bytes = int64_t(rows) * width * int64_t(sizeof(Bits));
  if (end - from != aligned(bytes)) return kBadDirectory;
  for (int row = 0; row < rows; ++row) memcpy(to + row * stride, from + int64_t(row) * width * int64_t(sizeof(Bits)), size_t(width) * sizeof(Bits));
  for (const uint8_t* at = from + bytes; at < end; ++at)
    if (*at != 0) return kBadReserved;
  return kOk;
}

template <typename Bits>
int32_t restore_constant(const uint8_t* from, const uint8_t* end, int64_t stride, int rows, int width, Bits* to) {
  if (end - from != 4) return kBadDirectory;
  uint32_t all = 0;
  memcpy(&all, from, 4);
  if (sizeof(Bits) < 4 && all >> (8 * sizeof(Bits) % 32) != 0) return kBadReserved;
  for (int row = 0; row < rows; ++row) std::fill(to + row * stride, to + row * stride + width, Bits(all));
  return kOk;
}

// A tile of channels that is being decoded, row by row.
template <typename T>
struct Reader {
  using Bits = typename T::Bits;
  alignas(64) uint32_t x[kLanes];
  Words words;
  const uint32_t* bases;
  const float *steps, *centres;
  int width;

  // How it is kept is one of those with symbols. Its arrays are taken from `arena`.
  int32_t open(uint32_t kind, const uint8_t* from, const uint8_t* end, int columns, Arena& arena) {
    width = columns;
    int lanes = int(ceil_div(width, kLanes)) * kLanes, states = std::min(width, kLanes);
    int step_count = kind == kTokenScales ? 0 : kind == kOneStep ? 1 : width;
    int64_t side = int64_t(states) * 4 + step_count + 2 * width;
    side += side & 1;
    if (end - from < side) return kBadDirectory;
    float *own_steps = arena.take<float>(lanes), *own_centres = arena.take<float>(lanes);
    uint32_t* own_bases = arena.take<uint32_t>(lanes);
    memcpy(x, from, size_t(states) * 4);
    const uint8_t* codes = from + states * 4;
    const int8_t* middles = reinterpret_cast<const int8_t*>(codes + step_count);
    const uint8_t* chosen = codes + step_count + width;
    for (int c = 0; c < width; ++c) {
      if (chosen[c] >= kFamily) return kBadTable;
      own_steps[c] = step_count == 0 ? 1.0f : kSteps[codes[step_count == 1 ? 0 : c]];
      own_centres[c] = float(middles[c]), own_bases[c] = uint32_t(chosen[c]) << kPrecision;
    }
    for (int c = width; c < lanes; ++c) own_steps[c] = own_centres[c] = 0.0f, own_bases[c] = 0;
    for (int lane = 0; lane < states; ++lane)
      if (x[lane] < kLow) return kBadWords;
    words = Words{from + side, end};
    steps = own_steps, centres = own_centres, bases = own_bases;
    return kOk;
  }

  // middle, scale: of `cachegen`, half the bins less one, and that of this token; else middle is 0.
  void row(float middle, float scale, Bits* out) {
    const uint32_t* tables = family().decode;
    for (int c = 0; c < width; c += kLanes) {
      alignas(64) uint8_t symbols[kLanes];
      int active = std::min(kLanes, width - c);
      if (active == kLanes) take_row<kPrecision>(x, tables, bases + c, symbols, words);
      else take_some<kPrecision>(x, tables, bases + c, active, symbols, words);
      if (middle == 0.0f && active == kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) out[c + lane] = value_of<T>(symbols[lane], steps[c + lane], centres[c + lane]);
      } else if (middle == 0.0f) {
        for (int lane = 0; lane < active; ++lane) out[c + lane] = value_of<T>(symbols[lane], steps[c + lane], centres[c + lane]);
      } else {
        for (int lane = 0; lane < active; ++lane) {
          float level = float(symbols[lane] + kFirst) + centres[c + lane];
          out[c + lane] = T::store((level - middle) / middle * scale);
        }
      }
      uint32_t escapes = escapes_of(symbols, active);
      if (__builtin_expect(escapes != 0, 0)) take_escapes(escapes, words, out + c);
    }
  }

  int32_t close() const { return ended_well(x, std::min(width, kLanes), words) ? kOk : kBadWords; }
};

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

// Reads one plane's own table; where it ends, or null.
inline const uint8_t* read_table(const uint8_t* from, const uint8_t* end, uint32_t* table) {
  if (end - from < 2 || from[0] > from[1]) return nullptr;
  int first = from[0], last = from[1];
  from += 2;
  int64_t slot = 0;
  for (int symbol = first; symbol <= last; ++symbol) {
    if (from == end) return nullptr;
    uint32_t frequency = *from++;
    if (frequency & 0x80) {
      if (from == end) return nullptr;
      frequency = (frequency & 0x7f) << 8 | *from++;
    }
    if (slot + frequency > kWideSlots) return nullptr;
    for (uint32_t above = 0; above < frequency; ++above) table[slot++] = decode_slot(uint32_t(symbol), frequency, above);
  }
  return slot == kWideSlots ? from : nullptr;
}

// The tiles of one block of tokens, side by side: so that memory is written to in its order, and so that several lanes of
// one are on their way while those of another are.
template <typename T>
int32_t decode_block(const KvzGeometry& g, const Stream& stream, int64_t tile, int rows, float middle, const uint8_t* scales,
                     Arena arena, const uint8_t* begin, typename T::Bits* to, int64_t& offset) {
  const Header& h = stream.header;
  using Bits = typename T::Bits;
  struct Open {
    int column;
    int64_t offset;
  };
  int bands = int(ceil_div(g.hidden, h.band)), together = int(std::min(kBandsTogether, std::max<int64_t>(1, kColumnsTogether / h.band)));
  static_assert(sizeof(Reader<T>) <= 320, "there is room for them in the workspace");
  Reader<T>* readers = arena.take<Reader<T>>(together);
  Open* open = arena.take<Open>(together);
  for (int first = 0; first < bands; first += together) {
    Arena own = arena;
    int count = 0;
    for (int band = first; band < std::min(first + together, bands); ++band) {
      const uint8_t *from = stream.tile_begin(tile + band), *end = stream.tile_end(tile + band);
      int column = band * h.band, width = std::min<int>(h.band, g.hidden - column);
      uint32_t kind = stream.kind(tile + band);
      offset = from - begin;
      int32_t error = kOk;
      if (kind == kRaw) {
        error = restore_raw(from, end, g.hidden, rows, width, to + column);
      } else if (kind == kConst) {
        error = restore_constant(from, end, g.hidden, rows, width, to + column);
      } else if (kind != (scales != nullptr ? kTokenScales : kind == kOneStep ? kOneStep : kChannelSteps)) {
        error = kBadDirectory;
      } else {
        error = readers[count].open(kind, from, end, width, own);
        open[count++] = {column, offset};
      }
      if (error != kOk) return error;
    }
    for (int row = 0; row < rows; ++row) {
      float scale = 0.0f;
      if (scales != nullptr) {
        Bits bits;
        memcpy(&bits, scales + int64_t(row) * int64_t(sizeof bits), sizeof bits);
        scale = T::load(bits);
      }
      Bits* out = to + int64_t(row) * g.hidden;
      for (int each = 0; each < count; ++each) readers[each].row(middle, scale, out + open[each].column);
    }
    for (int each = 0; each < count; ++each) {
      offset = open[each].offset;
      int32_t error = readers[each].close();
      if (error != kOk) return error;
    }
  }
  return kOk;
}

template <typename T>
int32_t decode_bands(const KvzGeometry& g, const Stream& stream, const KvzDecode& job, Arena arena, int64_t& offset) {
  const Header& h = stream.header;
  using Bits = typename T::Bits;
  int64_t tile = 0;
  bool scaled = h.mode == kCacheGen;
  const uint8_t* scales = stream.tables + aligned(2 * g.planes);
  for (int plane = 0; plane < g.planes; ++plane) {
    Bits* to = static_cast<Bits*>(job.target) + plane * job.plane_stride;
    float middle = 0.0f;
    if (scaled) {
      uint16_t bins;
      memcpy(&bins, stream.tables + 2 * plane, 2);
      offset = kHeaderBytes + 2 * plane;
      if (bins < 4 || bins > 64) return kBadTable;
      middle = float(bins / 2 - 1);
    }
    for (int token = 0; token < g.tokens; token += h.tile_tokens) {
      int rows = std::min<int>(h.tile_tokens, g.tokens - token);
      const uint8_t* of_block = nullptr;
      if (scaled) {
        of_block = scales + (int64_t(plane) * g.tokens + token) * int64_t(sizeof(Bits));
        for (int row = 0; row < rows; ++row) {
          Bits bits;
          memcpy(&bits, of_block + row * int64_t(sizeof bits), sizeof bits);
          offset = of_block + row * int64_t(sizeof bits) - job.stream;
          if (!is_finite(T::load(bits))) return kBadTable;
        }
      }
      int32_t error = decode_block<T>(g, stream, tile, rows, middle, of_block, arena, job.stream, to + int64_t(token) * g.hidden, offset);
      if (error != kOk) return error;
      tile += ceil_div(g.hidden, h.band);
    }
  }
  return kOk;
}

template <int kDtype>
int32_t decode_runs(const KvzGeometry& g, const Stream& stream, const KvzDecode& job, Arena arena, int64_t& offset) {
  using Bits = typename Split<kDtype>::Bits;
  int64_t elements = int64_t(g.tokens) * g.hidden, tile = 0;
  uint32_t* tables = arena.take<uint32_t>(2 * kWideSlots);
  const uint8_t* at = stream.tables;
  for (int plane = 0; plane < g.planes; ++plane) {
    offset = at - job.stream;
    at = read_table(at, stream.directory, tables + plane * kWideSlots);
    if (at == nullptr) return kBadTable;
  }
  if (stream.directory - at >= 4) return kBadTable;
  for (; at < stream.directory; ++at)
    if (*at != 0) return kBadReserved;
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
