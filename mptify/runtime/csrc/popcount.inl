// Counts where bits differ from a filter's signs under its mask, in blocks of 32 bytes.

#if CPU_BYTES >= 32
typedef __m256i Count;  // per byte

static inline __attribute__((always_inline)) Count count_block(
    const uint8_t* mask, const uint8_t* signs, const uint8_t* input) {
  const auto load = [](const uint8_t* from) __attribute__((always_inline)) {
    return _mm256_loadu_si256((const __m256i*)from);
  };
  const __m256i counts = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i bits = _mm256_xor_si256(_mm256_and_si256(load(mask), load(input)), load(signs));
  const __m256i high_bits = _mm256_and_si256(_mm256_srli_epi16(bits, 4), low);
  return _mm256_add_epi8(
      _mm256_shuffle_epi8(counts, _mm256_and_si256(bits, low)),
      _mm256_shuffle_epi8(counts, high_bits));
}

static inline __attribute__((always_inline)) uint64_t total_of(Count bytes) {
  uint64_t words[4];
  const __m256i sums = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
  std::memcpy(words, &sums, 32);
  return words[0] + words[1] + words[2] + words[3];
}

static inline __attribute__((always_inline)) Count add_counts(Count one, Count other) {
  return _mm256_add_epi8(one, other);
}
#else
typedef uint64_t Count;

static inline __attribute__((always_inline)) Count count_block(
    const uint8_t* mask, const uint8_t* signs, const uint8_t* input) {
  uint64_t count = 0;
  for (int64_t i = 0; i < 32; i += 8) {
    const uint64_t differing = (load_word(mask + i) & load_word(input + i)) ^ load_word(signs + i);
    count += (uint64_t)__builtin_popcountll(differing);
  }
  return count;
}

static inline __attribute__((always_inline)) uint64_t total_of(Count count) { return count; }

static inline __attribute__((always_inline)) Count add_counts(Count one, Count other) {
  return one + other;
}
#endif

static constexpr int64_t MAX_BLOCKS = 31;  // whose counts a byte holds: 31 times 8
