// A pruned convolution of ordinary numbers with weights of ±1, as a network's first layer is: additions and subtractions only.
// Included once per instruction set, inside its namespace (see cpu.inl).

typedef float Numbers __attribute__((vector_size(CPU_BYTES)));
static constexpr int PIXELS = CPU_BYTES / 4;  // in a vector

static inline __attribute__((always_inline)) Numbers numbers_at(const float* from) {
  Numbers numbers;
  __builtin_memcpy(&numbers, from, sizeof(Numbers));
  return numbers;
}

// VECTORS * PIXELS sums side by side: of one filter, in one row.
template <int VECTORS>
static inline __attribute__((always_inline)) void sums_of(const Pixels& job, const float* at, int64_t f, float* sums) {
  Numbers sum[VECTORS] = {};
  const int32_t* starts = job.starts + 2 * f;
  for (int64_t k = starts[0]; k < starts[1]; k++)
    #pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) sum[i] -= numbers_at(at + job.index[k] + i * PIXELS);
  for (int64_t k = starts[1]; k < starts[2]; k++)
    #pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) sum[i] += numbers_at(at + job.index[k] + i * PIXELS);
  __builtin_memcpy(sums, sum, sizeof(sum));
}

// Rows [begin, end) of all filters: a bit is 1 where the sum reaches the threshold, or with `falling` does not exceed it.
static void run_pixels(const Pixels& of, int64_t begin, int64_t end) {
  const Pixels job = of;  // which nothing that is written can change
  constexpr int64_t most = 14 * PIXELS;
  for (int64_t y = begin; y < end; y++)
    for (int64_t f = 0; f < job.filters; f++) {
      uint8_t* row = job.out + f * job.stride + y * job.row_bytes;
      for (int64_t x = 0; x < job.width; x += most) {
        float sums[most];
        const float* at = job.numbers + y * job.step + x;
        constexpr int64_t whole = PIXELS < 8 ? 8 : PIXELS;  // bits are written by the byte
        const int64_t vectors = std::min<int64_t>(14, (job.width - x + whole - 1) / whole * (whole / PIXELS));
        switch (vectors) {
          case 1: sums_of<1>(job, at, f, sums); break;
          case 2: sums_of<2>(job, at, f, sums); break;
          case 3: case 4: sums_of<4>(job, at, f, sums); break;
          case 5: case 6: case 7: sums_of<7>(job, at, f, sums); break;
          case 8: case 9: case 10: sums_of<10>(job, at, f, sums); break;
          default: sums_of<14>(job, at, f, sums);
        }
        const int64_t count = std::min<int64_t>(most, job.width - x);
        const float least = job.thresholds[f];
        const bool falling = job.falling[f];
        for (int64_t i = 0; i < count; i += 8) row[(x + i) / 8] = reached(least, sums + i, falling);
      }
    }
}
