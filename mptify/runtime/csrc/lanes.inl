// Lanes: vectors of pixels of one channel, to which a kept weight adds one vector of its input.
//
// A layer whose inputs are real numbers adds float32 lanes. Inputs of 8 bits are added as 16-bit
// integers, and inputs of 2 and 4 bits as bytes; sums are widened before they can overflow.

typedef float FloatLanes __attribute__((vector_size(CPU_BYTES), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(CPU_BYTES), aligned(4), may_alias));
typedef int16_t ShortLanes __attribute__((vector_size(CPU_BYTES), aligned(2), may_alias));
typedef uint8_t ByteLanes __attribute__((vector_size(CPU_BYTES), aligned(1), may_alias));
typedef int16_t WideBytes __attribute__((vector_size(2 * CPU_BYTES), aligned(2), may_alias));
typedef int32_t WideShorts __attribute__((vector_size(2 * CPU_BYTES), aligned(4), may_alias));

// x · a + b, rounded once.
static inline __attribute__((always_inline)) FloatLanes multiply_add(
    FloatLanes x, float a, float b) {
#if CPU_BYTES == 64
  return (FloatLanes)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(a), _mm512_set1_ps(b));
#elif CPU_BYTES == 32
  return (FloatLanes)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(a), _mm256_set1_ps(b));
#else
  for (int i = 0; i < CPU_BYTES / 4; i++) x[i] = __builtin_fmaf(x[i], a, b);
  return x;
#endif
}

// The survivors of one filter among some channels: offsets of the vectors that it adds, and then
// of those that it subtracts.
struct Taps {
  const int32_t* added;
  const int32_t* subtracted;
  const int32_t* end;
};

// `sums` of VECTORS vectors of lanes, or what they grow by if `first` is false.
template <int VECTORS>
static inline __attribute__((always_inline)) void add_lanes(
    const float* __restrict base, const Taps& taps, bool first, float* __restrict sums) {
  constexpr int LANES = CPU_BYTES / 4;
  FloatLanes sum[VECTORS];
  #pragma GCC unroll 16
  for (int i = 0; i < VECTORS; i++)
    sum[i] = first ? FloatLanes{} : *(const FloatLanes*)(sums + LANES * i);
  for (const int32_t* tap = taps.added; tap < taps.subtracted; tap++)
    #pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) sum[i] += *(const FloatLanes*)(base + *tap + LANES * i);
  for (const int32_t* tap = taps.subtracted; tap < taps.end; tap++)
    #pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) sum[i] -= *(const FloatLanes*)(base + *tap + LANES * i);
  #pragma GCC unroll 16
  for (int i = 0; i < VECTORS; i++) *(FloatLanes*)(sums + LANES * i) = sum[i];
}

// The same for 16-bit lanes, with 32-bit sums. There are so few taps that 16 bits do not overflow.
template <int VECTORS>
static inline __attribute__((always_inline)) void add_lanes(
    const int16_t* __restrict base, const Taps& taps, bool first, int32_t* __restrict sums) {
  constexpr int LANES = CPU_BYTES / 2;
  ShortLanes sum[VECTORS];
  #pragma GCC unroll 16
  for (int i = 0; i < VECTORS; i++) sum[i] = ShortLanes{};
  for (const int32_t* tap = taps.added; tap < taps.subtracted; tap++)
    #pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) sum[i] += *(const ShortLanes*)(base + *tap + LANES * i);
  for (const int32_t* tap = taps.subtracted; tap < taps.end; tap++)
    #pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) sum[i] -= *(const ShortLanes*)(base + *tap + LANES * i);
  #pragma GCC unroll 16
  for (int i = 0; i < VECTORS; i++) {
    WideShorts* to = (WideShorts*)(sums + LANES * i);
    const WideShorts wide = __builtin_convertvector(sum[i], WideShorts);
    *to = first ? wide : *to + wide;
  }
}

// The same for bytes, with 16-bit sums; after `most` taps of one sign a byte is full.
template <int VECTORS>
static inline __attribute__((always_inline)) void add_lanes(
    const uint8_t* __restrict base, const Taps& taps, int64_t most, bool first,
    int16_t* __restrict sums) {
  WideBytes sum[VECTORS];
  #pragma GCC unroll 8
  for (int i = 0; i < VECTORS; i++)
    sum[i] = first ? WideBytes{} : *(const WideBytes*)(sums + CPU_BYTES * i);
  const int32_t *added = taps.added, *subtracted = taps.subtracted;
  while (added < taps.subtracted || subtracted < taps.end) {
    ByteLanes plus[VECTORS], minus[VECTORS];
    #pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) plus[i] = minus[i] = ByteLanes{};
    for (const int32_t* end = std::min(taps.subtracted, added + most); added < end; added++)
      #pragma GCC unroll 8
      for (int i = 0; i < VECTORS; i++) plus[i] += *(const ByteLanes*)(base + *added + CPU_BYTES * i);
    for (const int32_t* end = std::min(taps.end, subtracted + most); subtracted < end; subtracted++)
      #pragma GCC unroll 8
      for (int i = 0; i < VECTORS; i++)
        minus[i] += *(const ByteLanes*)(base + *subtracted + CPU_BYTES * i);
    #pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++)
      sum[i] += __builtin_convertvector(plus[i], WideBytes) -
                __builtin_convertvector(minus[i], WideBytes);
  }
  #pragma GCC unroll 8
  for (int i = 0; i < VECTORS; i++) *(WideBytes*)(sums + CPU_BYTES * i) = sum[i];
}

template <class Lane>
struct LaneTraits;
template <>
struct LaneTraits<float> {
  typedef float Sum;
  static constexpr int MAX_VECTORS = 8;
};
template <>
struct LaneTraits<int16_t> {
  typedef int32_t Sum;
  static constexpr int MAX_VECTORS = 8;
};
template <>
struct LaneTraits<uint8_t> {
  typedef int16_t Sum;
  static constexpr int MAX_VECTORS = CPU_BYTES == 64 ? 4 : 3;
};
