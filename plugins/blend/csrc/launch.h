// With nvcc, CUDA; with a C++ compiler, a launch is a loop over all threads, one after the other, so that tests run the
// kernel where there is no GPU. Enough for kernels whose threads tell each other nothing.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)

#define KVR_KERNEL __global__ static void
#define KVR_LAUNCH(kernel, blocks, threads, stream, ...) \
  (kernel<<<dim3(unsigned(blocks)), threads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__))
#define KVR_UNROLL _Pragma("unroll")

namespace kvr {
__device__ __forceinline__ int thread() { return int(threadIdx.x); }
__device__ __forceinline__ int threads() { return int(blockDim.x); }
__device__ __forceinline__ int64_t block() { return int64_t(blockIdx.x); }
__device__ __forceinline__ int64_t blocks() { return int64_t(gridDim.x); }
}  // namespace kvr

#else

#define KVR_KERNEL static void
#define KVR_LAUNCH(kernel, blocks, threads, stream, ...) \
  ((void)(stream), kvr::run_all(int64_t(blocks), threads, [&] { kernel(__VA_ARGS__); }))
#define KVR_UNROLL

namespace kvr {
struct Running {
  int64_t block, blocks;
  int thread, threads;
};
inline thread_local Running running;
inline int thread() { return running.thread; }
inline int threads() { return running.threads; }
inline int64_t block() { return running.block; }
inline int64_t blocks() { return running.blocks; }

template <typename Body>
void run_all(int64_t blocks, int threads, Body body) {
  for (int64_t block = 0; block < blocks; ++block)
    for (int thread = 0; thread < threads; ++thread) {
      running = Running{block, blocks, thread, threads};
      body();
    }
}
}  // namespace kvr

#endif
