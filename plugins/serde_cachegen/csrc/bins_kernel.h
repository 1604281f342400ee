// The mode `cachegen` on a GPU: scales of all tokens, and what they make of a tile.
#pragma once
#include "encode_work.h"

namespace kvz {
namespace KVZ_NAMESPACE {

KVZ_DEVICE bool has_bins(const KvzGeometry& g, const KvzEncode& job) {
  bool good = true;
  for (int plane = 0; plane < g.planes; ++plane) good = good && job.bins[plane] >= kLeastBins && job.bins[plane] <= kMostBins;
  return good;
}

KVZ_DEVICE uint8_t* scales_of(const KvzGeometry& g, const KvzEncode& job) { return job.out + kHeaderBytes + aligned(2 * g.planes); }

// A warp for each token of each plane of each stream: its largest finite magnitude, to where the stream has it.
template <typename T>
KVZ_KERNEL scale_tokens(KvzGeometry g, const KvzEncode* jobs, int64_t all, EncodeWork work) {
  using Bits = typename T::Bits;
  if (block() == 0 && thread() == 0) *work.next = 0;
  int64_t each = block() * kWarps + thread() / 32, of_stream = int64_t(g.planes) * g.tokens;
  if (each >= all) return;
  const KvzEncode& job = jobs[each / of_stream];
  int64_t number = each % of_stream;
  const Bits* from = static_cast<const Bits*>(job.source) + number / g.tokens * job.plane_stride + number % g.tokens * g.hidden;
  float most = 0.0f;
  for (int c = lane(); c < g.hidden; c += kLanes) {
    float value = fabsf(T::load(from[c]));
    most = is_finite(value) && value > most ? value : most;
  }
  most = as_float(uint32_t(largest_of(int(as_bits(most)))));  // Of numbers that are not negative the bits are in order.
  Bits bits = T::store(most);
  if (lane() == 0) memcpy(scales_of(g, job) + number * int64_t(sizeof bits), &bits, sizeof bits);
}

// A warp: of each token of a tile, by what its values become levels.
template <typename T>
KVZ_DEVICE void fill_factors(const uint8_t* scales, int rows, float middle, float* factors) {
  sync_warp();
  for (int row = lane(); row < rows; row += kLanes) {
    typename T::Bits scale;
    memcpy(&scale, scales + row * int64_t(sizeof scale), sizeof scale);
    factors[row] = level_factor(T::load(scale), middle);
  }
  sync_warp();
}

template <typename T>
struct BinsSource {
  using Bits = typename T::Bits;
  const Bits* from;  // the first element of the tile
  int stride;
  const float* factors;  // of its tokens
  float middle;
  uint32_t top;  // of its levels

  struct Channel {};
  KVZ_DEVICE Channel channel(int) const { return {}; }
  KVZ_DEVICE Bits bits(int row, int c) const { return from[int64_t(row) * stride + c]; }
  // As level_of.
  KVZ_DEVICE int symbol(int row, Bits bits, const Channel&) const {
    uint32_t level = as_bits(T::load(bits) * factors[row] + middle + kRounds) - kRoundsBits;
    return level <= top ? int(level - top / 2) - kFirst : kEscape;
  }
};

// A warp: the tables of one stream but for its scales.
KVZ_DEVICE void write_bins(const KvzGeometry& g, KvzEncode& job, int64_t table_bytes) {
  uint8_t* tables = job.out + kHeaderBytes;
  int64_t used = scales_of(g, job) - tables + int64_t(g.planes) * g.tokens * element_bytes(g.dtype);
  for (int64_t at = 2 * g.planes + lane(); at < scales_of(g, job) - tables; at += kLanes) tables[at] = 0;
  for (int64_t at = used + lane(); at < table_bytes; at += kLanes) tables[at] = 0;
  if (lane() < g.planes) tables[2 * lane()] = uint8_t(job.bins[lane()]), tables[2 * lane() + 1] = 0;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
