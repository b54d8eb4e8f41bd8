// Packed 1/1 layers on bit planes: one plane per channel, one bit per pixel. Plain C++ with C names: no torch, no Python.
//
// A word of 256 bits then holds 256 pixels of one channel. A kept weight costs an addition of such a word into counters that are
// planes themselves, a pruned one costs nothing, and BatchNorm with sign is a threshold that the counters start from: bitsliced.inl.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "crew.h"
#include "jobs.h"
#include "rows.h"

// -- kernels, once per instruction set ---------------------------------------------------------------------------------------

namespace {

// The word at byte `place` of the planes, for filters [first, last).
struct Width {
  int64_t bytes;
  void (*run)(const Job&, int64_t place, int64_t first, int64_t last);
};

struct Cpu {
  const char* name;
  void (*pixels)(const Pixels&, int64_t begin, int64_t end);
  void (*popcount)(const Popcount&, int64_t first, int64_t last);
  void (*expand)(const Conv&, int64_t strip, int64_t begin, int64_t end, uint8_t* planes);  // channels [begin, end)
  void (*pool_short)(const Pooling&, int64_t begin, int64_t end);
  void (*numbers_of)(const uint8_t* counters, int64_t bytes, int bits, int16_t* numbers);
  void (*compare_sums)(
      const int16_t* ones, const int16_t* others, const int16_t* table, int16_t most, int64_t bytes, int16_t* least, uint8_t* out);
  void (*sums_of_windows)(const Windows&, int64_t f, int32_t* sums);
  std::vector<Width> widths;  // of words, the widest first
};

namespace portable {
#define CPU_BYTES 16
#include "cpu.inl"
#undef CPU_BYTES
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__) && !defined(MPTIFY_ONE_CPU)
#define MPTIFY_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2")
#endif
namespace avx2 {
#define CPU_BYTES 32
#include "cpu.inl"
#undef CPU_BYTES
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,bmi,bmi2")
#endif
namespace avx512 {
#define CPU_BYTES 64
#include "cpu.inl"
#undef CPU_BYTES
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

const std::vector<Cpu>& cpus() {  // the best that this machine has comes last
  static const std::vector<Cpu> found = [] {
    std::vector<Cpu> list = {portable::kernels("portable")};
#ifdef MPTIFY_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) list.push_back(avx2::kernels("avx2"));
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) list.push_back(avx512::kernels("avx512"));
#endif
    return list;
  }();
  return found;
}

// The widest words that strips of `strip` bytes can be cut into.
const Width& widest_in(const Cpu& cpu, int64_t strip) {
  const Width* widest = &cpu.widths.front();
  while (strip % widest->bytes) widest++;
  return *widest;
}

// The narrowest that holds `bytes` bytes.
const Width& narrowest_for(const Cpu& cpu, int64_t bytes) {
  const Width* narrowest = &cpu.widths.back();
  while (narrowest->bytes < bytes) narrowest--;
  return *narrowest;
}

const Cpu& cpu_of(int which) { return which < 0 ? cpus().back() : cpus()[which]; }

// What a thread gets of [0, count), part by part.
class Ranges {
 public:
  Ranges(Crew::Parts* parts, int64_t count, int64_t all) : parts_(parts), count_(count), all_(all) {}

  bool next(int64_t& begin, int64_t& end) {
    int64_t first = 0, last = all_;
    if (parts_ ? !parts_->next(first, last) : alone_++) return false;
    begin = count_ * first / all_, end = count_ * last / all_;
    return true;
  }

 private:
  Crew::Parts* const parts_;  // null where one thread gets all
  const int64_t count_, all_;
  int alone_ = 0;
};

constexpr int64_t PARTS = 64;  // per thread, which takes several of them at a time

// work(ranges) on each thread, for parts of [0, count), none of them shorter than `grain`: more than threads, since one may be held up.
// `least`: see Crew::share.
template <class Work>
void in_ranges(int64_t count, Crew& crew, int64_t grain, uint32_t least, const Work& work) {
  const int64_t all = std::max<int64_t>(1, std::min<int64_t>(crew.threads > 1 ? PARTS * crew.threads : 1, count / grain));
  const auto of = [&](Crew::Parts* parts) {
    Ranges ranges(parts, count, all);
    work(ranges);
  };
  if (all == 1) return of(nullptr);
  crew.share((uint32_t)all, least, [&](Crew::Parts& parts) { of(&parts); });
}

// The same where threads need nothing of their own: work(begin, end) for each part.
template <class Work>
void in_parts(int64_t count, Crew& crew, int64_t grain, const Work& work) {
  in_ranges(count, crew, grain, 1, [&](Ranges& ranges) {
    for (int64_t begin, end; ranges.next(begin, end);) work(begin, end);
  });
}

}  // namespace

#include "steps.h"

extern "C" {

int mptify_packed_edition() { return 13; }

int mptify_packed_cpus() { return (int)cpus().size(); }

const char* mptify_packed_cpu(int which) { return cpus()[which].name; }

int mptify_packed_word() { return (int)cpus().back().widths.front().bytes; }  // the widest that this machine has, in bytes

// Steps on images, one image after the other. Array a of image i lies at arrays[a] + i * strides[a].
void mptify_packed_run(
    const Step* steps, int64_t count, uint8_t* const* arrays, const int64_t* strides, int64_t images, int which_cpu, int threads) {
  const Cpu& cpu = cpu_of(which_cpu);
  Crew crew(std::max(1, threads));
  crew.work([&] {
    for (int64_t image = 0; image < images; image++)
      for (const Step* step = steps; step < steps + count; step++) run_step(cpu, *step, Arrays{arrays, strides, image}, crew);
  });
}

}  // extern "C"
