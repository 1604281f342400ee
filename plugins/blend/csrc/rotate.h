// Pairs of K that are turned by an angle: what the loops of processors and the kernel share. Products and sums are
// rounded each for itself, so that every build gives the bits that torch does.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVR_BOTH __host__ __device__ __forceinline__
#else
#define KVR_BOTH inline __attribute__((always_inline))
#endif
#define KVR_API __attribute__((visibility("default")))

extern "C" {

// K of one layer: [tokens][heads x head size], the last two contiguous; strides are in bytes.
typedef struct {
  const uint8_t* source;
  uint8_t* target;  // The source itself, or memory of its own.
  int64_t source_token, target_token;
} KvrLayer;

typedef struct {
  const KvrLayer* layers;
  const float *cos, *sin;  // [tokens][pairs], of all layers.
  int64_t tokens;
  int32_t count;  // Of layers.
  int32_t dtype;  // 0 float32, 1 bfloat16, 2 float16
  int32_t heads, head_size;
  int32_t start, pairs;  // The dims of each head from `start` to `start + 2 * pairs` are turned.
  int32_t interleaved;   // Neighbours make a pair, else the halves of those dims do.
} KvrRotate;

}  // extern "C"

namespace kvr {

KVR_BOTH bool sensible(const KvrRotate& r) {
  return r.tokens >= 1 && r.count >= 1 && r.dtype >= 0 && r.dtype <= 2 && r.heads >= 1 && r.pairs >= 1 && r.start >= 0 &&
         r.start + 2 * int64_t(r.pairs) <= r.head_size;
}

KVR_BOTH uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

KVR_BOTH float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Elements. To float32 exactly, and from it to the nearest, of two to the even one.

struct Float32 {
  typedef float Stored;
  static constexpr bool kBySixteen = false;
  static KVR_BOTH float load(float stored) { return stored; }
  static KVR_BOTH float store(float value) { return value; }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static constexpr bool kBySixteen = true;
  static KVR_BOTH float load(uint16_t stored) { return of_bits(uint32_t(stored) << 16); }
  static KVR_BOTH uint16_t store(float value) {
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
};

struct Float16 {
  typedef uint16_t Stored;
  static constexpr bool kBySixteen = false;
  static KVR_BOTH float load(uint16_t stored) {
    const uint32_t size = uint32_t(stored & 0x7fff) << 13, sign = uint32_t(stored & 0x8000) << 16;
    const uint32_t finite = bits_of(of_bits(size) * of_bits(0x77800000));  // 2^112, exact for the smallest ones too
    return of_bits(sign | (size >= 0x0f800000 ? size | 0x7f800000 : finite));
  }
  static KVR_BOTH uint16_t store(float value) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    const uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    const uint32_t small = bits_of(of_bits(size) + 0.5f) - 0x3f000000;  // Units of 2^-24 are the last ones of a half.
    uint32_t rounded = size < 0x38800000 ? small : normal;
    rounded = size >= 0x477ff000 ? 0x7c00 : rounded;
    return uint16_t(sign | (size > 0x7f800000 ? 0x7e00 : rounded));
  }
};

KVR_BOTH float turned_first(float x, float y, float cos, float sin) { return x * cos - y * sin; }
KVR_BOTH float turned_second(float x, float y, float cos, float sin) { return y * cos + x * sin; }

}  // namespace kvr
