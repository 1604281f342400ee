// The loops of processors, once for each instruction set: KVR_NAMESPACE is its name, and has loads, stores and sums of
// eight pairs at a time. None of the sets has fused multiply-adds, which would give other bits.
#include "rotate.h"

namespace kvr {
namespace KVR_NAMESPACE {

// Sixteen pairs in halves. What lies side by side in two bytes is quicker taken apart, every other one, than one after
// the other, and need not be put in order for that.
template <typename E>
inline void turn_sixteen(const typename E::Stored* from, typename E::Stored* to, const float* cos, const float* sin, int apart) {
  Eight c[2], s[2], x[2], y[2];
  load_pairs<Float32>(cos, c, c + 1);
  load_pairs<Float32>(sin, s, s + 1);
  load_pairs<E>(from, x, x + 1);
  load_pairs<E>(from + apart, y, y + 1);
  store_pairs<E>(to, turned_first(x[0], y[0], c[0], s[0]), turned_first(x[1], y[1], c[1], s[1]));
  store_pairs<E>(to + apart, turned_second(x[0], y[0], c[0], s[0]), turned_second(x[1], y[1], c[1], s[1]));
}

// The pairs of one head. Those that are turned together are read before one of them is written, as the target may be
// the source.
template <typename E, bool kInterleaved>
inline void turn_head(const typename E::Stored* from, typename E::Stored* to, const float* cos, const float* sin, int pairs) {
  int pair = 0;
  if (E::kBySixteen && !kInterleaved)
    for (; pair + 16 <= pairs; pair += 16) turn_sixteen<E>(from + pair, to + pair, cos + pair, sin + pair, pairs);
  for (; pair + 8 <= pairs; pair += 8) {
    const Eight c = load_table(cos + pair), s = load_table(sin + pair);
    Eight x, y;
    if (kInterleaved) {
      load_pairs<E>(from + 2 * pair, &x, &y);
      store_pairs<E>(to + 2 * pair, turned_first(x, y, c, s), turned_second(x, y, c, s));
    } else {
      x = load<E>(from + pair), y = load<E>(from + pairs + pair);
      store<E>(to + pair, turned_first(x, y, c, s));
      store<E>(to + pairs + pair, turned_second(x, y, c, s));
    }
  }
  for (; pair < pairs; ++pair) {
    const int first = kInterleaved ? 2 * pair : pair, second = kInterleaved ? first + 1 : pairs + pair;
    const float x = E::load(from[first]), y = E::load(from[second]);
    to[first] = E::store(kvr::turned_first(x, y, cos[pair], sin[pair]));
    to[second] = E::store(kvr::turned_second(x, y, cos[pair], sin[pair]));
  }
}

// Tokens `first` to `end` of all layers: what they have of cosines and sines stays in the cache.
template <typename E, bool kInterleaved>
void rotate_tokens(const KvrRotate& r, int64_t first, int64_t end) {
  typedef typename E::Stored Stored;
  const int after = r.start + 2 * r.pairs;
  for (int32_t of = 0; of < r.count; ++of) {
    const KvrLayer& layer = r.layers[of];
    const bool copied = layer.source != layer.target;
    for (int64_t token = first; token < end; ++token) {
      const Stored* from = reinterpret_cast<const Stored*>(layer.source + token * layer.source_token);
      Stored* to = reinterpret_cast<Stored*>(layer.target + token * layer.target_token);
      const float *cos = r.cos + token * r.pairs, *sin = r.sin + token * r.pairs;
      for (int32_t head = 0; head < r.heads; ++head, from += r.head_size, to += r.head_size) {
        if (copied && r.start) memcpy(to, from, size_t(r.start) * sizeof(Stored));
        turn_head<E, kInterleaved>(from + r.start, to + r.start, cos, sin, r.pairs);
        if (copied && after < r.head_size) memcpy(to + after, from + after, size_t(r.head_size - after) * sizeof(Stored));
      }
    }
  }
}

template <typename E>
void rotate_elements(const KvrRotate& r, int64_t first, int64_t end) {
  r.interleaved ? rotate_tokens<E, true>(r, first, end) : rotate_tokens<E, false>(r, first, end);
}

void rotate(const KvrRotate& r, int64_t first, int64_t end) {
  switch (r.dtype) {
    case 0: return rotate_elements<Float32>(r, first, end);
    case 1: return rotate_elements<BFloat16>(r, first, end);
    case 2: return rotate_elements<Float16>(r, first, end);
  }
}

}  // namespace KVR_NAMESPACE
}  // namespace kvr
