// The codec for AVX-512 (F, BW, VL, DQ).
#define KVZ_NAMESPACE avx512
#define KVZ_AVX512 1
#include "codec.h"
#include "instructions.h"

namespace kvz {
const Instructions kAvx512 = {avx512::encode_stream, avx512::decode_stream};
}
