// Products of matrices of small whole numbers, which no order of summation changes: the transform's inner loop. Included
// once for each instruction set.
#pragma once
#include "kvz.h"

#if defined(KVZ_AVX512) || defined(KVZ_AVX2)
#include <immintrin.h>
#endif

namespace kvz {
namespace KVZ_NAMESPACE {

// Matrices on the right stand in pairs of rows, [inner / 2][outer][2]. Sums are modulo 2^32.
inline void multiply_some(const int16_t* a, int64_t stride, int rows, int inner, const int8_t* b, int outer, int first, int32_t* out) {
  for (int row = 0; row < rows; ++row) {
    for (int column = first; column < outer; ++column) {
      uint32_t sum = 0;
      for (int k = 0; k < inner; k += 2) {
        const int16_t* left = a + row * stride + k;
        const int8_t* right = b + (int64_t(k / 2) * outer + column) * 2;
        sum += uint32_t(left[0] * right[0]) + uint32_t(left[1] * right[1]);
      }
      out[int64_t(row) * outer + column] = int32_t(sum);
    }
  }
}

#if defined(KVZ_AVX512)

// kRows rows by 32 columns: the sums stay in registers.
template <int kRows>
inline void multiply_block(const int16_t* a, int64_t stride, int inner, const int8_t* b, int outer, int32_t* out) {
  __m512i sums[kRows][2];
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_si512();
  for (int k = 0; k < inner; k += 2, b += int64_t(outer) * 2) {
    __m512i low = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    __m512i high = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b) + 1));
    for (int row = 0; row < kRows; ++row) {
      int32_t pair;
      memcpy(&pair, a + row * stride + k, 4);
      __m512i both = _mm512_set1_epi32(pair);
      sums[row][0] = _mm512_add_epi32(sums[row][0], _mm512_madd_epi16(low, both));
      sums[row][1] = _mm512_add_epi32(sums[row][1], _mm512_madd_epi16(high, both));
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < 2; ++half) _mm512_storeu_si512(out + int64_t(row) * outer + 16 * half, sums[row][half]);
}
constexpr int kBlockRows = 8;

#elif defined(KVZ_AVX2)

template <int kRows>
inline void multiply_block(const int16_t* a, int64_t stride, int inner, const int8_t* b, int outer, int32_t* out) {
  for (int part = 0; part < 32; part += 16) {
    __m256i sums[kRows][2];
    for (auto& row : sums) row[0] = row[1] = _mm256_setzero_si256();
    const int8_t* at = b + 2 * part;
    for (int k = 0; k < inner; k += 2, at += int64_t(outer) * 2) {
      __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
      __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at) + 1));
      for (int row = 0; row < kRows; ++row) {
        int32_t pair;
        memcpy(&pair, a + row * stride + k, 4);
        __m256i both = _mm256_set1_epi32(pair);
        sums[row][0] = _mm256_add_epi32(sums[row][0], _mm256_madd_epi16(low, both));
        sums[row][1] = _mm256_add_epi32(sums[row][1], _mm256_madd_epi16(high, both));
      }
    }
    for (int row = 0; row < kRows; ++row)
      for (int half = 0; half < 2; ++half)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + int64_t(row) * outer + part + 8 * half), sums[row][half]);
  }
}
constexpr int kBlockRows = 4;

#endif

// out[rows][outer] = a[rows][inner] x b[inner][outer]; inner is even.
inline void multiply(const int16_t* a, int64_t stride, int rows, int inner, const int8_t* b, int outer, int32_t* out) {
  int column = 0;
#if defined(KVZ_AVX512) || defined(KVZ_AVX2)
  for (; column + 32 <= outer; column += 32) {
    int row = 0;
    for (; row + kBlockRows <= rows; row += kBlockRows)
      multiply_block<kBlockRows>(a + row * stride, stride, inner, b + 2 * column, outer, out + int64_t(row) * outer + column);
    for (; row < rows; ++row)
      multiply_block<1>(a + row * stride, stride, inner, b + 2 * column, outer, out + int64_t(row) * outer + column);
  }
#endif
  multiply_some(a, stride, rows, inner, b, outer, column, out);
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
