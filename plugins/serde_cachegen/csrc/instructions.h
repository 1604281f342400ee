// One set of functions for each instruction set.
#pragma once
#include "kvz_api.h"

namespace kvz {
struct Instructions {
  int32_t (*encode)(const KvzGeometry&, const KvzSettings&, KvzEncode&, uint8_t* workspace);
  int32_t (*decode)(const KvzGeometry&, KvzDecode&, uint8_t* workspace);
};
extern const Instructions kPortable, kAvx2, kAvx512;
}  // namespace kvz
