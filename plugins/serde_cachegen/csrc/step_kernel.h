// The mode `step` on a GPU: steps and centres of all channels, and what they make of a tile.
#pragma once
#include "encode_work.h"

namespace kvz {
namespace KVZ_NAMESPACE {

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
  constexpr int kTogether = 16;  // All read before any is used.
  for (int row = 1; row < place.rows; row += kTogether) {
    typename T::Bits some[kTogether];
    KVZ_UNROLL
    for (int each = 0; each < kTogether; ++each)
      if (row + each < place.rows) some[each] = *(from += g.hidden);
    KVZ_UNROLL
    for (int each = 0; each < kTogether; ++each) {
      if (row + each >= place.rows) break;
      float value = T::load(some[each]), off = is_finite(value) ? value - first : 0.0f;
      sum += off;
      squares += off * off;
    }
  }
  Moments it = moments(first, sum, squares, place.rows);
  int64_t at = (place.job * work.blocks + place.number) * g.hidden + c;
  work.means[at] = it.mean, work.sigmas[at] = it.sigma;
}

// A block for each block of tokens of a stream: its attention sinks, as `find_sinks` of the processor has them.
template <typename T>
KVZ_KERNEL find_sinks(KvzGeometry g, KvzSettings s, const KvzEncode* jobs, EncodeWork work) {
  using Bits = typename T::Bits;
  int64_t of_stream = work.blocks / g.planes;
  const KvzEncode& job = jobs[block() / of_stream];
  int token = int(block() % of_stream) * s.tile_tokens, rows = g.tokens - token < s.tile_tokens ? g.tokens - token : s.tile_tokens;
  const Bits* values = static_cast<const Bits*>(job.source) + job.plane_stride + int64_t(token) * g.hidden;
  float* squares = work.squares + block() * s.tile_tokens;
  uint8_t* sinks = work.sinks + block() * s.tile_tokens;
  for (int row = thread() / 32; row < rows; row += threads() / 32) {
    float own = 0.0f, sum = 0.0f;
    for (int c = lane(); c < g.hidden; c += kLanes) {
      float value = T::load(values[int64_t(row) * g.hidden + c]);
      own += is_finite(value) ? value * value : 0.0f;
    }
    for (int each = 0; each < kLanes; ++each) sum += from_lane(own, each);
    if (lane() == 0) squares[row] = sum;
  }
  sync_block();
  float partial = 0.0f, sum = 0.0f;
  for (int row = lane(); row < rows; row += kLanes) partial += squares[row];
  for (int each = 0; each < kLanes; ++each) sum += from_lane(partial, each);
  float most = kSinkSquares * (sum / float(rows));
  int count = 0;
  for (int row = lane(); row < rows; row += kLanes) count += squares[row] < most;
  count = sum_of(count);
  if (thread() >= 32) return;
  for (int row = lane(); row < rows; row += kLanes) sinks[row] = squares[row] < most;
  if (lane() == 0) work.has_sinks[block()] = count > 0 && count <= rows / kTokensOfSink;
}

// A block for each block of tokens: steps and centres, as `StepEncoder` has them. Each warp has some of the bands.
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
  float step = step_of(s.step, g.planes, place.plane), shared = step * (sum / float(counted));
  const float* weights = jobs[place.job].weights[place.plane];
  if (place.plane == 1 && weights != nullptr) shared_to = 0;
  int mean = 0;
  if (weights == nullptr) {
    int top = 0, total = 0, known = 0;
    for (int c = shared_to + lane(); c < g.hidden; c += kLanes) {
      int code = step_code(step * sigmas[c]);
      top = code > top ? code : top;
    }
    top = largest_of(top);
    int least = top > kCodesBelowTop ? top - kCodesBelowTop : 0;
    for (int c = shared_to + lane(); c < g.hidden; c += kLanes) {
      int code = step_code(step * sigmas[c]);
      if (sigmas[c] > 0.0f) total += code > least ? code : least, known += 1;
    }
    total = sum_of(total), known = sum_of(known);
    mean = known > 0 ? (total + known / 2) / known : 0;
  }
  for (int begin = thread() / 32 * s.band; begin < g.hidden; begin += threads() / 32 * s.band) {
    int width = g.hidden - begin < s.band ? g.hidden - begin : s.band;
    bool one = begin < shared_to;
    float farthest = 0.0f;
    for (int c = begin + lane(); c < begin + width; c += kLanes) farthest = fabsf(means[c]) > farthest ? fabsf(means[c]) : farthest;
    farthest = as_float(uint32_t(largest_of(int(as_bits(farthest)))));  // Of numbers that are not negative the bits are in order.
    for (int c = begin + lane(); c < begin + width; c += kLanes) {
      float wanted = shared;
      if (!one && weights != nullptr) wanted = shared * weights[c];
      if (!one && weights == nullptr) {
        wanted = kSteps[level_code(step_code(step * sigmas[c]), mean)];
      }
      int code = channel_step(wanted, one ? farthest : means[c]);
      codes[c] = uint8_t(code);
      centres[c] = int8_t(channel_centre(means[c], code));
    }
  }
}

template <typename T>
struct StepSource {
  using Bits = typename T::Bits;
  const Bits* from;  // the first element of the tile
  int stride;
  const uint8_t* codes;
  const int8_t* centres;
  const uint8_t* sinks;  // Of its tokens, null if there are none.

  struct Channel {
    float inverse, step;
    uint32_t first;  // What bits are of what has symbol 0.
  };
  KVZ_DEVICE Channel channel(int c) const { return {kInverseSteps[codes[c]], kSteps[codes[c]], kRoundsBits + uint32_t(centres[c] + kFirst)}; }
  KVZ_DEVICE Bits bits(int row, int c) const { return from[int64_t(row) * stride + c]; }
  // As symbol_of.
  KVZ_DEVICE int symbol(int row, Bits bits, const Channel& its) const {
    float rounded = T::load(bits) * its.inverse + kRounds;
    uint32_t symbol = as_bits(rounded) - its.first;
    bool in = symbol < uint32_t(kEscape);
    if constexpr (T::kDtype == kFP16 || T::kDtype == kE4M3 || T::kDtype == kE5M2) in = in && fabsf((rounded - kRounds) * its.step) <= T::kMax;
    in = in && !(sinks != nullptr && sinks[row]);
    return in ? int(symbol) : kEscape;
  }
};

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
