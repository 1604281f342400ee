// The loops for AVX2 and F16C.
#define KVR_NAMESPACE avx2
#include <immintrin.h>

#include "rotate.h"

namespace kvr {
namespace avx2 {

typedef __m256 Eight;

inline Eight load_table(const float* from) { return _mm256_loadu_ps(from); }

inline Eight turned_first(Eight x, Eight y, Eight cos, Eight sin) {
  return _mm256_sub_ps(_mm256_mul_ps(x, cos), _mm256_mul_ps(y, sin));
}

inline Eight turned_second(Eight x, Eight y, Eight cos, Eight sin) {
  return _mm256_add_ps(_mm256_mul_ps(y, cos), _mm256_mul_ps(x, sin));
}

// The bits of bfloat16 in the upper halves; the lower ones are anything.
inline __m256i rounded(Eight v) {
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc00000), nan);
}

// Of each of two sets of eight, in order: the first in the lower half.
inline __m256i words_of(__m256i low, __m256i high) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8); }

template <typename E> Eight load(const typename E::Stored*);
template <typename E> void store(typename E::Stored*, Eight);
template <typename E> void load_pairs(const typename E::Stored*, Eight* x, Eight* y);
template <typename E> void store_pairs(typename E::Stored*, Eight x, Eight y);

inline __m128i words(const uint16_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline void put(uint16_t* to, __m128i words) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words); }
inline void put(uint16_t* to, __m256i words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words); }

template <> inline Eight load<Float32>(const float* from) { return _mm256_loadu_ps(from); }
template <> inline void store<Float32>(float* to, Eight v) { _mm256_storeu_ps(to, v); }
template <> inline void load_pairs<Float32>(const float* from, Eight* x, Eight* y) {
  const __m256 low = _mm256_loadu_ps(from), high = _mm256_loadu_ps(from + 8);
  const __m256 left = _mm256_permute2f128_ps(low, high, 0x20), right = _mm256_permute2f128_ps(low, high, 0x31);
  *x = _mm256_shuffle_ps(left, right, 0x88);
  *y = _mm256_shuffle_ps(left, right, 0xdd);
}
template <> inline void store_pairs<Float32>(float* to, Eight x, Eight y) {
  const __m256 left = _mm256_unpacklo_ps(x, y), right = _mm256_unpackhi_ps(x, y);
  _mm256_storeu_ps(to, _mm256_permute2f128_ps(left, right, 0x20));
  _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(left, right, 0x31));
}

template <> inline Eight load<BFloat16>(const uint16_t* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words(from)), 16));
}
template <> inline void store<BFloat16>(uint16_t* to, Eight v) {
  const __m256i upper = _mm256_srli_epi32(rounded(v), 16);
  put(to, _mm256_castsi256_si128(words_of(upper, upper)));
}
template <> inline void load_pairs<BFloat16>(const uint16_t* from, Eight* x, Eight* y) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  *x = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  *y = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
}
template <> inline void store_pairs<BFloat16>(uint16_t* to, Eight x, Eight y) {
  put(to, _mm256_blend_epi16(_mm256_srli_epi32(rounded(x), 16), rounded(y), 0xaa));
}

template <> inline Eight load<Float16>(const uint16_t* from) { return _mm256_cvtph_ps(words(from)); }
template <> inline void store<Float16>(uint16_t* to, Eight v) { put(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
template <> inline void load_pairs<Float16>(const uint16_t* from, Eight* x, Eight* y) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i apart = words_of(_mm256_and_si256(both, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(both, 16));
  *x = _mm256_cvtph_ps(_mm256_castsi256_si128(apart));
  *y = _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
}
template <> inline void store_pairs<Float16>(uint16_t* to, Eight x, Eight y) {
  const __m128i first = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), second = _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT);
  put(to, _mm_unpacklo_epi16(first, second));
  put(to + 8, _mm_unpackhi_epi16(first, second));
}

}  // namespace avx2
}  // namespace kvr

#include "rows.h"
