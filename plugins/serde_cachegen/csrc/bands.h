// Decoding tiles of channels, side by side.
#pragma once
#include "reading.h"
#include "transform.h"
#include "writing.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// A tile of channels that is being decoded, row by row.
template <typename T>
struct Reader {
  using Bits = typename T::Bits;
  alignas(64) uint32_t x[kLanes];
  Words words;
  const uint32_t* bases;
  const float *steps, *centres;
  int width;

  // How it is kept is one of those with symbols. Its arrays are taken from `arena`.
  int32_t open(uint32_t kind, const uint8_t* from, const uint8_t* end, int columns, Arena& arena) {
    width = columns;
    int lanes = int(ceil_div(width, kLanes)) * kLanes, states = std::min(width, kLanes);
    int step_count = kind == kTokenScales ? 0 : kind == kOneStep ? 1 : width, centre_count = kind == kTokenScales ? 0 : width;
    int64_t side = int64_t(states) * 4 + step_count + centre_count + width;
    side += side & 1;
    if (end - from < side) return kBadDirectory;
    float *own_steps = arena.take<float>(lanes), *own_centres = arena.take<float>(lanes);
    uint32_t* own_bases = arena.take<uint32_t>(lanes);
    memcpy(x, from, size_t(states) * 4);
    const uint8_t* codes = from + states * 4;
    const int8_t* middles = reinterpret_cast<const int8_t*>(codes + step_count);
    const uint8_t* chosen = codes + step_count + centre_count;
    for (int c = 0; c < width; ++c) {
      if (chosen[c] >= kFamily) return kBadTable;
      own_steps[c] = step_count == 0 ? 1.0f : kSteps[codes[step_count == 1 ? 0 : c]];
      own_centres[c] = centre_count == 0 ? 0.0f : float(middles[c]), own_bases[c] = uint32_t(chosen[c]) << kPrecision;
    }
    if (((step_count + centre_count + width) & 1) && chosen[width] != 0) return kBadReserved;
    for (int c = width; c < lanes; ++c) own_steps[c] = own_centres[c] = 0.0f, own_bases[c] = 0;
    for (int lane = 0; lane < states; ++lane)
      if (x[lane] < kLow) return kBadWords;
    words = Words{from + side, end};
    steps = own_steps, centres = own_centres, bases = own_bases;
    return kOk;
  }

  // middle, scale: of `cachegen`, half the bins less one, and that of this token; else middle is 0.
  void row(float middle, float scale, Bits* out) {
    const uint32_t* tables = family().decode;
    for (int c = 0; c < width; c += kLanes) {
      alignas(64) uint8_t symbols[kLanes];
      int active = std::min(kLanes, width - c);
      if (active == kLanes) take_row<kPrecision>(x, tables, bases + c, symbols, words);
      else take_some<kPrecision>(x, tables, bases + c, active, symbols, words);
      if (middle == 0.0f && active == kLanes) {
        Bits values[kLanes];  // Bytes may be anybody's: written through `out`, they would keep vectors from it.
        for (int lane = 0; lane < kLanes; ++lane) values[lane] = value_of<T>(symbols[lane], steps[c + lane], centres[c + lane]);
        memcpy(out + c, values, sizeof values);
      } else if (middle == 0.0f) {
        for (int lane = 0; lane < active; ++lane) out[c + lane] = value_of<T>(symbols[lane], steps[c + lane], centres[c + lane]);
      } else {
        for (int lane = 0; lane < active; ++lane) {
          out[c + lane] = T::store(float(symbols[lane] + kFirst) / middle * scale);
        }
      }
      uint32_t escapes = escapes_of(symbols, active);
      if (__builtin_expect(escapes != 0, 0)) take_escapes(escapes, words, out + c);
    }
  }

  int32_t close() const { return ended_well(x, std::min(width, kLanes), words) ? kOk : kBadWords; }
};

// The tiles of one block of tokens, side by side: so that memory is written to in its order, and so that several lanes of
// one are on their way while those of another are.
template <typename T>
int32_t decode_block(const KvzGeometry& g, const Stream& stream, int64_t tile, int rows, float middle, const uint8_t* scales,
                     Arena arena, const uint8_t* begin, typename T::Bits* to, int64_t& offset) {
  const Header& h = stream.header;
  using Bits = typename T::Bits;
  struct Open {
    int column;
    int64_t offset;
  };
  int bands = int(ceil_div(g.hidden, h.band)), together = int(std::min(kBandsTogether, std::max<int64_t>(1, kColumnsTogether / h.band)));
  static_assert(sizeof(Reader<T>) <= 320, "there is room for them in the workspace");
  Reader<T>* readers = arena.take<Reader<T>>(together);
  Open* open = arena.take<Open>(together);
  for (int first = 0; first < bands; first += together) {
    Arena own = arena;
    int count = 0;
    for (int band = first; band < std::min(first + together, bands); ++band) {
      const uint8_t *from = stream.tile_begin(tile + band), *end = stream.tile_end(tile + band);
      int column = band * h.band, width = std::min<int>(h.band, g.hidden - column);
      uint32_t kind = stream.kind(tile + band);
      offset = from - begin;
      int32_t error = kOk;
      if (kind == kRaw) {
        error = restore_raw(from, end, g.hidden, rows, width, to + column);
      } else if (kind == kConst) {
        error = restore_constant(from, end, g.hidden, rows, width, to + column);
      } else if (kind != (scales != nullptr ? kTokenScales : kind == kOneStep ? kOneStep : kChannelSteps)) {
        error = kBadDirectory;
      } else {
        error = readers[count].open(kind, from, end, width, own);
        open[count++] = {column, offset};
      }
      if (error != kOk) return error;
    }
    for (int row = 0; row < rows; ++row) {
      float scale = 0.0f;
      if (scales != nullptr) {
        Bits bits;
        memcpy(&bits, scales + int64_t(row) * int64_t(sizeof bits), sizeof bits);
        scale = T::load(bits);
      }
      Bits* out = to + int64_t(row) * g.hidden;
      for (int each = 0; each < count; ++each) readers[each].row(middle, scale, out + open[each].column);
    }
    for (int each = 0; each < count; ++each) {
      offset = open[each].offset;
      int32_t error = readers[each].close();
      if (error != kOk) return error;
    }
  }
  return kOk;
}

template <typename T>
int32_t decode_bands(const KvzGeometry& g, const Stream& stream, const KvzDecode& job, Arena arena, int64_t& offset) {
  const Header& h = stream.header;
  using Bits = typename T::Bits;
  int64_t tile = 0;
  bool scaled = h.mode == kCacheGen;
  const uint8_t* table = stream.tables + kProfileBytes + 4;
  int32_t start = -1;
  if (h.mode == kKlt) {
    offset = kHeaderBytes;
    if (job.profile == nullptr || memcmp(job.profile->id, stream.tables, kProfileBytes) != 0) return kNoProfile;
    memcpy(&start, stream.tables + kProfileBytes, 4);
  }
  const uint8_t* scales = stream.tables + aligned(2 * g.planes);
  for (int plane = 0; plane < g.planes; ++plane) {
    Bits* to = static_cast<Bits*>(job.target) + plane * job.plane_stride;
    float middle = 0.0f;
    if (scaled) {
      uint16_t bins;
      memcpy(&bins, stream.tables + 2 * plane, 2);
      offset = kHeaderBytes + 2 * plane;
      if (bins < 4 || bins > 64) return kBadTable;
      middle = float(bins / 2 - 1);
    }
    for (int token = 0; token < g.tokens; token += h.tile_tokens) {
      int rows = std::min<int>(h.tile_tokens, g.tokens - token);
      if (h.mode == kKlt) {
        uint16_t head[2];
        memcpy(head, table, sizeof head);
        offset = table - job.stream;
        table += 4;
        if (head[1] != 0) {
          if (head[0] > job.bases[plane].rank || head[1] > 255 || !is_placed(*job.profile, plane, start, token, rows)) return kBadTable;
          TransformDecoder<T> decoder{g, stream, job, start};
          int32_t error = decoder.block(plane, token, tile, rows, head[0], head[1], arena, to + int64_t(token) * g.hidden, offset);
          if (error != kOk) return error;
          tile += ceil_div(g.hidden, h.band);
          continue;
        }
        if (head[0] != 0) return kBadReserved;
      }
      const uint8_t* of_block = nullptr;
      if (scaled) {
        of_block = scales + (int64_t(plane) * g.tokens + token) * int64_t(sizeof(Bits));
        for (int row = 0; row < rows; ++row) {
          Bits bits;
          memcpy(&bits, of_block + row * int64_t(sizeof bits), sizeof bits);
          offset = of_block + row * int64_t(sizeof bits) - job.stream;
          if (!is_finite(T::load(bits))) return kBadTable;
        }
      }
      int32_t error = decode_block<T>(g, stream, tile, rows, middle, of_block, arena, job.stream, to + int64_t(token) * g.hidden, offset);
      if (error != kOk) return error;
      tile += ceil_div(g.hidden, h.band);
    }
  }
  return kOk;
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
