// Lanes: vectors of pixels of one channel, to which a kept weight adds one vector of its input.
//
// A layer whose inputs are real numbers adds float32 lanes. Inputs of 8 bits are added as 16-bit
// integers, and inputs of 2 and 4 bits as bytes; sums are widened before they can overflow.

typedef float FloatLanes __attribute__((vector_size(CPU_BYTES), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(CPU_BYTES), aligned(4), may_alias));

// A vector of lanes, at any address.
template <class Lane>
struct VectorOf {
  typedef Lane type __attribute__((vector_size(CPU_BYTES), aligned(sizeof(Lane)), may_alias));
};

// As many numbers of a type as a vector has float32 lanes.
template <class Number>
struct SomeOf {
  typedef Number type
      __attribute__((vector_size(CPU_BYTES / 4 * sizeof(Number)), aligned(1), may_alias));
};

static constexpr int64_t FLOAT_LANES = CPU_BYTES / 4;  // lanes of a vector of float32

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

// NaN stays NaN.
static inline __attribute__((always_inline)) FloatLanes clip(FloatLanes x, float low, float high) {
  const FloatLanes least = FloatLanes{} + low, most = FloatLanes{} + high;
#if CPU_BYTES == 64
  return (FloatLanes)_mm512_min_ps((__m512)most, _mm512_max_ps((__m512)least, (__m512)x));
#elif CPU_BYTES == 32
  return (FloatLanes)_mm256_min_ps((__m256)most, _mm256_max_ps((__m256)least, (__m256)x));
#else
  x = x < least ? least : x;
  return x > most ? most : x;
#endif
}

// Rounds half to even.
static inline __attribute__((always_inline)) IntLanes round_lanes(FloatLanes x) {
#if CPU_BYTES == 64
  return (IntLanes)_mm512_cvtps_epi32((__m512)x);
#elif CPU_BYTES == 32
  return (IntLanes)_mm256_cvtps_epi32((__m256)x);
#else
  const FloatLanes shifted = x + 12582912.0f;  // 1.5 · 2^23, which leaves no bits behind the point
  return (IntLanes)shifted - (IntLanes)(FloatLanes{} + 12582912.0f);
#endif
}

// One vector of float32 from numbers of another type, and back. Compilers convert bytes one by one.
template <class Number>
static inline __attribute__((always_inline)) FloatLanes load_numbers(const Number* from) {
  typename SomeOf<Number>::type some;
  __builtin_memcpy(&some, from, sizeof(some));
  if constexpr (std::is_same<Number, float>::value) return some;
#if CPU_BYTES == 64
  else if constexpr (std::is_same<Number, int16_t>::value)
    return (FloatLanes)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32((__m256i)some));
  else if constexpr (std::is_same<Number, int8_t>::value)
    return (FloatLanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)some));
  else if constexpr (std::is_same<Number, uint8_t>::value)
    return (FloatLanes)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)some));
#elif CPU_BYTES == 32
  else if constexpr (std::is_same<Number, int16_t>::value)
    return (FloatLanes)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32((__m128i)some));
  else if constexpr (std::is_same<Number, int8_t>::value)
    return (FloatLanes)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
  else if constexpr (std::is_same<Number, uint8_t>::value)
    return (FloatLanes)_mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
  else return __builtin_convertvector(__builtin_convertvector(some, IntLanes), FloatLanes);
}

template <class Number>
static inline __attribute__((always_inline)) void store_levels(IntLanes levels, Number* to) {
  typedef typename SomeOf<Number>::type Some;
  const Some some = __builtin_convertvector(levels, Some);
  __builtin_memcpy(to, &some, sizeof(some));
}

// Four vectors of levels as bytes.
template <class Number>
static inline __attribute__((always_inline)) void store_bytes(const IntLanes* levels, Number* to) {
#if CPU_BYTES == 64
  // Packing takes 128 bits of each vector in turn.
  const __m512i* const from = (const __m512i*)levels;
  const __m512i low = _mm512_packs_epi32(from[0], from[1]);
  const __m512i high = _mm512_packs_epi32(from[2], from[3]);
  const __m512i bytes = std::is_signed<Number>::value ? _mm512_packs_epi16(low, high)
                                                      : _mm512_packus_epi16(low, high);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
#elif CPU_BYTES == 32
  const __m256i* const from = (const __m256i*)levels;
  const __m256i low = _mm256_packs_epi32(from[0], from[1]);
  const __m256i high = _mm256_packs_epi32(from[2], from[3]);
  const __m256i bytes = std::is_signed<Number>::value ? _mm256_packs_epi16(low, high)
                                                      : _mm256_packus_epi16(low, high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, order));
#else
  for (int i = 0; i < 4; i++) store_levels(levels[i], to + i * FLOAT_LANES);
#endif
}

// Some numbers, and zeros behind them. Not written number by number and then read as a vector,
// which would have to wait until all numbers are in the cache.
template <class Number>
static inline __attribute__((always_inline)) FloatLanes load_some(
    const Number* from, int64_t count, int64_t stride) {
  FloatLanes some = {};
  for (int64_t i = 0; i < count; i++) some[i] = (float)from[i * stride];
  return some;
}

// Numbers that lie `stride` apart.
static inline __attribute__((always_inline)) FloatLanes gather(const float* from, int64_t stride) {
#if CPU_BYTES == 64
  const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_mullo_epi32(each, _mm512_set1_epi32((int)stride));
  return (FloatLanes)_mm512_i32gather_ps(at, from, 4);
#elif CPU_BYTES == 32
  const __m256i each = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i at = _mm256_mullo_epi32(each, _mm256_set1_epi32((int)stride));
  return (FloatLanes)_mm256_i32gather_ps(from, at, 4);
#else
  return load_some(from, FLOAT_LANES, stride);
#endif
}

// A pointer that the compiler keeps as it is: an addition that reads from base + index would be
// two operations for the processor, and one that reads from a register only is one.
template <class Type>
static inline __attribute__((always_inline)) const Type* in_register(const Type* pointer) {
#ifdef __GNUC__
  asm("" : "+r"(pointer));
#endif
  return pointer;
}

// `sum` plus or minus what `count` taps find. We take two at a time: that is fewer branches, and
// additions of float32, which take long, wait less for each other.
template <int VECTORS, bool SUBTRACT, class Lane>
static inline __attribute__((always_inline)) const uint16_t* add_taps(
    const uint8_t* planes, const uint16_t* tap, int64_t count,
    typename VectorOf<Lane>::type* sum) {
  typedef typename VectorOf<Lane>::type Lanes;
  const auto add = [&](int v, Lanes found) __attribute__((always_inline)) {
    sum[v] = SUBTRACT ? sum[v] - found : sum[v] + found;
  };
  for (const uint16_t* end = tap + (count & ~1); tap < end; tap += 2) {
    const Lanes* const one = (const Lanes*)in_register(planes + tap[0] * UNIT);
    const Lanes* const other = (const Lanes*)in_register(planes + tap[1] * UNIT);
    if (std::is_same<Lane, float>::value) {
      #pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) add(v, one[v] + other[v]);
    } else {
      #pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) add(v, one[v]);
      #pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) add(v, other[v]);
    }
  }
  if (count & 1) {
    const Lanes* const one = (const Lanes*)in_register(planes + *tap++ * UNIT);
    #pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) add(v, one[v]);
  }
  return tap;
}

// Adds all taps of some filters to their sums, which are `width` lanes apart.
template <int VECTORS, class Lane>
static __attribute__((noinline)) void add_filters(
    const uint8_t* __restrict planes, const uint16_t* tap, const TapCounts* counts,
    const TapCounts* end, int64_t width, Lane* __restrict sums) {
  typedef typename VectorOf<Lane>::type Lanes;
  for (; counts < end; counts++, sums += width) {
    Lanes* const mine = (Lanes*)sums;
    Lanes sum[VECTORS];
    #pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sum[v] = mine[v];
    tap = add_taps<VECTORS, false, Lane>(planes, tap, counts->added, sum);
    tap = add_taps<VECTORS, true, Lane>(planes, tap, counts->subtracted, sum);
    #pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) mine[v] = sum[v];
  }
}

// Half of a vector, as numbers of twice as many bits.
template <class Wide, class Lane>
static inline __attribute__((always_inline)) typename VectorOf<Wide>::type widen_half(
    const Lane* from) {
  typedef Lane Half __attribute__((vector_size(CPU_BYTES / 2)));
  Half half;
  __builtin_memcpy(&half, from, sizeof(half));
#if CPU_BYTES == 64
  if constexpr (std::is_same<Lane, uint8_t>::value)
    return (typename VectorOf<Wide>::type)_mm512_cvtepu8_epi16((__m256i)half);
  else if constexpr (std::is_same<Lane, int8_t>::value)
    return (typename VectorOf<Wide>::type)_mm512_cvtepi8_epi16((__m256i)half);
  else return (typename VectorOf<Wide>::type)_mm512_cvtepi16_epi32((__m256i)half);
#elif CPU_BYTES == 32
  if constexpr (std::is_same<Lane, uint8_t>::value)
    return (typename VectorOf<Wide>::type)_mm256_cvtepu8_epi16((__m128i)half);
  else if constexpr (std::is_same<Lane, int8_t>::value)
    return (typename VectorOf<Wide>::type)_mm256_cvtepi8_epi16((__m128i)half);
  else return (typename VectorOf<Wide>::type)_mm256_cvtepi16_epi32((__m128i)half);
#else
  return __builtin_convertvector(half, typename VectorOf<Wide>::type);
#endif
}

// Adds a vector of bytes to 16-bit sums, or one of 16-bit integers to 32-bit sums.
template <bool SUBTRACT, class Lane, class Wide>
static inline __attribute__((always_inline)) void widen(
    typename VectorOf<Lane>::type sum, Wide* to) {
  typedef typename VectorOf<Wide>::type WideLanes;
  #pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    WideLanes* const wide = (WideLanes*)to + i;
    const WideLanes more = widen_half<Wide>((const Lane*)&sum + i * (CPU_BYTES / 2 / sizeof(Lane)));
    *wide = SUBTRACT ? *wide - more : *wide + more;
  }
}

// The same as add_filters with 16-bit sums: after `most` taps a byte is full.
template <int VECTORS, class Lane>
static __attribute__((noinline)) void add_filters_widening(
    const uint8_t* __restrict planes, const uint16_t* tap, const TapCounts* counts,
    const TapCounts* end, int64_t width, int64_t most, int16_t* __restrict sums) {
  typedef typename VectorOf<Lane>::type Lanes;
  for (; counts < end; counts++, sums += width) {
    for (int64_t left = counts->added; left > 0; left -= most) {
      Lanes sum[VECTORS] = {};
      tap = add_taps<VECTORS, false, Lane>(planes, tap, std::min(most, left), sum);
      #pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) widen<false, Lane, int16_t>(sum[v], sums + v * CPU_BYTES);
    }
    for (int64_t left = counts->subtracted; left > 0; left -= most) {
      Lanes sum[VECTORS] = {};
      tap = add_taps<VECTORS, false, Lane>(planes, tap, std::min(most, left), sum);
      #pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) widen<true, Lane, int16_t>(sum[v], sums + v * CPU_BYTES);
    }
  }
}
