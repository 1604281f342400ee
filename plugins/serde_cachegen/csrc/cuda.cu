// The launchers of the CUDA build. Compiled by nvcc, or, for tests without a GPU, as C++ with the emulator.
#define KVZ_NAMESPACE cuda
#if defined(__CUDACC__)
#define KVZ_TABLE static __device__ __align__(16) const
#endif
#include "decode_kernel.h"
#include "encode_kernel.h"
#include "lossless_decode_kernel.h"
#include "lossless_encode_kernel.h"

namespace {

using namespace kvz;
using namespace kvz::cuda;

bool sensible(const KvzGeometry& g) {
  return g.dtype >= kBF16 && g.dtype <= kByte && (g.planes == 1 || g.planes == 2) && g.tokens >= 1 && g.hidden >= 1 &&
         int64_t(g.planes) * g.tokens * g.hidden * element_bytes(g.dtype) < (int64_t(1) << 30);
}

bool sensible(const KvzGeometry& g, const KvzSettings& s) {
  if (s.mode == kLossless) return true;
  return (s.mode == kStep || s.mode == kCacheGen) && g.dtype != kByte && s.band >= 1 && s.band <= kMaxBand && s.band <= g.hidden && s.tile_tokens >= 1 && s.tile_tokens <= kMaxTileTokens &&
         s.shared_from >= 0 && s.shared_from <= g.hidden && s.shared_from % s.band == 0 &&
         (s.mode == kCacheGen || (s.step > 0.0f && s.step < 1e6f));
}

bool decodes(const KvzGeometry& g, int32_t mode) {
  return sensible(g) && (mode == kLossless || (mode >= kStep && mode <= kKlt && g.dtype != kByte));
}

#if defined(__CUDACC__)
int32_t launched() { return -int32_t(cudaGetLastError()); }

// As many blocks as are at work at once: they take tiles until there are none left.
template <typename Kernel>
int64_t blocks_at_once(Kernel kernel, int threads, size_t shared) {
  int device = 0, processors = 0, each = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
  return std::max<int64_t>(1, int64_t(processors) * each);
}
#else
int32_t launched() { return kOk; }
template <typename Kernel>
int64_t blocks_at_once(Kernel, int, size_t) { return 2; }
#endif

int32_t encode_lossless(const KvzGeometry& g, KvzEncode* jobs, int32_t count, void* workspace, void* stream) {
  RunWork work(g, count, workspace);
  if (count * work.tiles >= kMostTiles) return kBadSettings;
  return for_split(g.dtype, [&](auto split) {
    constexpr int kDtype = decltype(split)::value;
    constexpr size_t kShared = size_t(kWarps) * 512 * 4;
    KVZ_LAUNCH(count_symbols<kDtype>, count * work.tiles, kThreads, kWarps * 256 * 4, stream, jobs, work);
    KVZ_LAUNCH(make_tables, count * g.planes, 256, 256 * 6, stream, g, work);
    KVZ_LAUNCH(encode_runs<kDtype>, blocks_at_once(encode_runs<kDtype>, kThreads, kShared), kThreads, kShared, stream, g, jobs, int32_t(count * work.tiles), work);
    KVZ_LAUNCH(write_run_directories, count, 32, 0, stream, g, jobs, work);
    KVZ_LAUNCH(place_runs<kDtype>, count * work.tiles, kThreads, 0, stream, jobs, work);
    return launched();
  });
}

}  // namespace

extern "C" {

int32_t kvz_cuda_devices() {
#if defined(__CUDACC__)
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  return error == cudaSuccess ? count : -int32_t(error);
#else
  return 0;
#endif
}

int64_t kvz_cuda_decode_workspace(const KvzGeometry* g, int32_t mode, int32_t count) {
  return decodes(*g, mode) && count >= 1 ? DecodeMemory(*g, mode, count, nullptr).bytes : -1;
}

int64_t kvz_cuda_encode_workspace(const KvzGeometry* g, const KvzSettings* s, int32_t count) {
  if (!sensible(*g) || !sensible(*g, *s) || count < 1) return -1;
  return s->mode == kLossless ? RunWork(*g, count, nullptr).bytes : EncodeWork(*g, *s, count, nullptr).bytes;
}

int32_t kvz_cuda_decode(const KvzGeometry* g, int32_t mode, KvzDecode* jobs, int32_t count, void* workspace, void* stream) {
  if (!decodes(*g, mode) || count < 1) return kBadSettings;
  DecodeMemory memory(*g, mode, count, workspace);
  KVZ_LAUNCH(check_streams, count, kThreads, 0, stream, *g, mode, jobs, memory.work, memory.tables);
  KVZ_LAUNCH(number_tiles, 1, 32, 0, stream, count, jobs, memory.work);
  if (mode == kLossless) {
    return for_split(g->dtype, [&](auto split) {
      constexpr int kDtype = decltype(split)::value;
      constexpr size_t kShared = kWarps * WarpWords::kBytes;
      KVZ_LAUNCH(decode_runs<kDtype>, blocks_at_once(decode_runs<kDtype>, kThreads, kShared), kThreads, kShared, stream, *g, jobs, count, memory.work, memory.tables);
      return launched();
    });
  }
  return for_element(g->dtype, [&](auto element) {
    using T = decltype(element);
    auto run = [&](auto kernel) { KVZ_LAUNCH(kernel, blocks_at_once(kernel, kTileThreads, kDecodeShared), kTileThreads, kDecodeShared, stream, *g, jobs, count, memory); };
    if (mode == kStep) run(decode_tiles<T, kStep>);
    if (mode == kCacheGen) run(decode_tiles<T, kCacheGen>);
    if (mode != kKlt) return launched();
    run(decode_tiles<T, kKlt>);
    int64_t blocks = int64_t(count) * g->planes * ceil_div(g->tokens, kTokensTogether);
    KVZ_LAUNCH(restore_tokens<T>, blocks, kThreads, kRestoreShared, stream, *g, jobs, memory);
    return launched();
  });
}

int32_t kvz_cuda_encode(const KvzGeometry* g, const KvzSettings* s, KvzEncode* jobs, int32_t count, void* workspace, void* stream) {
  if (!sensible(*g) || !sensible(*g, *s) || count < 1) return kBadSettings;
  if (s->mode == kLossless) return encode_lossless(*g, jobs, count, workspace, stream);
  EncodeWork work(*g, *s, count, workspace);
  if (count * work.tiles >= kMostTiles) return kBadSettings;
  return for_element(g->dtype, [&](auto element) {
    using T = decltype(element);
    auto run = [&](auto kernel, size_t shared) {
      KVZ_LAUNCH(kernel, blocks_at_once(kernel, kTileThreads, shared), kTileThreads, shared, stream, *g, *s, jobs, int32_t(count * work.tiles), work);
    };
    if (s->mode == kCacheGen) {
      int64_t tokens = count * int64_t(g->planes) * g->tokens;
      KVZ_LAUNCH(scale_tokens<T>, ceil_div(tokens, kWarps), kThreads, 0, stream, *g, jobs, tokens, work);
      run(encode_tiles<T, kCacheGen>, encode_shared(kCacheGen));
    } else {
      KVZ_LAUNCH(measure_channels<T>, count * work.blocks * ceil_div(g->hidden, kThreads), kThreads, 0, stream, *g, *s, jobs, work);
      if (g->planes == 2) KVZ_LAUNCH(find_sinks<T>, count * work.blocks / 2, kThreads, 0, stream, *g, *s, jobs, work);
      KVZ_LAUNCH(choose_steps, count * work.blocks, kThreads, 0, stream, *g, *s, jobs, work);
      run(encode_tiles<T, kStep>, encode_shared(kStep));
    }
    KVZ_LAUNCH(write_directories, count, 32, 0, stream, *g, *s, jobs, work);
    KVZ_LAUNCH(place_tiles<T>, count * work.tiles, 32, 0, stream, *g, *s, jobs, work);
    return launched();
  });
}
}
