// What a profile says of channels and positions: for processors and for kernels.
#pragma once
#include "layout.h"

namespace kvz {

KVZ_BOTH bool rotates(const KvzProfile& profile, int plane) { return plane == 0 && profile.rotary_size > 0; }

// Whether the positions of these tokens are known, or not asked for.
KVZ_BOTH bool is_placed(const KvzProfile& profile, int plane, int64_t start, int token, int rows) {
  return !rotates(profile, plane) || (start >= 0 && start + token + rows <= int64_t(1) << kPositionBits);
}

// The shift that a component has in the sums over components: there they all count in the same unit.
KVZ_BOTH int shift_of(const KvzBasis& basis, int component) { return kMostExponent - basis.exponents[component]; }

// Two channels that are worked on together: those of a pair, or, where nothing is rotated, any two.
struct ChannelPair {
  int first, second;
  int rotation;  // number of the pair in its head; -1: none
};
// which: below hidden / 2.
KVZ_BOTH ChannelPair channels_of(const KvzProfile& profile, int hidden, int plane, int which) {
  if (!rotates(profile, plane)) return {2 * which, 2 * which + 1, -1};
  int pairs = profile.rotary_size / 2, all = hidden / profile.head_size * pairs;
  if (which < all) {
    int head = which / pairs * profile.head_size, pair = which % pairs;
    return profile.interleaved ? ChannelPair{head + 2 * pair, head + 2 * pair + 1, pair} : ChannelPair{head + pair, head + pair + pairs, pair};
  }
  int left = profile.head_size - profile.rotary_size, number = 2 * (which - all), next = number + 1;
  return {number / left * profile.head_size + profile.rotary_size + number % left, next / left * profile.head_size + profile.rotary_size + next % left, -1};
}

struct Rotation {
  float cosine, sine;
};
// Of one pair at one position: a product over its bits, from the lowest.
KVZ_BOTH Rotation rotation_at(const KvzProfile& profile, uint32_t position, int pair) {
  Rotation it{1.0f, 0.0f};
  const float* by = profile.rotations + 2 * pair;
  for (; position != 0; position >>= 1, by += profile.rotary_size) {
    if ((position & 1u) == 0) continue;
    it = {it.cosine * by[0] - it.sine * by[1], it.cosine * by[1] + it.sine * by[0]};
  }
  return it;
}

}  // namespace kvz
