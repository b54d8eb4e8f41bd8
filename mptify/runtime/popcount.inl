// kept - 2 · popcount(mask & (input ^ sign)): for layers that see one pixel, where planes would hold one bit each.
// Included once per instruction set, inside its namespace (see cpu.inl).

#if CPU_BYTES >= 32
typedef __m256i Block;

static inline __attribute__((always_inline)) Block differing_in(const uint8_t* mask, const uint8_t* signs, const uint8_t* input) {
  const auto load = [](const uint8_t* from) __attribute__((always_inline)) { return _mm256_loadu_si256((const __m256i*)from); };
  const __m256i counts = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  const __m256i low = _mm256_set1_epi8(15), bits = _mm256_xor_si256(_mm256_and_si256(load(mask), load(input)), load(signs));
  const __m256i high_counts = _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi16(bits, 4), low));
  return _mm256_add_epi8(_mm256_shuffle_epi8(counts, _mm256_and_si256(bits, low)), high_counts);  // per byte
}

static inline __attribute__((always_inline)) uint64_t total_of(Block bytes) {
  uint64_t parts[4];
  const __m256i sums = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
  std::memcpy(parts, &sums, 32);
  return parts[0] + parts[1] + parts[2] + parts[3];
}

static inline __attribute__((always_inline)) Block together(Block one, Block other) { return _mm256_add_epi8(one, other); }
#else
typedef uint64_t Block;

static inline __attribute__((always_inline)) Block differing_in(const uint8_t* mask, const uint8_t* signs, const uint8_t* input) {
  uint64_t count = 0;
  for (int64_t i = 0; i < 32; i += 8)
    count += (uint64_t)__builtin_popcountll((eight_bytes(mask + i) & eight_bytes(input + i)) ^ eight_bytes(signs + i));
  return count;
}

static inline __attribute__((always_inline)) uint64_t total_of(Block count) { return count; }
static inline __attribute__((always_inline)) Block together(Block one, Block other) { return one + other; }
#endif

static void run_popcount(const Popcount& job, int64_t first, int64_t last) {
  const int64_t whole = job.bytes / 32 * 32, rest = job.bytes - whole;
  for (int64_t f = first; f < last; f++) {
    const uint8_t *mask = job.weights + f * 2 * job.bytes, *signs = mask + job.bytes;
    uint64_t differing = 0;
    for (int64_t at = 0; at < whole;) {
      Block count = {};
      for (const int64_t end = std::min(whole, at + 31 * 32); at < end; at += 32)  // 31 times 8 fit into a byte
        count = together(count, differing_in(mask + at, signs + at, job.input + at));
      differing += total_of(count);
    }
    if (rest) {
      uint8_t ends[3][32] = {};
      const uint8_t* from[3] = {mask, signs, job.input};
      for (int i = 0; i < 3; i++) std::memcpy(ends[i], from[i] + whole, (size_t)rest);
      differing += total_of(differing_in(ends[0], ends[1], ends[2]));
    }
    job.out[f] = (float)(job.kept[f] - 2 * (int64_t)differing);
  }
}
