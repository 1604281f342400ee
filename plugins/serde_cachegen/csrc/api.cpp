// The C interface: checks what it is asked, and shares streams out among threads.
#include "kvz_api.h"

#include <atomic>
#include <thread>
#include <vector>

#define KVZ_NAMESPACE api
#include "codec.h"
#include "instructions.h"

namespace {

using namespace kvz;

bool sensible(const KvzGeometry& g) {
  return g.dtype >= kBF16 && g.dtype <= kByte && (g.planes == 1 || g.planes == 2) && g.tokens >= 1 && g.hidden >= 1 &&
         int64_t(g.planes) * g.tokens * g.hidden * element_bytes(g.dtype) < (int64_t(1) << 30);
}

bool sensible(const KvzGeometry& g, const KvzSettings& s) {
  if (s.mode == kLossless) return true;
  return (s.mode == kStep || s.mode == kCacheGen || s.mode == kKlt) && g.dtype != kByte && s.band >= 1 && s.band <= kMaxBand && s.band <= g.hidden && s.tile_tokens >= 1 &&
         s.tile_tokens <= kMaxTileTokens && s.shared_from >= 0 && s.shared_from <= g.hidden && s.shared_from % s.band == 0 &&
         (s.mode == kCacheGen || (s.step > 0.0f && s.step < 1e6f));
}

bool sensible(const KvzGeometry& g, const KvzProfile* profile, const KvzBasis* bases) {
  if (profile == nullptr || bases == nullptr || g.hidden % 2 != 0) return false;
  int rotary = profile->rotary_size;
  if (rotary != 0 && (rotary < 0 || rotary % 2 != 0 || rotary > profile->head_size || g.hidden % profile->head_size != 0)) return false;
  for (int plane = 0; plane < g.planes; ++plane)
    if (bases[plane].rank < 2 || bases[plane].rank % 2 != 0 || bases[plane].rank > g.hidden || !(bases[plane].sigma > 0.0f)) return false;
  return true;
}

const Instructions* chosen(int32_t instructions) {
#if defined(KVZ_X86)
  if (instructions == 2) return kvz_instructions() == 2 ? &kAvx512 : nullptr;
  if (instructions == 1) return kvz_instructions() >= 1 ? &kAvx2 : nullptr;
#endif
  return instructions == 0 ? &kPortable : nullptr;
}

// Calls work(number of the job, number of the thread) for each job, on this thread and some more.
template <typename Work>
void share(int32_t jobs, int32_t threads, Work&& work) {
  std::atomic<int32_t> next{0};
  auto run = [&](int32_t thread) {
    for (int32_t job; (job = next.fetch_add(1)) < jobs;) work(job, thread);
  };
  std::vector<std::thread> others;
  for (int32_t thread = 1; thread < threads && thread < jobs; ++thread) {
    try {
      others.emplace_back(run, thread);
    } catch (...) {  // No more threads are to be had.
      break;
    }
  }
  run(0);
  for (std::thread& each : others) each.join();
}

}  // namespace

extern "C" {

int64_t kvz_bound(const KvzGeometry* g, const KvzSettings* s) {
  if (!sensible(*g) || !sensible(*g, *s)) return -1;
  Cut cut(s->mode, g->tokens, g->hidden, s->band, s->tile_tokens);
  int64_t raw = int64_t(g->planes) * g->tokens * g->hidden * element_bytes(g->dtype), tiles = g->planes * cut.per_plane;
  return kHeaderBytes + table_bytes(s->mode, g->dtype, g->planes, g->tokens, s->tile_tokens) + 8 * tiles + raw + 64;
}

int64_t kvz_encode_workspace(const KvzGeometry* g, const KvzSettings* s) { return (encode_workspace(*g, *s) + 127) & ~int64_t(63); }

int64_t kvz_decode_workspace(const KvzGeometry* g, int32_t transformed) {
  return (kDecodeWorkspace + (transformed ? transform_workspace(*g) : 0) + 127) & ~int64_t(63);
}

int32_t kvz_instructions() {
#if defined(KVZ_X86)
  static const int32_t best = [] {
    __builtin_cpu_init();  // Each is asked for that the files are compiled with: virtual machines mask some.
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
    bool avx512 = avx2 && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
    return avx512 ? 2 : avx2 ? 1 : 0;
  }();
  return best;
#else
  return 0;
#endif
}

int32_t kvz_encode(const KvzGeometry* g, const KvzSettings* s, KvzEncode* jobs, int32_t count, uint8_t* workspace,
                   int32_t threads, int32_t instructions) {
  const Instructions* with = chosen(instructions);
  if (with == nullptr || !sensible(*g) || !sensible(*g, *s)) return kBadSettings;
  for (int32_t job = 0; job < count; ++job)
    for (int plane = 0; s->mode == kCacheGen && plane < g->planes; ++plane)
      if (jobs[job].bins[plane] < kLeastBins || jobs[job].bins[plane] > kMostBins) return kBadSettings;
  for (int32_t job = 0; s->mode == kKlt && job < count; ++job)
    if (!sensible(*g, jobs[job].profile, jobs[job].bases) || ceil_div(g->hidden, s->band) > kMaxReaders) return kBadSettings;
  int64_t each = kvz_encode_workspace(g, s);
  share(count, threads, [&](int32_t job, int32_t thread) { jobs[job].error = with->encode(*g, *s, jobs[job], workspace + thread * each); });
  for (int32_t job = 0; job < count; ++job)
    if (jobs[job].error != kOk) return jobs[job].error;
  return kOk;
}

int32_t kvz_decode(const KvzGeometry* g, KvzDecode* jobs, int32_t count, uint8_t* workspace, int32_t transformed, int32_t threads,
                   int32_t instructions) {
  const Instructions* with = chosen(instructions);
  if (with == nullptr || !sensible(*g)) return kBadSettings;
  for (int32_t job = 0; job < count; ++job)
    if (jobs[job].profile != nullptr && !(transformed && sensible(*g, jobs[job].profile, jobs[job].bases))) return kBadSettings;
  int64_t each = kvz_decode_workspace(g, transformed);
  share(count, threads, [&](int32_t job, int32_t thread) { jobs[job].error = with->decode(*g, jobs[job], workspace + thread * each); });
  for (int32_t job = 0; job < count; ++job)
    if (jobs[job].error != kOk) return jobs[job].error;
  return kOk;
}
}
