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

namespace {

// A layer on one image. Planes of the output, of thresholds and of the shortcut lie `stride` bytes apart, a multiple of 64.
struct Job {
  const uint8_t* planes;    // the input's, shifted as the kernel's taps need them: see `expand`
  const uint16_t* index;    // which of them each filter adds, in units of `unit` bytes
  const int64_t* starts;    // where in `index` the negative survivors of filter f begin [2 f], and the positive ones [2 f + 1]
  const uint8_t* init;      // [filters][sets][groups][bits]: which of a group's classes have that bit set in threshold - 1
  const uint8_t* unions;    // [groups][8]: planes of the pixels in each subset of a group's (up to three) classes
  const uint64_t* present;  // per 8 bytes of a plane: the groups that lie in them, as bits
  const uint8_t* shortcut;  // [filters], or null
  uint8_t* out;             // [filters]
  uint8_t* counters;        // [filters][bits], in place of `out`, or null
  int64_t unit, stride, groups, sets, bits;
};

inline uint64_t eight_bytes(const uint8_t* from) {
  uint64_t bits;
  std::memcpy(&bits, from, 8);
  return bits;
}

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
  const int64_t* starts;    // where in `index` the negative survivors of filter f begin [2 f], and the positive ones [2 f + 1]
  const float* thresholds;  // [filters]
  const uint8_t* falling;   // [filters]
  uint8_t* out;             // planes [filters]
  int64_t filters, width, row_bytes, stride, step;  // `step`: from an output row's numbers to the next one's
};

// A layer that sees one pixel: `blocks` times 256 inputs.
struct Popcount {
  const uint8_t* input;    // one bit per input, 1 for +1
  const uint8_t* weights;  // [filters][blocks]: 256 bits of the mask, and the 256 signs, 0 where the mask is
  const int32_t* kept;     // [filters]
  float* out;              // [filters]
  int64_t blocks;
};

}  // namespace

// -- one loop per instruction set and width of word -----------------------------------------------------------------------

#define WORD_BYTES 8
#define WORD_NAMESPACE portable_8
#include "bitsliced.inl"
#undef WORD_BYTES
#undef WORD_NAMESPACE
#define WORD_BYTES 16
#define WORD_NAMESPACE portable_16
#include "bitsliced.inl"
#undef WORD_BYTES
#undef WORD_NAMESPACE
#define PIXEL_FLOATS 4
#define PIXEL_NAMESPACE portable_pixels
#include "pixels.inl"
#undef PIXEL_FLOATS
#undef PIXEL_NAMESPACE
#define POPCOUNT_NAMESPACE portable_popcount
#include "popcount.inl"
#undef POPCOUNT_NAMESPACE

#if defined(__x86_64__) && defined(__GNUC__) && !defined(MPTIFY_ONE_CPU)
#define MPTIFY_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2")
#endif
#define WORD_BYTES 16
#define WORD_NAMESPACE avx2_16
#include "bitsliced.inl"
#undef WORD_BYTES
#undef WORD_NAMESPACE
#define WORD_BYTES 32
#define WORD_NAMESPACE avx2_32
#include "bitsliced.inl"
#undef WORD_BYTES
#undef WORD_NAMESPACE
#define PIXEL_FLOATS 8
#define PIXEL_NAMESPACE avx2_pixels
#include "pixels.inl"
#undef PIXEL_FLOATS
#undef PIXEL_NAMESPACE
#define POPCOUNT_AVX2
#define POPCOUNT_NAMESPACE avx2_popcount
#include "popcount.inl"
#undef POPCOUNT_NAMESPACE
#undef POPCOUNT_AVX2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,bmi,bmi2")
#endif
#define WORD_BYTES 16
#define WORD_NAMESPACE avx512_16
#include "bitsliced.inl"
#undef WORD_BYTES
#undef WORD_NAMESPACE
#define WORD_BYTES 32
#define WORD_NAMESPACE avx512_32
#include "bitsliced.inl"
#undef WORD_BYTES
#undef WORD_NAMESPACE
#define WORD_BYTES 64
#define WORD_NAMESPACE avx512_64
#include "bitsliced.inl"
#undef WORD_BYTES
#undef WORD_NAMESPACE
#define PIXEL_FLOATS 16
#define PIXEL_NAMESPACE avx512_pixels
#include "pixels.inl"
#undef PIXEL_FLOATS
#undef PIXEL_NAMESPACE
#define POPCOUNT_AVX2
#define POPCOUNT_NAMESPACE avx512_popcount
#include "popcount.inl"
#undef POPCOUNT_NAMESPACE
#undef POPCOUNT_AVX2
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

using Loop = void (*)(const Job&, int64_t, int64_t, int64_t, int64_t);
using PixelLoop = void (*)(const Pixels&, int64_t, int64_t);
using PopcountLoop = void (*)(const Popcount&, int64_t, int64_t);

struct Width {
  int64_t bytes;
  Loop run;
};

// Widths of word, the widest first.
struct Cpu {
  const char* name;
  PixelLoop pixels;
  PopcountLoop popcount;
  std::vector<Width> widths;
};

const std::vector<Cpu>& cpus() {  // the best that this machine has comes last
  static const std::vector<Cpu> found = [] {
    std::vector<Cpu> list = {{"portable", portable_pixels::run, portable_popcount::run, {{16, portable_16::run_with}, {8, portable_8::run_with}}}};
#ifdef MPTIFY_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
      list.push_back({"avx2", avx2_pixels::run, avx2_popcount::run, {{32, avx2_32::run_with}, {16, avx2_16::run_with}, {8, portable_8::run_with}}});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
      list.push_back({"avx512", avx512_pixels::run, avx512_popcount::run, {{64, avx512_64::run_with}, {32, avx512_32::run_with}, {16, avx512_16::run_with}, {8, portable_8::run_with}}});
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

// -- rows of bits -------------------------------------------------------------------------------------------------------------

inline uint64_t low_bits(int64_t count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }

// A row with zeros around it, so that 64 bits can be taken from anywhere.
class PaddedRow {
 public:
  PaddedRow(int64_t width, int64_t reach) : width_(width), margin_((reach + 7) / 8 + 8), bytes_((width + 7) / 8 + 2 * margin_ + 16) {}

  uint8_t* row() { return bytes_.data() + margin_; }

  void end_row() {  // what lies behind the last pixel means nothing
    if (width_ % 8) row()[width_ / 8] &= (uint8_t)low_bits(width_ % 8);
  }

  uint64_t at(int64_t bit) const {
    const int64_t from = bit + 8 * margin_, skipped = from % 8;
    if (from < 0 || from / 8 + 9 > (int64_t)bytes_.size()) return 0;
    const uint8_t* first = bytes_.data() + from / 8;
    return skipped ? eight_bytes(first) >> skipped | (uint64_t)first[8] << (64 - skipped) : eight_bytes(first);
  }

  inline uint64_t every(int64_t bit, int64_t step) const;  // 64 bits, `step` bits apart

 private:
  int64_t width_, margin_;
  std::vector<uint8_t> bytes_;
};

// Every second bit, from the first on, moved together into the lower half.
inline uint64_t even_bits(uint64_t x) {
  x &= 0x5555555555555555ull;
  x = (x | x >> 1) & 0x3333333333333333ull;
  x = (x | x >> 2) & 0x0f0f0f0f0f0f0f0full;
  x = (x | x >> 4) & 0x00ff00ff00ff00ffull;
  x = (x | x >> 8) & 0x0000ffff0000ffffull;
  return (x | x >> 16) & 0x00000000ffffffffull;
}

inline uint64_t PaddedRow::every(int64_t bit, int64_t step) const {
  if (step == 1) return at(bit);
  if (step == 2) return even_bits(at(bit)) | even_bits(at(bit + 64)) << 32;
  uint64_t found = 0;
  for (int64_t i = 0; i < 64; i++) found |= (at(bit + i * step) & 1) << i;
  return found;
}

inline void write_row(uint8_t* row, int64_t bytes, int64_t at, uint64_t bits) {
  switch (const int64_t left = bytes - at / 8) {  // of a length that is known, a copy is an instruction or two
    case 1: return (void)std::memcpy(row + at / 8, &bits, 1);
    case 2: return (void)std::memcpy(row + at / 8, &bits, 2);
    case 4: return (void)std::memcpy(row + at / 8, &bits, 4);
    case 7: return (void)std::memcpy(row + at / 8, &bits, 7);
    default: return (void)(left >= 8 ? std::memcpy(row + at / 8, &bits, 8) : std::memcpy(row + at / 8, &bits, left));
  }
}

struct Shape {  // of a convolution, as Python gives it
  int64_t channels, height, width, in_bytes;        // of the input; bytes of one of its rows
  int64_t out_height, out_width, out_bytes;         // likewise
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t phases, rows;                             // row phases of the taps, and rows of one expanded plane
};

// Planes [channel][kw][phase][row]: what the tap (kh, kw) sees of a channel, row by row of the output. Rows of taps above each
// other are rows of one plane, `stride_h` input rows apart; `phases` says which first rows occur.
void expand(const uint8_t* image, const Shape& shape, const int64_t* phases, int64_t in_stride, uint8_t* planes, int64_t begin, int64_t end) {
  const int64_t plane = shape.rows * shape.out_bytes, taps = shape.kernel_w, reach = shape.pad_w + taps * shape.dilation_w;
  const uint64_t in_mask = low_bits(shape.width), out_mask = low_bits(shape.out_width);
  const bool one_number = shape.stride_w <= 2 && shape.width + reach <= 64;  // a row with its padding
  PaddedRow padded(shape.width, reach + 64 * shape.stride_w);
  for (int64_t channel = begin; channel < end; channel++)
    for (int64_t phase = 0; phase < shape.phases; phase++)
      for (int64_t j = 0; j < shape.rows; j++) {
        const int64_t y = j * shape.stride_h + phases[phase] - shape.pad_h;
        uint8_t* row = planes + (channel * taps * shape.phases + phase) * plane + j * shape.out_bytes;  // of the first tap
        if (y < 0 || y >= shape.height) {
          for (int64_t kw = 0; kw < taps; kw++) std::memset(row + kw * shape.phases * plane, 0, shape.out_bytes);
          continue;
        }
        const uint8_t* from = image + channel * in_stride + y * shape.in_bytes;
        if (one_number) {
          uint64_t bits = (eight_bytes(from) & in_mask) << shape.pad_w;  // behind the last plane there is room to read
          for (int64_t kw = 0; kw < taps; kw++, row += shape.phases * plane, bits >>= shape.dilation_w)
            write_row(row, shape.out_bytes, 0, (shape.stride_w == 2 ? even_bits(bits) : bits) & out_mask);
          continue;
        }
        std::memcpy(padded.row(), from, shape.in_bytes);
        padded.end_row();
        for (int64_t kw = 0; kw < taps; kw++, row += shape.phases * plane)
          for (int64_t x = 0; x < shape.out_width; x += 64)
            write_row(
                row, shape.out_bytes, x,
                padded.every(x * shape.stride_w + kw * shape.dilation_w - shape.pad_w, shape.stride_w) & low_bits(shape.out_width - x));
      }
}

// 8 bits, one per byte.
inline uint64_t spread(uint8_t bits) {
  return (((bits & 0x7full) * 0x0002040810204081ull) & 0x0101010101010101ull) | (uint64_t)(bits >> 7) << 56;
}

}  // namespace

extern "C" {

int mptify_packed_edition() { return 1; }

int mptify_packed_cpus() { return (int)cpus().size(); }

const char* mptify_packed_cpu(int which) { return cpus()[which].name; }

// One image through a layer: into `out` planes, or with `dots` into the sums themselves (float32, [filters][height][width]).
// `scratch` holds the expanded planes, and behind them 2 × 64 zero bytes and one plane of zeros.
// `bias` [filters][classes] is what 2 × (positives - negatives) exceeds the sum by, in each of the classes in `classes` [height][width].
void mptify_packed_conv(
    const uint8_t* image, int64_t in_stride, const Shape* shape, const int64_t* phases, const Job* given, int64_t filters, uint8_t* scratch,
    float* dots, const int16_t* bias, const uint8_t* classes, int64_t class_count, int which_cpu, int threads) {
  const Cpu& cpu = cpu_of(which_cpu);
  in_parts(shape->channels, threads, 16, [&](int64_t begin, int64_t end) { expand(image, *shape, phases, in_stride, scratch, begin, end); });
  const int64_t planes = shape->channels * shape->kernel_w * shape->phases * shape->rows * shape->out_bytes;
  std::memset(scratch + planes, 0, shape->rows * shape->out_bytes + 128);
  const int64_t bytes = shape->out_height * shape->out_bytes;
  in_parts(filters, threads, 4, [&](int64_t first, int64_t last) {
    Job job = *given;
    job.planes = scratch;
    if (dots == nullptr) return run_words(cpu, job, bytes, first, last);
    std::vector<uint8_t> counters(job.bits * job.stride);
    job.counters = counters.data();
    for (int64_t f = first; f < last; f++) {
      run_words(cpu, job, bytes, f, f + 1);
      float* sums = dots + f * shape->out_height * shape->out_width;
      const int16_t* biases = bias + f * class_count;
      for (int64_t y = 0; y < shape->out_height; y++)
        for (int64_t x = 0; x < shape->out_width; x += 8) {
          const uint8_t* byte = counters.data() + y * shape->out_bytes + x / 8;
          uint64_t low = 0, high = 0;
          for (int64_t i = 0; i < job.bits; i++) (i < 8 ? low : high) |= spread(byte[i * job.stride]) << (i % 8);
          const int shift = 16 - (int)job.bits;
          for (int64_t k = 0; k < 8 && x + k < shape->out_width; k++) {
            const uint16_t value = (uint16_t)((low >> (8 * k) & 0xff) | (high >> (8 * k) & 0xff) << 8);
            const int64_t pixel = y * shape->out_width + x + k;
            sums[pixel] = (float)(2 * ((int16_t)(uint16_t)(value << shift) >> shift) - biases[classes[pixel]]);
          }
        }
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
      const uint8_t turned = falling[channel] ? 0xff : 0;  // min is not max of not
      PaddedRow most(shape->width, shape->pad_w + shape->kernel_w * shape->dilation_w + 64 * shape->stride_w);  // over a window's rows
      for (int64_t y = 0; y < shape->out_height; y++) {
        std::memset(most.row(), 0, shape->in_bytes);
        for (int64_t kh = 0; kh < shape->kernel_h; kh++) {
          const int64_t from = y * shape->stride_h + kh * shape->dilation_h - shape->pad_h;
          if (from < 0 || from >= shape->height) continue;
          const uint8_t* source = planes + channel * in_stride + from * shape->in_bytes;
          for (int64_t i = 0; i < shape->in_bytes; i++) most.row()[i] |= source[i] ^ turned;
        }
        most.end_row();
        for (int64_t x = 0; x < shape->out_width; x += 64) {
          uint64_t bits = 0;
          for (int64_t kw = 0; kw < shape->kernel_w; kw++)
            bits |= most.every(x * shape->stride_w + kw * shape->dilation_w - shape->pad_w, shape->stride_w);
          write_row(out + channel * out_stride + y * shape->out_bytes, shape->out_bytes, x, turned ? ~bits : bits);
        }
      }
    }
  });
}

}  // extern "C"
