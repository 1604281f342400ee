// What the kernels of both directions share: how work is shared out among warps, and element types.
#pragma once
#include <type_traits>

#include "kvz_cuda.h"
#include "layout.h"
#include "warp.h"

namespace kvz {
namespace KVZ_NAMESPACE {

constexpr int kWarps = 8;  // Of a block.
constexpr int kThreads = 32 * kWarps;

// The next number that no warp has taken.
KVZ_DEVICE int32_t next_ticket(int32_t* counter) {
  int32_t ticket = lane() == 0 ? take_ticket(counter) : 0;
  return from_lane(ticket, 0);
}

template <typename Run>
int32_t for_element(int dtype, Run&& run) {
  switch (dtype) {
    case kBF16: return run(BF16{});
    case kFP16: return run(FP16{});
    case kFP32: return run(FP32{});
    case kE4M3: return run(E4M3{});
    case kE5M2: return run(E5M2{});
    default: return kBadGeometry;
  }
}

// Of `lossless`: the type of elements as a number.
template <typename Run>
int32_t for_split(int dtype, Run&& run) {
  switch (dtype) {
    case kBF16: return run(std::integral_constant<int, kBF16>{});
    case kFP16: return run(std::integral_constant<int, kFP16>{});
    case kFP32: return run(std::integral_constant<int, kFP32>{});
    default: return run(std::integral_constant<int, kByte>{});
  }
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
