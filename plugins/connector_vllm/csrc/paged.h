// Where the KV of tokens lies in an engine's pages and in chunks: what the loop of processors and the kernel share.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define KVP_BOTH __host__ __device__ __forceinline__
#else
#define KVP_BOTH inline
#endif
#define KVP_API __attribute__((visibility("default")))

extern "C" {

// One plane (K or V) of one layer. The content of a head is contiguous; strides are in bytes.
typedef struct {
  uint8_t* base;
  int64_t block, slot, head;
} KvpPages;

// [planes][layers][tokens][heads x head size], the last two contiguous; strides are in bytes.
typedef struct {
  int64_t base;  // Its address, less the `chunks_at` of a move.
  int64_t plane, layer;
  int64_t first;  // Of its tokens, in the order of `slots`.
} KvpChunk;

typedef struct {
  const KvpPages* pages;    // [planes][all_layers]
  const KvpChunk* chunks;
  const int64_t* slots;     // Of each token, chunk after chunk; a negative one is left alone.
  const int32_t* chunk_of;  // Of each token.
  int64_t chunks_at;
  int64_t begin, tokens;    // The first that is moved, and how many.
  int32_t planes, layers, heads, head_bytes, block_size;
  int32_t to_pages;         // Else to chunks.
  int32_t first_layer, all_layers;  // The first of the layers that are moved, and how many the tables have.
} KvpMove;

}  // extern "C"

namespace kvp {

KVP_BOTH bool sensible(const KvpMove& m) {
  return m.begin >= 0 && m.tokens >= 1 && (m.planes == 1 || m.planes == 2) && m.layers >= 1 && m.heads >= 1 && m.head_bytes >= 1 &&
         m.block_size >= 1 && m.first_layer >= 0 && m.layers <= m.all_layers - m.first_layer;
}

KVP_BOTH int64_t row_bytes(const KvpMove& m) { return int64_t(m.heads) * m.head_bytes; }

// `of`: planes times layers that are moved.
KVP_BOTH const KvpPages& pages_of(const KvpMove& m, int64_t of) {
  return m.pages[of / m.layers * m.all_layers + m.first_layer + of % m.layers];
}

// Of the first head, in plane and layer `of`.
KVP_BOTH uint8_t* in_pages(const KvpMove& m, int64_t of, int64_t slot) {
  const KvpPages& pages = pages_of(m, of);
  return pages.base + slot / m.block_size * pages.block + slot % m.block_size * pages.slot;
}

KVP_BOTH uint8_t* in_chunk(const KvpMove& m, int64_t of, int64_t token) {
  const KvpChunk& chunk = m.chunks[m.chunk_of[token]];
  return reinterpret_cast<uint8_t*>(m.chunks_at + chunk.base + of / m.layers * chunk.plane +
                                    (m.first_layer + of % m.layers) * chunk.layer + (token - chunk.first) * row_bytes(m));
}

}  // namespace kvp
