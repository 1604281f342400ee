// The build for processors: threads take the planes of layers in turn.
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "paged.h"

namespace {

using namespace kvp;

// How many tokens from `token` on lie side by side in one block, and in one chunk.
int64_t together(const KvpMove& m, int64_t token) {
  int64_t slot = m.slots[token], room = m.block_size - slot % m.block_size, count = 1;
  for (int64_t next = token + 1; count < room && next < m.begin + m.tokens; ++count, ++next)
    if (m.slots[next] != slot + count || m.chunk_of[next] != m.chunk_of[token]) break;
  return count;
}

template <bool kToPages>
void copy(uint8_t* page, uint8_t* chunk, int64_t bytes) {
  if (kToPages) memcpy(page, chunk, size_t(bytes));
  else memcpy(chunk, page, size_t(bytes));
}

template <bool kToPages>
void move_plane(const KvpMove& m, int64_t of) {
  const KvpPages& pages = pages_of(m, of);
  const int64_t row = row_bytes(m);
  const bool heads_joined = m.heads == 1 || pages.head == m.head_bytes;
  for (int64_t token = m.begin; token < m.begin + m.tokens;) {
    if (m.slots[token] < 0) {
      ++token;
      continue;
    }
    uint8_t *page = in_pages(m, of, m.slots[token]), *chunk = in_chunk(m, of, token);
    int64_t count = together(m, token);
    if (heads_joined && pages.slot == row) {
      copy<kToPages>(page, chunk, count * row);
    } else if (heads_joined) {
      for (int64_t each = 0; each < count; ++each) copy<kToPages>(page + each * pages.slot, chunk + each * row, row);
    } else {
      for (int64_t each = 0; each < count; ++each, page += pages.slot, chunk += row)
        for (int64_t head = 0; head < m.heads; ++head)
          copy<kToPages>(page + head * pages.head, chunk + head * m.head_bytes, m.head_bytes);
    }
    token += count;
  }
}

}  // namespace

extern "C" {

// 0, or 1 where the numbers make no sense. Addresses are not looked at.
KVP_API int32_t kvp_move(const KvpMove* move, int32_t threads) {
  if (!sensible(*move)) return 1;
  std::atomic<int64_t> next{0};
  const int64_t all = int64_t(move->planes) * move->layers;
  auto work = [&] {
    for (int64_t of; (of = next++) < all;) move->to_pages ? move_plane<true>(*move, of) : move_plane<false>(*move, of);
  };
  std::vector<std::thread> others;
  try {
    for (int32_t each = 1; each < threads && each < all; ++each) others.emplace_back(work);
  } catch (const std::exception&) {  // Fewer threads then.
  }
  work();
  for (auto& thread : others) thread.join();
  return 0;
}
}
