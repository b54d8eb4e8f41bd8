// A pruned convolution of real or few-bit numbers with weights of ±1, on lanes of pixels.
//
// The output is computed in tiles of whole rows, or of a part of one row. For each tile, the input
// channels are expanded in groups that fit the L1 cache: for each channel and kernel column a plane
// of what that column's taps see, so that the vectors that a filter adds are aligned. Taps above
// each other see rows of one plane, or have planes of their own (`phases`), as in expand.inl. Sums
// of a tile wait in memory between groups. What follows the layer is applied to the sums of the
// last group.

// How numbers become levels while they are expanded: round(x · inverse), clipped. The
// value of a level is `unit`.
struct LevelRange {
  float inverse, lowest, highest, unit;
};

// What follows the sums of a filter: ((sum · unit · scale + bias) · alpha + beta) + other, clipped
// to a range, · last_alpha + last_beta. Each operation rounds as torch's does: it is known of each
// machine whether its BatchNorm rounds once (`fused`) or twice. 1, 0 and infinities stand for
// operations that a layer lacks.
struct Epilogue {
  float unit, scale, bias, alpha, beta, low, high, last_alpha, last_beta;

  Epilogue(const Step& step, const Buffers& buffers, int64_t f) {
    const auto at = [&](int64_t buffer, int64_t i, float otherwise) {
      return buffer < 0 ? otherwise : buffers.at<float>(buffer)[i];
    };
    const float infinity = std::numeric_limits<float>::infinity();
    unit = step.lanes.levels < 0 ? 1 : buffers.at<LevelRange>(step.lanes.levels)->unit;
    scale = *buffers.at<float>(step.gain);
    bias = at(step.bias, f, 0);
    alpha = at(step.lanes.alpha, f, 1), beta = at(step.lanes.beta, f, 0);
    low = at(step.lanes.range, 0, -infinity), high = at(step.lanes.range, 1, infinity);
    last_alpha = at(step.lanes.last_alpha, f, 1), last_beta = at(step.lanes.last_beta, f, 0);
  }

  template <bool FUSED>
  static inline __attribute__((always_inline)) FloatLanes norm(FloatLanes x, float a, float b) {
    return FUSED ? multiply_add(x, a, b) : x * a + b;
  }

  template <bool FUSED>
  inline __attribute__((always_inline)) FloatLanes of(FloatLanes y, FloatLanes other) const {
    y = norm<FUSED>(y * unit * scale + bias, alpha, beta) + other;
    const FloatLanes least = FloatLanes{} + low, most = FloatLanes{} + high;
    y = y < least ? least : y;
    y = y > most ? most : y;
    return norm<FUSED>(y, last_alpha, last_beta);
  }
};

template <class Lane>
class LanesConv {
 public:
  typedef typename LaneTraits<Lane>::Sum Sum;
  typedef Lane Lanes __attribute__((vector_size(CPU_BYTES)));
  static constexpr int64_t LANES = CPU_BYTES / sizeof(Lane), NUMBERS = CPU_BYTES / 4;

  LanesConv(const Step& step, const Buffers& buffers)
      : step_(step),
        shape_(step.conv.shape),
        lanes_(step.lanes),
        buffers_(buffers),
        other_(buffers.at<float>(step.second_input)),
        input_(buffers.at<float>(step.input)),
        input_end_(input_ + shape_.channels * shape_.height * shape_.width),
        taps_(buffers.at<int32_t>(step.conv.index)),
        starts_(buffers.at<int32_t>(step.conv.starts)),
        phases_(buffers.at<int64_t>(step.conv.phases)),
        range_(buffers.at<LevelRange>(lanes_.levels)),
        output_(buffers.at<float>(step.output)),
        tile_columns_(lanes_.columns),
        tiles_down_((shape_.out_height + lanes_.rows - 1) / lanes_.rows),
        tiles_across_((shape_.out_width + lanes_.columns - 1) / lanes_.columns),
        vectors_((lanes_.rows * lanes_.row + LANES - 1) / LANES),
        filters_(step.filters / step.conv.groups),
        channels_(shape_.channels / step.conv.groups),
        staged_rows_(
            (lanes_.plane_rows - 1) * shape_.stride_h + phases_[shape_.phases - 1] + 1),
        staged_row_(lanes_.row + (shape_.kernel_w - 1) * shape_.dilation_w / shape_.stride_w + 1) {}

  void run(ThreadPool& pool) const {
    const int64_t blocks = lanes_.filter_blocks;
    const int64_t items = tiles_down_ * tiles_across_ * step_.conv.groups * blocks;
    pool.share(items, 1, [&](Chunks& chunks) {
      const int64_t most = (filters_ + blocks - 1) / blocks;
      AlignedBuffer<Lane> planes(lanes_.group_channels * next_channel() + SLACK);
      AlignedBuffer<Sum> sums(most * vectors_ * LANES + SLACK);
      AlignedBuffer<Lane> staged((staged_rows_ + 1) * shape_.stride_w * staged_row_ + SLACK);
      for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t item = begin; item < end; item++) {
          const int64_t group = item / blocks % step_.conv.groups;
          const int64_t tile = item / blocks / step_.conv.groups;
          const int64_t first = item % blocks * most;
          convolve(
              tile, group, first, std::min(filters_, first + most), planes.data(), sums.data(),
              staged.data());
        }
    });
  }

 private:
  static constexpr int64_t SLACK = 1024;  // vectors read and write past the end of a tile

  const Step& step_;
  const ConvShape& shape_;
  const LaneArguments& lanes_;
  const Buffers buffers_;
  const float* const other_;
  const float* const input_;
  const float* const input_end_;  // of numbers without gaps
  const int32_t* const taps_;
  const int32_t* const starts_;
  const int64_t* const phases_;
  const LevelRange* const range_;
  float* const output_;
  const int64_t tile_columns_, tiles_down_, tiles_across_, vectors_, filters_, channels_;
  const int64_t staged_rows_, staged_row_;  // of what a tile reads; columns modulo the stride

  int64_t next_channel() const { return shape_.kernel_w * shape_.phases * lanes_.plane; }

  // Filters [first, last) of a group of the convolution, on one tile.
  void convolve(
      int64_t tile, int64_t group, int64_t first, int64_t last, Lane* planes, Sum* sums,
      Lane* staged) const {
    const int64_t top = tile / tiles_across_ * lanes_.rows;
    const int64_t left = tile % tiles_across_ * tile_columns_;
    const int64_t parts = (channels_ + lanes_.group_channels - 1) / lanes_.group_channels;
    for (int64_t part = 0; part < parts; part++) {
      const int64_t begin = part * lanes_.group_channels;
      const int64_t end = std::min(channels_, begin + lanes_.group_channels);
      for (int64_t channel = begin; channel < end; channel++)
        expand(
            group * channels_ + channel, top, left, staged,
            planes + (channel - begin) * next_channel());
      for (int64_t f = first; f < last; f++) {
        const int64_t filter = group * filters_ + f;
        const int32_t* start = starts_ + 2 * (part * step_.filters + filter);
        const Taps taps = {taps_ + start[0], taps_ + start[1], taps_ + start[2]};
        Sum* mine = sums + (f - first) * vectors_ * LANES;
        add(planes, taps, part == 0, mine);
        if (part + 1 < parts) continue;
        if (lanes_.fused) write<true>(filter, top, left, mine);
        else write<false>(filter, top, left, mine);
      }
    }
  }

  void add(const Lane* planes, const Taps& taps, bool first, Sum* sums) const {
    const int64_t most = LaneTraits<Lane>::MAX_VECTORS;
    const int64_t blocks = (vectors_ + most - 1) / most, each = (vectors_ + blocks - 1) / blocks;
    for (int64_t at = 0; at < vectors_; at += each) {
      const int64_t count = std::min(each, vectors_ - at);
      const Lane* base = planes + at * LANES;
      Sum* to = sums + at * LANES;
      switch (count) {
        case 1: add_some<1>(base, taps, first, to); break;
        case 2: add_some<2>(base, taps, first, to); break;
        case 3: add_some<3>(base, taps, first, to); break;
        case 4: add_some<4>(base, taps, first, to); break;
        case 5: add_some<5>(base, taps, first, to); break;
        case 6: add_some<6>(base, taps, first, to); break;
        case 7: add_some<7>(base, taps, first, to); break;
        default: add_some<8>(base, taps, first, to);
      }
    }
  }

  template <int VECTORS>
  void add_some(const Lane* base, const Taps& taps, bool first, Sum* sums) const {
    if constexpr (VECTORS > LaneTraits<Lane>::MAX_VECTORS) return;
    else if constexpr (sizeof(Lane) == 1) add_lanes<VECTORS>(base, taps, lanes_.most, first, sums);
    else add_lanes<VECTORS>(base, taps, first, sums);
  }

  // What the taps of each kernel column see of a channel, in the rows of a tile. `staged` is memory
  // for the rows of the input, padded, with the columns side by side that a stride reads together.
  void expand(int64_t channel, int64_t top, int64_t left, Lane* staged, Lane* planes) const {
    const int64_t stride = shape_.stride_h, across = shape_.stride_w, staged_rows = staged_rows_;
    const int64_t first = top * stride - shape_.pad_h, x = left * across - shape_.pad_w;
    const int64_t next_row = across * staged_row_;
    for (int64_t y = 0; y < staged_rows; y++)
      stage(channel, first + y, x, staged + staged_rows * next_row, staged + y * next_row);
    const int64_t columns = shape_.kernel_w, phases = shape_.phases, plane = lanes_.plane;
    const int64_t rows = lanes_.plane_rows, row = lanes_.row;
    for (int64_t kw = 0; kw < columns; kw++) {
      const int64_t column = kw * shape_.dilation_w;
      const Lane* from = staged + column % across * staged_row_ + column / across;
      for (int64_t phase = 0; phase < phases; phase++)
        copy_rows(
            from + phases_[phase] * next_row, stride * next_row, rows, row,
            planes + (kw * phases + phase) * plane);
    }
  }

  // Copies rows in whole vectors: what is written too much is overwritten by the next row.
  static inline __attribute__((always_inline)) void copy_rows(
      const Lane* from, int64_t next, int64_t rows, int64_t row, Lane* to) {
    for (int64_t r = 0; r < rows; r++, from += next, to += row)
      for (int64_t i = 0; i < row; i += LANES) {
        Lanes some;
        __builtin_memcpy(&some, from + i, sizeof(some));
        store(some, to + i);
      }
  }

  // Row y of a channel from column x on, as lanes. `row` is memory for one.
  void stage(int64_t channel, int64_t y, int64_t x, Lane* row, Lane* to) const {
    const int64_t across = shape_.stride_w, staged_row = staged_row_, count = across * staged_row;
    const Lanes zeros = {};
    const bool inside = (uint64_t)y < (uint64_t)shape_.height;
    const int64_t begin = inside ? std::min(count, std::max<int64_t>(0, -x)) : 0;
    const int64_t end = inside ? std::max(begin, std::min(count, shape_.width - x)) : 0;
    if (across == 1) {
      for (int64_t i = 0; i < begin; i++) to[i] = 0;
      if (end > begin) convert(input_row(channel, y, x + begin), end - begin, to + begin);
      for (int64_t i = end; i < count; i += LANES) store(zeros, to + i);
      return;
    }
    for (int64_t i = 0; i < begin; i++) row[i] = 0;
    if (end > begin) convert(input_row(channel, y, x + begin), end - begin, row + begin);
    for (int64_t i = end; i < count; i += LANES) store(zeros, row + i);
    if (across == 2) return deinterleave(row, staged_row, to);
    for (int64_t phase = 0; phase < across; phase++)
      for (int64_t i = 0; i < staged_row; i++) to[phase * staged_row + i] = row[i * across + phase];
  }

  // The even and then the odd columns of a row.
  static void deinterleave(const Lane* __restrict row, int64_t count, Lane* __restrict to) {
    for (int64_t i = 0; i < count; i++) to[i] = row[2 * i];  // which compilers vectorize
    for (int64_t i = 0; i < count; i++) to[count + i] = row[2 * i + 1];
  }

  const float* input_row(int64_t channel, int64_t y, int64_t x) const {
    return input_ + channel * step_.strides[0] + y * step_.strides[1] + x * step_.strides[2];
  }

  // Numbers of the input as lanes, in whole vectors: what is written too much is overwritten.
  void convert(const float* from, int64_t count, Lane* __restrict to) const {
    const int64_t stride = step_.strides[2];
    if (stride != 1) {
      float some[NUMBERS];
      for (int64_t i = 0; i < count; i += NUMBERS) {
        for (int64_t j = 0; j < std::min(NUMBERS, count - i); j++) some[j] = from[(i + j) * stride];
        convert_vector(load_floats(some), to + i);
      }
      return;
    }
    int64_t i = 0;
    for (; i < count && from + i + NUMBERS <= input_end_; i += NUMBERS)
      convert_vector(load_floats(from + i), to + i);
    if (i < count) convert_vector(load_some(from + i, count - i), to + i);
  }

  inline __attribute__((always_inline)) void convert_vector(FloatLanes x, Lane* to) const {
    if constexpr (std::is_same<Lane, float>::value) {
      store(x, to);
    } else {
      const LevelRange& range = *range_;
      typedef Lane Some __attribute__((vector_size(CPU_BYTES / 4 * sizeof(Lane))));
      const IntLanes level = round_lanes(clip_lanes(x * range.inverse, range));
      const Some some = __builtin_convertvector(level, Some);
      __builtin_memcpy(to, &some, sizeof(some));
    }
  }

  // Some numbers, and zeros behind them. Not written number by number and then read as a vector,
  // which would have to wait until all numbers are in the cache.
  static inline __attribute__((always_inline)) FloatLanes load_some(
      const float* from, int64_t count) {
    FloatLanes some = {};
    for (int64_t i = 0; i < count; i++) some[i] = from[i];
    return some;
  }

  template <class Vector>
  static inline __attribute__((always_inline)) void store(Vector x, Lane* to) {
    __builtin_memcpy(to, &x, sizeof(x));
  }

  static inline __attribute__((always_inline)) FloatLanes clip_lanes(
      FloatLanes x, const LevelRange& range) {
    const FloatLanes low = FloatLanes{} + range.lowest, high = FloatLanes{} + range.highest;
    x = x < low ? low : x;
    return x > high ? high : x;
  }

  // Rounds half to even: adding 1.5 · 2^23 leaves no bits behind the point.
  static inline __attribute__((always_inline)) IntLanes round_lanes(FloatLanes x) {
    const FloatLanes shifted = x + 12582912.0f;
    return (IntLanes)shifted - (IntLanes)(FloatLanes{} + 12582912.0f);
  }

  template <bool FUSED>
  void write(int64_t f, int64_t top, int64_t left, const Sum* sums) const {
    const Epilogue epilogue(step_, buffers_, f);
    const int64_t *strides = lanes_.out_strides, stride = strides[2], next = strides[1];
    int64_t rows = std::min(lanes_.rows, shape_.out_height - top), row = lanes_.row;
    int64_t width = std::min(tile_columns_, shape_.out_width - left);
    const int64_t at = f * strides[0] + top * next + left * stride;
    if (width == row && next == width) width *= rows, rows = 1;  // a tile without gaps
    float* to = output_ + at;
    const float* other = other_ ? other_ + at : nullptr;
    for (int64_t y = 0; y < rows; y++, sums += row, to += next) {
      if (stride == 1) write_row<FUSED>(epilogue, sums, other, width, y + 1 < rows, to);
      else
        for (int64_t x = 0; x < width; x += NUMBERS)
          scatter<FUSED>(epilogue, sums + x, other, x, std::min(NUMBERS, width - x), stride, to);
      if (other) other += next;
    }
  }

  // A row of the output. `overruns` says that a vector may be written past its end.
  template <bool FUSED>
  static inline __attribute__((always_inline)) void write_row(
      const Epilogue& epilogue, const Sum* sums, const float* other, int64_t width, bool overruns,
      float* to) {
    int64_t x = 0;
    for (; x + NUMBERS <= width; x += NUMBERS) {
      const FloatLanes added = other ? load_floats(other + x) : FloatLanes{};
      const FloatLanes y = epilogue.template of<FUSED>(load_sums(sums + x), added);
      __builtin_memcpy(to + x, &y, sizeof(y));
    }
    if (x == width) return;
    const FloatLanes added = other ? load_some(other + x, width - x) : FloatLanes{};
    const FloatLanes y = epilogue.template of<FUSED>(load_sums(sums + x), added);
    if (overruns && width >= NUMBERS) __builtin_memcpy(to + x, &y, sizeof(y));
    else std::memcpy(to + x, &y, (size_t)(width - x) * sizeof(float));
  }

  // `count` numbers from the x-th on, `stride` apart.
  template <bool FUSED>
  static void scatter(
      const Epilogue& epilogue, const Sum* sums, const float* other, int64_t x, int64_t count,
      int64_t stride, float* to) {
    float some[NUMBERS] = {};
    if (other)
      for (int64_t i = 0; i < count; i++) some[i] = other[(x + i) * stride];
    const FloatLanes y = epilogue.template of<FUSED>(load_sums(sums), load_floats(some));
    for (int64_t i = 0; i < count; i++) to[(x + i) * stride] = y[i];
  }

  static inline __attribute__((always_inline)) FloatLanes load_sums(const Sum* from) {
    typedef Sum Sums __attribute__((vector_size(CPU_BYTES / 4 * sizeof(Sum)), aligned(2), may_alias));
    return __builtin_convertvector(*(const Sums*)from, FloatLanes);
  }
};

static void run_lanes_conv(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  switch (step.lanes.bytes) {
    case 4: return LanesConv<float>(step, buffers).run(pool);
    case 2: return LanesConv<int16_t>(step, buffers).run(pool);
    default: return LanesConv<uint8_t>(step, buffers).run(pool);
  }
}
