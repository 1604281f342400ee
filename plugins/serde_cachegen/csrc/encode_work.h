// What kernels that encode have in common: tiles are coded apart, then moved together.
#pragma once
#include "kernels.h"
#include "rows.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// What is known of each tile before streams are put together.
struct TileDone {
  uint32_t kind;
  int32_t bytes;   // a multiple of 4
  int32_t words;   // of 16 bits, at the end of its room
  uint32_t states[kLanes];
};

// Scratch memory for the tiles of all jobs.
struct TileWork {
  int64_t tiles;    // of one stream
  int64_t room;     // words of 16 bits for one tile
  int32_t* next;    // tile that no warp has taken
  TileDone* done;   // [jobs][tiles]
  uint16_t* words;  // [jobs][tiles][room]

  void take(Arena& arena, int64_t jobs) {
    next = arena.take<int32_t>(1), done = arena.take<TileDone>(jobs * tiles), words = arena.take<uint16_t>(jobs * tiles * room);
  }
};

// Scratch memory of all jobs in modes that have blocks of tokens, cut into arrays.
struct EncodeWork : TileWork {
  int64_t blocks, channels;         // of one stream: blocks of tokens of all planes, channels of all of those
  float *means, *sigmas;            // [jobs][blocks][hidden], as the next: of `step`
  uint8_t* codes;
  int8_t* centres;
  uint8_t* chosen;                  // [jobs][blocks][hidden]
  float* squares;                   // [jobs][blocks of a plane][tile_tokens], as the next: of `step` with two planes
  uint8_t *sinks, *has_sinks;       // ... and [jobs][blocks of a plane]
  int64_t bytes;

  EncodeWork(const KvzGeometry& g, const KvzSettings& s, int64_t jobs, void* memory) {
    Cut cut(kStep, g.tokens, g.hidden, s.band, s.tile_tokens);
    tiles = g.planes * cut.per_plane, blocks = g.planes * cut.blocks, channels = blocks * g.hidden;
    int64_t rows = g.tokens < s.tile_tokens ? g.tokens : s.tile_tokens;
    // A tile with more words than its elements have is raw; there is room for those of one row more, so that it is enough to look once a row.
    int64_t most = s.band * (1 + escape_words(g.dtype));
    room = (rows * s.band * element_bytes(g.dtype) / 2 + most + 8 + 7) & ~int64_t(7);
    Arena arena{static_cast<uint8_t*>(memory)};
    take(arena, jobs);
    int64_t stepped = s.mode == kStep ? jobs * channels : 0;
    means = arena.take<float>(stepped), sigmas = arena.take<float>(stepped);
    codes = arena.take<uint8_t>(stepped), centres = arena.take<int8_t>(stepped), chosen = arena.take<uint8_t>(jobs * channels);
    int64_t searched = s.mode == kStep && g.planes == 2 ? jobs * cut.blocks : 0;
    squares = arena.take<float>(searched * s.tile_tokens), sinks = arena.take<uint8_t>(searched * s.tile_tokens), has_sinks = arena.take<uint8_t>(searched);
    bytes = arena.at - static_cast<uint8_t*>(memory) + 64;
  }
};

// One block of tokens of one plane of one stream.
struct BlockPlace {
  int64_t job, number;  // of the job; of the block in its stream
  int plane, token, rows;
  KVZ_DEVICE BlockPlace(const KvzGeometry& g, const KvzSettings& s, int64_t blocks, int64_t which) {
    int per_plane = int(ceil_div(g.tokens, s.tile_tokens));
    job = which / blocks, number = which % blocks;
    plane = int(number) / per_plane, token = int(number) % per_plane * s.tile_tokens;
    rows = g.tokens - token < s.tile_tokens ? g.tokens - token : s.tile_tokens;
  }
};

// A symbol of each lane that is active: words, of which there may be as many, go before `end`. Stores are all that is not done by
// every lane, so that there is nothing to branch for.
template <int kBits>
KVZ_DEVICE void put_symbols(bool active, uint32_t slot, uint32_t inverse, uint16_t*& end, uint32_t& x) {
  uint32_t frequency = slot & 0xffff, before = slot >> 16 & 0x7fff;
  bool full = active && x >> (32 - kBits) >= frequency;
  uint32_t filling = ballot(full);
  end -= count_ones(filling);
  uint16_t* to = end + count_ones(filling & lanes_below());
  if (full) *to = uint16_t(x);
  uint32_t left = full ? x >> 16 : x, quotient = product_high(left, inverse);
  if (left - quotient * frequency >= frequency) quotient += 1;  // It was exact, or one too small.
  uint32_t after = left + before + quotient * ((1u << kBits) - frequency);
  x = active ? after : x;
}

KVZ_DEVICE Header header_of(const KvzGeometry& g, int mode, int64_t tiles, int64_t table_bytes) {
  Header header{};
  header.magic = kMagic, header.version = kVersion, header.mode = uint8_t(mode), header.dtype = uint8_t(g.dtype), header.planes = uint8_t(g.planes);
  header.tokens = uint32_t(g.tokens), header.hidden = uint32_t(g.hidden), header.tiles = uint32_t(tiles), header.table_bytes = uint32_t(table_bytes);
  return header;
}

// A warp: the header and the directory of a stream, whose tiles are `done`.
KVZ_DEVICE void finish_stream(Header header, const TileDone* done, KvzEncode& job) {
  uint8_t* begin = job.out + kHeaderBytes + header.table_bytes;
  uint32_t* directory = reinterpret_cast<uint32_t*>(begin);
  int64_t tiles = header.tiles, end = 0;
  for (int64_t first = 0; first < tiles; first += kLanes) {
    int64_t tile = first + lane();
    int quarters = sum_to_here(tile < tiles ? done[tile].bytes / 4 : 0);
    if (tile < tiles) directory[tile] = done[tile].kind << 29 | uint32_t(end / 4 + quarters);
    end += 4 * int64_t(from_lane(quarters, kLanes - 1));
  }
  if (lane() != 0) return;
  header.total = uint32_t(begin - job.out + 4 * tiles + end);
  memcpy(job.out, &header, sizeof header);
  job.size = header.total, job.error = kOk;
}

// Where a tile of so many bytes is to be in a stream with a header and a directory.
KVZ_DEVICE uint8_t* place_of(const KvzEncode& job, int64_t tile, int32_t bytes) {
  Header header;
  memcpy(&header, job.out, sizeof header);
  uint8_t* directory = job.out + kHeaderBytes + header.table_bytes;
  uint32_t entry;
  memcpy(&entry, directory + 4 * tile, 4);
  return directory + 4 * int64_t(header.tiles) + 4 * int64_t(entry & 0x1fffffff) - bytes;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
