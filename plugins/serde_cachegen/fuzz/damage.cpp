// Every kind of damage that can be listed, done to streams of every mode and type. Run it under the sanitizers.
#include "examples.h"

namespace {

using namespace fuzz;
using Stream = std::vector<uint8_t>;

int64_t decoded = 0, refused = 0;

bool decodes(const KvzGeometry& g, const Stream& stream) {
  const bool well = decode(g, stream.data(), int64_t(stream.size())).error == kOk;
  (well ? decoded : refused) += 1;
  return well;
}

// Up to `most` of the numbers below `end`: all of them, or all near both ends and some of those between.
template <typename With>
void some_below(int64_t end, int64_t most, With&& with) {
  const int64_t near = most / 3, step = end <= most ? 1 : std::max<int64_t>(1, (end - 2 * near) / near);
  for (int64_t i = 0; i < end; i += end <= most || i < near || i >= end - near ? 1 : std::min(step, end - near - i)) with(i);
}

void cut_short(const KvzGeometry& g, const Stream& whole) {
  some_below(int64_t(whole.size()), 400, [&](int64_t length) {
    EXPECT(!decodes(g, {whole.begin(), whole.begin() + length}));
    Stream told(whole.begin(), whole.begin() + length);  // And it says that it is that long.
    if (length >= kHeaderBytes) {
      const uint32_t total = uint32_t(length);
      memcpy(told.data() + offsetof(Header, total), &total, 4);
      EXPECT(!decodes(g, told));
    }
  });
  Stream longer = whole;
  for (int extra = 0; extra < 8; ++extra) longer.push_back(0), EXPECT(!decodes(g, longer));
}

void flipped(const KvzGeometry& g, const Stream& whole) {
  Stream stream = whole;
  some_below(int64_t(whole.size()) * 8, 1500, [&](int64_t bit) {
    stream[size_t(bit / 8)] ^= uint8_t(1 << bit % 8);
    decodes(g, stream);
    stream[size_t(bit / 8)] ^= uint8_t(1 << bit % 8);
  });
}

void of_another_geometry(const Stream& whole, uint8_t choice) {
  for (int other = 0; other < 6 * kShapeCount; ++other)
    if (other != choice) EXPECT(!decodes(expected(uint8_t(other)), whole));
}

// Tiles that overlap, lie beyond the stream, are of any length and any kind.
void hostile_directory(const KvzGeometry& g, const Stream& whole, Random& random) {
  Header h;
  memcpy(&h, whole.data(), sizeof h);
  const size_t directory = sizeof h + h.table_bytes;
  const uint32_t units = uint32_t((whole.size() - directory - 4 * h.tiles) / 4);
  Stream stream = whole;
  for (int round = 0; round < 120; ++round) {
    uint32_t before = 0;
    for (uint32_t tile = 0; tile < h.tiles; ++tile) {
      uint32_t end = round % 4 == 0 ? random.next() & 0x1fffffff : round % 4 == 1 ? random.below(units + 2) : before + random.below(units - before + 1);
      if (round % 4 == 3 || tile + 1 == h.tiles) end = round % 2 ? units : end;  // In half of all rounds, all is in order.
      const uint32_t entry = random.below(8) << 29 | end;
      memcpy(stream.data() + directory + 4 * tile, &entry, 4);
      before = std::min(end, units);
    }
    decodes(g, stream);
  }
  stream = whole;
  for (uint32_t tile = 0; tile < std::min(h.tiles, 8u); ++tile) {  // Each tile as every kind.
    uint32_t entry;
    memcpy(&entry, whole.data() + directory + 4 * tile, 4);
    for (uint32_t kind = 0; kind < 8; ++kind) {
      const uint32_t as = (entry & 0x1fffffff) | kind << 29;
      memcpy(stream.data() + directory + 4 * tile, &as, 4);
      decodes(g, stream);
    }
    memcpy(stream.data() + directory + 4 * tile, &entry, 4);
  }
}

// Frequencies that add up to anything, symbols in any order, tables that end early; scales and bins of any value.
void hostile_tables(const KvzGeometry& g, const Stream& whole, Random& random) {
  Header h;
  memcpy(&h, whole.data(), sizeof h);
  for (int round = 0; h.table_bytes > 0 && round < 120; ++round) {
    Stream stream = whole;
    const uint32_t changes = round % 2 ? 1 + random.below(4) : h.table_bytes;
    for (uint32_t i = 0; i < changes; ++i) stream[sizeof h + random.below(h.table_bytes)] = uint8_t(random.next());
    decodes(g, stream);
  }
}

void random_streams(Random& random) {
  for (int round = 0; round < 20000; ++round) {
    Stream stream(random.below(400));
    for (uint8_t& byte : stream) byte = uint8_t(random.next());
    const KvzGeometry g = expected(uint8_t(random.below(6 * 7)));
    mend(g, uint8_t(random.below(8)), stream);
    decodes(g, stream);
  }
}

}  // namespace

int main() {
  Random random(2);
  int streams = 0;
  examples([&](const KvzGeometry& g, uint8_t choice, int, const Stream& whole) {
    EXPECT(decodes(g, whole));
    const bool large = whole.size() > 8000;
    cut_short(g, whole);
    if (!large) flipped(g, whole);
    if (!large) of_another_geometry(whole, choice);
    hostile_directory(g, whole, random);
    hostile_tables(g, whole, random);
    ++streams;
  });
  random_streams(random);
  printf("%d streams, damaged: %lld refused, %lld decoded, %d instruction sets\n", streams, static_cast<long long>(refused),
         static_cast<long long>(decoded), kvz_instructions() + 1);
}
