// What the kernels are told: one layer on one image each.
#pragma once

#include <cstdint>

#include "rows.h"

namespace {

constexpr int MOST_GROUPS = 64;  // of classes of pixels

// A layer on one image. Planes of the output and of the shortcut lie `stride` bytes apart: 8, 16, 32, or a multiple of 64. What is behind
// a plane is read, but never written: it may be another thread's.
struct Job {
  const uint8_t* planes;    // the input's, as the kernel's taps need them: one strip of them, see strips.inl
  const uint16_t* index;    // which of them each filter adds, in units of `unit` bytes; behind the last one there are 3 to read
  const int32_t* starts;    // where in `index` filter f begins [2 f], and where its mixed pairs end [2 f + 1]: see bitsliced.inl
  const uint8_t* flipped;   // [filters]: of more negative survivors than positive ones the complement is counted, with signs turned
  const uint8_t* init;      // [filters][sets][groups][bits]: which of a group's classes have that bit set at the start
  const uint8_t* odd;       // [filters][groups]: of which classes sums are odd; null where signs are asked for
  const uint8_t* unions;    // [groups][8]: planes of the pixels in each subset of a group's (up to three) classes, `union_stride` bytes apart
  const uint64_t* present;  // per 8 bytes of a plane: the groups that lie in them, as bits
  const uint8_t* shortcut;  // [filters], or null
  uint8_t* out;             // [filters]
  uint8_t* counters;        // [filters][1 + bits] words, in place of `out`: sums in two's complement
  int64_t from;             // the byte of a plane at which the strip begins
  int64_t unit, stride, union_stride, groups, sets, bits;
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
  const float* numbers;     // padded, columns of like phase side by side: see `run_pixels`
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

// A convolution that sees few pixels: one row of bits per window.
struct Windows {
  const uint8_t* windows;  // [pixels], `step` bytes apart, a multiple of 32; behind the last one there is room for three more
  const uint8_t* weights;  // [filters]: `bytes` of the mask's bits, and as many of signs, 0 where the mask is
  const int32_t* bias;     // [filters][classes]: what a sum is if nothing differs; outside of the image every input is 0
  const uint8_t* classes;  // [pixels]
  int64_t pixels, step, bytes, class_count;
};

// A max-pool on one image.
struct Pooling {
  const uint8_t* planes;   // [channels], `in_stride` bytes apart
  const uint8_t* falling;  // [channels]: those of which the smallest is wanted; or null
  uint8_t* out;            // [channels], `stride` bytes apart
  const Shape* shape;
  int64_t in_stride, stride;

  // Whether four channels at a time can be done.
  bool is_short() const {
    return shape->pad_w + shape->width <= 128 && shape->pad_w < 64 && (shape->kernel_w - 1) * shape->dilation_w < 64 && shape->stride_w <= 2 &&
           shape->out_width <= 64;
  }
};

// A convolution's image, from which `expand` makes planes, strip by strip.
struct Conv {
  const uint8_t* image;
  const Shape* shape;
  const int64_t* phases;
  // [kernel_w]: what may be seen of a plane whose rows are shifted all at once, rounded up to 32 bytes, and 32 zeros; null unless the
  // stride is 1 and rows keep their bytes.
  const uint8_t* masks;
  int64_t in_stride;
  int64_t strip, part;  // bytes of the output that one strip is for, and bytes that a plane has in it

  int64_t planes() const { return shape->channels * shape->kernel_w * shape->phases; }
};

}  // namespace
