// Encoding in the mode `cachegen`: a scale for each token, bins for each layer.
#pragma once
#include "writing.h"

namespace kvz {
namespace KVZ_NAMESPACE {

template <typename T>
struct BinsEncoder {
  const KvzGeometry& g;
  const KvzSettings& s;
  const KvzEncode& job;
  Scratch scratch;
  int lanes;

  BinsEncoder(const KvzGeometry& g, const KvzSettings& s, const KvzEncode& job, Arena arena)
      : g(g), s(s), job(job), scratch(arena, s.band, escape_words(T::kDtype)), lanes(int(ceil_div(s.band, kLanes)) * kLanes) {}

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
      for (int row = 0; row < rows; ++row) {
        typename T::Bits bits;
        memcpy(&bits, block_scales + int64_t(row) * int64_t(sizeof bits), sizeof bits);
        float factor = level_factor(T::load(bits), middle);
        for (int c = 0; c < width; ++c)
          scratch.symbols[int64_t(row) * lanes + c] = uint8_t(level_of(T::load(at[int64_t(row) * g.hidden + c]), factor, middle));
      }
      Kept kept = keep_smaller(kTokenScales, at, g.hidden, rows, width, lanes, scratch, nullptr, 0, nullptr, out);
      out += kept.bytes;
      note(kept.kind, out);
    }
    return out;
  }
};

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
