// The codec for AVX2.
#define KVZ_NAMESPACE avx2
#define KVZ_AVX2 1
#include "codec.h"
#include "instructions.h"

namespace kvz {
const Instructions kAvx2 = {avx2::encode_stream, avx2::decode_stream};
}
