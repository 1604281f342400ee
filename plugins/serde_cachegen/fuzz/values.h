// Whether values came back as the stream says that they do: bit for bit, or within half a step.
#pragma once
#include <algorithm>

#include "subject.h"

namespace fuzz {

// The largest error of rounding to a type, as half an ulp of `value`.
struct Rounding {
  double epsilon, least_normal;
};
inline Rounding rounding_of(int dtype) {
  switch (dtype) {
    case kBF16: return {0x1p-7, 0x1p-126};
    case kFP16: return {0x1p-10, 0x1p-14};
    case kE4M3: return {0x1p-3, 0x1p-6};
    case kE5M2: return {0x1p-2, 0x1p-14};
    default: return {0x1p-23, 0x1p-126};
  }
}

template <typename T>
double load(const uint8_t* at) {
  typename T::Bits bits;
  memcpy(&bits, at, sizeof bits);
  return double(T::load(bits));
}
inline double value_at(int dtype, const uint8_t* at) {
  switch (dtype) {
    case kBF16: return load<BF16>(at);
    case kFP16: return load<FP16>(at);
    case kE4M3: return load<E4M3>(at);
    case kE5M2: return load<E5M2>(at);
    default: return load<FP32>(at);
  }
}

// The steps of one tile of a stream that decodes: of a channel, and of a token.
struct Steps {
  uint32_t kind;
  const uint8_t* codes;
  const uint8_t* scales;
  double half;  // Of `cachegen`: half the bins less one.
  int dtype;
  double of(int row, int column) const {
    if (kind == kTokenScales) return fabs(value_at(dtype, scales + row * element_bytes(dtype))) / half;
    return double(kSteps[codes[kind == kOneStep ? 0 : column]]);
  }
};

inline void check_values(Planes& source, const uint8_t* stream, const std::vector<uint8_t>& values) {
  const KvzGeometry& g = source.g;
  const int width = element_bytes(g.dtype);
  Header h;
  memcpy(&h, stream, sizeof h);
  const uint8_t *tables = stream + sizeof h, *directory = tables + h.table_bytes, *payload = directory + 4 * int64_t(h.tiles), *tile = payload;
  auto same = [&](int plane, int64_t element) {
    return memcmp(source.plane(plane) + element * width, values.data() + plane * source.plane_bytes() + element * width, size_t(width)) == 0;
  };
  if (h.mode == kLossless) {
    for (int plane = 0; plane < g.planes; ++plane)
      for (int64_t element = 0; element < plane_elements(g); ++element) EXPECT(same(plane, element));
    return;
  }
  const Rounding rounding = rounding_of(g.dtype);
  for (int plane = 0; plane < g.planes; ++plane) {
    for (int token = 0; token < g.tokens; token += h.tile_tokens) {
      for (int begin = 0; begin < g.hidden; begin += h.band) {
        uint32_t entry;
        memcpy(&entry, directory, 4), directory += 4;
        const int columns = std::min<int>(h.band, g.hidden - begin), rows = std::min<int>(h.tile_tokens, g.tokens - token);
        Steps steps{entry >> 29, tile + 4 * std::min(columns, kLanes), nullptr, 1.0, g.dtype};
        if (h.mode == kCacheGen) {
          uint16_t bins;
          memcpy(&bins, tables + 2 * plane, 2);
          steps.half = bins / 2 - 1;
          steps.scales = tables + (2 * g.planes + 3) / 4 * 4 + (int64_t(plane) * g.tokens + token) * width;
        }
        tile = payload + 4 * int64_t(entry & 0x1fffffff);
        if (steps.kind == kCoefficients) continue;  // Errors are spread over all channels of a token.
        for (int row = 0; row < rows; ++row) {
          for (int column = 0; column < columns; ++column) {
            const int64_t element = int64_t(token + row) * g.hidden + begin + column;
            if (same(plane, element)) continue;
            EXPECT(steps.kind >= kChannelSteps && steps.kind <= kTokenScales);
            const double was = value_at(g.dtype, source.plane(plane) + element * width);
            const double is = value_at(g.dtype, values.data() + plane * source.plane_bytes() + element * width);
            const double half_ulp = (fabs(is) + rounding.least_normal) * rounding.epsilon / 2;
            EXPECT(fabs(is - was) <= steps.of(row, column) / 2 * (1 + 0x1p-14) + half_ulp);  // Neither is NaN.
          }
        }
      }
    }
  }
}

}  // namespace fuzz
