// Decoding the mode `lossless` on a GPU: a warp decodes a tile, 32 neighbouring elements at a time.
#pragma once
#include "decode_work.h"

namespace kvz {
namespace KVZ_NAMESPACE {

template <int kDtype>
KVZ_DEVICE int32_t decode_run(const uint8_t* from, const uint8_t* end, int count, const uint32_t* table, typename Split<kDtype>::Bits* to) {
  using S = Split<kDtype>;
  int states = count < kLanes ? count : kLanes;
  int64_t rest_bytes = aligned(int64_t(count) * S::kRest);
  if (end - from < states * 4 + rest_bytes) return kBadDirectory;
  const uint8_t* rest = from + states * 4;
  for (int64_t at = int64_t(count) * S::kRest; at < rest_bytes; ++at)
    if (rest[at] != 0) return kBadReserved;
  uint32_t x = kLow;
  if (lane() < states) memcpy(&x, from + 4 * lane(), 4);
  if (ballot(x < kLow) != 0) return kBadWords;
  WarpWords words(shared_memory(), rest + rest_bytes, end);
  for (int first = 0; first < count; first += kLanes) {
    int at = first + lane();
    bool active = at < count;
    uint32_t slot = 0;
    if (active) {
      slot = table[x & (kWideSlots - 1)];
      x = ((slot >> 12 & 0xfff) + 1) * (x >> kWidePrecision) + (slot & 0xfff);
      to[at] = S::join(uint8_t(slot >> 24), rest + int64_t(at) * S::kRest);
    }
    bool low = active && x < kLow;
    uint32_t next = words.take(low);
    if (low) x = x << 16 | next;
  }
  bool through = words.through();
  return ballot(x != kLow || !through) == 0 ? kOk : kBadWords;
}

template <int kDtype>
KVZ_KERNEL decode_runs(KvzGeometry g, KvzDecode* jobs, int32_t count, DecodeWork* work, const uint32_t* tables) {
  using Bits = typename Split<kDtype>::Bits;
  int64_t elements = int64_t(g.tokens) * g.hidden;
  int runs = int(ceil_div(elements, kFlatTile));
  for (int32_t ticket = first_ticket(); ticket < work->tiles; ticket = next_ticket(&work->next)) {
    int32_t number = stream_of(work, count, ticket);
    KvzDecode& job = jobs[number];
    if (from_lane(job.error, 0) != kOk) continue;
    Stream stream;
    int64_t offset = 0;
    parse_header(g, job.stream, job.size, stream, offset);
    int tile = ticket - work->before[number], plane = tile / runs;
    int64_t begin = int64_t(tile % runs) * kFlatTile;
    int elements_here = int(elements - begin < kFlatTile ? elements - begin : kFlatTile);
    const uint8_t *from = stream.tile_begin(tile), *end = stream.tile_end(tile);
    Bits* to = static_cast<Bits*>(job.target) + plane * job.plane_stride + begin;
    const uint32_t* table = tables + (int64_t(number) * g.planes + plane) * kWideSlots;
    uint32_t kind = stream.kind(tile);
    int32_t error = kBadDirectory;
    if (kind == kRaw) error = copy_raw(from, end, 0, 1, elements_here, to);
    else if (kind == kConst) error = fill_constant(from, end, 0, 1, elements_here, to);
    else if (kind == kSymbols) error = decode_run<kDtype>(from, end, elements_here, table, to);
    if (lane() == 0 && error != kOk) blame(job, error, from - job.stream);
  }
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
