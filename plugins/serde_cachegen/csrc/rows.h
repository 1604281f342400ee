// The coder: 32 interleaved rANS lanes, a row of up to 32 symbols at a time. Included once for each instruction set; all
// give the same words.
//
// The state of a lane is in [2^16, 2^32). Words of 16 bits stand in the order in which the decoder takes them: of each
// row first those that lanes take to stay above 2^16, in the order of lanes, then the original bits of what escapes.
#pragma once
#include "kvz.h"

#if defined(KVZ_AVX512) || defined(KVZ_AVX2)
#include <immintrin.h>
#endif

namespace kvz {
namespace KVZ_NAMESPACE {

struct EncodeTables {
  const uint32_t* slots;     // Of each symbol: frequency, in bits 16-30 what comes before it, in bit 31 if it escapes.
  const uint32_t* inverses;  // 2^32 by its frequency, rounded down.
};
// Of each slot: the symbol in bits 24-31, its frequency less 1 in bits 12-23, and how far the slot is from its first.
using DecodeTables = const uint32_t*;

KVZ_BOTH uint32_t encode_slot(uint32_t frequency, uint32_t before, bool escapes) {
  return frequency | before << 16 | uint32_t(escapes) << 31;
}
KVZ_BOTH uint32_t decode_slot(uint32_t symbol, uint32_t frequency, uint32_t above) {
  return symbol << 24 | (frequency - 1) << 12 | above;
}
KVZ_BOTH uint32_t inverse_of(uint32_t frequency) { return 0xffffffffu / frequency; }

// Words that are left to read; past their end there are zeros, and the reader remembers.
struct Words {
  const uint8_t* at;
  const uint8_t* end;
  bool short_of = false;

  bool has(int words) const { return end - at >= 2 * words; }
  uint32_t take() {
    if (!has(1)) {
      short_of = true;
      return 0;
    }
    uint16_t word;
    memcpy(&word, at, 2);
    at += 2;
    return word;
  }
};

// -- one row, whatever the machine -------------------------------------------------------------------------------------

// Encodes `active` symbols, backwards: words go before `end`. base: of each lane, where its table begins. escape(mask,
// end) writes the bits of what escapes. Returns the new end.
template <int kBits, typename Escape>
inline uint16_t* put_some(uint32_t* x, const EncodeTables& tables, const uint8_t* symbols, const uint32_t* base,
                          int active, uint16_t* end, Escape&& escape) {
  uint32_t escapes = 0;
  for (int lane = 0; lane < active; ++lane) escapes |= (tables.slots[base[lane] + symbols[lane]] >> 31) << lane;
  if (escapes != 0) end = escape(escapes, end);
  for (int lane = active - 1; lane >= 0; --lane) {
    uint32_t slot = tables.slots[base[lane] + symbols[lane]], frequency = slot & 0xffff, before = slot >> 16 & 0x7fff;
    if (x[lane] >> (32 - kBits) >= frequency) {
      *--end = uint16_t(x[lane]);
      x[lane] >>= 16;
    }
    uint32_t quotient = uint32_t(uint64_t(x[lane]) * tables.inverses[base[lane] + symbols[lane]] >> 32);
    uint32_t rest = x[lane] - quotient * frequency;
    if (rest >= frequency) quotient += 1, rest -= frequency;  // It was exact, or one too small.
    x[lane] = (quotient << kBits) + rest + before;
  }
  return end;
}

template <int kBits>
inline void take_some(uint32_t* x, DecodeTables tables, const uint32_t* base, int active, uint8_t* symbols, Words& words) {
  for (int lane = 0; lane < active; ++lane) {
    uint32_t slot = tables[base[lane] + (x[lane] & ((1u << kBits) - 1))];
    symbols[lane] = uint8_t(slot >> 24);
    x[lane] = ((slot >> 12 & 0xfff) + 1) * (x[lane] >> kBits) + (slot & 0xfff);
    if (x[lane] < kLow) x[lane] = x[lane] << 16 | words.take();
  }
}

// -- a whole row of 32 -------------------------------------------------------------------------------------------------

#if defined(KVZ_AVX512)

inline uint16_t* push(uint16_t* end, __mmask16 which, __m512i words) {
  int count = __builtin_popcount(which);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i last = _mm512_permutexvar_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(count)), _mm512_maskz_compress_epi32(which, words));
  // What is before them is overwritten by those that come next: a masked store costs more.
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(end - 16), _mm512_cvtepi32_epi16(last));
  return end - count;
}

template <int kBits>
inline __m512i put_half(__m512i x, __m512i slots, __m512i inverses) {
  __m512i frequency = _mm512_and_si512(slots, _mm512_set1_epi32(0xffff));
  __m512i before = _mm512_and_si512(_mm512_srli_epi32(slots, 16), _mm512_set1_epi32(0x7fff));
  __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(x, inverses), 32);
  __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(inverses, 32));
  __m512i quotient = _mm512_mask_blend_epi32(0xaaaa, even, odd);
  __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(quotient, frequency));
  __mmask16 over = _mm512_cmpge_epu32_mask(rest, frequency);
  quotient = _mm512_mask_add_epi32(quotient, over, quotient, _mm512_set1_epi32(1));
  rest = _mm512_mask_sub_epi32(rest, over, rest, frequency);
  return _mm512_add_epi32(_mm512_slli_epi32(quotient, kBits), _mm512_add_epi32(rest, before));
}

template <int kBits, typename Escape>
inline uint16_t* put_row(uint32_t* x, const EncodeTables& tables, const uint8_t* symbols, const uint32_t* base,
                         uint16_t* end, Escape&& escape) {
  const __m128i* bytes = reinterpret_cast<const __m128i*>(symbols);
  __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + 16);
  __m512i at_low = _mm512_add_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes)), _mm512_loadu_si512(base));
  __m512i at_high = _mm512_add_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes + 1)), _mm512_loadu_si512(base + 16));
  __m512i slots_low = _mm512_i32gather_epi32(at_low, tables.slots, 4);
  __m512i slots_high = _mm512_i32gather_epi32(at_high, tables.slots, 4);
  uint32_t escapes = uint32_t(_mm512_movepi32_mask(slots_low)) | uint32_t(_mm512_movepi32_mask(slots_high)) << 16;
  if (__builtin_expect(escapes != 0, 0)) end = escape(escapes, end);
  __m512i bits = _mm512_set1_epi32(0xffff);
  __mmask16 full_low = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(low, 32 - kBits), _mm512_and_si512(slots_low, bits));
  __mmask16 full_high = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(high, 32 - kBits), _mm512_and_si512(slots_high, bits));
  end = push(end, full_high, high);
  end = push(end, full_low, low);
  low = _mm512_mask_srli_epi32(low, full_low, low, 16);
  high = _mm512_mask_srli_epi32(high, full_high, high, 16);
  _mm512_storeu_si512(x, put_half<kBits>(low, slots_low, _mm512_i32gather_epi32(at_low, tables.inverses, 4)));
  _mm512_storeu_si512(x + 16, put_half<kBits>(high, slots_high, _mm512_i32gather_epi32(at_high, tables.inverses, 4)));
  return end;
}

template <int kBits>
inline __m128i take_half(__m512i& x, DecodeTables tables, const uint32_t* base, Words& words) {
  __m512i at = _mm512_add_epi32(_mm512_and_si512(x, _mm512_set1_epi32((1 << kBits) - 1)), _mm512_loadu_si512(base));
  __m512i slots = _mm512_i32gather_epi32(at, tables, 4);
  __m512i bits = _mm512_set1_epi32(0xfff);
  __m512i frequency = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(slots, 12), bits), _mm512_set1_epi32(1));
  x = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(x, kBits)), _mm512_and_si512(slots, bits));
  __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(int(kLow)));
  __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words.at)));
  words.at += 2 * __builtin_popcount(low);
  x = _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(low, next));
  return _mm512_cvtepi32_epi8(_mm512_srli_epi32(slots, 24));
}

template <int kBits>
inline void take_row(uint32_t* x, DecodeTables tables, const uint32_t* base, uint8_t* symbols, Words& words) {
  if (!words.has(kLanes)) return take_some<kBits>(x, tables, base, kLanes, symbols, words);
  __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + 16);
  __m128i first = take_half<kBits>(low, tables, base, words), second = take_half<kBits>(high, tables, base + 16, words);
  _mm512_storeu_si512(x, low);
  _mm512_storeu_si512(x + 16, high);
  // One store, as it is one load that reads it: two would not be forwarded to it.
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols), _mm256_set_m128i(second, first));
}

#elif defined(KVZ_AVX2)

// For each set of lanes that give a word, which lane goes where: to the end, in their order.
struct Gather {
  alignas(32) uint32_t from[256][8];
  Gather() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 7;
      for (int lane = 7; lane >= 0; --lane)
        if (mask >> lane & 1) from[mask][next--] = uint32_t(lane);
      while (next >= 0) from[mask][next--] = 0;
    }
  }
};
static const Gather kGather;

template <int kBits, typename Escape>
inline uint16_t* put_row(uint32_t* x, const EncodeTables& tables, const uint8_t* symbols, const uint32_t* base,
                         uint16_t* end, Escape&& escape) {
  const __m256i bits = _mm256_set1_epi32(0xffff);
  __m256i at[4], slots[4];
  uint32_t escapes = 0;
  for (int part = 0; part < 4; ++part) {
    __m256i symbol = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(symbols + 8 * part)));
    at[part] = _mm256_add_epi32(symbol, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + 8 * part)));
    slots[part] = _mm256_i32gather_epi32(reinterpret_cast<const int*>(tables.slots), at[part], 4);
    escapes |= uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(slots[part]))) << (8 * part);
  }
  if (__builtin_expect(escapes != 0, 0)) end = escape(escapes, end);
  for (int part = 3; part >= 0; --part) {
    __m256i state = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * part));
    __m256i frequency = _mm256_and_si256(slots[part], bits);
    __m256i before = _mm256_and_si256(_mm256_srli_epi32(slots[part], 16), _mm256_set1_epi32(0x7fff));
    __m256i stays = _mm256_cmpgt_epi32(frequency, _mm256_srli_epi32(state, 32 - kBits));
    unsigned mask = ~unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(stays))) & 0xff;
    __m256i given = _mm256_permutevar8x32_epi32(_mm256_and_si256(state, bits), _mm256_load_si256(reinterpret_cast<const __m256i*>(kGather.from[mask])));
    // What is before them is overwritten by those that come next.
    _mm_storeu_si128(reinterpret_cast<__m128i*>(end - 8), _mm_packus_epi32(_mm256_castsi256_si128(given), _mm256_extracti128_si256(given, 1)));
    end -= __builtin_popcount(mask);
    state = _mm256_blendv_epi8(_mm256_srli_epi32(state, 16), state, stays);
    __m256i inverses = _mm256_i32gather_epi32(reinterpret_cast<const int*>(tables.inverses), at[part], 4);
    __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(state, inverses), 32);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(state, 32), _mm256_srli_epi64(inverses, 32));
    __m256i quotient = _mm256_blend_epi32(even, odd, 0xaa);
    __m256i rest = _mm256_sub_epi32(state, _mm256_mullo_epi32(quotient, frequency));
    __m256i under = _mm256_cmpgt_epi32(frequency, rest);  // It was exact; else one too small.
    quotient = _mm256_add_epi32(quotient, _mm256_andnot_si256(under, _mm256_set1_epi32(1)));
    rest = _mm256_sub_epi32(rest, _mm256_andnot_si256(under, frequency));
    state = _mm256_add_epi32(_mm256_slli_epi32(quotient, kBits), _mm256_add_epi32(rest, before));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + 8 * part), state);
  }
  return end;
}

// For each set of lanes that take a word, which word goes where.
struct Spread {
  alignas(32) uint32_t from[256][8];
  Spread() {
    for (int mask = 0; mask < 256; ++mask)
      for (int lane = 0, next = 0; lane < 8; ++lane) from[mask][lane] = mask >> lane & 1 ? uint32_t(next++) : 7;
  }
};
static const Spread kSpread;

template <int kBits>
inline void take_row(uint32_t* x, DecodeTables tables, const uint32_t* base, uint8_t* symbols, Words& words) {
  if (!words.has(kLanes)) return take_some<kBits>(x, tables, base, kLanes, symbols, words);
  const __m256i bits = _mm256_set1_epi32(0xfff), one = _mm256_set1_epi32(1);
  for (int part = 0; part < kLanes; part += 8) {
    __m256i state = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + part));
    __m256i at = _mm256_add_epi32(_mm256_and_si256(state, _mm256_set1_epi32((1 << kBits) - 1)),
                                  _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + part)));
    __m256i slots = _mm256_i32gather_epi32(reinterpret_cast<const int*>(tables), at, 4);
    __m256i symbol = _mm256_srli_epi32(slots, 24);
    symbol = _mm256_packus_epi16(_mm256_packus_epi32(symbol, symbol), symbol);
    uint32_t first = uint32_t(_mm256_extract_epi32(symbol, 0)), second = uint32_t(_mm256_extract_epi32(symbol, 4));
    memcpy(symbols + part, &first, 4);
    memcpy(symbols + part + 4, &second, 4);
    __m256i frequency = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(slots, 12), bits), one);
    state = _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(state, kBits)), _mm256_and_si256(slots, bits));
    __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(state, 16), _mm256_setzero_si256());
    int mask = _mm256_movemask_ps(_mm256_castsi256_ps(low));
    __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words.at)));
    next = _mm256_permutevar8x32_epi32(next, _mm256_load_si256(reinterpret_cast<const __m256i*>(kSpread.from[mask])));
    words.at += 2 * __builtin_popcount(unsigned(mask));
    state = _mm256_blendv_epi8(state, _mm256_or_si256(_mm256_slli_epi32(state, 16), next), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + part), state);
  }
}

#else

template <int kBits, typename Escape>
inline uint16_t* put_row(uint32_t* x, const EncodeTables& tables, const uint8_t* symbols, const uint32_t* base,
                         uint16_t* end, Escape&& escape) {
  return put_some<kBits>(x, tables, symbols, base, kLanes, end, escape);
}
template <int kBits>
inline void take_row(uint32_t* x, DecodeTables tables, const uint32_t* base, uint8_t* symbols, Words& words) {
  take_some<kBits>(x, tables, base, kLanes, symbols, words);
}

#endif

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
