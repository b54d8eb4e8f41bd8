// A pruned convolution of real or few-bit numbers with weights of ±1, on lanes of pixels.
//
// The output is computed in tiles of whole rows, or of a part of one row. For each tile, the input
// channels are expanded in groups that fit the L1 cache: for each channel and kernel column a plane
// of what that column's taps see, so that the vectors that a filter adds are aligned. Taps above
// each other see rows of one plane, or have planes of their own (`phases`), as in expand.inl. Sums
// of a tile wait in memory between groups. What follows the layer is applied to the sums of the
// last group.

// What follows the sums of a filter: ((sum · scale + bias) · alpha + beta) + other, clipped to a
// range, · alpha + beta again. Each operation rounds as torch's does.
struct Epilogue {
  const float* bias;   // [filters] each, or null
  const float* alpha;
  const float* beta;
  const float* last_alpha;
  const float* last_beta;
  const float* other;  // numbers of the output's shape, or null
  float scale, low, high;
  bool clips;

  Epilogue(const Step& step, const Buffers& buffers)
      : bias(buffers.at<float>(step.bias)),
        alpha(buffers.at<float>(step.lanes.alpha)),
        beta(buffers.at<float>(step.lanes.beta)),
        last_alpha(buffers.at<float>(step.lanes.last_alpha)),
        last_beta(buffers.at<float>(step.lanes.last_beta)),
        other(buffers.at<float>(step.second_input)),
        scale(*buffers.at<float>(step.gain)),
        clips(step.lanes.range >= 0) {
    const float* range = buffers.at<float>(step.lanes.range);
    low = clips ? range[0] : 0, high = clips ? range[1] : 0;
  }

  template <class Numbers>
  inline __attribute__((always_inline)) Numbers of(Numbers y, int64_t f, const float* added) const {
    y = y * scale;
    if (bias) y = y + bias[f];
    if (alpha) y = y * alpha[f] + beta[f];
    if (added) {
      Numbers more;
      __builtin_memcpy(&more, added, sizeof(Numbers));
      y = y + more;
    }
    if (clips) {
      const Numbers least = Numbers{} + low, most = Numbers{} + high;
      y = y < least ? least : y;
      y = y > most ? most : y;
    }
    if (last_alpha) y = y * last_alpha[f] + last_beta[f];
    return y;
  }
};

// How numbers become levels while they are expanded: round(x · inverse), clipped, plus `zero`.
struct LevelRange {
  float inverse, lowest, highest, zero;
};

template <class Lane>
class LanesConv {
 public:
  typedef typename LaneTraits<Lane>::Sum Sum;
  static constexpr int64_t LANES = CPU_BYTES / sizeof(Lane);

  LanesConv(const Step& step, const Buffers& buffers)
      : step_(step),
        shape_(step.conv.shape),
        lanes_(step.lanes),
        epilogue_(step, buffers),
        input_(buffers.at<float>(step.input)),
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
        channels_(shape_.channels / step.conv.groups) {}

  void run(ThreadPool& pool) const {
    const int64_t blocks = lanes_.filter_blocks;
    const int64_t items = tiles_down_ * tiles_across_ * step_.conv.groups * blocks;
    pool.share(items, 1, [&](Chunks& chunks) {
      const int64_t most = (filters_ + blocks - 1) / blocks;
      AlignedBuffer<Lane> planes(lanes_.group_channels * next_channel() + SLACK);
      AlignedBuffer<Sum> sums(most * vectors_ * LANES + SLACK);
      AlignedBuffer<Lane> row(shape_.width + SLACK);
      for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t item = begin; item < end; item++) {
          const int64_t group = item / blocks % step_.conv.groups;
          const int64_t tile = item / blocks / step_.conv.groups;
          const int64_t first = item % blocks * most;
          convolve(
              tile, group, first, std::min(filters_, first + most), planes.data(), sums.data(),
              row.data());
        }
    });
  }

 private:
  static constexpr int64_t SLACK = 1024;  // vectors read and write past the end of a tile

  const Step& step_;
  const ConvShape& shape_;
  const LaneArguments& lanes_;
  const Epilogue epilogue_;
  const float* const input_;
  const int32_t* const taps_;
  const int32_t* const starts_;
  const int64_t* const phases_;
  const LevelRange* const range_;
  float* const output_;
  const int64_t tile_columns_, tiles_down_, tiles_across_, vectors_, filters_, channels_;

  int64_t next_channel() const { return shape_.kernel_w * shape_.phases * lanes_.plane; }

  // Filters [first, last) of a group of the convolution, on one tile.
  void convolve(
      int64_t tile, int64_t group, int64_t first, int64_t last, Lane* planes, Sum* sums,
      Lane* row) const {
    const int64_t top = tile / tiles_across_ * lanes_.rows;
    const int64_t left = tile % tiles_across_ * tile_columns_;
    const int64_t parts = (channels_ + lanes_.group_channels - 1) / lanes_.group_channels;
    for (int64_t part = 0; part < parts; part++) {
      const int64_t begin = part * lanes_.group_channels;
      const int64_t end = std::min(channels_, begin + lanes_.group_channels);
      for (int64_t channel = begin; channel < end; channel++)
        expand(group * channels_ + channel, top, left, row, planes + (channel - begin) * next_channel());
      for (int64_t f = first; f < last; f++) {
        const int64_t filter = group * filters_ + f;
        const int32_t* start = starts_ + 2 * (part * step_.filters + filter);
        const Taps taps = {taps_ + start[0], taps_ + start[1], taps_ + start[2]};
        Sum* mine = sums + (f - first) * vectors_ * LANES;
        add(planes, taps, part == 0, mine);
        if (part + 1 == parts) write(filter, top, left, mine);
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

  // What the taps of each kernel column see of a channel, in the rows of a tile.
  void expand(int64_t channel, int64_t top, int64_t left, Lane* row, Lane* planes) const {
    const int64_t plane_rows = lanes_.plane_rows, stride = shape_.stride_h;
    const int64_t first = top * stride - shape_.pad_h;
    const int64_t last = first + (plane_rows - 1) * stride + phases_[shape_.phases - 1];
    const Lane zero = range_ ? (Lane)range_->zero : Lane(0);
    for (int64_t y = first; y <= last; y++) {
      const bool inside = (uint64_t)y < (uint64_t)shape_.height;
      const Lane* from = nullptr;
      for (int64_t phase = 0; phase < shape_.phases; phase++) {
        const int64_t below = y - first - phases_[phase];
        if (below < 0 || below % stride || below / stride >= plane_rows) continue;
        if (inside && from == nullptr) from = input_row(channel, y, row);
        Lane* to = planes + phase * lanes_.plane + below / stride * lanes_.row;
        for (int64_t kw = 0; kw < shape_.kernel_w; kw++, to += shape_.phases * lanes_.plane)
          copy_columns(from, left * shape_.stride_w - shape_.pad_w + kw * shape_.dilation_w, zero, to);
      }
    }
  }

  // Columns `x`, `x` + stride, ... of a row, as many as a tile has; `zero` outside of the image.
  void copy_columns(const Lane* __restrict from, int64_t x, Lane zero, Lane* __restrict to) const {
    const int64_t count = lanes_.row, step = shape_.stride_w;
    int64_t begin = 0, end = 0;
    if (from) {
      begin = std::min(count, std::max<int64_t>(0, (-x + step - 1) / step));
      end = std::min(count, std::max(begin, (shape_.width - x + step - 1) / step));
    }
    for (int64_t i = 0; i < begin; i++) to[i] = zero;
    if (step == 1) std::memcpy(to + begin, from + x + begin, (size_t)(end - begin) * sizeof(Lane));
    else
      for (int64_t i = begin; i < end; i++) to[i] = from[x + i * step];
    for (int64_t i = end; i < count; i++) to[i] = zero;
  }

  // A row of the input as lanes; `row` is memory for one.
  const Lane* input_row(int64_t channel, int64_t y, Lane* __restrict row) const {
    const float* from = input_ + channel * step_.strides[0] + y * step_.strides[1];
    const int64_t width = shape_.width, stride = step_.strides[2];
    if constexpr (std::is_same<Lane, float>::value) {
      if (stride == 1) return from;
      for (int64_t x = 0; x < width; x++) row[x] = from[x * stride];
    } else {
      const LevelRange range = *range_;
      int64_t x = 0;
      if (stride == 1)
        for (; x + CPU_BYTES / 4 <= width; x += CPU_BYTES / 4) {
          const FloatLanes y = *(const FloatLanes*)(from + x) * range.inverse;
          const IntLanes level = round_lanes(clip_lanes(y, range)) + (int)range.zero;
          typedef Lane Some __attribute__((vector_size(CPU_BYTES / 4 * sizeof(Lane))));
          const Some some = __builtin_convertvector(level, Some);
          __builtin_memcpy(row + x, &some, sizeof(some));
        }
      for (; x < width; x++) {
        const float y = from[x * stride] * range.inverse;
        const float clipped = std::min(std::max(y, range.lowest), range.highest);
        row[x] = (Lane)((int)std::nearbyintf(clipped) + (int)range.zero);
      }
    }
    return row;
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

  void write(int64_t f, int64_t top, int64_t left, const Sum* sums) const {
    const int64_t rows = std::min(lanes_.rows, shape_.out_height - top);
    const int64_t width = std::min(tile_columns_, shape_.out_width - left);
    const int64_t stride = lanes_.out_strides[2];
    for (int64_t y = 0; y < rows; y++) {
      const Sum* from = sums + y * lanes_.row;
      const int64_t at = f * lanes_.out_strides[0] + (top + y) * lanes_.out_strides[1] + left * stride;
      const float* other = epilogue_.other ? epilogue_.other + at : nullptr;
      int64_t x = 0;
      constexpr int64_t STEP = CPU_BYTES / 4;
      if (stride == 1)
        for (; x + STEP <= width; x += STEP) {
          FloatLanes y = epilogue_.of(load_sums(from + x), f, other ? other + x : nullptr);
          __builtin_memcpy(output_ + at + x, &y, sizeof(y));
        }
      for (; x < width; x++) {
        const float* added = other ? other + x * stride : nullptr;
        output_[at + x * stride] = epilogue_.of((float)from[x], f, added);
      }
    }
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
