// What kernels are written in: the threads of a warp and what they tell each other. With nvcc this is CUDA; without it,
// emulator.h runs the same kernels on a processor, thread by thread, for tests where there is no GPU.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)

#define KVZ_KERNEL __global__ static void
#define KVZ_DEVICE __device__ __forceinline__
#define KVZ_UNROLL _Pragma("unroll")
// So few registers that so many blocks of so many threads are at work at once.
#define KVZ_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define KVZ_LAUNCH(kernel, blocks, threads, shared, stream, ...) \
  (kernel<<<dim3(unsigned(blocks)), threads, shared, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__))

namespace kvz {
extern __shared__ __align__(16) uint8_t kvz_shared[];
KVZ_DEVICE uint8_t* shared_memory() { return kvz_shared; }
KVZ_DEVICE int thread() { return int(threadIdx.x); }
KVZ_DEVICE int threads() { return int(blockDim.x); }
KVZ_DEVICE int64_t block() { return int64_t(blockIdx.x); }
KVZ_DEVICE int64_t blocks() { return int64_t(gridDim.x); }
KVZ_DEVICE uint32_t ballot(bool mine) { return __ballot_sync(0xffffffffu, mine); }
template <typename V>
KVZ_DEVICE V from_lane(V mine, int lane) { return __shfl_sync(0xffffffffu, mine, lane); }
KVZ_DEVICE void sync_warp() { __syncwarp(); }
KVZ_DEVICE void sync_block() { __syncthreads(); }
KVZ_DEVICE int count_ones(uint32_t mask) { return __popc(mask); }
KVZ_DEVICE uint32_t product_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
// Two products, of signed 16 bits by signed 8 bits, the lower by the lower; modulo 2^32.
KVZ_DEVICE uint32_t add_products(int32_t pair, uint32_t bytes, uint32_t sum) { return uint32_t(__dp2a_lo(pair, int(bytes), int(sum))); }
// Bytes 0, 2, 4, 6 of a value or, with odd, 1, 3, 5, 7.
KVZ_DEVICE uint32_t every_other_byte(uint64_t value, bool odd) { return __byte_perm(uint32_t(value), uint32_t(value >> 32), odd ? 0x7531 : 0x6420); }
// A warp multiplies a matrix of bytes without sign, [16][32], by another, [32][8], on its tensor cores, and adds [16][8] sums. A lane
// has rows lane / 4 and that + 8 of the first, columns 4 * (lane % 4) to + 3 and those + 16: a[0] and a[1], then a[2] and a[3] of those
// that are 16 on. Of the second it has column lane / 4, the same places down. Of the sums the same rows, columns 2 * (lane % 4) and + 1.
KVZ_DEVICE void multiply_bytes(const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t (&sums)[4]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four bytes from device memory to that of the block, or zeros where there are none: on their way, until a thread has waited for all
// but the latest kLeft sets of copies that it ended.
KVZ_DEVICE void copy_later(void* to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from)), "r"(there ? 4 : 0) : "memory");
}
KVZ_DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
KVZ_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory"); }
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
// Of this lane and of the one that is so far apart.
KVZ_DEVICE uint32_t least_of(uint32_t mine, int apart) {
  uint32_t other = from_lane(mine, lane() ^ apart);
  return other < mine ? other : mine;
}
KVZ_DEVICE int sum_of(int mine) {
  for (int apart = 16; apart > 0; apart /= 2) mine += from_lane(mine, lane() ^ apart);
  return mine;
}
}  // namespace kvz
