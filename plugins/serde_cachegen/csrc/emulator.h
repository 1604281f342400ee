// Runs kernels on a processor: every thread of a block is a fibre, and a fibre goes on until it waits for others. Slow, and
// exact: what the threads of a warp tell each other, and who waits for whom, is as on a GPU. A block whose threads wait
// for what never comes ends the process, with a word.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define KVZ_KERNEL static void
#define KVZ_DEVICE inline
#define KVZ_UNROLL
#define KVZ_BOUNDS(threads, blocks)
#define KVZ_LAUNCH(kernel, blocks, threads, shared, stream, ...) \
  ((void)(stream), kvz::emulate(int64_t(blocks), threads, shared, [&] { kernel(__VA_ARGS__); }))

namespace kvz {

struct Meeting {  // Where threads wait for each other.
  int expected = 0, arrived = 0;
  int64_t round = 0;
};

struct Emulated {
  struct Fibre {
    jmp_buf context;
    bool begun = false, done = false;
  };
  std::vector<Fibre> fibres;
  std::vector<Meeting> warps;
  std::vector<uint64_t> told;  // By warp, round and lane: a round may begin before everybody has read the one before.
  Meeting all;
  std::vector<uint8_t> shared;
  std::function<void()> body;
  jmp_buf scheduler;
  int current = 0;
  int64_t number = 0, count = 0, meetings = 0;
};
inline thread_local Emulated* emulated = nullptr;

inline int thread() { return emulated->current; }
inline int threads() { return int(emulated->fibres.size()); }
inline int64_t block() { return emulated->number; }
inline int64_t blocks() { return emulated->count; }
inline uint8_t* shared_memory() { return emulated->shared.data(); }

// swapcontext would ask the system for the signal mask each time.
inline void leave() {
  if (!_setjmp(emulated->fibres[size_t(emulated->current)].context)) _longjmp(emulated->scheduler, 1);
}

inline void meet(Meeting& meeting) {
  int64_t round = meeting.round;
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0, meeting.round += 1, emulated->meetings += 1;
    return;
  }
  while (meeting.round == round) leave();
}
inline void sync_block() { meet(emulated->all); }
inline void sync_warp() { meet(emulated->warps[size_t(thread() / 32)]); }

// Everybody's value, for everybody.
inline const uint64_t* tell(uint64_t mine) {
  Meeting& warp = emulated->warps[size_t(thread() / 32)];
  uint64_t* told = emulated->told.data() + (thread() / 32 * 2 + warp.round % 2) * 32;
  told[thread() % 32] = mine;
  meet(warp);
  return told;
}
inline uint32_t ballot(bool mine) {
  const uint64_t* told = tell(mine);
  uint32_t mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= uint32_t(told[lane]) << lane;
  return mask;
}
template <typename V>
inline V from_lane(V mine, int lane) {
  uint64_t bits = 0;
  memcpy(&bits, &mine, sizeof mine);
  bits = tell(bits)[lane & 31];
  memcpy(&mine, &bits, sizeof mine);
  return mine;
}
inline int count_ones(uint32_t mask) { return __builtin_popcount(mask); }
inline uint32_t product_high(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline uint32_t add_products(int32_t pair, uint32_t bytes, uint32_t sum) {
  return sum + uint32_t(int16_t(pair) * int8_t(bytes)) + uint32_t(int16_t(uint32_t(pair) >> 16) * int8_t(bytes >> 8));
}
inline uint32_t every_other_byte(uint64_t value, bool odd) {
  uint32_t bytes = 0;
  for (int each = 0; each < 4; ++each) bytes |= uint32_t(value >> (16 * each + 8 * odd) & 0xff) << 8 * each;
  return bytes;
}
inline void multiply_bytes(const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t (&sums)[4]) {
  uint32_t left[32][4], right[32][2];  // of all lanes
  for (int half = 0; half < 2; ++half) {
    const uint64_t* told = tell(a[2 * half] | uint64_t(a[2 * half + 1]) << 32);
    for (int from = 0; from < 32; ++from) left[from][2 * half] = uint32_t(told[from]), left[from][2 * half + 1] = uint32_t(told[from] >> 32);
  }
  const uint64_t* told = tell(b[0] | uint64_t(b[1]) << 32);
  for (int from = 0; from < 32; ++from) right[from][0] = uint32_t(told[from]), right[from][1] = uint32_t(told[from] >> 32);
  for (int each = 0; each < 4; ++each) {
    int row = thread() % 32 / 4, column = thread() % 4 * 2 + each % 2;
    for (int k = 0; k < 32; ++k) {
      uint32_t one = left[row * 4 + k % 16 / 4][each / 2 + k / 16 * 2], other = right[column * 4 + k % 16 / 4][k / 16];
      sums[each] += (one >> k % 4 * 8 & 0xff) * (other >> k % 4 * 8 & 0xff);
    }
  }
}
inline void copy_later(void* to, const void* from, bool there) {
  if (there) memcpy(to, from, 4);
  else memset(to, 0, 4);
}
inline void end_copies() {}
template <int kLeft>
inline void wait_for_copies() {}
inline int32_t take_ticket(int32_t* counter) { return (*counter)++; }
inline void count_one(uint32_t* counter) { *counter += 1; }
inline bool first_to_set(int32_t* place, int32_t value) {
  if (*place != 0) return false;
  *place = value;
  return true;
}

inline void enter() {
  emulated->body();
  emulated->fibres[size_t(emulated->current)].done = true;
  leave();
}

inline void resume(Emulated::Fibre& fibre, char* stack, size_t size) {
  if (_setjmp(emulated->scheduler)) return;
  if (fibre.begun) _longjmp(fibre.context, 1);
  fibre.begun = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

inline void emulate(int64_t blocks, int thread_count, size_t shared_bytes, std::function<void()> body) {
  constexpr size_t kStack = 128 * 1024;
  static thread_local std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < size_t(thread_count)) stacks.emplace_back(new char[kStack]);
  Emulated machine;
  emulated = &machine;
  machine.body = std::move(body);
  machine.count = blocks;
  machine.fibres.resize(size_t(thread_count));
  for (machine.number = 0; machine.number < blocks; ++machine.number) {
    machine.warps.assign(size_t((thread_count + 31) / 32), Meeting{32, 0, 0});
    machine.told.assign(machine.warps.size() * 64, 0);
    machine.all = Meeting{thread_count, 0, 0};
    machine.shared.assign(shared_bytes, 0xA5);
    for (auto& fibre : machine.fibres) fibre.begun = fibre.done = false;
    for (bool busy = true; busy;) {
      busy = false;
      int64_t before = machine.meetings;
      bool ended = false;
      for (machine.current = 0; machine.current < thread_count; ++machine.current) {
        auto& fibre = machine.fibres[size_t(machine.current)];
        if (fibre.done) continue;
        resume(fibre, stacks[size_t(machine.current)].get(), kStack);
        busy = busy || !fibre.done, ended = ended || fibre.done;
      }
      if (busy && !ended && machine.meetings == before) {
        fprintf(stderr, "kernel: threads wait for others that never come\n");
        abort();
      }
    }
  }
  emulated = nullptr;
}

}  // namespace kvz
