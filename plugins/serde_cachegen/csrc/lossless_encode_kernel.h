// Encoding in the mode `lossless` on a GPU: symbols are counted, tables made, and a warp encodes a tile.
#pragma once
#include "encode_work.h"
#include "own_tables.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// Scratch memory of all jobs, cut into arrays.
struct RunWork : TileWork {
  int64_t elements, runs;      // of a plane
  uint32_t* counts;            // [jobs][tiles][256]
  uint32_t *slots, *inverses;  // [jobs][planes][256], as EncodeTables has them
  uint8_t* tables;             // [jobs][planes][kMaxTables]
  int32_t* lengths;            // of tables, [jobs][planes]
  int64_t bytes;

  RunWork(const KvzGeometry& g, int64_t jobs, void* memory) {
    elements = int64_t(g.tokens) * g.hidden, runs = ceil_div(elements, kFlatTile), tiles = g.planes * runs;
    // A tile with more words is not smaller than its elements; there is room for 32 more, so that it is enough to look before them.
    room = (std::min<int64_t>(elements, kFlatTile) / 2 + kLanes + 8 + 7) & ~int64_t(7);
    Arena arena{static_cast<uint8_t*>(memory)};
    take(arena, jobs);
    counts = arena.take<uint32_t>(jobs * tiles * 256);
    slots = arena.take<uint32_t>(jobs * g.planes * 256), inverses = arena.take<uint32_t>(jobs * g.planes * 256);
    tables = arena.take<uint8_t>(jobs * g.planes * kMaxTables), lengths = arena.take<int32_t>(jobs * g.planes);
    bytes = arena.at - static_cast<uint8_t*>(memory) + 64;
  }
};

// One tile: of which job and plane, and its elements.
template <int kDtype>
struct Run {
  using Bits = typename Split<kDtype>::Bits;
  int64_t job, tile;  // of the job; of the tile in its stream
  int plane, count;
  const Bits* from;
  KVZ_DEVICE Run(const KvzEncode* jobs, const RunWork& work, int64_t which) {
    job = which / work.tiles, tile = which % work.tiles, plane = int(tile / work.runs);
    int64_t begin = tile % work.runs * kFlatTile, left = work.elements - begin;
    count = int(left < kFlatTile ? left : kFlatTile);
    from = static_cast<const Bits*>(jobs[job].source) + plane * jobs[job].plane_stride + begin;
  }
};

// A block for each tile: how often each symbol is in it.
template <int kDtype>
KVZ_KERNEL count_symbols(const KvzEncode* jobs, RunWork work) {
  if (block() == 0 && thread() == 0) *work.next = 0;
  uint32_t* counts = reinterpret_cast<uint32_t*>(shared_memory());  // [kWarps][256]
  for (int each = thread(); each < kWarps * 256; each += threads()) counts[each] = 0;
  sync_block();
  Run<kDtype> run(jobs, work, block());
  uint32_t* own = counts + thread() / 32 * 256;
  for (int at = thread(); at < run.count; at += threads()) count_one(own + Split<kDtype>::symbol(run.from[at]));
  sync_block();
  for (int symbol = thread(); symbol < 256; symbol += threads()) {
    uint32_t sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += counts[warp * 256 + symbol];
    work.counts[block() * 256 + symbol] = sum;
  }
}

// A block of 256 threads for each plane of each stream: its table, to be written and to be coded with.
KVZ_KERNEL make_tables(KvzGeometry g, RunWork work) {
  uint32_t* counts = reinterpret_cast<uint32_t*>(shared_memory());        // [256]
  uint16_t* frequencies = reinterpret_cast<uint16_t*>(counts + 256);  // [256]
  const uint32_t* of_tiles = work.counts + (block() / g.planes * work.tiles + block() % g.planes * work.runs) * 256 + thread();
  uint32_t own = 0;
  for (int64_t run = 0; run < work.runs; ++run) own += of_tiles[run * 256];
  counts[thread()] = own;
  sync_block();
  int present = 0, largest = 0;
  for (int symbol = 0; symbol < 256; ++symbol) {
    present += counts[symbol] != 0;
    largest = counts[symbol] > counts[largest] ? symbol : largest;
  }
  frequencies[thread()] = share_of(own, uint64_t(work.elements), present);
  sync_block();
  if (thread() == 0) {
    settle(frequencies, largest);
    uint8_t* table = work.tables + block() * kMaxTables;
    work.lengths[block()] = int32_t(write_table(frequencies, table) - table);
  }
  sync_block();
  uint32_t before = 0, frequency = frequencies[thread()];
  for (int symbol = 0; symbol < thread(); ++symbol) before += frequencies[symbol];
  work.slots[block() * 256 + thread()] = encode_slot(frequency, before, false);
  work.inverses[block() * 256 + thread()] = frequency == 0 ? 0 : inverse_of(frequency);
}

// Backwards, to the end of `words`, which has room for `room` of them; how many there are, or -1 if they do not fit.
template <int kDtype>
KVZ_DEVICE int encode_run(const Run<kDtype>& run, const uint32_t* slots, const uint32_t* inverses, uint16_t* words, int room, uint32_t& x) {
  uint16_t* end = words + room;
  int last = (run.count - 1) / kLanes * kLanes;
  x = kLow;
  typename Run<kDtype>::Bits element = last + lane() < run.count ? run.from[last + lane()] : 0;
  for (int first = last; first >= 0; first -= kLanes) {
    bool active = first + lane() < run.count;
    int symbol = Split<kDtype>::symbol(element);
    if (first > 0) element = run.from[first - kLanes + lane()];  // On its way before it is needed.
    if (end - words < kLanes) return -1;
    put_symbols<kWidePrecision>(active, active ? slots[symbol] : 1, inverses[symbol], end, x);
  }
  return int(words + room - end);
}

template <int kDtype>
KVZ_DEVICE bool is_constant(const Run<kDtype>& run) {
  bool same = true;
  for (int first = 0; first < run.count && ballot(!same) == 0; first += kLanes) same = first + lane() >= run.count || run.from[first + lane()] == run.from[0];
  return ballot(!same) == 0;
}

template <int kDtype>
KVZ_KERNEL encode_runs(KvzGeometry g, const KvzEncode* jobs, int32_t all, RunWork work) {
  uint32_t* slots = reinterpret_cast<uint32_t*>(shared_memory()) + thread() / 32 * 512;  // [256], then inverses
  for (int32_t ticket = first_ticket(); ticket < all; ticket = next_ticket(work.next)) {
    Run<kDtype> run(jobs, work, ticket);
    TileDone& done = work.done[ticket];
    int64_t whole = int64_t(run.count) * int64_t(sizeof(typename Run<kDtype>::Bits)), rest = aligned(int64_t(run.count) * Split<kDtype>::kRest);
    uint32_t kind = kConst;
    int32_t bytes = 4, words = 0;
    if (!is_constant(run)) {
      int64_t table = (run.job * g.planes + run.plane) * 256;
      sync_warp();
      for (int symbol = lane(); symbol < 256; symbol += kLanes) slots[symbol] = work.slots[table + symbol], slots[256 + symbol] = work.inverses[table + symbol];
      sync_warp();
      uint32_t x;
      words = encode_run(run, slots, slots + 256, work.words + ticket * work.room, int(work.room), x);
      int64_t coded = aligned((run.count < kLanes ? run.count : kLanes) * 4 + 2 * int64_t(words) + rest);
      bool smaller = words >= 0 && coded < aligned(whole);
      kind = smaller ? kSymbols : kRaw, bytes = int32_t(smaller ? coded : aligned(whole));
      done.states[lane()] = x;
    }
    if (lane() == 0) done.kind = kind, done.bytes = bytes, done.words = words;
  }
}

// A warp for each stream: its tables, its header and its directory.
KVZ_KERNEL write_run_directories(KvzGeometry g, KvzEncode* jobs, RunWork work) {
  KvzEncode& job = jobs[block()];
  int64_t length = 0;
  for (int plane = 0; plane < g.planes; ++plane) {
    int64_t which = block() * g.planes + plane;
    for (int at = lane(); at < work.lengths[which]; at += kLanes) job.out[kHeaderBytes + length + at] = work.tables[which * kMaxTables + at];
    length += work.lengths[which];
  }
  if (lane() < aligned(length) - length) job.out[kHeaderBytes + length + lane()] = 0;
  finish_stream(header_of(g, kLossless, work.tiles, aligned(length)), work.done + block() * work.tiles, job);
}

// A block for each tile: its bytes to where the directory says.
template <int kDtype>
KVZ_KERNEL place_runs(const KvzEncode* jobs, RunWork work) {
  using S = Split<kDtype>;
  using Bits = typename S::Bits;
  Run<kDtype> run(jobs, work, block());
  const TileDone& done = work.done[block()];
  uint8_t* out = place_of(jobs[run.job], run.tile, done.bytes);
  int64_t written = sizeof(Bits);
  if (done.kind == kConst) {
    if (thread() == 0) memcpy(out, run.from, sizeof(Bits));
  } else if (done.kind == kRaw) {
    for (int at = thread(); at < run.count; at += threads()) memcpy(out + int64_t(at) * int64_t(sizeof(Bits)), run.from + at, sizeof(Bits));
    written = int64_t(run.count) * int64_t(sizeof(Bits));
  } else {
    int states = run.count < kLanes ? run.count : kLanes;
    if (thread() < states) memcpy(out + 4 * thread(), done.states + thread(), 4);
    uint8_t *rest = out + 4 * states, *after = rest + aligned(int64_t(run.count) * S::kRest);
    for (int at = thread(); at < run.count; at += threads()) S::rest(run.from[at], rest + int64_t(at) * S::kRest);
    for (uint8_t* at = rest + int64_t(run.count) * S::kRest + thread(); at < after; at += threads()) *at = 0;
    const uint16_t* words = work.words + (block() + 1) * work.room - done.words;
    uint16_t* to = reinterpret_cast<uint16_t*>(after);
    for (int word = thread(); word < done.words; word += threads()) to[word] = words[word];
    written = after - out + 2 * int64_t(done.words);
  }
  for (int64_t at = written + thread(); at < done.bytes; at += threads()) out[at] = 0;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
