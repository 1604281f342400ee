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
constexpr int kTileWarps = 16;  // Of a block whose warps share the tables of the family; two of them are at work at once.
constexpr int kTileThreads = 32 * kTileWarps;

// Tiles have numbers. The first of each warp are such that few of them are shared out among all blocks ...
KVZ_DEVICE int32_t first_ticket() { return int32_t(thread() / 32 * blocks() + block()); }
// ... and the next is one that no warp has taken.
KVZ_DEVICE int32_t next_ticket(int32_t* counter) {
  int32_t ticket = lane() == 0 ? take_ticket(counter) : 0;
  return int32_t(threads() / 32 * blocks()) + from_lane(ticket, 0);
}

constexpr int kUsualGroups = 4;  // Of 32 channels: of tiles of the usual width, of which what is known of channels is kept at hand.

// Added to a number below 2^22 it rounds that to a whole one, ties to even, and the bits of the sum are as far from its own bits; those
// of sums with larger numbers, or with what is none, are at least 2^22 away. That takes fewer cycles than rintf and a conversion.
constexpr float kRounds = 0x1.8p23f;
constexpr uint32_t kRoundsBits = 0x4b400000;
// The other way: of the sum of kRoundsBits and a whole number, that number.
KVZ_DEVICE float whole_of(uint32_t bits) { return as_float(bits) - kRounds; }

// How far apart tables of the family are in the memory of a block: most lanes look for symbols near the middle, each in a table of its
// own, and with 64 they would all be in one bank.
constexpr int kTableStride = 65;

// A warp: of a table of the family, frequencies of symbols 2 * lane and the next, and what comes before them.
struct Frequencies {
  uint32_t own[2], before[2];
  KVZ_DEVICE explicit Frequencies(int table) {
    own[0] = kFrequencies[table][2 * lane()], own[1] = kFrequencies[table][2 * lane() + 1];
    before[1] = uint32_t(sum_to_here(int(own[0] + own[1]))) - own[1], before[0] = before[1] - own[0];
  }
};

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
