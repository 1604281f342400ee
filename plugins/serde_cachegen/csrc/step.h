// Encoding in the mode `step`: a step for each channel, or one for all.
#pragma once
#include "writing.h"

namespace kvz {
namespace KVZ_NAMESPACE {

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

// Codes of the steps of channels: one for all, but coarser where a channel deviates by much more than others do, because
// what the model makes of such a channel is as much less. Measured in docs/design.
inline void level_codes(const float* sigmas, float step, int count, uint8_t* codes) {
  int top = 0, sum = 0, known = 0;
  for (int c = 0; c < count; ++c) {
    codes[c] = uint8_t(step_code(step * sigmas[c]));
    top = std::max<int>(top, codes[c]);
  }
  int least = std::max(top - kCodesBelowTop, 0);
  for (int c = 0; c < count; ++c)
    if (sigmas[c] > 0.0f) sum += std::max<int>(codes[c], least), known += 1;
  int mean = known > 0 ? (sum + known / 2) / known : 0;
  for (int c = 0; c < count; ++c) codes[c] = uint8_t(level_code(codes[c], mean));
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

// Marks the attention sinks among the tokens of a block, by its V; false if there are none. squares: [rows]
template <typename T>
bool find_sinks(const typename T::Bits* values, int rows, int hidden, float* squares, uint8_t* sinks) {
  for (int row = 0; row < rows; ++row) {
    const typename T::Bits* at = values + int64_t(row) * hidden;
    float sums[kLanes] = {};
    for (int begin = 0; begin < hidden; begin += kLanes) {
      int width = std::min(kLanes, hidden - begin);
      for (int c = 0; c < width; ++c) {
        float value = T::load(at[begin + c]);
        sums[c] += is_finite(value) ? value * value : 0.0f;
      }
    }
    squares[row] = 0.0f;
    for (float each : sums) squares[row] += each;
  }
  float most = kSinkSquares * mean_of(squares, rows);
  int count = 0;
  for (int row = 0; row < rows; ++row) sinks[row] = squares[row] < most, count += sinks[row];
  return count > 0 && count <= rows / kTokensOfSink;
}

template <typename T>
struct StepEncoder {
  const KvzGeometry& g;
  const KvzSettings& s;
  const KvzEncode& job;
  float *first, *sum, *squares, *steps, *inverses, *centre_steps;
  uint8_t* levelled;
  Scratch scratch;
  int lanes;
  const typename T::Bits* searched = nullptr;  // The V in which sinks were looked for.
  bool has_sinks = false;
  uint8_t sinks[kMaxTileTokens];

  StepEncoder(const KvzGeometry& g, const KvzSettings& s, const KvzEncode& job, Arena arena)
      : g(g), s(s), job(job), scratch(arena, s.band, escape_words(T::kDtype)) {
    lanes = int(ceil_div(s.band, kLanes)) * kLanes;
    first = arena.take<float>(g.hidden), sum = arena.take<float>(g.hidden), squares = arena.take<float>(g.hidden);
    levelled = arena.take<uint8_t>(g.hidden);
    steps = arena.take<float>(lanes), inverses = arena.take<float>(lanes), centre_steps = arena.take<float>(lanes);
  }

  // Writes the tiles of one block of tokens of one plane; gives how each is kept and where it ends to `note`.
  template <typename Note>
  uint8_t* block(int plane, const typename T::Bits* from, int rows, uint8_t* out, Note&& note) {
    const typename T::Bits* values = plane == 0 ? from + job.plane_stride : from;
    if (g.planes == 2 && searched != values) {
      float squares_of_tokens[kMaxTileTokens];
      has_sinks = find_sinks<T>(values, rows, g.hidden, squares_of_tokens, sinks), searched = values;
    }
    measure<T>(from, rows, g.hidden, first, sum, squares);
    float *means = first, *sigmas = sum;
    for (int c = 0; c < g.hidden; ++c) {
      Moments it = moments(first[c], sum[c], squares[c], rows);
      means[c] = it.mean, sigmas[c] = it.sigma;
    }
    int shared_to = plane == 0 ? s.shared_from : g.hidden;
    float step = step_of(s.step, g.planes, plane), shared = step * mean_of(sigmas, shared_to > 0 ? shared_to : g.hidden);
    const float* weights = job.weights[plane];
    if (plane == 1 && weights != nullptr) shared_to = 0;
    if (weights == nullptr) level_codes(sigmas + shared_to, step, g.hidden - shared_to, levelled + shared_to);
    for (int begin = 0; begin < g.hidden; begin += s.band) {
      int width = std::min(s.band, g.hidden - begin);
      bool one = begin < shared_to;
      uint8_t codes[kMaxBand];
      int8_t centres[kMaxBand];
      float farthest = 0.0f;
      for (int c = 0; c < width; ++c) farthest = std::max(farthest, fabsf(means[begin + c]));
      for (int c = 0; c < width; ++c) {
        float mean = means[begin + c];
        float wanted = one ? shared : weights != nullptr ? shared * weights[begin + c] : kSteps[levelled[begin + c]];
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
        for (int row = 0; has_sinks && row < rows; ++row)
          if (sinks[row]) memset(scratch.symbols + int64_t(row) * lanes, kEscape, size_t(width));
        kept = keep_smaller(one ? kOneStep : kChannelSteps, at, g.hidden, rows, width, lanes, scratch, codes,
                               one ? 1 : width, centres, out);
      }
      out += kept.bytes;
      note(kept.kind, out);
    }
    return out;
  }
};

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
