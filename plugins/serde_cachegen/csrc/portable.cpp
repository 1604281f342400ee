// The codec for any processor: the reference for all others.
#define KVZ_NAMESPACE portable
#include "codec.h"
#include "instructions.h"

namespace kvz {
const Instructions kPortable = {portable::encode_stream, portable::decode_stream};
}
