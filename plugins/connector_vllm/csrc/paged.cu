// The kernel, for pages in device memory. Chunks may be in host memory that the device can address. Nothing is
// allocated, and nothing waits.
#include "launch.h"
#include "paged.h"

namespace {

using namespace kvp;

constexpr int kThreads = 256, kLanes = 32, kAtOnce = 4;

// A warp takes one token of one plane and layer after another: neighbouring warps take neighbouring tokens, which lie
// side by side in their chunk. kAtOnce words of each lane are under way at a time, for the bus is far away.
template <typename Word, bool kToPages>
KVP_KERNEL move_rows(KvpMove m) {
  const int64_t warps = threads() / kLanes, rows = m.tokens * m.planes * m.layers;
  const int lane = thread() % kLanes, head_words = m.head_bytes / int(sizeof(Word)), words = m.heads * head_words;
  for (int64_t row = block() * warps + thread() / kLanes; row < rows; row += blocks() * warps) {
    const int64_t of = row / m.tokens, token = row % m.tokens, slot = m.slots[token];
    if (slot < 0) continue;
    uint8_t* page = in_pages(m, of, slot);
    Word* chunk = reinterpret_cast<Word*>(in_chunk(m, of, token));
    const int64_t stride = m.pages[of].head;
    auto in_page = [&](int word) -> Word& {
      return reinterpret_cast<Word*>(page + word / head_words * stride)[word % head_words];
    };
    for (int from = lane; from < words; from += kLanes * kAtOnce) {
      Word held[kAtOnce];
      KVP_UNROLL
      for (int each = 0; each < kAtOnce; ++each) {
        const int word = from + each * kLanes;
        if (word < words) held[each] = kToPages ? chunk[word] : in_page(word);
      }
      KVP_UNROLL
      for (int each = 0; each < kAtOnce; ++each) {
        const int word = from + each * kLanes;
        if (word >= words) continue;
        if (kToPages) in_page(word) = held[each];
        else chunk[word] = held[each];
      }
    }
  }
}

template <typename Word>
int32_t launch(const KvpMove& m, int64_t blocks, void* stream) {
  if (m.head_bytes % int32_t(sizeof(Word))) return 1;
  if (m.to_pages) KVP_LAUNCH((move_rows<Word, true>), blocks, kThreads, stream, m);
  else KVP_LAUNCH((move_rows<Word, false>), blocks, kThreads, stream, m);
#if defined(__CUDACC__)
  return -int32_t(cudaGetLastError());
#else
  return 0;
#endif
}

}  // namespace

extern "C" {

// How many devices there are; a negative number is a CUDA error, as without a driver.
KVP_API int32_t kvp_cuda_devices() {
#if defined(__CUDACC__)
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  return error == cudaSuccess ? count : -int32_t(error);
#else
  return 0;
#endif
}

// The address under which the device has memory of the host or its own; null where it cannot reach it.
KVP_API void* kvp_cuda_address(const void* memory) {
#if defined(__CUDACC__)
  cudaPointerAttributes about;
  if (cudaPointerGetAttributes(&about, memory) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return about.type == cudaMemoryTypeUnregistered ? nullptr : about.devicePointer;
#else
  return const_cast<void*>(memory);
#endif
}

// Queues one launch on `stream`. Every pointer in `move` is one of the device's. word: bytes at a time, 1, 2, 4, 8 or
// 16, by which all addresses, strides and head_bytes can be divided. blocks: at most so many are at work. Returns 0, 1
// where the numbers make no sense, or minus a CUDA error.
KVP_API int32_t kvp_cuda_move(const KvpMove* move, int32_t word, int32_t blocks, void* stream) {
  if (!sensible(*move) || blocks < 1) return 1;
  const int64_t rows = move->tokens * move->planes * move->layers, warps = kThreads / kLanes;
  const int64_t needed = (rows + warps - 1) / warps, count = needed < blocks ? needed : blocks;
  switch (word) {
    case 1: return launch<uint8_t>(*move, count, stream);
    case 2: return launch<uint16_t>(*move, count, stream);
    case 4: return launch<uint32_t>(*move, count, stream);
    case 8: return launch<uint64_t>(*move, count, stream);
    case 16: return launch<uint4>(*move, count, stream);
  }
  return 1;
}
}
