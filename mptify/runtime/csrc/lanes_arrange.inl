// Arranges the input of a layer on lanes: planes of numbers or levels with zeros around them, in
// which what a tap sees of all pixels is one run of memory. Rows and columns that a stride skips
// are put into planes of their own, the phases (see lanes_conv.inl).

// How numbers become levels: round(x · inverse), clipped. For numbers from levels, `inverse` is the
// step.
struct LevelRange {
  float inverse, lowest, highest;
};

#if CPU_BYTES > 16
// Every second byte of a vector.
static inline __attribute__((always_inline)) void pick_even_bytes(
    const uint8_t* from, uint8_t* to) {
#if CPU_BYTES == 64
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi16_epi8(_mm512_loadu_si512(from)));
#else
  const __m256i some = _mm256_loadu_si256((const __m256i*)from);
  const __m256i even = _mm256_and_si256(some, _mm256_set1_epi16(0xFF));
  const __m128i low = _mm256_castsi256_si128(even), high = _mm256_extracti128_si256(even, 1);
  _mm_storeu_si128((__m128i*)to, _mm_packus_epi16(low, high));
#endif
}
#endif

// Every `step`-th element.
template <class Number>
static void pick(
    const Number* __restrict from, int64_t step, int64_t count, Number* __restrict to) {
  int64_t first = 0;
#if CPU_BYTES > 16
  if (sizeof(Number) == 1 && step == 2)
    for (; first + CPU_BYTES / 2 <= count; first += CPU_BYTES / 2)
      pick_even_bytes((const uint8_t*)from + 2 * first, (uint8_t*)to + first);
#endif
  if (step == 2)
    for (int64_t i = first; i < count; i++) to[i] = from[2 * i];  // which compilers vectorize
  else
    for (int64_t i = 0; i < count; i++) to[i] = from[step * i];
}

template <class From, class To>
class LanesArrange {
 public:
  LanesArrange(const Step& step, const Buffers& buffers)
      : step_(step),
        shape_(step.conv.shape),
        lanes_(step.lanes),
        input_(buffers.at<From>(step.input) + lanes_.in_origin),
        output_(buffers.at<To>(step.output) + lanes_.out_origin),
        phases_(buffers.at<int64_t>(step.conv.phases)),
        range_(step.lanes.levels < 0 ? LevelRange{1, 0, 0}
                                     : *buffers.at<LevelRange>(step.lanes.levels)) {}

  void run(ThreadPool& pool) const {
    if (step_.strides[2] != 1 && shape_.height == 1 && std::is_same<From, float>::value)
      return pool.for_each(shape_.width, 4 * FLOAT_LANES, [&](int64_t begin, int64_t end) {
        transpose(begin, end);
      });
    pool.for_each(shape_.channels, 1, [&](int64_t begin, int64_t end) {
      std::vector<To> row((size_t)(shape_.stride_w * lanes_.row + 2 * FLOAT_LANES));
      for (int64_t channel = begin; channel < end; channel++) arrange(channel, row.data());
    });
  }

 private:
  const Step& step_;
  const ConvShape& shape_;
  const LaneArguments& lanes_;
  const From* const input_;
  To* const output_;
  const int64_t* const phases_;  // of rows, then of columns
  const LevelRange range_;

  void arrange(int64_t channel, To* row) const {
    const int64_t columns = lanes_.column_phases, width = lanes_.row;
    To* plane = output_ + channel * lanes_.out_channel;
    if (has_margins()) pick_rows(channel, plane);
    else fill_rows(channel, plane, row);
    // Taps of the last row read behind it.
    for (int64_t i = 0; i < shape_.phases * columns; i++)
      std::fill_n(plane + i * lanes_.phase + lanes_.rows * width, lanes_.tail, To{});
  }

  // Whether the input has the zeros that taps read around it.
  bool has_margins() const {
    return std::is_same<From, To>::value && step_.strides[2] == 1 &&
           lanes_.in_margin >= std::max(shape_.pad_h, shape_.pad_w);
  }

  void pick_rows(int64_t channel, To* plane) const {
    constexpr int64_t LANES = CPU_BYTES / (2 * sizeof(To));
    const int64_t columns = lanes_.column_phases, width = lanes_.row;
    const int64_t whole = (width + LANES - 1) / LANES * LANES;
    const int64_t *down = phases_, *across = phases_ + shape_.phases;
    const To* input = (const To*)input_ + channel * step_.strides[0] - shape_.pad_w;
    for (int64_t i = 0; i < shape_.phases; i++)
      for (int64_t j = 0; j < columns; j++, plane += lanes_.phase)
        for (int64_t y = 0; y < lanes_.rows; y++) {
          const int64_t from = y * shape_.stride_h + down[i] - shape_.pad_h;
          // Whole vectors, which run over into the next row, are faster.
          const int64_t count = y + 1 < lanes_.rows ? whole : width;
          if (from >= shape_.height + shape_.pad_h) std::fill_n(plane + y * width, width, To{});
          else
            pick(input + from * step_.strides[1] + across[j], shape_.stride_w, count,
                 plane + y * width);
        }
  }

  void fill_rows(int64_t channel, To* plane, To* row) const {
    const int64_t columns = lanes_.column_phases, width = lanes_.row;
    const int64_t *down = phases_, *across = phases_ + shape_.phases;
    for (int64_t i = 0; i < shape_.phases; i++)
      for (int64_t y = 0; y < lanes_.rows; y++) {
        const int64_t from = y * shape_.stride_h + down[i] - shape_.pad_h;
        To* to = plane + i * columns * lanes_.phase + y * width;
        if (shape_.stride_w == 1 && columns == 1) {
          fill(channel, from, across[0] - shape_.pad_w, width, to);
          continue;
        }
        fill(channel, from, -shape_.pad_w, shape_.stride_w * width, row);
        for (int64_t j = 0; j < columns; j++, to += lanes_.phase)
          pick(row + across[j], shape_.stride_w, width, to);
      }
  }

  // `count` numbers of row y of a channel from column x on; zeros outside of the image.
  void fill(int64_t channel, int64_t y, int64_t x, int64_t count, To* to) const {
    const bool inside = (uint64_t)y < (uint64_t)shape_.height;
    const int64_t begin = inside ? std::min(count, std::max<int64_t>(0, -x)) : 0;
    const int64_t end = inside ? std::max(begin, std::min(count, shape_.width - x)) : 0;
    const int64_t *strides = step_.strides, stride = strides[2];
    for (int64_t i = 0; i < begin; i++) to[i] = To{};
    for (int64_t i = end; i < count; i++) to[i] = To{};
    if (begin == end) return;
    const From* from = input_ + channel * strides[0] + y * strides[1] + (x + begin) * stride;
    to += begin;
    const int64_t left = end - begin;
    if constexpr (std::is_same<From, To>::value) {
      if (stride == 1) return (void)std::memcpy(to, from, (size_t)left * sizeof(To));
    }
    if (stride == 1 && left >= FLOAT_LANES) {
      for (int64_t i = 0; i < left; i += FLOAT_LANES) {
        const int64_t at = std::min(i, left - FLOAT_LANES);  // the last vectors may overlap
        store(load_numbers(from + at), FLOAT_LANES, to + at);
      }
      return;
    }
    for (int64_t i = 0; i < left; i += FLOAT_LANES) {
      const int64_t some = std::min(FLOAT_LANES, left - i);
      store(load_some(from + i * stride, some, stride), some, to + i);
    }
  }

  inline __attribute__((always_inline)) void store(FloatLanes x, int64_t count, To* to) const {
    To some[FLOAT_LANES];
    if constexpr (std::is_same<To, float>::value && !std::is_same<From, float>::value)
      x *= range_.inverse;  // the step
    if constexpr (std::is_same<To, float>::value) std::memcpy(some, &x, sizeof(x));
    else if constexpr (std::is_same<From, float>::value)
      store_levels(round_lanes(clip(x * range_.inverse, range_.lowest, range_.highest)), some);
    else store_levels(__builtin_convertvector(x, IntLanes), some);
    if (count == FLOAT_LANES) std::memcpy(to, some, sizeof(some));
    else std::memcpy(to, some, (size_t)count * sizeof(To));
  }

  // Tokens [begin, end), whose channels lie side by side, as planes of tokens.
  void transpose(int64_t begin, int64_t end) const {
    const int64_t stride = step_.strides[2], pad = shape_.pad_w;
    const float* input = (const float*)input_;
    for (int64_t token = begin; token < end; token += FLOAT_LANES) {
      const int64_t count = std::min(FLOAT_LANES, end - token);
      for (int64_t channel = 0; channel < shape_.channels; channel++) {
        const float* from = input + channel * step_.strides[0] + token * stride;
        const FloatLanes x =
            count == FLOAT_LANES ? gather(from, stride) : load_some(from, count, stride);
        store(x, count, output_ + channel * lanes_.out_channel + pad + token);
      }
    }
  }
};

// The element types of values: how `lanes.in_type` and `lanes.out_type` name them.
enum LaneType { FLOAT32 = 0, UINT8 = 1, INT8 = 2 };

static void run_lanes_arrange(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const int64_t from = step.lanes.in_type, to = step.lanes.out_type;
  if (from == FLOAT32 && to == FLOAT32) LanesArrange<float, float>(step, buffers).run(pool);
  else if (from == FLOAT32 && to == UINT8) LanesArrange<float, uint8_t>(step, buffers).run(pool);
  else if (from == FLOAT32) LanesArrange<float, int8_t>(step, buffers).run(pool);
  else if (to == FLOAT32 && from == UINT8) LanesArrange<uint8_t, float>(step, buffers).run(pool);
  else if (to == FLOAT32) LanesArrange<int8_t, float>(step, buffers).run(pool);
  else if (from == UINT8) LanesArrange<uint8_t, uint8_t>(step, buffers).run(pool);
  else LanesArrange<int8_t, int8_t>(step, buffers).run(pool);
}
