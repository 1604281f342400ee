// What kernels that decode have in common: streams are checked, their tiles numbered, and warps take them.
#pragma once
#include "kernels.h"
#include "own_tables.h"
#include "positions.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// Of one launch, so that their numbers, and those that warps take beyond them, are 32-bit. Of one stream: those of a warp of streams
// can be added.
constexpr int64_t kMostTiles = int64_t(1) << 30;
constexpr uint32_t kMostOfOne = 1u << 25;

// What all warps know of the streams, once they were checked.
struct DecodeWork {
  int32_t next;      // tile, of those of all streams
  int32_t tiles;     // of all of them
  int32_t before[1];  // [count]: tiles of the streams before
};

// Scratch memory of all jobs, cut into arrays.
struct DecodeMemory {
  DecodeWork* work;
  uint32_t* tables;       // of `lossless`, [jobs][planes][4096]
  int16_t* coefficients;  // of `klt`, [jobs][planes][tokens][hidden]
  int64_t bytes;

  DecodeMemory(const KvzGeometry& g, int32_t mode, int64_t jobs, void* memory) {
    Arena arena{static_cast<uint8_t*>(memory)};
    work = reinterpret_cast<DecodeWork*>(arena.take<int32_t>(int64_t(sizeof(DecodeWork)) / 4 + jobs));
    tables = arena.take<uint32_t>(mode == kLossless ? jobs * g.planes * kWideSlots : 0);
    coefficients = arena.take<int16_t>(mode == kKlt ? jobs * g.planes * g.tokens * g.hidden : 0);
    bytes = arena.at - static_cast<uint8_t*>(memory) + 64;
  }
};

KVZ_DEVICE void blame(KvzDecode& job, int32_t error, int64_t offset) {
  if (first_to_set(&job.error, error)) job.offset = offset;
}

// What a stream of mode `klt` says of a block of tokens.
struct BlockHead {
  int used, code;  // components; of their step, 0: it is not transformed
  int64_t at;      // in the tables
};
KVZ_DEVICE BlockHead head_of(const Stream& stream, const KvzGeometry& g, int plane, int token) {
  int tile_tokens = stream.header.tile_tokens;
  int64_t at = kProfileBytes + 4 + 4 * (plane * ceil_div(g.tokens, tile_tokens) + token / tile_tokens);
  uint16_t head[2];
  memcpy(head, stream.tables + at, sizeof head);
  return {head[0], head[1], at};
}
KVZ_DEVICE int32_t start_of(const Stream& stream) {
  int32_t start;
  memcpy(&start, stream.tables + kProfileBytes, 4);
  return start;
}

// All threads of a block: the tables of `klt`.
KVZ_DEVICE void check_heads(const KvzGeometry& g, const Stream& stream, KvzDecode& job) {
  bool known = job.profile != nullptr;
  for (int at = 0; known && at < kProfileBytes; ++at) known = job.profile->id[at] == stream.tables[at];
  if (!known) return blame(job, kNoProfile, kHeaderBytes);
  int tile_tokens = stream.header.tile_tokens, blocks = int(ceil_div(g.tokens, tile_tokens));
  for (int which = thread(); which < g.planes * blocks; which += threads()) {
    int plane = which / blocks, token = which % blocks * tile_tokens, rows = g.tokens - token < tile_tokens ? g.tokens - token : tile_tokens;
    BlockHead head = head_of(stream, g, plane, token);
    bool fits = head.used <= job.bases[plane].rank && head.code <= 255 && is_placed(*job.profile, plane, start_of(stream), token, rows);
    if (head.code == 0 && head.used != 0) blame(job, kBadReserved, kHeaderBytes + head.at);
    else if (head.code != 0 && !fits) blame(job, kBadTable, kHeaderBytes + head.at);
    else if (ceil_div(head.used, stream.header.band) > kMaxReaders) blame(job, kBadGeometry, kHeaderBytes + head.at);
  }
}

// A block for each stream, of which all are to be of one mode. tables: of `lossless`, [streams][planes][4096].
KVZ_KERNEL check_streams(KvzGeometry g, int32_t mode, KvzDecode* jobs, DecodeWork* work, uint32_t* tables) {
  KvzDecode& job = jobs[block()];
  if (thread() == 0) job.error = kOk;
  sync_block();
  Stream stream;
  int64_t offset = 0, bad = 0;
  int32_t error = parse_header(g, job.stream, job.size, stream, offset);
  if (error == kOk && stream.header.mode != mode) error = kBadGeometry, offset = 5;
  if (error == kOk && stream.header.tiles > kMostOfOne) error = kNoRoom, offset = 20;
  if (thread() == 0) {
    if (error != kOk) blame(job, error, offset);
    work->before[block()] = error == kOk ? int32_t(stream.header.tiles) : 0;  // How many, until they are numbered.
  }
  if (error != kOk) return;
  if (check_directory(stream, thread(), threads(), bad) != kOk) blame(job, kBadDirectory, stream.directory - job.stream + 4 * bad);
  sync_block();
  if (mode == kLossless) {
    error = read_tables(stream, g.planes, thread(), threads(), tables + block() * g.planes * kWideSlots, offset);
    if (error != kOk) blame(job, error, offset);
  }
  if (mode == kKlt) check_heads(g, stream, job);
  if (mode != kCacheGen) return;
  const uint8_t* scales = stream.tables + aligned(2 * g.planes);
  int bytes = element_bytes(g.dtype);
  for (int plane = thread(); plane < g.planes; plane += threads()) {
    uint32_t bins = stream.tables[2 * plane] | uint32_t(stream.tables[2 * plane + 1]) << 8;
    if (bins < 4 || bins > 64) blame(job, kBadTable, kHeaderBytes + 2 * plane);
  }
  for (int64_t token = thread(); token < int64_t(g.planes) * g.tokens; token += threads()) {
    uint32_t bits = 0;
    memcpy(&bits, scales + token * bytes, size_t(bytes));
    float scale = g.dtype == kBF16 ? BF16::load(uint16_t(bits)) : g.dtype == kFP16 ? FP16::load(uint16_t(bits))
                : g.dtype == kE4M3 ? E4M3::load(uint8_t(bits)) : g.dtype == kE5M2 ? E5M2::load(uint8_t(bits)) : FP32::load(bits);
    if (!is_finite(scale)) blame(job, kBadTable, scales + token * bytes - job.stream);
  }
}

// One warp: where the tiles of each stream begin in the numbering of all. Streams behind the last that has room are refused.
KVZ_KERNEL number_tiles(int32_t count, KvzDecode* jobs, DecodeWork* work) {
  int64_t all = 0;
  int32_t numbered = 0;
  for (int32_t first = 0; first < count; first += 32) {
    int32_t job = first + lane(), own = job < count ? work->before[job] : 0, end = sum_to_here(own);
    bool fits = all + end <= kMostTiles;
    if (job < count) work->before[job] = fits ? int32_t(all + end - own) : int32_t(kMostTiles);
    if (job < count && !fits) blame(jobs[job], kNoRoom, 20);
    int some = count_ones(ballot(fits)), last = from_lane(end, some - 1);
    if (some) numbered = int32_t(all + last);
    all += from_lane(end, 31);
  }
  if (lane() == 0) work->tiles = numbered, work->next = 0;
}

// The stream that a tile is of: the last that begins at its number or before, and has tiles.
KVZ_DEVICE int32_t stream_of(const DecodeWork* work, int32_t count, int32_t tile) {
  int32_t low = 0, high = count;
  while (high - low > 1) {
    int32_t middle = (low + high) / 2;
    if (work->before[middle] <= tile) low = middle;
    else high = middle;
  }
  return low;
}

// The words of a tile, by way of a ring in the memory of the block: of four parts, those that may be taken next are the first two, and
// the others are on their way before they are needed. In registers they would be waited for wherever compilers move those.
struct WarpWords {
  static constexpr int kPart = 2 * kLanes, kParts = 4;
  static constexpr size_t kBytes = kPart * kParts * 2;
  const uint16_t* words;
  uint16_t* memory;  // of the block, in which the ring of the warp begins at `ring`
  uint32_t ring;
  int count;         // in all
  int at, next;      // The one that is taken next, and where the part after its begins.

  // shared: memory of the block, kBytes for each warp. `end` is a multiple of 4: if `from` is none, there is a word before that is skipped.
  KVZ_DEVICE WarpWords(uint8_t* shared, const uint8_t* from, const uint8_t* end) {
    at = int(end - from) / 2 % 2, next = kPart;
    words = reinterpret_cast<const uint16_t*>(from) - at, count = int(end - from) / 2 + at;
    memory = reinterpret_cast<uint16_t*>(shared), ring = uint32_t(thread() / 32 * (kPart * kParts));
    sync_warp();
    for (int part = 0; part < kParts; ++part) fetch(part * kPart);
    arrive();
  }
  KVZ_DEVICE uint32_t word(int number) const { return memory[place(number)]; }
  KVZ_DEVICE void skip(int more) {
    at += more;
    while (at >= next) go_on();
  }
  // One for each lane that wants one, in the order of lanes; the others get anything.
  KVZ_DEVICE uint32_t take(bool wants) {
    uint32_t mask = ballot(wants), taken = word(at + count_ones(mask & lanes_below()));
    at += count_ones(mask);
    if (at >= next) go_on();
    return taken;
  }
  // All were taken but a padding of zero, and not more than there are. No more are to be taken.
  KVZ_DEVICE bool through() const {
    wait_for_copies<0>();
    sync_warp();
    return at == count || (at == count - 1 && word(at) == 0);
  }

 private:
  KVZ_DEVICE uint32_t place(int number) const { return ring | uint32_t(number) % (kPart * kParts); }
  KVZ_DEVICE void fetch(int first) const {
    int number = first + 2 * lane();
    bool there = number < count;  // Past the end there are zeros.
    copy_later(memory + place(number), words + (there ? number : 0), there);
    end_copies();
  }
  KVZ_DEVICE void arrive() const {
    wait_for_copies<kParts - 2>();
    sync_warp();
  }
  KVZ_DEVICE void go_on() {
    sync_warp();
    fetch(next + (kParts - 1) * kPart);
    next += kPart;
    arrive();
  }
};

template <typename Bits>
KVZ_DEVICE int32_t copy_raw(const uint8_t* from, const uint8_t* end, int64_t stride, int rows, int width, Bits* to) {
  int64_t bytes = int64_t(rows) * width * int64_t(sizeof(Bits));
  if (end - from != aligned(bytes)) return kBadDirectory;
  for (int row = 0; row < rows; ++row)
    for (int c = lane(); c < width; c += kLanes) memcpy(to + row * stride + c, from + (int64_t(row) * width + c) * int64_t(sizeof(Bits)), sizeof(Bits));
  for (int64_t at = bytes; at < end - from; ++at)
    if (from[at] != 0) return kBadReserved;
  return kOk;
}

template <typename Bits>
KVZ_DEVICE int32_t fill_constant(const uint8_t* from, const uint8_t* end, int64_t stride, int rows, int width, Bits* to) {
  if (end - from != 4) return kBadDirectory;
  uint32_t all = 0;
  memcpy(&all, from, 4);
  if (sizeof(Bits) < 4 && all >> (8 * sizeof(Bits) % 32) != 0) return kBadReserved;
  for (int row = 0; row < rows; ++row)
    for (int c = lane(); c < width; c += kLanes) to[row * stride + c] = Bits(all);
  return kOk;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
