// Packed 1/1 layers on bit planes: one plane per channel, one bit per pixel. Plain C++ with C names: no torch, no Python.
//
// A word of 256 bits then holds 256 pixels of one channel. A kept weight costs one carry-save addition of such a word, a
// pruned one costs nothing, and BatchNorm with sign is a threshold that the counters start from: bitsliced.inl.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../native/team.h"
#include "rows.h"

namespace {

// A layer on one image. Planes of the output, of thresholds and of the shortcut lie `stride` bytes apart, a multiple of 64.
struct Job {
  const uint8_t* planes;    // the input's, shifted as the kernel's taps need them: see `expand`
  const uint16_t* index;    // which of them each filter adds, in units of `unit` bytes; behind the last one there are 3 to read
  const int32_t* starts;    // where in `index` the negative survivors of filter f begin [2 f], and the positive ones [2 f + 1]
  const uint8_t* init;      // [filters][sets][groups][bits]: which of a group's classes have that bit set in threshold - 1; or null
  const uint8_t* unions;    // [groups][8]: planes of the pixels in each subset of a group's (up to three) classes
  const uint64_t* present;  // per 8 bytes of a plane: the groups that lie in them, as bits
  const uint8_t* shortcut;  // [filters], or null
  uint8_t* out;             // [filters]
  uint8_t* counters;        // [filters][bits], in place of `out`, or null
  int64_t unit, stride, groups, sets, bits;
};

// 8 comparisons, as bits: least <= numbers, or if `falling` least >= numbers.
inline uint8_t reached(float least, const float* numbers, bool falling) {
#ifdef __SSE2__
  const __m128 bound = _mm_set1_ps(least), low = _mm_loadu_ps(numbers), high = _mm_loadu_ps(numbers + 4);
  const int bits = falling ? _mm_movemask_ps(_mm_cmpge_ps(bound, low)) | _mm_movemask_ps(_mm_cmpge_ps(bound, high)) << 4
                           : _mm_movemask_ps(_mm_cmple_ps(bound, low)) | _mm_movemask_ps(_mm_cmple_ps(bound, high)) << 4;
#else
  unsigned bits = 0;
  for (int k = 0; k < 8; k++) bits |= (unsigned)(falling ? least >= numbers[k] : least <= numbers[k]) << k;
#endif
  return (uint8_t)bits;
}

// A convolution of ordinary numbers on one image.
struct Pixels {
  const float* numbers;     // padded, columns of like phase side by side: see `mptify_packed_pixels`
  const int32_t* index;     // where each survivor finds its numbers, from a row's first on
  const int32_t* starts;    // where in `index` the negative survivors of filter f begin [2 f], and the positive ones [2 f + 1]
  const float* thresholds;  // [filters]
  const uint8_t* falling;   // [filters]
  uint8_t* out;             // planes [filters]
  int64_t filters, width, row_bytes, stride, step;  // `step`: from an output row's numbers to the next one's
};

// A layer that sees one pixel: 8 times `bytes` inputs.
struct Popcount {
  const uint8_t* input;    // one bit per input, 1 for +1
  const uint8_t* weights;  // [filters]: the mask's bits, and as many of signs, 0 where the mask is
  const int32_t* kept;     // [filters]
  float* out;              // [filters]
  int64_t bytes;
};

// A convolution of one image: `expand` makes its planes, `job` adds them up. The sum of a filter over a window is
// 2 * (positives - negatives) - bias, which depends on the window's class: on which of its taps lie in the image.
struct Conv {
  const uint8_t* image;
  const Shape* shape;
  const int64_t* phases;
  const Job* job;
  uint8_t* scratch;     // the expanded planes, and behind them one plane of zeros and 128 bytes
  const int16_t* bias;  // [filters][classes]
  const uint8_t* masks; // [kernel_w]: what a plane shifted as a whole may show; null unless the stride is 1 and rows keep their bytes
  int64_t in_stride, classes;
};

// Neighbouring pixels of one class (of two layers: of one class in each).
struct Run {
  int64_t begin, end;  // as the bits lie in a plane
  int64_t pixel;       // the first one, as the numbers lie in an image
  int64_t one, other;  // classes
};

// Two layers whose outputs are added: a sign is +1 where the sum of the first reaches what the table says for that of the second.
struct Join {
  const Conv* one;
  const Conv* other;
  const int16_t* table;  // [filters][span]: thresholds for sums of the second from -(span / 2) on
  const Run* runs;
  uint8_t* out;
  int64_t span, run_count, filters, stride;
};

}  // namespace

// -- kernels, once per instruction set ---------------------------------------------------------------------------------------

namespace {

// Words from byte `begin` to byte `end` of the planes, for filters [first, last).
struct Width {
  int64_t bytes;
  void (*run)(const Job&, int64_t begin, int64_t end, int64_t first, int64_t last);
};

struct Cpu {
  const char* name;
  void (*pixels)(const Pixels&, int64_t begin, int64_t end);
  void (*popcount)(const Popcount&, int64_t first, int64_t last);
  void (*expand_whole)(const Conv&, int64_t begin, int64_t end);
  void (*numbers_of)(const uint8_t* counters, int64_t stride, int bits, int64_t count, int16_t* numbers);
  void (*bits_of)(const uint8_t* bytes, int64_t count, uint8_t* bits);
  void (*sums_of_filter)(const Conv&, const Run*, int64_t run_count, int64_t f, const int16_t* numbers, float* sums);
  void (*compare_sums)(const Join&, int64_t f, const int16_t* ones, const int16_t* others, uint8_t* above);
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

// All words of the planes' first `bytes` bytes: as many of the widest as fit, and the rest in the narrowest that holds it.
void run_words(const Cpu& cpu, const Job& job, int64_t bytes, int64_t first, int64_t last) {
  const Width& widest = cpu.widths.front();
  const int64_t whole = bytes / widest.bytes * widest.bytes;
  if (whole) widest.run(job, 0, whole, first, last);
  if (whole == bytes) return;
  for (size_t i = cpu.widths.size(); i-- > 0;)
    if (cpu.widths[i].bytes >= bytes - whole) return cpu.widths[i].run(job, whole, bytes, first, last);
}

const Cpu& cpu_of(int which) { return which < 0 ? cpus().back() : cpus()[which]; }

// work(begin, end) on parts of [0, count), none of them shorter than `grain`.
template <class Work>
void in_parts(int64_t count, int threads, int64_t grain, const Work& work) {
  const int parts = (int)std::max<int64_t>(1, std::min<int64_t>(threads, count / grain));
  in_team(parts, [&](int part) { work(count * part / parts, count * (part + 1) / parts); });
}

// The planes that a convolution adds, from its image.
void prepare(const Cpu& cpu, const Conv& conv, int threads) {
  const Shape& shape = *conv.shape;
  in_parts(shape.channels, threads, 16, [&](int64_t begin, int64_t end) {
    if (conv.masks) return cpu.expand_whole(conv, begin, end);
    expand(conv.image, shape, conv.phases, conv.in_stride, conv.scratch, begin, end);
  });
  const int64_t planes = shape.channels * shape.kernel_w * shape.phases * shape.rows * shape.out_bytes;
  std::memset(conv.scratch + planes, 0, (size_t)(shape.rows * shape.out_bytes + 128));
}

Job job_of(const Conv& conv, uint8_t* counters) {
  Job job = *conv.job;
  job.planes = conv.scratch;
  job.counters = counters;
  return job;
}

// A thread's room for the numbers of one filter after the other.
class Numbers {
 public:
  const int64_t count;  // of pixels, as the bits lie in a plane

  explicit Numbers(const Conv& conv)
      : count(8 * conv.shape->out_height * conv.shape->out_bytes),
        counters_((size_t)(conv.job->bits * conv.job->stride)),
        numbers_((size_t)count + 16),
        job_(job_of(conv, counters_.data())) {}

  const int16_t* of(const Cpu& cpu, int64_t f) {
    run_words(cpu, job_, count / 8, f, f + 1);
    cpu.numbers_of(counters_.data(), job_.stride, (int)job_.bits, count, numbers_.data());
    return numbers_.data();
  }

 private:
  std::vector<uint8_t> counters_;
  std::vector<int16_t> numbers_;
  Job job_;
};

}  // namespace

extern "C" {

int mptify_packed_edition() { return 3; }

int mptify_packed_cpus() { return (int)cpus().size(); }

const char* mptify_packed_cpu(int which) { return cpus()[which].name; }

// One image through a layer: into its job's `out` planes, or with `sums` into the sums themselves (float32, [filters][height][width]).
void mptify_packed_conv(const Conv* conv, int64_t filters, float* sums, const Run* runs, int64_t run_count, int which_cpu, int threads) {
  const Cpu& cpu = cpu_of(which_cpu);
  const Shape& shape = *conv->shape;
  prepare(cpu, *conv, threads);
  in_parts(filters, threads, 4, [&](int64_t first, int64_t last) {
    if (sums == nullptr) return run_words(cpu, job_of(*conv, nullptr), shape.out_height * shape.out_bytes, first, last);
    Numbers room(*conv);
    for (int64_t f = first; f < last; f++)
      cpu.sums_of_filter(*conv, runs, run_count, f, room.of(cpu, f), sums + f * shape.out_height * shape.out_width);
  });
}

// One image each through two layers, and the signs of what their outputs add up to.
void mptify_packed_join(const Join* join, int which_cpu, int threads) {
  const Cpu& cpu = cpu_of(which_cpu);
  prepare(cpu, *join->one, threads);
  prepare(cpu, *join->other, threads);
  in_parts(join->filters, threads, 4, [&](int64_t first, int64_t last) {
    Numbers one(*join->one), other(*join->other);
    std::vector<uint8_t> above((size_t)one.count + 16);
    for (int64_t f = first; f < last; f++) {
      cpu.compare_sums(*join, f, one.of(cpu, f), other.of(cpu, f), above.data());
      cpu.bits_of(above.data(), one.count, join->out + f * join->stride);
    }
  });
}

// One image through a first layer. `scratch` holds [channels][phases of columns][padded rows][length] floats, all zeros but for
// what is written here, and 256 more.
void mptify_packed_pixels(
    const float* image, const Shape* shape, const Pixels* given, float* scratch, int64_t length, int which_cpu, int threads) {
  const Cpu& cpu = cpu_of(which_cpu);
  const int64_t rows = shape->height + 2 * shape->pad_h, step = shape->stride_w;
  for (int64_t channel = 0; channel < shape->channels; channel++)
    for (int64_t y = 0; y < shape->height; y++) {
      const float* from = image + (channel * shape->height + y) * shape->width;
      for (int64_t phase = 0; phase < step; phase++) {
        float* to = scratch + ((channel * step + phase) * rows + y + shape->pad_h) * length;
        const int64_t first = (shape->pad_w - phase + step - 1) / step;  // of the phase's columns, the first that is no padding
        int64_t x = first * step + phase - shape->pad_w;
        for (int64_t i = std::max<int64_t>(first, 0); i < length && x < shape->width; i++, x += step) to[i] = from[x];
      }
    }
  Pixels job = *given;
  job.numbers = scratch;
  in_parts(shape->out_height, threads, 4, [&](int64_t begin, int64_t end) { cpu.pixels(job, begin, end); });
}

void mptify_packed_popcount(const Popcount* job, int64_t filters, int which_cpu, int threads) {
  const Cpu& cpu = cpu_of(which_cpu);
  in_parts(filters, threads, 64, [&](int64_t begin, int64_t end) { cpu.popcount(*job, begin, end); });
}

// Planes from numbers: a bit is 1 where the number is at least 0. `steps` are the numbers' strides for channel, row and column.
void mptify_packed_pack(
    const float* numbers, const int64_t* steps, int64_t channels, int64_t height, int64_t width, uint8_t* planes, int64_t stride, int64_t row_bytes,
    int threads) {
  in_parts(channels, threads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++)
      for (int64_t y = 0; y < height; y++) {
        const float* from = numbers + channel * steps[0] + y * steps[1];
        uint8_t* row = planes + channel * stride + y * row_bytes;
        int64_t x = 0;
        if (steps[2] == 1)
          for (; x + 8 <= width; x += 8) row[x / 8] = reached(0, from + x, false);
        for (; x < width; x += 8) {
          unsigned bits = 0;
          for (int64_t k = 0; k < std::min<int64_t>(8, width - x); k++) bits |= (unsigned)(0 <= from[(x + k) * steps[2]]) << k;
          row[x / 8] = (uint8_t)bits;
        }
      }
  });
}

// ±1 from planes.
void mptify_packed_unpack(
    const uint8_t* planes, int64_t stride, int64_t row_bytes, int64_t channels, int64_t height, int64_t width, float* numbers, int threads) {
  in_parts(channels, threads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++)
      for (int64_t y = 0; y < height; y++) {
        const uint8_t* row = planes + channel * stride + y * row_bytes;
        float* to = numbers + (channel * height + y) * width;
        for (int64_t x = 0; x < width; x++) to[x] = row[x / 8] >> (x % 8) & 1 ? 1.0f : -1.0f;
      }
  });
}

// Largest value in each window, of planes that are thresholds of falling functions (`falling`) the smallest.
void mptify_packed_pool(
    const uint8_t* planes, int64_t in_stride, const Shape* shape, const uint8_t* falling, uint8_t* out, int64_t out_stride, int threads) {
  in_parts(shape->channels, threads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++) {
      const uint64_t turned = falling[channel] ? ~0ull : 0;  // min is not max of not
      PaddedRow most(shape->width, shape->pad_w + shape->kernel_w * shape->dilation_w + 64 * shape->stride_w);  // over a window's rows
      for (int64_t y = 0; y < shape->out_height; y++) {
        bool first = true;
        for (int64_t kh = 0; kh < shape->kernel_h; kh++) {
          const int64_t from = y * shape->stride_h + kh * shape->dilation_h - shape->pad_h;
          if (from < 0 || from >= shape->height) continue;
          most.take(planes + channel * in_stride + from * shape->in_bytes, [&](uint64_t before, uint64_t bits) {
            return (first ? 0 : before) | (bits ^ turned);
          });
          first = false;
        }
        const auto window = [&](int64_t bit) {  // the most in windows that begin at each of 64 pixels
          uint64_t bits = 0;
          for (int64_t kw = 0; kw < shape->kernel_w; kw++) bits |= most.at(bit + kw * shape->dilation_w - shape->pad_w);
          return bits;
        };
        for (int64_t x = 0; x < shape->out_width; x += 64) {
          const uint64_t bits = every(shape->stride_w, x * shape->stride_w, window);
          write_row(out + channel * out_stride + y * shape->out_bytes, shape->out_bytes, x, turned ? ~bits : bits);
        }
      }
    }
  });
}

}  // extern "C"
