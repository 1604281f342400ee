// What kernels are written in: the threads of a warp and what they tell each other. With nvcc this is CUDA; without it,
// emulator.h runs the same kernels on a processor, thread by thread, for tests where there is no GPU.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)

#define KVZ_KERNEL __global__ static void
#define KVZ_DEVICE __device__ __forceinline__
#define KVZ_UNROLL _Pragma("unroll")
#define KVZ_LAUNCH(kernel, blocks, threads, shared, stream, ...) \
  (kernel<<<dim3(unsigned(blocks)), threads, shared, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__))

namespace kvz {
extern __shared__ __align__(16) uint8_t kvz_shared[];
KVZ_DEVICE uint8_t* shared_memory() { return kvz_shared; }
KVZ_DEVICE int thread() { return int(threadIdx.x); }
KVZ_DEVICE int threads() { return int(blockDim.x); }
KVZ_DEVICE int64_t block() { return int64_t(blockIdx.x); }
KVZ_DEVICE uint32_t ballot(bool mine) { return __ballot_sync(0xffffffffu, mine); }
template <typename V>
KVZ_DEVICE V from_lane(V mine, int lane) { return __shfl_sync(0xffffffffu, mine, lane); }
KVZ_DEVICE void sync_warp() { __syncwarp(); }
KVZ_DEVICE void sync_block() { __syncthreads(); }
KVZ_DEVICE int count_ones(uint32_t mask) { return __popc(mask); }
KVZ_DEVICE uint32_t product_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
// Two products, of signed 16 bits by signed 8 bits, the lower by the lower; modulo 2^32.
KVZ_DEVICE uint32_t add_products(int32_t pair, uint32_t bytes, uint32_t sum) { return uint32_t(__dp2a_lo(pair, int(bytes), int(sum))); }
KVZ_DEVICE int32_t take_ticket(int32_t* counter) { return atomicAdd(counter, 1); }
KVZ_DEVICE void count_one(uint32_t* counter) { atomicAdd(counter, 1u); }
KVZ_DEVICE bool first_to_set(int32_t* place, int32_t value) { return atomicCAS(place, 0, value) == 0; }
}  // namespace kvz

#else

#include "emulator.h"

#endif

namespace kvz {
KVZ_DEVICE int lane() { return thread() & 31; }
KVZ_DEVICE uint32_t lanes_below() { return (1u << lane()) - 1; }
KVZ_DEVICE int largest_of(int mine) {
  for (int apart = 16; apart > 0; apart /= 2) {
    int other = from_lane(mine, lane() ^ apart);
    mine = other > mine ? other : mine;
  }
  return mine;
}
// Of this lane and those before it.
KVZ_DEVICE int sum_to_here(int mine) {
  for (int apart = 1; apart < 32; apart *= 2) {
    int before = from_lane(mine, lane() - apart);
    mine += lane() >= apart ? before : 0;
  }
  return mine;
}
KVZ_DEVICE int sum_of(int mine) {
  for (int apart = 16; apart > 0; apart /= 2) mine += from_lane(mine, lane() ^ apart);
  return mine;
}
}  // namespace kvz
