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

// Of PIXELS_AT_ONCE windows, how many inputs differ from a filter's signs where its mask is; `blocks` of 32 bytes.
static constexpr int PIXELS_AT_ONCE = 4;

static inline __attribute__((always_inline)) void add_differing(
    const uint8_t* mask, const uint8_t* signs, const uint8_t* windows, int64_t step, int64_t blocks, int64_t* differing) {
  for (int64_t at = 0; at < 32 * blocks;) {
    Block count[PIXELS_AT_ONCE] = {};
    for (const int64_t end = std::min(32 * blocks, at + 31 * 32); at < end; at += 32)
      #pragma GCC unroll 4
      for (int i = 0; i < PIXELS_AT_ONCE; i++) count[i] = together(count[i], differing_in(mask + at, signs + at, windows + i * step + at));
    for (int i = 0; i < PIXELS_AT_ONCE; i++) differing[i] += (int64_t)total_of(count[i]);
  }
}

// The sums of one filter over all windows, whose number is rounded up to PIXELS_AT_ONCE.
static void sums_of_windows(const Windows& job, int64_t f, int32_t* sums) {
  const uint8_t *mask = job.weights + f * 2 * job.bytes, *signs = mask + job.bytes;
  const int64_t whole = job.bytes / 32, rest = job.bytes % 32;
  uint8_t ends[2][32] = {};
  std::memcpy(ends[0], mask + 32 * whole, (size_t)rest);
  std::memcpy(ends[1], signs + 32 * whole, (size_t)rest);
  for (int64_t p = 0; p < job.pixels; p += PIXELS_AT_ONCE) {
    int64_t differing[PIXELS_AT_ONCE] = {};
    const uint8_t* windows = job.windows + p * job.step;
    add_differing(mask, signs, windows, job.step, whole, differing);
    if (rest) add_differing(ends[0], ends[1], windows + 32 * whole, job.step, 1, differing);
    for (int i = 0; i < PIXELS_AT_ONCE; i++)
      if (p + i < job.pixels) sums[p + i] = job.bias[f * job.class_count + job.classes[p + i]] - 2 * (int32_t)differing[i];
  }
}
