// What the mode `klt` needs beside the stream: cosines as components, which are at right angles to each other.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "../csrc/kvz.h"
#include "../csrc/kvz_api.h"

namespace fuzz {

class TestProfile {
 public:
  // For KV of `hidden` channels, an even number; null for an odd one, which has none. It is kept.
  static const TestProfile* of(int hidden) {
    static std::map<int, std::unique_ptr<TestProfile>> known;
    if (hidden % 2 != 0) return nullptr;
    std::unique_ptr<TestProfile>& found = known[hidden];
    if (found == nullptr) found.reset(new TestProfile(hidden));
    return found.get();
  }

  const KvzProfile* about() const { return &about_; }
  const KvzBasis* bases() const { return bases_; }

 private:
  explicit TestProfile(int hidden) : mean_(size_t(hidden)), scale_(size_t(hidden)) {
    const int heads = hidden % 8 == 0 ? 4 : 1, head_size = hidden / heads, rotary = head_size / 4 * 4 / 2 * 2;
    const double pi = acos(-1.0);
    for (int i = 0; i < hidden; ++i) mean_[size_t(i)] = float(i % 5 - 2), scale_[size_t(i)] = 0.5f + float(i % 7) * 0.25f;
    for (int bit = 0; bit < kvz::kPositionBits; ++bit)
      for (int pair = 0; pair < rotary / 2; ++pair) {
        const double angle = ldexp(pow(10000.0, -2.0 * pair / rotary), bit);
        rotations_.push_back(float(cos(angle))), rotations_.push_back(float(sin(angle)));
      }
    about_ = KvzProfile{{}, rotations_.data(), rotary, hidden % 3 == 0, head_size};
    for (int i = 0; i < 16; ++i) about_.id[i] = uint8_t(hidden + i);
    const int ranks[2] = {hidden, std::max(2, hidden / 4 * 2)};
    for (int plane = 0; plane < 2; ++plane) {
      const int rank = ranks[plane];
      forward_[plane].resize(size_t(rank) * size_t(hidden)), backward_[plane].resize(size_t(rank) * size_t(hidden));
      for (int j = 0; j < rank; ++j) {
        const double size = sqrt((j == 0 ? 1.0 : 2.0) / hidden);
        const int exponent = std::clamp(int(floor(-log2(size))), 0, kvz::kMostExponent);
        exponents_[plane].push_back(uint8_t(exponent));
        for (int c = 0; c < hidden; ++c) {
          const int8_t number = int8_t(std::clamp(rint(ldexp(size * cos(pi / hidden * (c + 0.5) * j), exponent) * 127), -127.0, 127.0));
          forward_[plane][size_t((c / 2 * rank + j) * 2 + c % 2)] = number;
          backward_[plane][size_t((j / 2 * hidden + c) * 2 + j % 2)] = number;
        }
      }
      bases_[plane] = KvzBasis{mean_.data(), scale_.data(), forward_[plane].data(), backward_[plane].data(), exponents_[plane].data(), 2.0f, rank};
    }
  }

  std::vector<float> mean_, scale_, rotations_;
  std::vector<int8_t> forward_[2], backward_[2];
  std::vector<uint8_t> exponents_[2];
  KvzProfile about_;
  KvzBasis bases_[2];
};

}  // namespace fuzz
