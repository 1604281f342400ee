// Products of matrices of small whole numbers, which no order of summation changes: the transform's inner loop. Included
// once for each instruction set.
//
// Matrices on the right stand in pairs of rows, [inner / 2][outer][2]. Sums are modulo 2^32.
#pragma once
#include "rows.h"
#include "layout.h"

#if defined(KVZ_AVX512) || defined(KVZ_AVX2)
#include <immintrin.h>
#endif

namespace kvz {
namespace KVZ_NAMESPACE {

#if defined(KVZ_AVX512)

using Vector = __m512i;
constexpr int kBlockRows = 8;
inline Vector load(const void* from) { return _mm512_load_si512(from); }
inline void store(void* to, Vector value) { _mm512_store_si512(to, value); }
inline Vector zero() { return _mm512_setzero_si512(); }
inline Vector all_are(int32_t value) { return _mm512_set1_epi32(value); }
inline Vector add_words(Vector a, Vector b) { return _mm512_add_epi16(a, b); }
inline Vector add(Vector a, Vector b) { return _mm512_add_epi32(a, b); }
inline Vector shifted(Vector a, __m128i by) { return _mm512_sll_epi32(a, by); }
inline Vector products_of_bytes(Vector a, Vector b) { return _mm512_maddubs_epi16(a, b); }
inline Vector products_of_words(Vector a, Vector b) { return _mm512_madd_epi16(a, b); }
inline Vector low_words(Vector a) { return _mm512_cvtepi16_epi32(_mm512_castsi512_si256(a)); }
inline Vector high_words(Vector a) { return _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(a, 1)); }
inline Vector words_of(const int8_t* from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline Vector words_of(const uint8_t* from) { return _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(from))); }

#elif defined(KVZ_AVX2)

using Vector = __m256i;
constexpr int kBlockRows = 4;
inline Vector load(const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); }
inline void store(void* to, Vector value) { _mm256_store_si256(static_cast<__m256i*>(to), value); }
inline Vector zero() { return _mm256_setzero_si256(); }
inline Vector all_are(int32_t value) { return _mm256_set1_epi32(value); }
inline Vector add_words(Vector a, Vector b) { return _mm256_add_epi16(a, b); }
inline Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
inline Vector shifted(Vector a, __m128i by) { return _mm256_sll_epi32(a, by); }
inline Vector products_of_bytes(Vector a, Vector b) { return _mm256_maddubs_epi16(a, b); }
inline Vector products_of_words(Vector a, Vector b) { return _mm256_madd_epi16(a, b); }
inline Vector low_words(Vector a) { return _mm256_cvtepi16_epi32(_mm256_castsi256_si128(a)); }
inline Vector high_words(Vector a) { return _mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1)); }
inline Vector words_of(const int8_t* from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
inline Vector words_of(const uint8_t* from) { return _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(from))); }

// For each set of lanes, which lane goes where: to the front, in their order.
struct Front {
  alignas(32) uint32_t from[256][8];
  Front() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0;
      for (int lane = 0; lane < 8; ++lane)
        if (mask >> lane & 1) from[mask][next++] = uint32_t(lane);
      while (next < 8) from[mask][next++] = 0;
    }
  }
};
static const Front kFront;

#endif

#if defined(KVZ_AVX512) || defined(KVZ_AVX2)

constexpr int kBytes = int(sizeof(Vector)), kSums = kBytes / 4;
static_assert(kColumnsOfPanel % (2 * kBytes) == 0, "sums have room for whole panels");

// The pairs of [pairs][2] numbers that are not zero, and where each stands. Counts them. Reads whole vectors, and writes them.
inline int pairs_of_row(const int16_t* a, int pairs, int32_t* values, int32_t* places) {
  constexpr int kOfVector = kBytes / 4;
  int count = 0;
#if defined(KVZ_AVX512)
  const Vector each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int k = 0; k < pairs; k += kOfVector) {
    Vector numbers = load(a + 2 * k);
    __mmask16 some = _mm512_test_epi32_mask(numbers, numbers);
    _mm512_storeu_si512(values + count, _mm512_maskz_compress_epi32(some, numbers));
    _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi32(some, add(each, all_are(k))));
    count += __builtin_popcount(some);
  }
#else
  for (int k = 0; k < pairs; k += kOfVector) {
    Vector numbers = load(a + 2 * k);
    int some = ~_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(numbers, zero()))) & 0xff;
    Vector from = load(kFront.from[some]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + count), _mm256_permutevar8x32_epi32(numbers, from));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(places + count), add(from, all_are(k)));
    count += __builtin_popcount(unsigned(some));
  }
#endif
  return count;
}

// -- all products, for the encoder -------------------------------------------------------------------------------------

constexpr int kDenseColumns = 2 * kSums, kDensePairs = kPanelBytes / (2 * kBytes);

// kBlockRows rows of `pairs` pairs by the columns of a panel, added to what `out` has, or in its place.
inline void multiply_block(const int16_t* a, int64_t stride, int pairs, const uint8_t* panel, bool first, int32_t* out, int64_t out_stride) {
  Vector sums[kBlockRows][2];
  for (int row = 0; row < kBlockRows; ++row)
    for (int half = 0; half < 2; ++half) sums[row][half] = first ? zero() : load(out + row * out_stride + half * kSums);
  for (int k = 0; k < pairs; ++k, panel += 2 * kBytes) {
    Vector left = load(panel), right = load(panel + kBytes);
    for (int row = 0; row < kBlockRows; ++row) {
      int32_t pair;
      memcpy(&pair, a + row * stride + 2 * k, 4);
      Vector both = all_are(pair);
      sums[row][0] = add(sums[row][0], products_of_words(left, both));
      sums[row][1] = add(sums[row][1], products_of_words(right, both));
    }
  }
  for (int row = 0; row < kBlockRows; ++row)
    for (int half = 0; half < 2; ++half) store(out + row * out_stride + half * kSums, sums[row][half]);
}

// Parts of the matrix on the right are copied to where they stay in the nearest cache: rows of it may be a power of two apart, and then
// few of them would.
inline void multiply_words(const int16_t* a, int64_t stride, int rows, int inner, const int8_t* b, int outer, int32_t* out, int64_t out_stride, uint8_t* panel) {
  for (int column = 0; column < outer; column += kDenseColumns) {
    for (int first = 0; first < inner / 2; first += kDensePairs) {
      int pairs = std::min(kDensePairs, inner / 2 - first), columns = std::min(kDenseColumns, outer - column);
      for (int k = 0; k < pairs; ++k) {
        const int8_t* from = b + (int64_t(first + k) * outer + column) * 2;
        int8_t rest[2 * kDenseColumns] = {};
        if (columns < kDenseColumns) from = static_cast<const int8_t*>(memcpy(rest, from, size_t(2 * columns)));
        store(panel + k * 2 * kBytes, words_of(from));
        store(panel + k * 2 * kBytes + kBytes, words_of(from + kBytes / 2));
        __builtin_prefetch(from + 2 * kDenseColumns, 0, 2);
      }
      for (int row = 0; row < rows; row += kBlockRows)
        multiply_block(a + row * stride + 2 * first, stride, pairs, panel, first == 0, out + row * out_stride + column, out_stride);
    }
  }
}

#if defined(KVZ_AVX512)

// The same, where there are products of four bytes at a time: numbers as far as they fit a byte, and pairs of what is left of them, of
// which there are few.
struct BytesProduct {
  static constexpr int kQuads = kPanelBytes / (2 * kBytes);
  struct Rest {
    int32_t numbers, row;
    int64_t pair;
  };
  int8_t* numbers;  // [kTogether][stride]
  int64_t stride;
  Rest* rests;
  int rest_count = 0;
  int32_t biases[kTogether] = {};

  BytesProduct(Arena& arena, int inner) : stride(ceil_div(inner, 4) * 4) {
    numbers = arena.take<int8_t>(kTogether * stride), rests = arena.take<Rest>(kTogether * kMostRests);
  }

  static bool works() {
    static const bool it = __builtin_cpu_supports("avx512vnni");
    return it;
  }

  // False where more is left of them than there is room for.
  bool split(const int16_t* a, int64_t a_stride, int rows, int inner) {
    rest_count = 0;
    for (int row = 0; row < rows; ++row) {
      const int16_t* from = a + row * a_stride;
      int8_t* to = numbers + row * stride;
      int32_t sum = 0, most = 0;
      for (int k = 0; k < inner; ++k) {
        int number = std::min(std::max(int(from[k]), -128), 127);
        to[k] = int8_t(number), sum += number, most |= number ^ from[k];
      }
      std::fill(to + inner, to + ceil_div(inner, 4) * 4, int8_t(0));
      biases[row] = -128 * sum;
      for (int k = 0; most != 0 && k < inner; k += 2) {
        int first = from[k] - to[k], second = from[k + 1] - to[k + 1];
        if ((first | second) == 0) continue;
        if (rest_count == kTogether * kMostRests) return false;
        rests[rest_count++] = {int32_t(uint32_t(uint16_t(first)) | uint32_t(second) << 16), row, k / 2};
      }
    }
    return true;
  }

  __attribute__((target("avx512vnni"))) static void block(const int8_t* a, int64_t stride, int quads, const uint8_t* panel, const int32_t* biases, int32_t* out, int64_t out_stride) {
    Vector sums[kBlockRows][2];
    for (int row = 0; row < kBlockRows; ++row)
      for (int half = 0; half < 2; ++half) sums[row][half] = biases != nullptr ? all_are(biases[row]) : load(out + row * out_stride + half * kSums);
    for (int k = 0; k < quads; ++k, panel += 2 * kBytes) {
      Vector left = load(panel), right = load(panel + kBytes);
      for (int row = 0; row < kBlockRows; ++row) {
        int32_t quad;
        memcpy(&quad, a + row * stride + 4 * k, 4);
        Vector all = all_are(quad);
        sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], left, all);
        sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], right, all);
      }
    }
    for (int row = 0; row < kBlockRows; ++row)
      for (int half = 0; half < 2; ++half) store(out + row * out_stride + half * kSums, sums[row][half]);
  }

  void multiply(int rows, int inner, const int8_t* b, int outer, int32_t* out, int64_t out_stride, uint8_t* panel) const {
    int all = int(ceil_div(inner, 4));
    alignas(64) int16_t order[32];
    for (int word = 0; word < 32; ++word) order[word] = int16_t(word / 2 + word % 2 * 16);
    for (int column = 0; column < outer; column += kDenseColumns) {
      for (int first = 0; first < all; first += kQuads) {
        int quads = std::min(kQuads, all - first), columns = std::min(kDenseColumns, outer - column);
        for (int k = 0; k < quads; ++k) {
          alignas(64) uint8_t both[2][2 * kDenseColumns] = {};
          for (int pair = 0; pair < 2 && 2 * (first + k) + pair < inner / 2; ++pair) {
            const int8_t* from = b + (int64_t(2 * (first + k) + pair) * outer + column) * 2;
            if (columns == kDenseColumns) memcpy(both[pair], from, 2 * kDenseColumns);
            else memcpy(both[pair], from, size_t(2 * columns));
            __builtin_prefetch(from + 2 * kDenseColumns, 0, 2);
          }
          Vector low = _mm512_shuffle_i64x2(load(both[0]), load(both[1]), 0x44), high = _mm512_shuffle_i64x2(load(both[0]), load(both[1]), 0xee);
          Vector above = _mm512_set1_epi8(-128);
          store(panel + k * 2 * kBytes, _mm512_xor_si512(_mm512_permutexvar_epi16(load(order), low), above));
          store(panel + k * 2 * kBytes + kBytes, _mm512_xor_si512(_mm512_permutexvar_epi16(load(order), high), above));
        }
        for (int row = 0; row < rows; row += kBlockRows)
          block(numbers + row * stride + 4 * first, stride, quads, panel, first == 0 ? biases + row : nullptr, out + row * out_stride + column, out_stride);
      }
    }
    for (const Rest* rest = rests; rest < rests + rest_count; ++rest) {
      const int8_t* from = b + rest->pair * outer * 2;
      int32_t* to = out + rest->row * out_stride;
      int column = 0, one = int16_t(rest->numbers), other = rest->numbers >> 16;
      for (Vector pair = all_are(rest->numbers); column + kSums <= outer; column += kSums)
        store(to + column, add(load(to + column), products_of_words(words_of(from + 2 * column), pair)));
      for (; column < outer; ++column) to[column] = int32_t(uint32_t(to[column]) + uint32_t(one * from[2 * column]) + uint32_t(other * from[2 * column + 1]));
    }
  }
};

#endif

// What the encoder multiplies with: out[rows][out_stride] = a[rows][inner] x b[inner][outer], and whatever, up to whole blocks of rows
// and whole panels of columns.
struct DenseProduct {
  uint8_t* panel;
#if defined(KVZ_AVX512)
  BytesProduct bytes;
  DenseProduct(Arena& arena, int inner) : panel(arena.take<uint8_t>(kPanelBytes)), bytes(arena, inner) {}
#else
  DenseProduct(Arena& arena, int) : panel(arena.take<uint8_t>(kPanelBytes)) {}
#endif

  void multiply(const int16_t* a, int64_t stride, int rows, int inner, const int8_t* b, int outer, int32_t* out, int64_t out_stride) {
#if defined(KVZ_AVX512)
    if (BytesProduct::works() && bytes.split(a, stride, rows, inner)) return bytes.multiply(rows, inner, b, outer, out, out_stride, panel);
#endif
    multiply_words(a, stride, rows, inner, b, outer, out, out_stride, panel);
  }
};

// -- without zeros, for the decoder ------------------------------------------------------------------------------------

// Rows of small numbers, of which many are zero, times a matrix of bytes. Pairs of numbers of which one is not zero are listed, and the
// matrix has 128 added to it: then sums of products fit 16 bits while their numbers' magnitudes sum up to 127 or less.
struct SparseProduct {
  static constexpr int kColumns = 2 * kBytes, kPairs = kPanelBytes / (2 * kColumns), kMost = 127;
  struct Entry {  // Of a pair: four bytes, the two numbers twice, or the two in words. Of a run: how many pairs, and their shift.
    int32_t numbers;
    uint32_t at;
  };
  Entry* next;
  uint32_t* begins;  // [parts][kTogether]: where the lists of a row begin, for each part of the inner dimension
  int32_t* biases;
  const Entry* entries;
  uint8_t *panel, *shifts;

  SparseProduct(Arena& arena, int inner) {
    int parts = int(ceil_div(inner, 2 * kPairs));
    entries = next = arena.take<Entry>(int64_t(kTogether) * (inner + 2 * parts));
    begins = arena.take<uint32_t>(parts * kTogether), biases = arena.take<int32_t>(kTogether);
    panel = arena.take<uint8_t>(kPanelBytes), shifts = arena.take<uint8_t>(inner / 2);
  }

  void clear() { next = const_cast<Entry*>(entries); }

  // Lists a row, [inner] and zeros up to a whole vector. Numbers of a pair are multiples of two to the power of its shift.
  void add_row(int row, const int16_t* a, int inner) {
    uint32_t sum = 0;
    for (int part = 0, first = 0; first < inner / 2; ++part, first += kPairs) {
      int32_t values[kPairs + kSums], places[kPairs + kSums], wide = 0, left = 0, shift = kMostExponent + 1, runs = 0;
      Entry wides[kPairs];
      Entry *head = next++, *run = nullptr;
      begins[part * kTogether + row] = uint32_t(head - entries);
      int count = pairs_of_row(a + 2 * first, std::min(kPairs, inner / 2 - first), values, places);
      for (int each = 0; each < count; ++each) {
        int low = int16_t(values[each]), high = values[each] >> 16, own = shifts[first + places[each]], by = std::min(own, shift);
        int size = std::abs(low >> by) + std::abs(high >> by);
        uint32_t at = uint32_t(places[each]) * 2 * kColumns;
        sum += uint32_t(low) + uint32_t(high);
        if (__builtin_expect(size > left || by != shift, 0)) {
          size = std::abs(low >> own) + std::abs(high >> own);
          if (size > kMost) {
            wides[wide++] = {values[each], at};
            continue;
          }
          if (run != nullptr) run->numbers = int32_t(next - run) - 1;
          run = next++, run->at = uint32_t(own), shift = by = own, left = kMost, ++runs;
        }
        left -= size;
        *next++ = {int32_t(uint32_t(uint8_t(low >> by) | uint8_t(high >> by) << 8) * 0x10001u), at};
      }
      if (run != nullptr) run->numbers = int32_t(next - run) - 1;
      memcpy(next, wides, size_t(wide) * sizeof(Entry));
      next += wide, *head = {runs, uint32_t(wide)};
    }
    biases[row] = int32_t(0u - 128u * sum);
  }

  // out[rows][out_stride]: of whole panels.
  void multiply(int rows, int inner, const int8_t* b, int outer, int32_t* out, int64_t out_stride) {
    if (inner == 0) std::fill(out, out + rows * out_stride, 0);
    for (int column = 0; column < outer; column += kColumns) {
      for (int part = 0, first = 0; first < inner / 2; ++part, first += kPairs) {
        int pairs = std::min(kPairs, inner / 2 - first), columns = std::min(kColumns, outer - column);
        for (int k = 0; k < pairs; ++k) {
          const int8_t* from = b + (int64_t(first + k) * outer + column) * 2;
          uint8_t* to = panel + k * 2 * kColumns;
          for (int c = 0; c < 2 * columns; ++c) to[c] = uint8_t(from[c]) ^ 0x80;
          for (int c = 0; c < 2 * kColumns; c += 64) __builtin_prefetch(from + 2 * kColumns + c, 0, 2);
        }
        for (int row = 0; row < rows; ++row)
          add_up(entries + begins[part * kTogether + row], first == 0, biases[row], out + row * out_stride + column);
      }
    }
  }

 private:
  void add_up(const Entry* at, bool first, int32_t bias, int32_t* out) const {
    Vector sums[8];
    for (int each = 0; each < 8; ++each) sums[each] = first ? all_are(bias) : load(out + each * kSums);
    int runs = at->numbers, wide = int(at->at);
    for (++at; runs > 0; --runs) {
      Vector words[4] = {zero(), zero(), zero(), zero()};
      __m128i shift = _mm_cvtsi32_si128(int(at->at));
      const Entry* end = at + 1 + at->numbers;
      for (++at; at < end; ++at) {
        Vector numbers = all_are(at->numbers);
        const uint8_t* from = panel + at->at;
        for (int each = 0; each < 4; ++each) words[each] = add_words(words[each], products_of_bytes(load(from + each * kBytes), numbers));
      }
      for (int each = 0; each < 4; ++each) {
        sums[2 * each] = add(sums[2 * each], shifted(low_words(words[each]), shift));
        sums[2 * each + 1] = add(sums[2 * each + 1], shifted(high_words(words[each]), shift));
      }
    }
    for (; wide > 0; --wide, ++at) {
      Vector numbers = all_are(at->numbers);
      for (int each = 0; each < 8; ++each) sums[each] = add(sums[each], products_of_words(words_of(panel + at->at + each * kBytes / 2), numbers));
    }
    for (int each = 0; each < 8; ++each) store(out + each * kSums, sums[each]);
  }
};

#else

// One row.
inline void multiply_row(const int16_t* a, int inner, const int8_t* b, int outer, int32_t* out) {
  std::fill(out, out + outer, 0);
  for (int k = 0; k < inner; k += 2) {
    int first = a[k], second = a[k + 1];
    if ((first | second) == 0) continue;
    const int8_t* from = b + int64_t(k) * outer;
    for (int c = 0; c < outer; ++c) out[c] = int32_t(uint32_t(out[c]) + uint32_t(first * from[2 * c]) + uint32_t(second * from[2 * c + 1]));
  }
}

struct DenseProduct {
  DenseProduct(Arena&, int) {}
  void multiply(const int16_t* a, int64_t stride, int rows, int inner, const int8_t* b, int outer, int32_t* out, int64_t out_stride) const {
    for (int row = 0; row < rows; ++row) multiply_row(a + row * stride, inner, b, outer, out + row * out_stride);
  }
};

struct SparseProduct {
  int16_t* numbers;
  uint8_t* shifts;
  int64_t stride;

  SparseProduct(Arena& arena, int inner) : stride(inner) {
    numbers = arena.take<int16_t>(kTogether * stride), shifts = arena.take<uint8_t>(inner / 2);
  }
  void clear() {}
  void add_row(int row, const int16_t* a, int inner) { memcpy(numbers + row * stride, a, size_t(inner) * sizeof *a); }
  void multiply(int rows, int inner, const int8_t* b, int outer, int32_t* out, int64_t out_stride) const {
    for (int row = 0; row < rows; ++row) multiply_row(numbers + row * stride, inner, b, outer, out + row * out_stride);
  }
};

#endif

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
