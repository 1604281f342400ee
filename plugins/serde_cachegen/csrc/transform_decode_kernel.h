// Decoding the mode `klt` on a GPU: components of all tokens, then sums over them.
#pragma once
#include "decode_work.h"

namespace kvz {
namespace KVZ_NAMESPACE {

// What becomes of symbols: coefficients, in the unit that they are summed in.
struct ComponentTarget {
  using Bits = int16_t;
  int16_t* to;  // the first of the tile
  int64_t stride;
  const KvzBasis* basis;
  int first;

  using Channel = int;
  using Row = int;
  KVZ_DEVICE Channel channel(int c) const { return shift_of(*basis, first + c); }
  KVZ_DEVICE Row row(int) const { return 0; }
  KVZ_DEVICE Bits value(int symbol, Channel shift, Row) const { return escaped(uint32_t(symbol + kFirst), shift); }
  KVZ_DEVICE Bits escaped(uint32_t bits, Channel shift) const { return Bits(bits << shift); }
};

constexpr int kTokensTogether = 8, kPairsTogether = 256;  // Of a block of threads; pairs of components.
constexpr size_t kRestoreShared = kTokensTogether * (kPairsTogether + 2) * 4;

// One token of a pair of channels, from its sums.
template <typename T>
KVZ_DEVICE void write_pair(const KvzProfile& profile, const KvzBasis& basis, const ChannelPair& pair, uint32_t first, uint32_t second, int code,
                           uint32_t position, typename T::Bits* to) {
  float step = kSteps[code] * kOfSum;
  float a = basis.mean[pair.first] + float(int32_t(first)) * (step / basis.scale[pair.first]);
  float b = basis.mean[pair.second] + float(int32_t(second)) * (step / basis.scale[pair.second]);
  if (pair.rotation >= 0) {
    Rotation by = rotation_at(profile, position, pair.rotation);
    float turned = a * by.cosine - b * by.sine;
    b = b * by.cosine + a * by.sine;
    a = turned;
  }
  a = a < T::kMax ? a : T::kMax, b = b < T::kMax ? b : T::kMax;
  to[pair.first] = T::store(a > -T::kMax ? a : -T::kMax), to[pair.second] = T::store(b > -T::kMax ? b : -T::kMax);
}

// A block for some tokens of a plane of a stream, a thread for each pair of channels at a time.
template <typename T>
KVZ_KERNEL restore_tokens(KvzGeometry g, const KvzDecode* jobs, DecodeMemory memory) {
  int groups = int(ceil_div(g.tokens, kTokensTogether)), first = int(block() % groups) * kTokensTogether, plane = int(block() / groups % g.planes);
  const KvzDecode& job = jobs[block() / groups / g.planes];
  if (job.error != kOk) return;
  Stream stream;
  int64_t offset = 0;
  parse_header(g, job.stream, job.size, stream, offset);
  int32_t* parts = reinterpret_cast<int32_t*>(shared_memory());  // [tokens][pairs of components]
  int32_t *used = parts + kTokensTogether * kPairsTogether, *codes = used + kTokensTogether;
  if (thread() < kTokensTogether) {
    BlockHead head = first + thread() < g.tokens ? head_of(stream, g, plane, first + thread()) : BlockHead{0, 0, 0};
    used[thread()] = head.code == 0 ? 0 : head.used, codes[thread()] = head.code;
  }
  sync_block();
  int most = 0;
  for (int each = 0; each < kTokensTogether; ++each) most = used[each] > most ? used[each] : most;
  const int16_t* from = memory.coefficients + (block() / groups * g.tokens + first) * g.hidden;
  const KvzBasis& basis = job.bases[plane];
  const uint16_t* backward = reinterpret_cast<const uint16_t*>(basis.backward);
  for (int begin = 0; begin < g.hidden / 2; begin += threads()) {
    bool active = begin + thread() < g.hidden / 2;
    ChannelPair pair = channels_of(*job.profile, g.hidden, plane, active ? begin + thread() : 0);
    uint32_t a[kTokensTogether] = {}, b[kTokensTogether] = {};
    for (int part = 0; part < most; part += 2 * kPairsTogether) {
      sync_block();
      for (int each = thread(); each < kTokensTogether * kPairsTogether; each += threads()) {
        int token = each / kPairsTogether, j = part + 2 * (each % kPairsTogether);
        const int16_t* own = from + int64_t(token) * g.hidden + j;
        uint32_t low = j < used[token] ? uint16_t(own[0]) : 0, high = j + 1 < used[token] ? uint16_t(own[1]) : 0;
        parts[each] = int32_t(low | high << 16);
      }
      sync_block();
      int pairs = (most - part + 1) / 2 < kPairsTogether ? (most - part + 1) / 2 : kPairsTogether;
      for (int k = 0; k < pairs; ++k) {
        const uint16_t* row = backward + int64_t(part / 2 + k) * g.hidden;
        uint32_t left = row[pair.first], right = row[pair.second];
        KVZ_UNROLL
        for (int token = 0; token < kTokensTogether; ++token) {
          int32_t both = parts[token * kPairsTogether + k];
          a[token] = add_products(both, left, a[token]), b[token] = add_products(both, right, b[token]);
        }
      }
    }
    typename T::Bits* to = static_cast<typename T::Bits*>(job.target) + plane * job.plane_stride + int64_t(first) * g.hidden;
    KVZ_UNROLL
    for (int token = 0; token < kTokensTogether; ++token)
      if (active && codes[token] != 0)
        write_pair<T>(*job.profile, basis, pair, a[token], b[token], codes[token], uint32_t(start_of(stream) + first + token), to + int64_t(token) * g.hidden);
  }
}

}  // namespace KVZ_NAMESPACE
}  // namespace kvz
