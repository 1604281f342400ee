// Any values: every instruction set writes the same stream, within its bound, and what it decodes to is as near to them as
// the stream says.
//
// Input: geometry and settings, one byte each, then the bytes of elements, over and over.
#include "values.h"

namespace {

struct Input {
  const uint8_t* at;
  const uint8_t* end;
  int take(int from, int to) { return from + (at < end ? *at++ : 0) % (to - from + 1); }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fuzz;
  Input input{data, data + size};
  KvzGeometry g{input.take(kBF16, kByte), input.take(1, 2), input.take(1, 40), input.take(1, 80)};
  const int large = input.take(0, 9);
  if (large == 9) g.tokens *= 13;  // More than one tile of tokens.
  if (large == 8) g.hidden *= 5;
  KvzSettings s{};
  s.mode = input.take(kStep, kModes);
  if (!encodes(s.mode, g)) s.mode = kLossless;
  // A tile costs 4096 operations a channel however small it is: few of them, so that many inputs are tried.
  s.band = std::min(std::max(input.take(1, 160), g.hidden / 4), g.hidden);
  s.tile_tokens = input.take(0, 3) ? 256 : std::max(input.take(1, 256), std::min(g.tokens / 2, 256));
  s.shared_from = input.take(0, 2) * s.band;
  if (s.shared_from > g.hidden) s.shared_from = 0;
  s.step = kSteps[input.take(0, 255)];
  const int bins = input.take(4, 63), start = input.take(-1, 100) * 997;
  const bool weighted = input.take(0, 3) == 0, varied = input.take(0, 1) == 1;
  Planes source(g, 0);
  if (input.at < input.end) {
    uint64_t state = 1;
    for (int plane = 0; plane < g.planes; ++plane)
      for (int64_t i = 0; i < source.plane_bytes(); ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        source.plane(plane)[i] = uint8_t(input.at[(plane * 7 + i) % (input.end - input.at)] ^ (varied ? state >> 61 : 0));
      }
  }
  std::vector<float> weights(size_t(g.hidden), 1.0f);
  for (int c = 0; c < g.hidden; ++c) weights[size_t(c)] = 0.25f + float(c % 9);
  const std::vector<uint8_t> stream = encode(g, s, source, {weighted ? weights.data() : nullptr, bins, std::max(start, -1)});
  const Outcome outcome = decode(g, stream.data(), int64_t(stream.size()));
  EXPECT(outcome.error == kOk);
  check_values(source, stream.data(), outcome.values);
  return 0;
}
