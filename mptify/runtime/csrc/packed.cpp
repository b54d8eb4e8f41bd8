// Packed 1/1 layers on bit planes: one plane per channel, one bit per pixel. Plain C++ with C
// names: no torch, no Python.
//
// A word of 256 bits holds 256 pixels of one channel. A kept weight costs one addition of such a
// word into counters that are planes themselves. A pruned weight costs nothing. BatchNorm and sign
// are a threshold that the counters start from. See bit_counters.inl.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../../nn/csrc/source.h"
#include "bits.h"
#include "lane_code.h"
#include "step.h"
#include "thread_pool.h"

namespace {

struct KernelEntry {
  const char* name;
  void (*run)(const Step&, const Buffers&, ThreadPool&);
};

// All kernels for one instruction set.
struct Cpu {
  const char* name;
  int word_bytes;
  const KernelEntry* kernels;
};

namespace portable {
#define CPU_BYTES 16
#include "kernels.inl"
#undef CPU_BYTES
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__) && !defined(MPTIFY_ONE_CPU)
#define MPTIFY_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2")
#endif
namespace avx2 {
#define CPU_BYTES 32
#include "kernels.inl"
#undef CPU_BYTES
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,fma,bmi,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,fma,bmi,bmi2")
#endif
namespace avx512 {
#define CPU_BYTES 64
#include "kernels.inl"
#undef CPU_BYTES
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

// The instruction sets of this machine, the best last. The environment variable MPTIFY_CPU names the
// last one to use.
const std::vector<Cpu>& cpus() {
  static const std::vector<Cpu> found = [] {
    std::vector<Cpu> list = {{"portable", 16, portable::KERNELS}};
#ifdef MPTIFY_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi2"))
      list.push_back({"avx2", 32, avx2::KERNELS});
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
      list.push_back({"avx512", 64, avx512::KERNELS});
#endif
    if (const char* last = std::getenv("MPTIFY_CPU"))
      for (size_t i = 0; i < list.size(); i++)
        if (std::string(last) == list[i].name) list.resize(i + 1);
    return list;
  }();
  return found;
}

}  // namespace

extern "C" {

// The structures that Python fills: see `layout`.
const char* mptify_packed_layout() { return layout().c_str(); }

// The kernels. A step's `kernel` is the number of its kernel in this list.
int mptify_packed_kernels() { return (int)std::size(portable::KERNELS); }
const char* mptify_packed_kernel_name(int number) { return portable::KERNELS[number].name; }

// The instruction sets that this machine can run, the best last.
int mptify_packed_cpus() { return (int)cpus().size(); }
const char* mptify_packed_cpu_name(int number) { return cpus()[number].name; }

// The widest words that this machine has, in bytes.
int mptify_packed_word_bytes() { return cpus().back().word_bytes; }

// Whether mptify_packed_compile can make code for the best instruction set.
int mptify_packed_compiles() { return ProgramCode::is_possible(cpus().back().word_bytes); }

// Make machine code for those of a program's steps that it can be made for, as an instruction set
// allows it; `kernel` is the number of lanes_conv. The steps run without it too, but slower. Null
// if there is no code; otherwise release it when the steps do not run any more.
void* mptify_packed_compile(
    Step* steps, int64_t count, uint8_t* const* addresses, int kernel, int cpu) {
  const Cpu& chosen = cpu < 0 ? cpus().back() : cpus()[cpu];
  return ProgramCode::compile(steps, count, addresses, kernel, chosen.word_bytes);
}
void mptify_packed_release(void* code) { delete (ProgramCode*)code; }

// Run steps on images, one image after the other. Buffer b of image i lies at
// addresses[b] + i * strides[b]. `cpu` is the number of an instruction set, or -1 for the best.
void mptify_packed_run(
    const Step* steps, int64_t count, uint8_t* const* addresses, const int64_t* strides,
    int64_t images, int cpu, int threads) {
  const KernelEntry* kernels = (cpu < 0 ? cpus().back() : cpus()[cpu]).kernels;
  ThreadPool pool(std::max(1, threads));
  pool.work([&] {
    for (int64_t image = 0; image < images; image++)
      for (const Step* step = steps; step < steps + count; step++)
        kernels[step->kernel].run(*step, Buffers{addresses, strides, image}, pool);
  });
}

}  // extern "C"
