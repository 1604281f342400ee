// The kernel, for K in device memory. Nothing is allocated, and nothing waits.
#include "launch.h"
#include "rotate.h"

namespace {

using namespace kvr;

constexpr int kThreads = 256, kLanes = 32;
constexpr int kLayers = 96;  // Of one launch: they travel with it, so that no table has to be copied to the device.

struct Some {
  KvrLayer layers[kLayers];
};

template <typename Stored, int kWidth>
struct alignas(sizeof(Stored) * kWidth) Word {
  Stored part[kWidth];
};

// A warp takes one token of one layer after another; a lane, kWidth pairs of a head at a time.
template <typename E, int kWidth, bool kInterleaved>
KVR_KERNEL rotate_rows(KvrRotate r, Some some) {
  typedef typename E::Stored Stored;
  typedef Word<Stored, kWidth> W;
  typedef Word<float, kWidth> Table;
  const int64_t warps = threads() / kLanes, rows = r.tokens * r.count;
  const int lane = thread() % kLanes, steps = r.pairs / kWidth, turned = 2 * steps, words = r.head_size / kWidth;
  const int before = r.start / kWidth, apart = kInterleaved ? 1 : steps;
  for (int64_t row = block() * warps + thread() / kLanes; row < rows; row += blocks() * warps) {
    const int64_t token = row % r.tokens;
    const KvrLayer& layer = some.layers[row / r.tokens];
    const W* from = reinterpret_cast<const W*>(layer.source + token * layer.source_token);
    W* to = reinterpret_cast<W*>(layer.target + token * layer.target_token);
    for (int item = lane; item < r.heads * steps; item += kLanes) {
      const int step = item % steps, at = item / steps * words + before + (kInterleaved ? 2 * step : step);
      const Table cos = reinterpret_cast<const Table*>(r.cos + token * r.pairs)[step];
      const Table sin = reinterpret_cast<const Table*>(r.sin + token * r.pairs)[step];
      W low = from[at], high = from[at + apart];
      KVR_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        // Interleaved, pair i lies in elements 2i and 2i + 1 of both words together.
        const int one = kInterleaved ? 2 * i : i, other = kInterleaved ? 2 * i + 1 : i + kWidth;
        Stored& first = one < kWidth ? low.part[one % kWidth] : high.part[one % kWidth];
        Stored& second = other < kWidth ? low.part[other % kWidth] : high.part[other % kWidth];
        const float x = E::load(first), y = E::load(second);
        first = E::store(turned_first(x, y, cos.part[i], sin.part[i]));
        second = E::store(turned_second(x, y, cos.part[i], sin.part[i]));
      }
      to[at] = low;
      to[at + apart] = high;
    }
    if (layer.source == layer.target) continue;
    const int left = words - turned;
    for (int item = lane; item < r.heads * left; item += kLanes) {
      const int word = item % left, at = item / left * words + (word < before ? word : word + turned);
      to[at] = from[at];
    }
  }
}

template <typename E, int kWidth>
int32_t launch(const KvrRotate& r, int64_t blocks, void* stream) {
  const int64_t warps = kThreads / kLanes;
  for (int32_t first = 0; first < r.count; first += kLayers) {
    KvrRotate part = r;
    Some some = {};
    part.count = r.count - first < kLayers ? r.count - first : kLayers;
    memcpy(some.layers, r.layers + first, size_t(part.count) * sizeof(KvrLayer));
    const int64_t needed = (part.tokens * part.count + warps - 1) / warps, count = needed < blocks ? needed : blocks;
    if (r.interleaved) KVR_LAUNCH((rotate_rows<E, kWidth, true>), count, kThreads, stream, part, some);
    else KVR_LAUNCH((rotate_rows<E, kWidth, false>), count, kThreads, stream, part, some);
#if defined(__CUDACC__)
    if (cudaError_t error = cudaGetLastError()) return -int32_t(error);
#endif
  }
  return 0;
}

template <typename E>
int32_t launch(const KvrRotate& r, int32_t width, int64_t blocks, void* stream) {
  if (r.pairs % width || r.start % width || r.head_size % width) return 1;
  switch (width) {
    case 1: return launch<E, 1>(r, blocks, stream);
    case 2: return launch<E, 2>(r, blocks, stream);
    case 4: return launch<E, 4>(r, blocks, stream);
    case 8: return sizeof(typename E::Stored) == 2 ? launch<E, sizeof(typename E::Stored) == 2 ? 8 : 4>(r, blocks, stream) : 1;
  }
  return 1;
}

}  // namespace

extern "C" {

// How many devices there are; a negative number is a CUDA error, as without a driver.
KVR_API int32_t kvr_cuda_devices() {
#if defined(__CUDACC__)
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  return error == cudaSuccess ? count : -int32_t(error);
#else
  return 0;
#endif
}

// Queues a launch for each 96 layers on `stream`. Every pointer is the device's, but `layers`, which is read before this
// returns. width: elements at a time, 1, 2, 4, or 8 of two bytes, by which pairs, start and head_size can be divided, and
// by whose bytes all addresses and strides can; those of the tables by as many floats. blocks: at most so many are at work. Returns 0, 1 where the numbers
// make no sense, or minus a CUDA error.
KVR_API int32_t kvr_cuda_rotate(const KvrRotate* r, int32_t width, int32_t blocks, void* stream) {
  if (!sensible(*r) || blocks < 1 || width < 1) return 1;
  switch (r->dtype) {
    case 0: return launch<Float32>(*r, width, blocks, stream);
    case 1: return launch<BFloat16>(*r, width, blocks, stream);
    case 2: return launch<Float16>(*r, width, blocks, stream);
  }
  return 1;
}
}
