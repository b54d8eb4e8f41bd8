// kept - 2 · popcount(mask & (input ^ sign)): for layers that see one pixel, where planes would hold one bit each.
// Included once per instruction set, inside its namespace.

namespace POPCOUNT_NAMESPACE {

static void run(const Popcount& job, int64_t first, int64_t last) {
  for (int64_t f = first; f < last; f++) {
    const uint8_t* weights = job.weights + f * job.blocks * 64;  // per block of 32 bytes: the mask, then the signs under it
    uint64_t differing = 0;
#ifdef POPCOUNT_AVX2
    const __m256i counts = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m256i low = _mm256_set1_epi8(15);
    __m256i total = _mm256_setzero_si256();
    for (int64_t block = 0; block < job.blocks;) {
      __m256i bytes = _mm256_setzero_si256();
      for (const int64_t end = std::min(job.blocks, block + 31); block < end; block++) {  // 31 times 8 fit into a byte
        const __m256i mask = _mm256_loadu_si256((const __m256i*)(weights + block * 64));
        const __m256i signs = _mm256_loadu_si256((const __m256i*)(weights + block * 64 + 32));
        const __m256i input = _mm256_loadu_si256((const __m256i*)(job.input + block * 32));
        const __m256i bits = _mm256_xor_si256(_mm256_and_si256(mask, input), signs);
        bytes = _mm256_add_epi8(bytes, _mm256_shuffle_epi8(counts, _mm256_and_si256(bits, low)));
        bytes = _mm256_add_epi8(bytes, _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi16(bits, 4), low)));
      }
      total = _mm256_add_epi64(total, _mm256_sad_epu8(bytes, _mm256_setzero_si256()));
    }
    uint64_t parts[4];
    std::memcpy(parts, &total, 32);
    differing = parts[0] + parts[1] + parts[2] + parts[3];
#else
    for (int64_t block = 0; block < job.blocks; block++)
      for (int64_t i = 0; i < 32; i += 8)
        differing += (uint64_t)__builtin_popcountll(
            (eight_bytes(weights + block * 64 + i) & eight_bytes(job.input + block * 32 + i)) ^ eight_bytes(weights + block * 64 + 32 + i));
#endif
    job.out[f] = (float)(job.kept[f] - 2 * (int64_t)differing);
  }
}

}  // namespace POPCOUNT_NAMESPACE
