// The build for processors: threads take some tokens of all layers in turn.
#include "rotate.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>
#if defined(KVR_X86)
#include <cpuid.h>
#endif

namespace kvr {
namespace portable { void rotate(const KvrRotate&, int64_t first, int64_t end); }
namespace avx2 { void rotate(const KvrRotate&, int64_t first, int64_t end); }
}  // namespace kvr

namespace {

using namespace kvr;

constexpr int64_t kTableBytes = 16 << 10;  // Of cosines and sines, which stay in the first cache with the rows.

typedef void (*Rotate)(const KvrRotate&, int64_t, int64_t);

#if defined(KVR_X86)
bool has_f16c() {  // Which not every compiler knows by name.
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

// instructions: 0 the best that there are, 1 those of any processor.
Rotate chosen(int32_t instructions) {
#if defined(KVR_X86)
  if (instructions == 0 && __builtin_cpu_supports("avx2") && has_f16c()) return avx2::rotate;
#endif
  (void)instructions;
  return portable::rotate;
}

}  // namespace

extern "C" {

// 0, or 1 where the numbers make no sense. Addresses are not looked at.
KVR_API int32_t kvr_rotate(const KvrRotate* r, int32_t threads, int32_t instructions) {
  if (!sensible(*r)) return 1;
  const Rotate rotate = chosen(instructions);
  const int64_t step = std::max<int64_t>(1, kTableBytes / (2 * int64_t(r->pairs) * int64_t(sizeof(float))));
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t first; (first = next.fetch_add(step)) < r->tokens;) rotate(*r, first, std::min(first + step, r->tokens));
  };
  std::vector<std::thread> others;
  try {
    for (int32_t each = 1; each < threads && each * step < r->tokens; ++each) others.emplace_back(work);
  } catch (const std::exception&) {  // Fewer threads then.
  }
  work();
  for (auto& thread : others) thread.join();
  return 0;
}
}
