// Decoding on a GPU: a warp decodes a tile, a lane of it is a lane of the coder.
#pragma once
#include "kernels.h"
#include "reading.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// What all warps know of the streams, once they were checked.
struct DecodeWork {
  int32_t next;      // tile, of those of all streams
  int32_t tiles;     // of all of them
  int32_t before[1];  // [count]: tiles of the streams before
};

KVZ_DEVICE void blame(KvzDecode& job, int32_t error, int64_t offset) {
  if (first_to_set(&job.error, error)) job.offset = offset;
}

// A block for each stream.
KVZ_KERNEL check_streams(KvzGeometry g, KvzDecode* jobs, DecodeWork* work) {
  KvzDecode& job = jobs[block()];
  if (thread() == 0) job.error = kOk;
  sync_block();
  Stream stream;
  int64_t offset = 0, bad = 0;
  int32_t error = parse_header(g, job.stream, job.size, stream, offset);
  if (error == kOk && stream.header.mode != kStep && stream.header.mode != kCacheGen) error = kBadGeometry, offset = 5;
  if (thread() == 0) {
    if (error != kOk) blame(job, error, offset);
    work->before[block()] = error == kOk ? int32_t(stream.header.tiles) : 0;  // How many, until they are numbered.
  }
  if (error != kOk) return;
  if (check_directory(stream, thread(), threads(), bad) != kOk) blame(job, kBadDirectory, stream.directory - job.stream + 4 * bad);
  if (stream.header.mode != kCacheGen) return;
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

// One warp: where the tiles of each stream begin in the numbering of all.
KVZ_KERNEL number_tiles(int32_t count, DecodeWork* work) {
  int32_t tiles = 0;
  for (int32_t first = 0; first < count; first += 32) {
    int32_t job = first + lane(), own = job < count ? work->before[job] : 0, end = sum_to_here(own);
    if (job < count) work->before[job] = tiles + end - own;
    tiles += from_lane(end, 31);
  }
  if (lane() == 0) work->tiles = tiles, work->next = 0;
}

// The words of a tile, of which each lane holds two: those that are taken next are on their way before they are needed.
struct WarpWords {
  const uint16_t* words;
  int count;           // in all
  int at = 0;          // of the first that is held
  int taken = 0;       // of those, below 32
  uint32_t now, later;

  KVZ_DEVICE WarpWords(const uint8_t* from, const uint8_t* end) : words(reinterpret_cast<const uint16_t*>(from)), count(int((end - from) / 2)) {
    now = word(lane()), later = word(32 + lane());
  }
  KVZ_DEVICE uint32_t word(int number) const {
    return number < count ? words[number] : 0;
  }
  KVZ_DEVICE void skip(int more) {
    for (taken += more; taken >= 32; taken -= 32) at += 32, now = later, later = word(at + 32 + lane());
  }
  // One for each lane that wants one, in the order of lanes; the others get anything.
  KVZ_DEVICE uint32_t take(bool wants) {
    uint32_t mask = ballot(wants);
    int number = taken + count_ones(mask & lanes_below());
    uint32_t first = from_lane(now, number), second = from_lane(later, number);
    skip(count_ones(mask));
    return number < 32 ? first : second;
  }
  // All were taken but a padding of zero, and not more than there are.
  KVZ_DEVICE bool through() const {
    int left = count - at - taken;
    return left == 0 || (left == 1 && word(at + taken) == 0);
  }
};

// The tables of the family in the memory of a block: the symbol of each slot, and each symbol's frequency and what is before it.
struct SharedFamily {
  uint8_t* symbols;  // [64][1024]
  uint32_t* slots;   // [64][64]
  static constexpr size_t kBytes = (size_t(kFamily) << kPrecision) + kFamily * 64 * 4;

  KVZ_DEVICE explicit SharedFamily(uint8_t* memory) : symbols(memory), slots(reinterpret_cast<uint32_t*>(memory + (size_t(kFamily) << kPrecision))) {
    for (int which = thread(); which < kFamily * 64; which += threads()) {
      int table = which / 64, symbol = which % 64;
      uint32_t before = 0, frequency = kFrequencies[table][symbol];
      for (int each = 0; each < symbol; ++each) before += kFrequencies[table][each];
      slots[which] = frequency | before << 16;
      for (uint32_t above = 0; above < frequency; ++above) symbols[(table << kPrecision) + before + above] = uint8_t(symbol);
    }
    sync_block();
  }
};

// Where a tile belongs.
struct TilePlace {
  int plane, token, column, rows, width;
  KVZ_DEVICE TilePlace(const KvzGeometry& g, const Header& h, int tile) {
    int bands = int(ceil_div(g.hidden, h.band)), blocks = int(ceil_div(g.tokens, h.tile_tokens));
    int band = tile % bands, block = tile / bands % blocks;
    plane = tile / bands / blocks, token = block * h.tile_tokens, column = band * h.band;
    rows = g.tokens - token < h.tile_tokens ? g.tokens - token : h.tile_tokens;
    width = g.hidden - column < h.band ? g.hidden - column : h.band;
  }
};

// What is known of a lane's channels, of which most tiles have at most four: those are kept at hand.
constexpr int kFewGroups = 4;

template <typename T, bool kFew>
KVZ_DEVICE int32_t decode_symbols(const KvzGeometry& g, const Stream& stream, const SharedFamily& family, uint32_t kind, const uint8_t* from,
                                  const uint8_t* end, const TilePlace& place, typename T::Bits* to) {
  using Bits = typename T::Bits;
  int width = place.width, states = width < kLanes ? width : kLanes;
  int step_count = kind == kTokenScales ? 0 : kind == kOneStep ? 1 : width;
  int centre_count = kind == kTokenScales ? 0 : width;
  int64_t side = int64_t(states) * 4 + step_count + centre_count + width;
  side += side & 1;
  if (end - from < side) return kBadDirectory;
  const uint8_t *codes = from + states * 4, *centres = codes + step_count, *chosen = centres + centre_count;
  bool good = true;
  for (int c = lane(); c < width; c += kLanes) good = good && chosen[c] < kFamily;
  if (ballot(!good) != 0) return kBadTable;
  if (((step_count + centre_count + width) & 1) && chosen[width] != 0) return kBadReserved;
  uint32_t x = kLow;
  if (lane() < states) memcpy(&x, from + 4 * lane(), 4);
  if (ballot(x < kLow) != 0) return kBadWords;
  WarpWords words(from + side, end);
  float middle = 0.0f;
  const uint8_t* scales = nullptr;
  if (kind == kTokenScales) {
    uint32_t bins = stream.tables[2 * place.plane] | uint32_t(stream.tables[2 * place.plane + 1]) << 8;
    middle = float(bins / 2 - 1);
    scales = stream.tables + aligned(2 * g.planes) + (int64_t(place.plane) * g.tokens + place.token) * int64_t(sizeof(Bits));
  }
  float step_of[kFewGroups], centre_of[kFewGroups];
  uint32_t table_of[kFewGroups];
  auto channel = [&](int c, float& step, float& centre, uint32_t& table) {
    bool there = c < width;
    table = there ? chosen[c] : 0;
    step = there && kind != kTokenScales ? kSteps[codes[kind == kOneStep ? 0 : c]] : 1.0f;
    centre = there && kind != kTokenScales ? float(int8_t(centres[c])) : 0.0f;
  };
  KVZ_UNROLL
  for (int group = 0; group < kFewGroups; ++group) channel(group * kLanes + lane(), step_of[group], centre_of[group], table_of[group]);
  int groups = kFew ? kFewGroups : int(ceil_div(width, kLanes));
  for (int row = 0; row < place.rows; ++row) {
    float scale = 0.0f;
    if (scales != nullptr) {
      Bits bits;
      memcpy(&bits, scales + row * int64_t(sizeof bits), sizeof bits);
      scale = T::load(bits);
    }
    Bits* out = to + int64_t(row) * g.hidden;
    KVZ_UNROLL
    for (int group = 0; group < (kFew ? kFewGroups : groups); ++group) {
      if (kFew && group * kLanes >= width) break;
      int c = group * kLanes + lane();
      bool active = c < width;
      float step, centre;
      uint32_t slot = 0, symbol = 0, table;
      if constexpr (kFew) step = step_of[group], centre = centre_of[group], table = table_of[group];
      else channel(c, step, centre, table);
      if (active) {
        uint32_t at = x & ((1u << kPrecision) - 1);
        symbol = family.symbols[(table << kPrecision) + at];
        slot = family.slots[table * 64 + symbol];
        x = (slot & 0xffff) * (x >> kPrecision) + at - (slot >> 16);
      }
      bool low = active && x < kLow;
      uint32_t next = words.take(low);
      if (low) x = x << 16 | next;
      bool escapes = active && symbol == kEscape;
      uint32_t escaping = ballot(escapes);
      if (active && !escapes)
        out[c] = kind == kTokenScales ? T::store(float(int(symbol) + kFirst) / middle * scale) : value_of<T>(int(symbol), step, centre);
      if (escaping != 0) {
        constexpr int kEach = sizeof(Bits) == 4 ? 2 : 1;
        int number = words.at + words.taken + kEach * count_ones(escaping & lanes_below());
        if (escapes) out[c] = Bits(words.word(number) | (kEach == 2 ? words.word(number + 1) << 16 : 0));
        words.skip(kEach * count_ones(escaping));
      }
    }
  }
  return ballot(x != kLow || !words.through()) == 0 ? kOk : kBadWords;
}

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

template <typename T>
KVZ_KERNEL decode_tiles(KvzGeometry g, KvzDecode* jobs, int32_t count, DecodeWork* work) {
  SharedFamily family(shared_memory());
  for (int32_t ticket = next_ticket(&work->next); ticket < work->tiles; ticket = next_ticket(&work->next)) {
    int32_t low = 0, high = count;  // The last stream that begins at the ticket or before, and has tiles.
    while (high - low > 1) {
      int32_t middle = (low + high) / 2;
      if (work->before[middle] <= ticket) low = middle;
      else high = middle;
    }
    KvzDecode& job = jobs[low];
    if (from_lane(job.error, 0) != kOk) continue;
    Stream stream;
    int64_t offset = 0;
    parse_header(g, job.stream, job.size, stream, offset);
    const Header& h = stream.header;
    int tile = ticket - work->before[low];
    TilePlace place(g, h, tile);
    const uint8_t *from = stream.tile_begin(tile), *end = stream.tile_end(tile);
    typename T::Bits* to = static_cast<typename T::Bits*>(job.target) + place.plane * job.plane_stride + int64_t(place.token) * g.hidden + place.column;
    uint32_t kind = stream.kind(tile);
    int32_t error = kBadDirectory;
    if (kind == kRaw) error = copy_raw(from, end, g.hidden, place.rows, place.width, to);
    else if (kind == kConst) error = fill_constant(from, end, g.hidden, place.rows, place.width, to);
    else if (h.mode == kCacheGen ? kind == kTokenScales : kind == kChannelSteps || kind == kOneStep)
      error = place.width <= kFewGroups * kLanes ? decode_symbols<T, true>(g, stream, family, kind, from, end, place, to)
                                                 : decode_symbols<T, false>(g, stream, family, kind, from, end, place, to);
    if (lane() == 0 && error != kOk) blame(job, error, from - job.stream);
  }
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
