// The C interface of the CPU build. Python calls it through ctypes; every pointer is the caller's.
#pragma once
#include <cstddef>
#include <cstdint>

#define KVZ_API __attribute__((visibility("default")))

extern "C" {

// What all streams of one call have in common.
struct KvzGeometry {
  int32_t dtype;        // kvz::Dtype
  int32_t planes;       // 2 for K and V, 1 for a latent cache or for opaque elements
  int32_t tokens;
  int32_t hidden;       // elements of one token of one plane
};

struct KvzSettings {
  int32_t mode;         // kvz::Mode
  int32_t band;         // channels of a tile: the head size, as a rule
  int32_t tile_tokens;  // at most 256
  int32_t shared_from;  // `step`: from this channel of plane 0 on, steps are by channel; before it, one for the plane
  float step;           // `step`: in standard deviations
};

// One stream: one layer of one chunk.
struct KvzEncode {
  const void* source;       // planes x [tokens, hidden], each plane contiguous
  int64_t plane_stride;     // in elements
  const float* weights;     // [hidden]: relative steps of plane 0, or null
  int32_t bins[2];          // `cachegen`: of each plane
  uint8_t* out;
  int64_t capacity;         // at least kvz_bound
  int64_t size;             // out: bytes of the stream
  int32_t error;            // out: kvz::Error
};

struct KvzDecode {
  const uint8_t* stream;
  int64_t size;
  void* target;             // as `source`
  int64_t plane_stride;
  int32_t error;            // out
  int64_t offset;           // out: where in the stream it is wrong
};

// The most that one stream takes, in bytes.
KVZ_API int64_t kvz_bound(const KvzGeometry*, const KvzSettings*);
// Scratch memory of one thread, in bytes.
KVZ_API int64_t kvz_workspace_bytes(const KvzGeometry*, const KvzSettings*);
// The best instruction set of this machine: 0 portable, 1 AVX2, 2 AVX-512.
KVZ_API int32_t kvz_instructions();
// Both: `workspace` holds kvz_workspace_bytes for each thread; 0 if all went well, else the first error.
KVZ_API int32_t kvz_encode(const KvzGeometry*, const KvzSettings*, KvzEncode*, int32_t count, uint8_t* workspace,
                   int32_t threads, int32_t instructions);
KVZ_API int32_t kvz_decode(const KvzGeometry*, KvzDecode*, int32_t count, uint8_t* workspace, int32_t threads,
                   int32_t instructions);
}
