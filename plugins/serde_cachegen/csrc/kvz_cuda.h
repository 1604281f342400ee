// The C interface of the CUDA build: all modes decoded and all but `klt` encoded in device memory, the same bytes and values as on
// a processor. Jobs are those of kvz_api.h, their array and every pointer in them, and in what they point to, in device memory; a
// launch covers all streams of all chunks. Streams begin at multiples of 4. Nothing is allocated, nothing waits.
#pragma once
#include "kvz_api.h"

extern "C" {

// How many devices there are; a negative number is a CUDA error, as without a driver.
KVZ_API int32_t kvz_cuda_devices();
// Scratch memory in bytes, in device memory, for `count` jobs; -1 for what is not taken. Streams of one call are of one mode.
KVZ_API int64_t kvz_cuda_decode_workspace(const KvzGeometry*, int32_t mode, int32_t count);
KVZ_API int64_t kvz_cuda_encode_workspace(const KvzGeometry*, const KvzSettings*, int32_t count);
// Both: 0, kvz::Error of what is asked for, or minus a CUDA error. What is wrong with a stream stands in its job when the
// stream of work `stream` is through; what was written by then is not to be used.
KVZ_API int32_t kvz_cuda_decode(const KvzGeometry*, int32_t mode, KvzDecode* jobs, int32_t count, void* workspace, void* stream);
KVZ_API int32_t kvz_cuda_encode(const KvzGeometry*, const KvzSettings*, KvzEncode* jobs, int32_t count, void* workspace, void* stream);
}
