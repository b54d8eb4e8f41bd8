// From bit-sliced counters to numbers, and from two layers' numbers to the sign of their sum. Included once per instruction
// set, inside its namespace (see cpu.inl).

// The numbers of a word of `bytes` bytes, pixel by pixel, from `bits` counters, of which the last one is the sign.
static void numbers_of(const uint8_t* counters, int64_t bytes, int bits, int16_t* numbers) {
#if CPU_BYTES >= 32
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);  // 8 pixels per byte
  const __m256i each = _mm256_set1_epi64x((int64_t)0x8040201008040201);
  for (int64_t at = 0; at < bytes; at += 4) {  // 32 pixels
    const auto bit_of = [&](int i) __attribute__((always_inline)) {  // -1 where it is set
      int32_t word;
      __builtin_memcpy(&word, counters + i * bytes + at, 4);
      return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), each), each);
    };
    __m256i high = bit_of(bits - 1), low = _mm256_setzero_si256();
    for (int i = bits - 2; i >= 8; i--) high = _mm256_sub_epi8(_mm256_add_epi8(high, high), bit_of(i));
    const int below = bits <= 8 ? bits - 2 : 7;
    if (bits <= 8) low = high;  // of few bits, the low byte is the number, and the sign fills the high one
    for (int i = below; i >= 0; i--) low = _mm256_sub_epi8(_mm256_add_epi8(low, low), bit_of(i));
    const __m256i one = _mm256_unpacklo_epi8(low, high), other = _mm256_unpackhi_epi8(low, high);
    _mm256_storeu_si256((__m256i*)(numbers + 8 * at), _mm256_permute2x128_si256(one, other, 0x20));
    _mm256_storeu_si256((__m256i*)(numbers + 8 * at + 16), _mm256_permute2x128_si256(one, other, 0x31));
  }
#else
  typedef uint16_t Lanes __attribute__((vector_size(32)));
  typedef int16_t Signed __attribute__((vector_size(32)));
  const Lanes lane = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  for (int64_t at = 0; at < bytes; at += 2) {  // 16 pixels
    Signed found = {};
    for (int i = bits - 1; i >= 0; i--) {
      uint16_t word;
      __builtin_memcpy(&word, counters + i * bytes + at, 2);
      const Signed bit = (Signed)(((Lanes{} + word) & lane) != 0);  // -1 where it is set
      found = i == bits - 1 ? bit : found + found - bit;
    }
    __builtin_memcpy(numbers + 8 * at, &found, 32);
  }
#endif
}

// Signs of `bytes` * 8 pixels: +1 where one layer's sum reaches what the table says for the other's, which is at the most `most`
// where there is an image. `least` is room to work in.
static void compare_sums(
    const int16_t* ones, const int16_t* others, const int16_t* table, int16_t most, int64_t bytes, int16_t* least, uint8_t* out) {
  const int64_t pixels = 8 * bytes;
  for (int64_t i = 0; i < pixels; i++) least[i] = std::max<int16_t>((int16_t)-most, std::min(most, others[i]));
  for (int64_t i = 0; i < pixels; i++) least[i] = table[least[i]];
#if CPU_BYTES >= 32
  for (int64_t at = 0; at < bytes; at += 4) {
    const auto below = [&](int64_t i) __attribute__((always_inline)) {
      return _mm256_cmpgt_epi16(_mm256_loadu_si256((const __m256i*)(least + i)), _mm256_loadu_si256((const __m256i*)(ones + i)));
    };
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(below(8 * at), below(8 * at + 16)), 0xd8);
    const uint32_t reached = ~(uint32_t)_mm256_movemask_epi8(both);
    __builtin_memcpy(out + at, &reached, 4);
  }
#else
  for (int64_t at = 0; at < bytes; at++) {
    unsigned reached = 0;
    for (int k = 0; k < 8; k++) reached |= (unsigned)(ones[8 * at + k] >= least[8 * at + k]) << k;
    out[at] = (uint8_t)reached;
  }
#endif
}
