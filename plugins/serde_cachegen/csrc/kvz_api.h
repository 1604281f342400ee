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

// Of the mode `klt`: what one plane of one layer of a model is made of.
struct KvzBasis {
  const float* mean;         // [hidden], of K before its position was rotated into it
  const float* scale;        // [hidden], how much an error of each channel counts
  const int8_t* forward;     // [hidden / 2][rank][2]: the basis, in units of 2^-exponent / 127
  const int8_t* backward;    // [rank / 2][hidden][2]: the same
  const uint8_t* exponents;  // [rank], at most 5
  float sigma;               // what steps are multiples of
  int32_t rank;              // even, at most `hidden`
};

struct KvzProfile {
  uint8_t id[16];
  const float* rotations;    // [24][rotary_size / 2][2]: cosine and sine of 2^b positions
  int32_t rotary_size;       // of each head; 0: none
  int32_t interleaved;       // pairs are neighbours; else the first half and the second
  int32_t head_size;
};

// One stream: one layer of one chunk.
struct KvzEncode {
  const void* source;       // planes x [tokens, hidden], each plane contiguous
  int64_t plane_stride;     // in elements
  const float* weights[2];  // of each plane, [hidden]: relative steps, or null
  int32_t bins[2];          // `cachegen`: of each plane
  int32_t start;            // `klt`: position of the first token; -1 if it is not known, then K is not transformed
  const KvzProfile* profile;  // `klt`
  const KvzBasis* bases;    // `klt`: of each plane
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
  const KvzProfile* profile;  // of streams of mode `klt`, which no other decodes
  const KvzBasis* bases;
  int32_t error;            // out
  int64_t offset;           // out: where in the stream it is wrong
};

// The most that one stream takes, in bytes.
KVZ_API int64_t kvz_bound(const KvzGeometry*, const KvzSettings*);
// Scratch memory of one thread, in bytes. Decoding: of streams of mode `klt`, or of any other.
KVZ_API int64_t kvz_encode_workspace(const KvzGeometry*, const KvzSettings*);
KVZ_API int64_t kvz_decode_workspace(const KvzGeometry*, int32_t transformed);
// The best instruction set of this machine: 0 portable, 1 AVX2, 2 AVX-512.
KVZ_API int32_t kvz_instructions();
// Both: `workspace` holds that for each thread; 0 if all went well, else the first error.
KVZ_API int32_t kvz_encode(const KvzGeometry*, const KvzSettings*, KvzEncode*, int32_t count, uint8_t* workspace,
                   int32_t threads, int32_t instructions);
KVZ_API int32_t kvz_decode(const KvzGeometry*, KvzDecode*, int32_t count, uint8_t* workspace, int32_t transformed,
                   int32_t threads, int32_t instructions);
}
