// Any bytes as a stream: refused or decoded, alike by every instruction set, and nothing beside is read or written.
//
// Input: which geometry the reader expects, what of the header is made to agree with it, the stream.
#include "decode_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const KvzGeometry g = fuzz::expected(data[0]);
  std::vector<uint8_t> stream(data + 2, data + size);
  fuzz::mend(g, data[1], stream);
  fuzz::decode(g, stream.data(), int64_t(stream.size()));
  return 0;
}
