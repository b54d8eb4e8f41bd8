// Rows of bits: shifted, thinned out, and put together again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

inline uint64_t load_word(const uint8_t* from) {
  uint64_t bits;
  std::memcpy(&bits, from, 8);
  return bits;
}

inline uint64_t low_bits(int64_t count) {
  return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1;
}

// A row with zeros around it, so that we can read 64 bits anywhere. It is written in whole words: a
// read that spans several earlier, smaller writes has to wait for memory.
class PaddedRow {
 public:
  PaddedRow(int64_t width, int64_t reach)
      : width_(width),
        words_((width + 63) / 64),
        margin_((reach + 63) / 64 + 1),
        row_((size_t)(words_ + 2 * margin_ + 1)) {}

  // combination(old word, new word) for each word. Bits behind the row's last pixel become 0.
  template <class Combination>
  void combine(const uint8_t* from, const Combination& combination) {
    uint64_t* word = row_.data() + margin_;
    for (int64_t i = 0; i < words_; i++)
      word[i] = combination(word[i], load_word(from + 8 * i)) & low_bits(width_ - 64 * i);
  }

  void clear() { std::fill(row_.begin(), row_.end(), 0); }

  uint64_t at(int64_t bit) const {
    const int64_t from = bit + 64 * margin_, word = from >> 6, skipped = from & 63;
    if (word < 0 || word + 1 >= (int64_t)row_.size()) return 0;
    return skipped ? row_[word] >> skipped | row_[word + 1] << (64 - skipped) : row_[word];
  }

 private:
  int64_t width_, words_, margin_;
  std::vector<uint64_t> row_;
};

// Every second bit, from the first on, moved into the lower half; also for vectors of words.
template <class Bits>
inline __attribute__((always_inline)) Bits even_bits(Bits x) {
  x &= 0x5555555555555555ull;
  x = (x | x >> 1) & 0x3333333333333333ull;
  x = (x | x >> 2) & 0x0f0f0f0f0f0f0f0full;
  x = (x | x >> 4) & 0x00ff00ff00ff00ffull;
  x = (x | x >> 8) & 0x0000ffff0000ffffull;
  return (x | x >> 16) & 0x00000000ffffffffull;
}

// 64 bits, `step` bits apart, from `bit` on. at(b) returns the 64 bits from bit b on.
template <class At>
inline uint64_t every_nth(int64_t step, int64_t bit, const At& at) {
  if (step == 1) return at(bit);
  if (step == 2) return even_bits(at(bit)) | even_bits(at(bit + 64)) << 32;
  uint64_t found = 0;
  for (int64_t i = 0; i < 64; i++) found |= (at(bit + i * step) & 1) << i;
  return found;
}

// Transposes a matrix of 8 × 8 bits.
inline uint64_t transpose_bits(uint64_t x) {
  uint64_t change = (x ^ x >> 7) & 0x00aa00aa00aa00aaull;
  x ^= change ^ change << 7;
  change = (x ^ x >> 14) & 0x0000cccc0000ccccull;
  x ^= change ^ change << 14;
  change = (x ^ x >> 28) & 0x00000000f0f0f0f0ull;
  return x ^ change ^ change << 28;
}

// Writes 64 pixels at pixel `at` of a row of `bytes` bytes, as far as they lie in it.
inline void write_row(uint8_t* row, int64_t bytes, int64_t at, uint64_t bits) {
  uint8_t* to = row + at / 8;
  switch (const int64_t left = bytes - at / 8) {  // copies of a known length take an instruction
    case 1: return (void)std::memcpy(to, &bits, 1);
    case 2: return (void)std::memcpy(to, &bits, 2);
    case 4: return (void)std::memcpy(to, &bits, 4);
    case 7: return (void)std::memcpy(to, &bits, 7);
    default: return (void)(left >= 8 ? std::memcpy(to, &bits, 8) : std::memcpy(to, &bits, left));
  }
}

// Eight comparisons as bits: threshold <= numbers, or threshold >= numbers if `falling`.
inline uint8_t compare_eight(float threshold, const float* numbers, bool falling) {
#ifdef __SSE2__
  const __m128 bound = _mm_set1_ps(threshold);
  const __m128 low = _mm_loadu_ps(numbers), high = _mm_loadu_ps(numbers + 4);
  const int low_result =
      _mm_movemask_ps(falling ? _mm_cmpge_ps(bound, low) : _mm_cmple_ps(bound, low));
  const int high_result =
      _mm_movemask_ps(falling ? _mm_cmpge_ps(bound, high) : _mm_cmple_ps(bound, high));
  return (uint8_t)(low_result | high_result << 4);
#else
  unsigned bits = 0;
  for (int k = 0; k < 8; k++)
    bits |= (unsigned)(falling ? threshold >= numbers[k] : threshold <= numbers[k]) << k;
  return (uint8_t)bits;
#endif
}

}  // namespace
