// The loops for any processor: the reference for the others.
#define KVR_NAMESPACE portable
#include "rotate.h"

namespace kvr {
namespace portable {

// Eight values, each of the same pair, in eight pairs.
struct Eight {
  float value[8];
};

inline Eight load_table(const float* from) {
  Eight v;
  memcpy(v.value, from, sizeof(v));
  return v;
}

inline Eight turned_first(Eight x, Eight y, Eight cos, Eight sin) {
  Eight v;
  for (int i = 0; i < 8; ++i) v.value[i] = kvr::turned_first(x.value[i], y.value[i], cos.value[i], sin.value[i]);
  return v;
}

inline Eight turned_second(Eight x, Eight y, Eight cos, Eight sin) {
  Eight v;
  for (int i = 0; i < 8; ++i) v.value[i] = kvr::turned_second(x.value[i], y.value[i], cos.value[i], sin.value[i]);
  return v;
}

template <typename E>
Eight load(const typename E::Stored* from, int apart) {
  Eight v;
  for (int i = 0; i < 8; ++i) v.value[i] = E::load(from[i * apart]);
  return v;
}

template <typename E>
void store(typename E::Stored* to, int apart, Eight v) {
  for (int i = 0; i < 8; ++i) to[i * apart] = E::store(v.value[i]);
}

template <typename E>
Eight load(const typename E::Stored* from) { return load<E>(from, 1); }
template <typename E>
void store(typename E::Stored* to, Eight v) { store<E>(to, 1, v); }

template <typename E>
void load_pairs(const typename E::Stored* from, Eight* x, Eight* y) {
  *x = load<E>(from, 2);
  *y = load<E>(from + 1, 2);
}

template <typename E>
void store_pairs(typename E::Stored* to, Eight x, Eight y) {
  store<E>(to, 2, x);
  store<E>(to + 1, 2, y);
}

}  // namespace portable
}  // namespace kvr

#include "rows.h"
