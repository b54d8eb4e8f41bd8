// Rows of bits: shifted, thinned out, and put together again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

inline uint64_t eight_bytes(const uint8_t* from) {
  uint64_t bits;
  std::memcpy(&bits, from, 8);
  return bits;
}

inline uint64_t low_bits(int64_t count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }

// A row with zeros around it, so that 64 bits can be taken from anywhere. In whole words: what was just written as a part of one
// and is read as a part of another has to wait for memory.
class PaddedRow {
 public:
  PaddedRow(int64_t width, int64_t reach)
      : width_(width), words_((width + 63) / 64), margin_((reach + 63) / 64 + 1), all_((size_t)(words_ + 2 * margin_ + 1)) {}

  // `combine`(old word, new word) for each word of the row; what `from` has behind its last pixel is left out.
  template <class Combine>
  void take(const uint8_t* from, const Combine& combine) {
    uint64_t* word = all_.data() + margin_;
    for (int64_t i = 0; i < words_; i++) word[i] = combine(word[i], eight_bytes(from + 8 * i)) & low_bits(width_ - 64 * i);
  }

  void clear() { std::fill(all_.begin(), all_.end(), 0); }

  uint64_t at(int64_t bit) const {
    const int64_t from = bit + 64 * margin_, word = from >> 6, skipped = from & 63;
    if (word < 0 || word + 1 >= (int64_t)all_.size()) return 0;
    return skipped ? all_[word] >> skipped | all_[word + 1] << (64 - skipped) : all_[word];
  }

 private:
  int64_t width_, words_, margin_;
  std::vector<uint64_t> all_;
};

// Every second bit, from the first on, moved together into the lower half; of a number, or of several in a vector.
template <class Bits>
inline __attribute__((always_inline)) Bits even_bits(Bits x) {
  x &= 0x5555555555555555ull;
  x = (x | x >> 1) & 0x3333333333333333ull;
  x = (x | x >> 2) & 0x0f0f0f0f0f0f0f0full;
  x = (x | x >> 4) & 0x00ff00ff00ff00ffull;
  x = (x | x >> 8) & 0x0000ffff0000ffffull;
  return (x | x >> 16) & 0x00000000ffffffffull;
}

// 64 bits, `step` bits apart, of what `at` says of the 64 bits from any bit on.
template <class At>
inline uint64_t every(int64_t step, int64_t bit, const At& at) {
  if (step == 1) return at(bit);
  if (step == 2) return even_bits(at(bit)) | even_bits(at(bit + 64)) << 32;
  uint64_t found = 0;
  for (int64_t i = 0; i < 64; i++) found |= (at(bit + i * step) & 1) << i;
  return found;
}

// 8 bytes of 8 bits each, rows for columns.
inline uint64_t turned(uint64_t x) {
  uint64_t change = (x ^ x >> 7) & 0x00aa00aa00aa00aaull;
  x ^= change ^ change << 7;
  change = (x ^ x >> 14) & 0x0000cccc0000ccccull;
  x ^= change ^ change << 14;
  change = (x ^ x >> 28) & 0x00000000f0f0f0f0ull;
  return x ^ change ^ change << 28;
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
  int64_t phases;                                   // row phases of the taps
};

}  // namespace
