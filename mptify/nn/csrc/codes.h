// Small numbers ("codes") of 1, 2, 4 or 8 bits, packed by blocks of 256, and what is stored as such:
// masks, levels of a quantizer, and where a quantizer did not clip.
//
// With n codes per byte, the bytes of a block hold first the codes 0, 256/n, 2·256/n …, then the
// codes 1, 256/n + 1 … So packing and unpacking are shifts of whole vectors. The last block may be
// incomplete; it is stored in full.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int64_t kCodes = 256;  // per block

template <int kBits>
inline void pack_codes(const uint8_t* codes, uint8_t* packed) {
  constexpr int kPerByte = 8 / kBits, kBytes = kCodes / kPerByte;
  for (int j = 0; j < kBytes; j++) {
    uint8_t byte = codes[j];
    for (int i = 1; i < kPerByte; i++) byte |= (uint8_t)(codes[j + i * kBytes] << (i * kBits));
    packed[j] = byte;
  }
}

template <int kBits>
inline void unpack_codes(const uint8_t* packed, uint8_t* codes) {
  constexpr int kPerByte = 8 / kBits, kBytes = kCodes / kPerByte;
  for (int i = 0; i < kPerByte; i++)
    for (int j = 0; j < kBytes; j++)
      codes[j + i * kBytes] = (uint8_t)(packed[j] >> (i * kBits)) & ((1 << kBits) - 1);
}

inline void clear_bit(uint8_t* packed, int64_t index) {
  const int64_t within = index % kCodes;
  packed[index / kCodes * 32 + within % 32] &= (uint8_t)~(1 << (within / 32));
}

// How a level becomes a code: `step` times a whole number from `lowest` on, in `bits` bits. One bit
// means ±1. Where levels are signed, the code that is left over stands for -0.0.
struct Levels {
  int bits, lowest;
  float step;

  int highest() const { return lowest + (1 << bits) - 1 - (lowest < 0); }
  int negative_zero() const { return lowest < 0 ? (1 << bits) - 1 : -1; }
};

inline uint32_t word_of(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}

inline float number_of(uint32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// The codes of at most 256 numbers; false if one of them is not a level.
inline bool codes_of(const float* x, int count, const Levels& levels, float inverse, uint8_t* out) {
  uint32_t wrong = 0;
  if (levels.bits == 1) {
    for (int i = 0; i < count; i++) {
      const uint32_t word = word_of(x[i]);
      wrong |= (word & 0x7fffffffu) ^ word_of(1.0f);
      out[i] = (uint8_t)(1 - (word >> 31));
    }
    return !wrong;
  }
  const float low = (float)levels.lowest, high = (float)levels.highest();
  const uint32_t zero = levels.lowest < 0 ? word_of(-0.0f) : 0;
  const int spare = levels.negative_zero();
  for (int i = 0; i < count; i++) {
    float scaled = x[i] * inverse;
    scaled = scaled >= low ? scaled : low;  // of NaN, too
    scaled = scaled <= high ? scaled : high;
    // Adding and subtracting 1.5 · 2^23 rounds to a whole number.
    const float level = (scaled + 12582912.0f) - 12582912.0f;
    const uint32_t word = word_of(x[i]);
    const bool is_spare = zero && word == zero;
    wrong |= is_spare ? 0 : word ^ word_of(level * levels.step);
    out[i] = (uint8_t)(is_spare ? spare : (int)level - levels.lowest);
  }
  return !wrong;
}

inline void levels_of(const uint8_t* codes, int count, const Levels& levels, float* out) {
  if (levels.bits == 1) {
    for (int i = 0; i < count; i++) out[i] = codes[i] ? 1.0f : -1.0f;
    return;
  }
  const int spare = levels.negative_zero();
  for (int i = 0; i < count; i++) {
    const float value = (float)((int)codes[i] + levels.lowest) * levels.step;
    out[i] = codes[i] == spare ? -0.0f : value;
  }
}
