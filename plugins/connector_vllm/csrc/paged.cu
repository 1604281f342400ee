// The kernel, for pages and chunks in device memory. Nothing is allocated, and nothing waits.
#include "launch.h"
#include "paged.h"

namespace {

using namespace kvp;

constexpr int kThreads = 256, kLanes = 32, kAtOnce = 4, kTableBlocks = 32;

// A warp takes one piece after another of the tokens' rows, a row being a token of one plane and layer: neighbouring
// warps take neighbouring pieces, and then neighbouring tokens, which lie side by side in their chunk. kAtOnce words of
// each lane are under way at a time.
template <typename Word, bool kToPages>
KVP_KERNEL move_rows(KvpMove m, int64_t pieces) {
  const int64_t warps = threads() / kLanes, all = m.tokens * m.planes * m.layers * pieces;
  const int lane = thread() % kLanes, head_words = m.head_bytes / int(sizeof(Word)), words = m.heads * head_words;
  for (int64_t piece = block() * warps + thread() / kLanes; piece < all; piece += blocks() * warps) {
    const int64_t row = piece / pieces, of = row / m.tokens, token = m.begin + row % m.tokens, slot = m.slots[token];
    if (slot < 0) continue;
    uint8_t* page = in_pages(m, of, slot);
    Word* chunk = reinterpret_cast<Word*>(in_chunk(m, of, token));
    const int64_t stride = pages_of(m, of).head;
    const int from = int(piece % pieces) * kLanes * kAtOnce + lane;
    auto in_page = [&](int word) -> Word& {
      return reinterpret_cast<Word*>(page + word / head_words * stride)[word % head_words];
    };
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

// From pinned host memory: a copy engine would do it behind all that is on its way over the bus.
KVP_KERNEL copy_tables(const uint4* from, uint4* to, int64_t count) {
  for (int64_t at = block() * threads() + thread(); at < count; at += blocks() * threads()) to[at] = from[at];
}

template <typename Word>
int32_t launch(const KvpMove& m, int64_t most_blocks, void* stream) {
  if (m.head_bytes % int32_t(sizeof(Word))) return 1;
  const int64_t words = row_bytes(m) / int64_t(sizeof(Word)), at_once = kLanes * kAtOnce;
  const int64_t pieces = (words + at_once - 1) / at_once, warps = kThreads / kLanes;
  const int64_t needed = (m.tokens * m.planes * m.layers * pieces + warps - 1) / warps;
  const int64_t blocks = needed < most_blocks ? needed : most_blocks;
  if (m.to_pages) KVP_LAUNCH((move_rows<Word, true>), blocks, kThreads, stream, m, pieces);
  else KVP_LAUNCH((move_rows<Word, false>), blocks, kThreads, stream, m, pieces);
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

// Queues a move on `stream`. Every pointer in `move` is one of the device's. word: bytes at a time, 1, 2, 4, 8 or 16, by
// which all addresses, strides and head_bytes can be divided. blocks: at most so many are at work. tables: what `move`
// points to, `table_bytes` in pinned host memory, which has to stay until this is done; it is copied to `there` first. 0 if
// a move that was queued before on this stream has copied it.
// Returns 0, 1 where the numbers make no sense, or minus a CUDA error.
KVP_API int32_t kvp_cuda_move(const KvpMove* move, int32_t word, int32_t blocks, const void* tables, void* there,
                              int64_t table_bytes, void* stream) {
  if (!sensible(*move) || blocks < 1 || table_bytes % int64_t(sizeof(uint4))) return 1;
  const int64_t count = table_bytes / int64_t(sizeof(uint4)), most = (count + kThreads - 1) / kThreads;
  if (count) KVP_LAUNCH(copy_tables, (most < kTableBlocks ? most : kTableBlocks), kThreads, stream, static_cast<const uint4*>(tables),
             static_cast<uint4*>(there), count);
  switch (word) {
    case 1: return launch<uint8_t>(*move, blocks, stream);
    case 2: return launch<uint16_t>(*move, blocks, stream);
    case 4: return launch<uint32_t>(*move, blocks, stream);
    case 8: return launch<uint64_t>(*move, blocks, stream);
    case 16: return launch<uint4>(*move, blocks, stream);
  }
  return 1;
}
}
