// From bit-sliced counters to numbers, and from two layers' numbers to the sign of their sum. Included once per instruction
// set, inside its namespace (see cpu.inl).

typedef uint16_t Lanes __attribute__((vector_size(32)));

// The counters' numbers, pixel by pixel as the bits lie in the planes: `count` of them, rounded up to 16.
static void numbers_of(const uint8_t* counters, int64_t stride, int bits, int64_t count, int16_t* numbers) {
  const Lanes lane = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  for (int64_t at = 0; at < count; at += 16) {
    Lanes found = {};
    for (int i = 0; i < bits; i++) {
      uint16_t word;
      __builtin_memcpy(&word, counters + i * stride + at / 8, 2);
      const Lanes ones = (Lanes)(((Lanes{} + word) & lane) != 0);
      const uint16_t bit = (uint16_t)(1u << i);
      found |= ones & (Lanes{} + bit);
    }
    typedef int16_t Signed __attribute__((vector_size(32)));
    const Signed whole = (Signed)(found << (16 - bits)) >> (16 - bits);  // the topmost counter is the sign
    __builtin_memcpy(numbers + at, &whole, 32);
  }
}

// Bits from bytes that are 0 or 1, eight at a time.
static void bits_of(const uint8_t* bytes, int64_t count, uint8_t* bits) {
  for (int64_t at = 0; at < count; at += 8)
    bits[at / 8] = (uint8_t)(eight_bytes(bytes + at) * 0x0102040810204080ull >> 56);
}

static void sums_of_word(const Conv& conv, const Runs& runs, int64_t f, const int16_t* numbers, float* sums) {
  const int16_t* bias = conv.bias + f * conv.classes;
  runs.for_each([&](const Run& run, int64_t begin, int64_t end) {
    const int32_t by = bias[run.one];
    float* to = sums + run.pixel + (runs.from + begin - run.begin);
    for (int64_t i = begin; i < end; i++) to[i - begin] = (float)(2 * numbers[i] - by);
  });
}

// Where one layer's sum reaches the threshold that the other's sum calls for.
static void compare_sums(const Join& join, const Runs& runs, int64_t f, const int16_t* ones, const int16_t* others, uint8_t* above) {
  const int16_t* table = join.table + f * join.span;
  const int16_t* bias_one = join.one->bias + f * join.one->classes;
  const int16_t* bias_other = join.other->bias + f * join.other->classes;
  runs.for_each([&](const Run& run, int64_t begin, int64_t end) {
    const int32_t by = bias_one[run.one];
    const int16_t* least = table + join.span / 2 - bias_other[run.other];
    int64_t i = begin;
#if CPU_BYTES >= 32
    // Eight at a time, beyond the run's end too, where the next one writes again; there a sum may lie outside of the table.
    const __m256i low = _mm256_set1_epi32((int)(table - least)), high = _mm256_set1_epi32((int)(table + join.span - 1 - least));
    const auto twice = [](const int16_t* from) __attribute__((always_inline)) {
      return _mm256_slli_epi32(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)from)), 1);
    };
    for (; i < end; i += 8) {
      const __m256i place = _mm256_min_epi32(_mm256_max_epi32(twice(others + i), low), high);
      const __m256i found = _mm256_srai_epi32(_mm256_slli_epi32(_mm256_i32gather_epi32((const int*)least, place, 2), 16), 16);
      const __m256i below = _mm256_cmpgt_epi32(found, _mm256_sub_epi32(twice(ones + i), _mm256_set1_epi32(by)));
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(below), _mm256_extracti128_si256(below, 1));
      _mm_storel_epi64((__m128i*)(above + i), _mm_add_epi8(_mm_packs_epi16(words, words), _mm_set1_epi8(1)));
    }
#endif
    for (; i < end; i++) above[i] = 2 * ones[i] - by >= least[2 * others[i]];
  });
}
