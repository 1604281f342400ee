// The mode `klt`: tokens as sums of the components that a model's KV is made of, K as it was before its position was
// rotated into it. All that depends on the model comes from a profile.
#pragma once
#include "products.h"
#include "positions.h"
#include "reading.h"
#include "step.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// Cosines of one position, then its sines, [2][pairs]: a product over its bits, from the lowest. Apart, and not in pairs, because
// compilers take sums and differences that alternate for fused ones, whatever they were told.
inline void rotation_of(const KvzProfile& profile, uint32_t position, float* cosines) {
  int pairs = profile.rotary_size / 2;
  float* sines = cosines + pairs;
  for (int pair = 0; pair < pairs; ++pair) cosines[pair] = 1.0f, sines[pair] = 0.0f;
  for (int bit = 0; position >> bit != 0; ++bit) {
    if ((position >> bit & 1u) == 0) continue;
    const float* by = profile.rotations + int64_t(bit) * pairs * 2;
    for (int pair = 0; pair < pairs; ++pair) {
      float cosine = cosines[pair], sine = sines[pair], c = by[2 * pair], s = by[2 * pair + 1];
      cosines[pair] = cosine * c - sine * s;
      sines[pair] = cosine * s + sine * c;
    }
  }
}

// Turns the pairs of one token; back: against the rotation.
inline void rotate(const KvzProfile& profile, const float* cosines, int hidden, bool back, float* x) {
  constexpr int kPart = 64;
  int pairs = profile.rotary_size / 2, next = profile.interleaved ? 1 : pairs, stride = profile.interleaved ? 2 : 1;
  const float* sines = cosines + pairs;
  float a[kPart], b[kPart], sign = back ? -1.0f : 1.0f;
  for (int head = 0; head < hidden; head += profile.head_size) {
    for (int part = 0; part < pairs; part += kPart) {
      float* at = x + head + part * stride;
      int count = std::min(kPart, pairs - part);
      for (int i = 0; i < count; ++i) a[i] = at[i * stride], b[i] = at[i * stride + next];
      for (int i = 0; i < count; ++i) {
        float cosine = cosines[part + i], sine = sign * sines[part + i], first = a[i], second = b[i];
        a[i] = first * cosine - second * sine;
        b[i] = second * cosine + first * sine;
      }
      for (int i = 0; i < count; ++i) at[i * stride] = a[i], at[i * stride + next] = b[i];
    }
  }
}

template <typename T>
struct TransformEncoder {
  using Bits = typename T::Bits;
  const KvzGeometry& g;
  const KvzSettings& s;
  const KvzEncode& job;
  Scratch scratch;
  DenseProduct product;
  int16_t *coefficients, *numbers;
  int32_t* sums;
  float *row, *factors, *rotation, *units, *limits;
  int lanes;

  TransformEncoder(const KvzGeometry& g, const KvzSettings& s, const KvzEncode& job, Arena arena)
      : g(g), s(s), job(job), scratch(arena, s.band, 1), product(arena, g.hidden), lanes(int(ceil_div(s.band, kLanes)) * kLanes) {
    coefficients = arena.take<int16_t>(int64_t(kMaxTileTokens) * g.hidden);
    numbers = arena.take<int16_t>(int64_t(kTogether) * g.hidden);
    sums = arena.take<int32_t>(kTogether * sums_of_token(g.hidden));
    row = arena.take<float>(g.hidden), factors = arena.take<float>(g.hidden), rotation = arena.take<float>(g.hidden);
    units = arena.take<float>(g.hidden), limits = arena.take<float>(g.hidden);
  }

  // Writes the tiles of one block of tokens of one plane, and what the tables say about it; null if it is not to be
  // transformed: where there are values that are not numbers, or far from all that the profile was made of.
  template <typename Note>
  uint8_t* block(int plane, int token, const Bits* from, int rows, uint8_t* table, uint8_t* out, Note&& note) {
    const KvzBasis& basis = job.bases[plane];
    int code = std::max(step_code(s.step * basis.sigma), 1), used = 0;
    if (!is_placed(*job.profile, plane, job.start, token, rows)) return nullptr;
    for (int c = 0; c < g.hidden; ++c) factors[c] = basis.scale[c] * kInverseSteps[code] * kUnits;
    for (int j = 0; j < basis.rank; ++j) units[j] = kOfUnit * float(1 << shift_of(basis, j)), limits[j] = float(32767 >> shift_of(basis, j));
    int64_t stride = sums_of_token(g.hidden);
    for (int at = 0; at < rows; at += kTogether) {
      int together = std::min(kTogether, rows - at);
      for (int each = 0; each < together; ++each)
        if (!numbers_of(plane, basis, token + at + each, from + int64_t(at + each) * g.hidden, numbers + int64_t(each) * g.hidden)) return nullptr;
      product.multiply(numbers, g.hidden, together, g.hidden, basis.forward, basis.rank, sums, stride);
      for (int each = 0; each < together; ++each) {
        int16_t* own = coefficients + int64_t(at + each) * basis.rank;
        if (!coefficients_of(basis, sums + each * stride, own)) return nullptr;
        int last = basis.rank;
        while (last > used && own[last - 1] == 0) --last;
        used = last;
      }
    }
    uint16_t head[2] = {uint16_t(used), uint16_t(code)};
    memcpy(table, head, sizeof head);
    uint8_t* begin = out;
    int64_t most = int64_t(rows) * g.hidden / 2;  // Four bits a value: without the transform there are fewer.
    for (int band = 0; band < g.hidden; band += s.band) {
      int width = std::min(used - band, s.band);
      Kept kept{kCoefficients, 0};
      if (width > 0) kept = tile(basis, band, width, rows, begin + most - out, out);
      if (kept.kind != kCoefficients) return nullptr;
      out += kept.bytes;
      note(kept.kind, out);
    }
    return out;
  }

 private:
  // One token in whole numbers, as far from the mean as the profile weighs it; false where they are too large.
  bool numbers_of(int plane, const KvzBasis& basis, int token, const Bits* from, int16_t* to) {
    for (int c = 0; c < g.hidden; ++c) row[c] = T::load(from[c]);
    if (rotates(*job.profile, plane)) {
      rotation_of(*job.profile, uint32_t(job.start + token), rotation);
      rotate(*job.profile, rotation, g.hidden, true, row);
    }
    int over = 0;
    for (int c = 0; c < g.hidden; ++c) {
      float number = rintf((row[c] - basis.mean[c]) * factors[c]);
      bool small = fabsf(number) <= 32767.0f;
      over |= !small;
      to[c] = int16_t(int(small ? number : 0.0f));
    }
    int64_t squares = 0;
    for (int c = 0; c < g.hidden; ++c) squares += int32_t(to[c]) * int32_t(to[c]);
    return over == 0 && squares < kMostSquares;
  }

  // One token's components in whole steps; false where one is too large.
  bool coefficients_of(const KvzBasis& basis, const int32_t* from, int16_t* to) const {
    int over = 0;
    for (int j = 0; j < basis.rank; ++j) {
      float value = rintf(float(from[j]) * units[j]);
      bool in = fabsf(value) <= limits[j];
      to[j] = int16_t(int(in ? value : 0.0f));
      over |= !in;
    }
    return over == 0;
  }

  Kept tile(const KvzBasis& basis, int first, int width, int rows, int64_t limit, uint8_t* out) {
    for (int at = 0; at < rows; ++at) {
      const int16_t* from = coefficients + int64_t(at) * basis.rank + first;
      uint8_t* to = scratch.symbols + int64_t(at) * lanes;
      for (int c = 0; c < width; ++c) {
        int value = from[c];
        to[c] = uint8_t(value >= kFirst && value < kFirst + kEscape ? value - kFirst : kEscape);
      }
    }
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(coefficients) + first;
    return keep_symbols(kCoefficients, bits, basis.rank, rows, width, lanes, scratch, nullptr, 0, nullptr, limit, out);
  }
};

// A tile of components that is being decoded, row by row.
struct CoefficientReader {
  alignas(64) uint32_t x[kLanes];
  Words words;
  const uint32_t* bases;
  int width;

  int32_t open(const uint8_t* from, const uint8_t* end, int components, Arena& arena) {
    width = components;
    int lanes = int(ceil_div(width, kLanes)) * kLanes, states = std::min(width, kLanes);
    int64_t side = int64_t(states) * 4 + width + (width & 1);
    if (end - from < side) return kBadDirectory;
    uint32_t* own_bases = arena.take<uint32_t>(lanes);
    memcpy(x, from, size_t(states) * 4);
    const uint8_t* chosen = from + states * 4;
    for (int c = 0; c < lanes; ++c) {
      if (c < width && chosen[c] >= kFamily) return kBadTable;
      own_bases[c] = c < width ? uint32_t(chosen[c]) << kPrecision : 0;
    }
    if ((width & 1) && chosen[width] != 0) return kBadReserved;
    for (int lane = 0; lane < states; ++lane)
      if (x[lane] < kLow) return kBadWords;
    words = Words{from + side, end};
    bases = own_bases;
    return kOk;
  }

  void row(int16_t* out) {
    for (int c = 0; c < width; c += kLanes) {
      alignas(64) uint8_t symbols[kLanes];
      int active = std::min(kLanes, width - c);
      if (active == kLanes) take_row<kPrecision>(x, family().decode, bases + c, symbols, words);
      else take_some<kPrecision>(x, family().decode, bases + c, active, symbols, words);
      for (int lane = 0; lane < active; ++lane) out[c + lane] = int16_t(symbols[lane] + kFirst);
      uint32_t escapes = escapes_of(symbols, active);
      if (__builtin_expect(escapes != 0, 0)) take_escapes(escapes, words, reinterpret_cast<uint16_t*>(out + c));
    }
  }

  int32_t close() const { return ended_well(x, std::min(width, kLanes), words) ? kOk : kBadWords; }
};

template <typename T>
struct TransformDecoder {
  using Bits = typename T::Bits;
  const KvzGeometry& g;
  const Stream& stream;
  const KvzDecode& job;
  int32_t start;

  // The tiles of one block, from number `tile`. `used` components, `code` for their step.
  int32_t block(int plane, int token, int64_t tile, int rows, int used, int code, Arena arena, Bits* to, int64_t& offset) const {
    int bands = int(ceil_div(used, stream.header.band));
    if (bands > kMaxReaders) return kBadGeometry;
    const KvzBasis& basis = job.bases[plane];
    const Header& h = stream.header;
    int inner = used + (used & 1);
    int64_t stride = sums_of_token(g.hidden);
    int16_t *coefficients = arena.take<int16_t>(basis.rank + 64), *shifts = arena.take<int16_t>(basis.rank);
    int32_t* sums = arena.take<int32_t>(kTogether * stride);
    SparseProduct product(arena, basis.rank);
    for (int j = 0; j < basis.rank; ++j) shifts[j] = int16_t(shift_of(basis, j));
    for (int j = 0; j < inner; j += 2) product.shifts[j / 2] = uint8_t(std::min(shifts[j], shifts[j + 1]));
    float *row = arena.take<float>(g.hidden), *factors = arena.take<float>(g.hidden), *rotation = arena.take<float>(g.hidden);
    for (int c = 0; c < g.hidden; ++c) factors[c] = kSteps[code] * kOfSum / basis.scale[c];
    CoefficientReader* readers = arena.take<CoefficientReader>(bands);
    for (int band = 0; band < int(ceil_div(g.hidden, h.band)); ++band) {
      const uint8_t *from = stream.tile_begin(tile + band), *end = stream.tile_end(tile + band);
      offset = from - job.stream;
      if (stream.kind(tile + band) != kCoefficients) return kBadDirectory;
      if (band >= bands && from != end) return kBadDirectory;
      if (band >= bands) continue;
      int32_t error = readers[band].open(from, end, std::min<int>(h.band, used - band * h.band), arena);
      if (error != kOk) return error;
    }
    for (int at = 0; at < rows; at += kTogether) {
      int together = std::min(kTogether, rows - at);
      product.clear();
      for (int each = 0; each < together; ++each) {
        std::fill(coefficients + used, coefficients + used + 33, int16_t(0));
        for (int band = 0; band < bands; ++band) readers[band].row(coefficients + band * h.band);
        for (int j = 0; j < used; ++j) coefficients[j] = int16_t(uint16_t(coefficients[j]) << shifts[j]);
        product.add_row(each, coefficients, inner);
      }
      product.multiply(together, inner, basis.backward, g.hidden, sums, stride);
      for (int each = 0; each < together; ++each)
        write_token(plane, token + at + each, basis, sums + each * stride, row, factors, rotation, to + int64_t(at + each) * g.hidden);
    }
    for (int band = 0; band < bands; ++band) {
      offset = stream.tile_begin(tile + band) - job.stream;
      int32_t error = readers[band].close();
      if (error != kOk) return error;
    }
    return kOk;
  }

 private:
  void write_token(int plane, int token, const KvzBasis& basis, const int32_t* sums, float* row, const float* factors, float* rotation, Bits* to) const {
    for (int c = 0; c < g.hidden; ++c) row[c] = basis.mean[c] + float(sums[c]) * factors[c];
    if (rotates(*job.profile, plane)) {
      rotation_of(*job.profile, uint32_t(start + token), rotation);
      rotate(*job.profile, rotation, g.hidden, false, row);
    }
    for (int c = 0; c < g.hidden; ++c) {
      float value = row[c] < T::kMax ? row[c] : T::kMax;
      to[c] = T::store(value > -T::kMax ? value : -T::kMax);
    }
  }
};

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
