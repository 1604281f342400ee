// What both builds share, the CPU's and CUDA's: the layout of a stream, and arithmetic that gives the same bits in each.
//
// Only + - * / sqrt rint and comparisons of float32, each rounded once: compile without contraction to fused
// multiply-adds and without fast-math. docs/design/kvz.md describes the format.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVZ_BOTH __host__ __device__ __forceinline__
#else
#define KVZ_BOTH inline __attribute__((always_inline))
#endif
#ifndef KVZ_TABLE
#define KVZ_TABLE static const
#endif
#include "tables.h"

namespace kvz {

constexpr uint32_t kMagic = 0x315A564B;  // "KVZ1"
constexpr int kVersion = 1;
constexpr int kHeaderBytes = 32;
constexpr int kLanes = 32;
constexpr uint32_t kLow = 1u << 16;  // States of a lane are at least this, and below 2^32.
constexpr int kPrecision = 10;       // Of the family's tables.
constexpr int kEscape = 62;
constexpr int kFirst = -31;            // The value of symbol 0, about the centre.
constexpr int kWidePrecision = 12;     // Of a stream's own tables.
constexpr int kFlatTile = 32768;       // Elements of a tile of `lossless`.
// Of the mode `klt`. Components are coded in whole steps, and computed from 16ths of a step by bases of whole numbers, in
// units of 2^-exponent / 127.
constexpr int kMostExponent = 5, kPositionBits = 24, kProfileBytes = 16;
constexpr float kUnits = 16.0f, kOfUnit = 1.0f / 65024.0f, kOfSum = 1.0f / 4064.0f;
constexpr int64_t kMostSquares = int64_t(1) << 37;  // Of a token: no sum of products is beyond 32 bits.
constexpr float kUnitOfNearest = 0x1.ea4afap-1f;  // 2^(-1/16)

enum Dtype : uint8_t { kBF16 = 1, kFP16 = 2, kFP32 = 3, kE4M3 = 4, kE5M2 = 5, kByte = 6 };
enum Mode : uint8_t { kStep = 1, kLossless = 2, kCacheGen = 3, kKlt = 4 };
// How a tile is kept.
enum Kind : uint32_t { kRaw = 0, kConst = 1, kChannelSteps = 2, kOneStep = 3, kTokenScales = 4, kSymbols = 5, kCoefficients = 6 };
enum Error : int32_t {
  kOk = 0, kTruncated = 1, kBadMagic = 2, kBadVersion = 3, kBadGeometry = 4, kBadDirectory = 5, kBadTable = 6,
  kBadWords = 7, kBadReserved = 8, kNoRoom = 9, kBadSettings = 10, kNoProfile = 11,
};

struct Header {  // Little endian, as the machines that this is built for.
  uint32_t magic;
  uint8_t version, mode, dtype, planes;
  uint32_t tokens, hidden;
  uint16_t band;         // Channels of a tile; 0 in `lossless`, whose tiles are runs of elements.
  uint16_t tile_tokens;  // Tokens of a tile, at most.
  uint32_t tiles;
  uint32_t table_bytes;  // Of what lies between this header and the directory.
  uint32_t total;        // Bytes of the stream.
};
static_assert(sizeof(Header) == kHeaderBytes, "the header has no padding");

KVZ_BOTH int element_bytes(int dtype) { return dtype == kFP32 ? 4 : (dtype == kBF16 || dtype == kFP16) ? 2 : 1; }
// Words of 16 bits in which an escape has its original bits.
KVZ_BOTH int escape_words(int dtype) { return dtype == kFP32 ? 2 : 1; }

KVZ_BOTH float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
KVZ_BOTH uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// -- element types: to float32, and back rounded to nearest, ties to even ----------------------------------------------

struct BF16 {
  using Bits = uint16_t;
  static constexpr int kDtype = kBF16;
  static constexpr float kMax = 0x1.fep127f;
  static KVZ_BOTH float load(Bits bits) { return as_float(uint32_t(bits) << 16); }
  static KVZ_BOTH Bits store(float value) {  // Of finite values only.
#if defined(__CUDA_ARCH__)
    Bits rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
#else
    uint32_t bits = as_bits(value);
    return Bits((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
  }
};

struct FP32 {
  using Bits = uint32_t;
  static constexpr int kDtype = kFP32;
  static constexpr float kMax = 0x1.fffffep127f;
  static KVZ_BOTH float load(Bits bits) { return as_float(bits); }
  static KVZ_BOTH Bits store(float value) { return as_bits(value); }
};

// Small floats. Their denormals go through integers: no float32 denormal is ever made, so that flushing them to zero,
// which is the thread's setting, changes nothing.
template <typename Element, int kElement, int kExponent, int kMantissa, int kBias, bool kHasInfinity, int kLargest>
struct Small {
  using Bits = Element;
  static constexpr int kDtype = kElement;
  static constexpr float kMax = kLargest;
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kMagnitude = (1u << (kExponent + kMantissa)) - 1;
  static KVZ_BOTH float load(Bits bits) {
    uint32_t magnitude = bits & kMagnitude, sign = uint32_t(bits >> (kExponent + kMantissa)) << 31;
    uint32_t top = kHasInfinity ? ((1u << kExponent) - 1) << kMantissa : kMagnitude;
    // All cases, and a choice: branches would keep vectors from it.
    constexpr float kUnit = 1.0f / (float(1u << (kBias - 1)) * float(1u << kMantissa));  // The least denormal.
    uint32_t normal = (magnitude << kShift) + (uint32_t(127 - kBias) << 23), denormal = as_bits(float(int(magnitude)) * kUnit);
    uint32_t finite = magnitude >> kMantissa ? normal : denormal;
    uint32_t other = kHasInfinity && magnitude == top ? 0x7f800000u : 0x7fc00000u;
    return as_float((magnitude >= top ? other : finite) | sign);
  }
  static KVZ_BOTH Bits store(float value) {  // Of values whose magnitude is at most the largest.
    uint32_t bits = as_bits(value), sign = bits >> 31 << (kExponent + kMantissa);
    uint32_t magnitude = bits & 0x7fffffffu;
    float scaled = as_float(magnitude);
    constexpr float kLeast = 1.0f / (1u << (kBias - 1));  // The least normal one.
    // A denormal: whole numbers of the least step.
    float small = scaled < kLeast ? scaled : 0.0f;
    uint32_t denormal = uint32_t(int(rintf(small * (float(1u << (kBias - 1)) * float(1u << kMantissa)))));
    magnitude += (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1u);
    uint32_t normal = (magnitude >> kShift) - (uint32_t(127 - kBias) << kMantissa);
    return Bits(sign | (scaled < kLeast ? denormal : normal));
  }
};

using FP16 = Small<uint16_t, kFP16, 5, 10, 15, true, 65504>;
using E4M3 = Small<uint8_t, kE4M3, 4, 3, 7, false, 448>;
using E5M2 = Small<uint8_t, kE5M2, 5, 2, 15, true, 57344>;

// -- the quantiser -----------------------------------------------------------------------------------------------------

KVZ_BOTH bool is_finite(float value) { return (as_bits(value) & 0x7f800000u) != 0x7f800000u; }

constexpr int kCodesBelowTop = 80;  // Ten octaves: what is that far below the largest channel counts as no lower.

// The steps of K, where there is V, relative to those of V: noise in K does more harm.
constexpr float kStepOfK = 0.5f;
// A token is an attention sink if its V has less than this part of the squares that V has on average. Other tokens attend to sinks much
// more than to what they say, so that sinks are kept bit for bit: unless there are more than one in so many tokens.
constexpr float kSinkSquares = 0.09f;
constexpr int kTokensOfSink = 16;
constexpr int kCodesAbove = 8;  // By so much the step of a channel may be above the mean before its own step is coarser.

// The code of the step nearest to `wanted` on a logarithmic scale.
KVZ_BOTH int step_code(float wanted) {
  if (!(wanted > kSteps[0])) return 0;
  if (!(wanted < kSteps[255])) return 255;
  int code = 160 + 8 * (int(as_bits(wanted) >> 23) - 127);  // Of the power of two below.
  int nearest = code;
  for (int above = 1; above <= 8; ++above) {
    if (code + above <= 255 && kSteps[code + above] * kUnitOfNearest <= wanted) nearest = code + above;
  }
  return nearest;
}

// Step, in standard deviations, of a plane.
KVZ_BOTH float step_of(float step, int planes, int plane) { return planes == 2 && plane == 0 ? step * kStepOfK : step; }

// The code of the step of a channel: that of all, `mean`, or coarser where `own` is far above it.
KVZ_BOTH int level_code(int own, int mean) { return own > mean + kCodesAbove ? own - kCodesAbove : mean; }

// Mean and standard deviation of a channel, from sums of differences to its first value, in the order of tokens.
struct Moments {
  float mean, sigma;
};
KVZ_BOTH Moments moments(float first, float sum, float squares, int tokens) {
  float count = float(tokens), mean = sum / count;
  float variance = squares / count - mean * mean;
  return {first + mean, sqrtf(variance > 0.0f ? variance : 0.0f)};
}

// A step is not finer than the centre can be told in: it has 8 bits.
KVZ_BOTH int channel_step(float wanted, float mean) {
  float least = fabsf(mean) * (1.0f / 120.0f);
  return step_code(wanted > least ? wanted : least);
}
KVZ_BOTH int channel_centre(float mean, int code) {
  float steps = rintf(mean * kInverseSteps[code]);
  steps = steps < -127.0f ? -127.0f : steps > 127.0f ? 127.0f : steps;
  return steps == steps ? int(steps) : 0;  // There is no mean where sums overflow.
}

// A symbol, or the escape: for what is far from the centre, not a number, or beyond the type once it is rounded.
template <typename T>
KVZ_BOTH int symbol_of(float value, float inverse, float step, float centre) {
  float steps = rintf(value * inverse), off = steps - centre;
  bool in = off >= float(kFirst) && off <= float(kFirst + kEscape - 1);
  if constexpr (T::kDtype == kFP16 || T::kDtype == kE4M3 || T::kDtype == kE5M2) in = in && fabsf(steps * step) <= T::kMax;
  return in ? int(off) - kFirst : kEscape;
}
template <typename T>
KVZ_BOTH typename T::Bits value_of(int symbol, float step, float centre) {
  return T::store((float(symbol + kFirst) + centre) * step);
}

// Of `cachegen`: the symbol of a value, or the escape, by the factor that its token's largest magnitude gives.
constexpr int kLeastBins = 4, kMostBins = 63;
KVZ_BOTH float level_factor(float most, float middle) { return most > 0.0f ? middle / most : 0.0f; }
KVZ_BOTH int level_of(float value, float factor, float middle) {
  float level = rintf(value * factor + middle);
  bool in = level >= 0.0f && level <= 2.0f * middle;
  return in ? int(level - middle) - kFirst : kEscape;
}

}  // namespace kvz
