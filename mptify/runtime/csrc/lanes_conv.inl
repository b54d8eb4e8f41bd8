// A pruned convolution of real or few-bit numbers with weights of ±1, on lanes of pixels.
//
// The input was arranged (lanes_arrange.inl) so that what a tap sees of all pixels is one run of
// memory: rows of the output are `row` lanes apart, and a tap's run starts `tap_offsets[tap]` bytes
// behind the start of its channel. The output is computed in tiles of a few vectors of lanes. For
// each tile, the kernel copies what each tap of some channels sees, so that the vectors that
// filters add are aligned and in the L1 cache, where the sums of a block of filters are as well.
// What follows the layer is applied to the sums at the end.

// Numbers that all filters share.
struct LaneFactors {
  float scale, unit;                  // of the sums: unit is the value of level 1
  float other;                        // the value of level 1 of what is added
  float low, high;                    // the range that the output is clipped to
  float inverse, lowest, highest;     // how the output becomes levels
};

// What follows the sums of a filter: ((sum · unit · scale + bias) · alpha + beta) + other, clipped
// to a range, · last_alpha + last_beta; as numbers, or rounded to levels. Each operation rounds as
// torch's does: whether BatchNorm rounds once (`fused`) or twice depends on the machine.
class LaneEpilogue {
 public:
  static constexpr int GROUP = 4;  // vectors that are computed side by side

  LaneEpilogue(const Step& step, const Buffers& buffers)
      : factors_(*buffers.at<LaneFactors>(step.lanes.factors)),
        bias_(buffers.at<float>(step.bias)),
        alpha_(buffers.at<float>(step.lanes.alpha)),
        beta_(buffers.at<float>(step.lanes.beta)),
        last_alpha_(buffers.at<float>(step.lanes.last_alpha)),
        last_beta_(buffers.at<float>(step.lanes.last_beta)),
        fused_(step.lanes.fused != 0),
        clips_(step.lanes.clips != 0) {}

  float other_unit() const { return factors_.other; }

  // Of GROUP vectors of sums of filter f; `other` is null if nothing is added.
  inline __attribute__((always_inline)) void apply(
      int64_t f, FloatLanes* y, const FloatLanes* other) const {
    if (factors_.unit != 1) each(y, [&](FloatLanes x) { return x * factors_.unit; });
    each(y, [&](FloatLanes x) __attribute__((always_inline)) { return x * factors_.scale; });
    if (bias_) each(y, [&](FloatLanes x) __attribute__((always_inline)) { return x + bias_[f]; });
    if (alpha_) norm(y, alpha_[f], beta_[f]);
    if (other) {
      #pragma GCC unroll 4
      for (int i = 0; i < GROUP; i++) y[i] += other[i];
    }
    if (clips_) each(y, [&](FloatLanes x) __attribute__((always_inline)) {
      return clip(x, factors_.low, factors_.high);
    });
    if (last_alpha_) norm(y, last_alpha_[f], last_beta_[f]);
  }

  inline __attribute__((always_inline)) IntLanes level(FloatLanes y) const {
    return round_lanes(clip(y * factors_.inverse, factors_.lowest, factors_.highest));
  }

 private:
  const LaneFactors factors_;
  const float *const bias_, *const alpha_, *const beta_, *const last_alpha_, *const last_beta_;
  const bool fused_, clips_;

  template <class Function>
  static inline __attribute__((always_inline)) void each(FloatLanes* y, const Function& function) {
    #pragma GCC unroll 4
    for (int i = 0; i < GROUP; i++) y[i] = function(y[i]);
  }

  inline __attribute__((always_inline)) void norm(FloatLanes* y, float a, float b) const {
    if (fused_)
      each(y, [&](FloatLanes x) __attribute__((always_inline)) { return multiply_add(x, a, b); });
    else each(y, [&](FloatLanes x) __attribute__((always_inline)) { return x * a + b; });
  }
};

// Lane: what is added. Source: what the arranged input holds. If WIDENS, bytes are added to 16-bit
// sums as soon as they are full; otherwise sums are lanes, which are widened between phases of the
// channels, or never.
template <class Lane, class Source, bool WIDENS>
class LanesConv {
 public:
  typedef typename std::conditional<sizeof(Lane) == 2, int32_t, int16_t>::type Wide;
  static constexpr int64_t LANES = CPU_BYTES / sizeof(Lane);

  LanesConv(const Step& step, const Buffers& buffers, const LaneCode* code = nullptr)
      : step_(step),
        shape_(step.conv.shape),
        lanes_(step.lanes),
        code_(code),
        epilogue_(step, buffers),
        input_(buffers.at<Source>(step.input)),
        tap_offsets_(buffers.at<int64_t>(lanes_.tap_offsets)),
        taps_(buffers.at<uint16_t>(step.conv.index)),
        counts_(buffers.at<TapCounts>(lanes_.counts)),
        starts_(buffers.at<int32_t>(step.conv.starts)),
        phase_ends_(buffers.at<uint8_t>(lanes_.phase_ends)),
        other_(buffers.at<uint8_t>(step.second_input)),
        output_(buffers.at<uint8_t>(step.output)),
        width_(code ? code->tile * LANES : lanes_.tile_bytes / (int64_t)sizeof(Lane)),
        lanes_in_all_(shape_.out_height * lanes_.row),
        filters_(step.filters / step.conv.groups),
        channels_(shape_.channels / step.conv.groups),
        parts_((channels_ + lanes_.group_channels - 1) / lanes_.group_channels),
        blocks_((filters_ + lanes_.filter_block - 1) / lanes_.filter_block) {}

  void run(ThreadPool& pool) const {
    const int64_t tiles = (lanes_in_all_ + width_ - 1) / width_;
    if (code_) return run_code(tiles, pool);
    pool.share(tiles * step_.conv.groups * blocks_, 1, [&](Chunks& chunks) {
      Workspace workspace(*this);
      for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t item = begin; item < end; item++)
          compute(item / tiles, item % tiles * width_, workspace);
    });
  }

 private:
  // Block by block, so that the code of a block stays in the cache while tiles run through it.
  void run_code(int64_t tiles, ThreadPool& pool) const {
    const std::vector<LaneCode::Block>& blocks = code_->blocks;
    pool.share(tiles * (int64_t)blocks.size(), 1, [&](Chunks& chunks) {
      Workspace workspace(*this);
      const LaneCode::Block* fetched = nullptr;
      for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t item = begin; item < end; item++) {
          const LaneCode::Block& block = blocks[(size_t)(item / tiles)];
          if (&block != fetched) block.prefetch();
          fetched = &block;
          execute(block, item % tiles * width_, workspace);
        }
    });
  }

  const Step& step_;
  const ConvShape& shape_;
  const LaneArguments& lanes_;
  const LaneCode* const code_;  // null if it adds what lists of taps say
  const LaneEpilogue epilogue_;
  const Source* const input_;
  const int64_t* const tap_offsets_;
  const uint16_t* const taps_;
  const TapCounts* const counts_;
  const int32_t* const starts_;
  const uint8_t* const phase_ends_;
  const uint8_t* const other_;
  uint8_t* const output_;
  const int64_t width_;         // lanes of a tile
  const int64_t lanes_in_all_;  // of the output
  const int64_t filters_, channels_, parts_, blocks_;

  // Memory of one thread.
  struct Workspace {
    explicit Workspace(const LanesConv& conv)
        : planes(conv.code_ ? 0 : conv.lanes_.group_channels * conv.lanes_.taps * conv.width_),
          sums(conv.filters_at_once() * conv.width_ + SLACK),
          wide(conv.needs_wide() ? conv.filters_at_once() * conv.width_ + SLACK : 0),
          tile(conv.writes_tokens() ? conv.filters_at_once() * conv.width_ : 0) {}
    AlignedBuffer<Lane> planes, sums;
    AlignedBuffer<Wide> wide;
    AlignedBuffer<float> tile;
  };

  static constexpr int64_t SLACK = LaneEpilogue::GROUP * FLOAT_LANES;  // read, but not used

  bool needs_wide() const { return code_ ? code_->is_wide : WIDENS || phase_ends_; }
  int64_t filters_at_once() const { return code_ ? code_->largest() : lanes_.filter_block; }
  bool writes_tokens() const { return lanes_.out_column != 1; }

  // A block of filters on one tile, by machine code.
  void execute(const LaneCode::Block& block, int64_t tile, Workspace& workspace) const {
    const int64_t end = std::min(width_, lanes_in_all_ - tile);
    for (const LaneCode::Function add : block.functions)
      for (int64_t at = 0; at < end; at += LANES)
        add((const uint8_t*)(input_ + tile + at), workspace.sums.data() + at,
            workspace.wide.data() + at);
    if (code_->is_wide && sizeof(Lane) == 1) join_bytes(block, end, (int16_t*)workspace.wide.data());
    if (code_->is_wide)
      write_all(block.filter, block.count, tile, workspace.wide.data(), workspace);
    else write_all(block.filter, block.count, tile, workspace.sums.data(), workspace);
  }

  // From sums of pairs of bytes to sums of each byte: see LaneCode::flushes.
  void join_bytes(const LaneCode::Block& block, int64_t end, int16_t* wide) const {
    typedef typename VectorOf<uint16_t>::type Words;
    for (int64_t f = 0; f < block.count; f++, wide += width_) {
      const int offset = LaneCode::MIDDLE * code_->flushes[(size_t)(block.filter + f)];
      const Words middle = Words{} + (uint16_t)offset;
      for (int64_t at = 0; at < end; at += LANES) {
        Words* const sums = (Words*)(wide + at);
        const Words all = sums[0], upper = sums[1];
        interleave(all - (upper << 8) - middle, upper - middle, (uint16_t*)sums);
      }
    }
  }

  // The numbers of two vectors, in turns.
  static inline __attribute__((always_inline)) void interleave(
      typename VectorOf<uint16_t>::type even, typename VectorOf<uint16_t>::type odd,
      uint16_t* to) {
    const uint16_t* const numbers[2] = {(const uint16_t*)&even, (const uint16_t*)&odd};
    constexpr int64_t HALF = CPU_BYTES / 4;
    for (int half = 0; half < 2; half++) {
#if CPU_BYTES == 64
      const __m512i low = _mm512_cvtepu16_epi32(*(const __m256i*)(numbers[0] + half * HALF));
      const __m512i high = _mm512_cvtepu16_epi32(*(const __m256i*)(numbers[1] + half * HALF));
      _mm512_storeu_si512(
          to + 2 * half * HALF, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
      for (int64_t i = 0; i < HALF; i++) {
        to[2 * (half * HALF + i)] = numbers[0][half * HALF + i];
        to[2 * (half * HALF + i) + 1] = numbers[1][half * HALF + i];
      }
#endif
    }
  }

  // A block of filters on one tile; `number` is that of the block, counted over groups.
  void compute(int64_t number, int64_t tile, Workspace& workspace) const {
    const int64_t first = number % blocks_ * lanes_.filter_block;
    const int64_t count = std::min(lanes_.filter_block, filters_ - first);
    if (WIDENS) std::fill_n(workspace.wide.data(), count * width_, Wide{});
    else std::fill_n(workspace.sums.data(), count * width_, Lane{});
    bool is_widened = WIDENS;
    for (int64_t part = 0; part < parts_; part++) {
      copy_planes(number, tile, part, workspace.planes.data());
      add_part(number, part, count, workspace);
      if constexpr (!WIDENS && sizeof(Lane) < 4) {
        if (phase_ends_ && phase_ends_[part]) {
          end_phase(workspace, count * width_, !is_widened);
          is_widened = true;
        }
      }
    }
    const int64_t filter = number / blocks_ * filters_ + first;
    if (is_widened) write_all(filter, count, tile, workspace.wide.data(), workspace);
    else write_all(filter, count, tile, workspace.sums.data(), workspace);
  }

  // What the taps of some channels see of the tile.
  void copy_planes(int64_t number, int64_t tile, int64_t part, Lane* to) const {
    switch (lanes_.tile_bytes / CPU_BYTES) {
      case 1: return copy_vectors<1>(number, tile, part, to);
      case 2: return copy_vectors<2>(number, tile, part, to);
      case 3: return copy_vectors<3>(number, tile, part, to);
      case 4: return copy_vectors<4>(number, tile, part, to);
      default: return copy_vectors<0>(number, tile, part, to);
    }
  }

  template <int VECTORS>
  void copy_vectors(int64_t number, int64_t tile, int64_t part, Lane* __restrict to) const {
    const int64_t begin = part * lanes_.group_channels;
    const int64_t end = std::min(channels_, begin + lanes_.group_channels);
    const int64_t taps = lanes_.taps, next = lanes_.in_channel;
    const int64_t vectors = VECTORS ? VECTORS : lanes_.tile_bytes / CPU_BYTES;
    const int64_t* const offsets = tap_offsets_;
    const uint8_t* from = (const uint8_t*)input_ + tile * (int64_t)sizeof(Source) +
                          (number / blocks_ * channels_ + begin) * next;
    const int64_t ahead = PREFETCHED * next, columns = shape_.kernel_w;
    const int64_t bytes = vectors * LANES * (int64_t)sizeof(Source);
    for (int64_t channel = begin; channel < end; channel++, from += next)
      for (int64_t first = 0; first < taps; first += columns) {
        for (int64_t at = 0; at <= bytes; at += 64)
          __builtin_prefetch(from + offsets[first] + ahead + at);
        for (int64_t tap = first; tap < first + columns; tap++) {
          const Source* pixels = (const Source*)(from + offsets[tap]);
          #pragma GCC unroll 4
          for (int64_t v = 0; v < vectors; v++, to += LANES) copy(pixels + v * LANES, to);
        }
      }
  }

  static constexpr int64_t PREFETCHED = 2;  // channels that are read ahead

  // A vector of pixels, as lanes.
  static inline __attribute__((always_inline)) void copy(const Source* from, Lane* to) {
    if constexpr (sizeof(Lane) == sizeof(Source)) {
      typename VectorOf<Lane>::type some;
      __builtin_memcpy(&some, from, CPU_BYTES);
      __builtin_memcpy(to, &some, CPU_BYTES);
    } else {
      *(typename VectorOf<Lane>::type*)to = widen_half<Lane>(from);
    }
  }

  // The taps of a block of filters among some channels, as many vectors at a time as registers
  // hold.
  void add_part(int64_t number, int64_t part, int64_t count, Workspace& workspace) const {
    const int64_t list = number * parts_ + part;
    for (int64_t at = 0, left = lanes_.tile_bytes / CPU_BYTES; left > 0;) {
      const int64_t some = left == 5 || left == 7 ? left - 1 : std::min<int64_t>(left, 8);
      switch (some) {
        case 1: add_vectors<1>(list, count, at, workspace); break;
        case 2: add_vectors<2>(list, count, at, workspace); break;
        case 3: add_vectors<3>(list, count, at, workspace); break;
        case 4: add_vectors<4>(list, count, at, workspace); break;
        case 6: add_vectors<6>(list, count, at, workspace); break;
        default: add_vectors<8>(list, count, at, workspace);
      }
      at += some * LANES, left -= some;
    }
  }

  template <int VECTORS>
  void add_vectors(int64_t list, int64_t count, int64_t at, Workspace& workspace) const {
    const uint8_t* planes = (const uint8_t*)(workspace.planes.data() + at);
    const TapCounts* counts = counts_ + list * lanes_.filter_block;
    const uint16_t* taps = taps_ + starts_[list];
    if constexpr (WIDENS) {
      int16_t* sums = (int16_t*)workspace.wide.data() + at;
      add_filters_widening<VECTORS, Lane>(
          planes, taps, counts, counts + count, width_, lanes_.most, sums);
    } else {
      Lane* sums = workspace.sums.data() + at;
      add_filters<VECTORS, Lane>(planes, taps, counts, counts + count, width_, sums);
    }
  }

  static void end_phase(Workspace& workspace, int64_t count, bool is_first) {
    typedef typename VectorOf<Lane>::type Lanes;
    Lane* sums = workspace.sums.data();
    if (is_first) std::fill_n(workspace.wide.data(), count, Wide{});
    for (int64_t i = 0; i < count; i += LANES) {
      Lanes& sum = *(Lanes*)(sums + i);
      widen<false, Lane, Wide>(sum, workspace.wide.data() + i);
      sum = Lanes{};
    }
  }

  // -- output ------------------------------------------------------------------------------------

  template <class Sum>
  void write_all(
      int64_t filter, int64_t count, int64_t tile, const Sum* sums, Workspace& workspace) const {
    if (lanes_.out_type == FLOAT32) write_as<float>(filter, count, tile, sums, workspace);
    else if (lanes_.out_type == UINT8) write_as<uint8_t>(filter, count, tile, sums, workspace);
    else write_as<int8_t>(filter, count, tile, sums, workspace);
  }

  template <class Number, class Sum>
  void write_as(
      int64_t filter, int64_t count, int64_t tile, const Sum* sums, Workspace& workspace) const {
    if (lanes_.flat) {
      if (!other_) write_flat<Number, void>(filter, count, tile, sums);
      else if (lanes_.other_type == FLOAT32) write_flat<Number, float>(filter, count, tile, sums);
      else if (lanes_.other_type == UINT8) write_flat<Number, uint8_t>(filter, count, tile, sums);
      else write_flat<Number, int8_t>(filter, count, tile, sums);
    } else if (writes_tokens()) {
      for (int64_t f = 0; f < count; f++)
        finish(filter + f, tile, sums + f * width_, workspace.tile.data() + f * width_);
      write_tokens(filter, count, tile, workspace.tile.data());
    } else {
      const Margins margins(*this, tile, std::min(width_, lanes_in_all_ - tile));
      for (int64_t f = 0; f < count; f++) {
        write_rows<Number>(filter + f, tile, sums + f * width_);
        if (lanes_.out_margin) margins.clear(output_of<Number>(filter + f) + tile);
      }
    }
  }

  template <class Number>
  Number* output_of(int64_t f) const {
    return (Number*)output_ + lanes_.out_origin + f * lanes_.out_channel;
  }

  // The output has the rows of the lanes, and memory behind its end: whole vectors are written.
  template <class Number, class Other, class Sum>
  void write_flat(int64_t filter, int64_t count, int64_t tile, const Sum* sums) const {
    constexpr int GROUP = LaneEpilogue::GROUP;
    const LaneEpilogue epilogue = epilogue_;  // a copy, which no write can change
    const int64_t end = std::min(width_, lanes_in_all_ - tile), width = width_;
    const Margins margins(*this, tile, end);
    for (int64_t f = filter; f < filter + count; f++, sums += width) {
      Number* const out = output_of<Number>(f) + tile;
      for (int64_t at = 0; at < end; at += GROUP * FLOAT_LANES) {
        FloatLanes y[GROUP];
        #pragma GCC unroll 4
        for (int i = 0; i < GROUP; i++) y[i] = load_numbers(sums + at + i * FLOAT_LANES);
        if constexpr (std::is_void<Other>::value) {
          epilogue.apply(f, y, nullptr);
        } else {
          const Other* from = (const Other*)other_ + lanes_.other_origin +
                              f * lanes_.other_channel + tile + at;
          FloatLanes other[GROUP];
          #pragma GCC unroll 4
          for (int i = 0; i < GROUP; i++) {
            other[i] = load_numbers(from + i * FLOAT_LANES);
            if (!std::is_same<Other, float>::value) other[i] *= epilogue.other_unit();
          }
          epilogue.apply(f, y, other);
        }
        const int64_t left = (end - at + FLOAT_LANES - 1) / FLOAT_LANES;
        if constexpr (std::is_same<Number, float>::value) {
          #pragma GCC unroll 4
          for (int i = 0; i < GROUP; i++)
            if (i < left) __builtin_memcpy(out + at + i * FLOAT_LANES, &y[i], CPU_BYTES);
        } else {
          IntLanes levels[GROUP];
          #pragma GCC unroll 4
          for (int i = 0; i < GROUP; i++) levels[i] = epilogue.level(y[i]);
          if (left >= GROUP) store_bytes(levels, out + at);
          else
            for (int i = 0; i < left; i++) store_levels(levels[i], out + at + i * FLOAT_LANES);
        }
      }
      margins.clear(out);
    }
  }

  // Lanes of a tile that are zeros between and around the rows of the output.
  struct Margins {
    int64_t before = 0, behind = 0, end, width, row, first;

    Margins(const LanesConv& conv, int64_t tile, int64_t end)
        : end(end), width(conv.lanes_.row - conv.shape_.out_width), row(conv.lanes_.row) {
      const int64_t around = conv.lanes_.out_margin * (row + 1);
      if (tile == 0) before = around;
      if (tile + end == conv.lanes_in_all_) behind = around;
      first = conv.shape_.out_width - tile % row;
    }

    template <class Number>
    void clear(Number* out) const {
      std::fill_n(out - before, before, Number{});
      for (int64_t at = first; at < end; at += row)
        for (int64_t x = std::max<int64_t>(0, at); x < std::min(end, at + width); x++)
          out[x] = Number{};
      std::fill_n(out + end, behind, Number{});
    }
  };

  // The output, or what is added to it, has other rows than the lanes. An output with margins does
  // have their rows.
  template <class Number, class Sum>
  void write_rows(int64_t f, int64_t tile, const Sum* sums) const {
    float found[MAX_WIDTH];
    finish(f, tile, sums, found);
    for_each_row(tile, [&](int64_t y, int64_t x, int64_t count, int64_t lane) {
      Number* to = output_of<Number>(f) + y * lanes_.out_row + x;
      if constexpr (std::is_same<Number, float>::value)
        std::memcpy(to, found + lane, (size_t)count * sizeof(float));
      else
        for (int64_t i = 0; i < count; i++) to[i] = (Number)(int32_t)found[lane + i];
    });
  }

  static constexpr int64_t MAX_WIDTH = 1024;  // lanes of a tile: 512 bytes, and some more to read

  // The output of a filter on a tile, as numbers or as levels in float32.
  template <class Sum>
  void finish(int64_t f, int64_t tile, const Sum* sums, float* to) const {
    constexpr int GROUP = LaneEpilogue::GROUP;
    float added[MAX_WIDTH];
    if (other_) gather_other(f, tile, added);
    for (int64_t at = 0; at < width_; at += GROUP * FLOAT_LANES) {
      FloatLanes y[GROUP], other[GROUP];
      const int64_t vectors = std::min<int64_t>(GROUP, (width_ - at) / FLOAT_LANES);
      for (int i = 0; i < GROUP; i++) {
        y[i] = i < vectors ? load_numbers(sums + at + i * FLOAT_LANES) : FloatLanes{};
        other[i] = FloatLanes{};
        if (other_ && i < vectors) other[i] = load_numbers(added + at + i * FLOAT_LANES);
      }
      epilogue_.apply(f, y, other_ ? other : nullptr);
      for (int i = 0; i < vectors; i++) {
        if (lanes_.out_type != FLOAT32)
          y[i] = __builtin_convertvector(epilogue_.level(y[i]), FloatLanes);
        __builtin_memcpy(to + at + i * FLOAT_LANES, &y[i], CPU_BYTES);
      }
    }
  }

  void gather_other(int64_t f, int64_t tile, float* to) const {
    const float unit = lanes_.other_type == FLOAT32 ? 1 : epilogue_.other_unit();
    const auto copy_from = [&](const auto* other) {
      const auto* from = other + lanes_.other_origin + f * lanes_.other_channel;
      for_each_row(tile, [&](int64_t y, int64_t x, int64_t count, int64_t lane) {
        const int64_t start = y * lanes_.other_row + x * lanes_.other_column;
        for (int64_t i = 0; i < count; i++)
          to[lane + i] = (float)from[start + i * lanes_.other_column] * unit;
      });
    };
    if (lanes_.other_type == FLOAT32) copy_from((const float*)other_);
    else if (lanes_.other_type == UINT8) copy_from(other_);
    else copy_from((const int8_t*)other_);
  }

  // each(row, column, count, lane of the tile) for each piece of a row of the output in a tile.
  template <class Each>
  inline __attribute__((always_inline)) void for_each_row(int64_t tile, const Each& each) const {
    const int64_t row = lanes_.row, width = shape_.out_width;
    const int64_t end = std::min(tile + width_, lanes_in_all_);
    for (int64_t y = tile / row; y * row < end; y++) {
      const int64_t from = std::max(tile, y * row), to = std::min(end, y * row + width);
      if (from < to) each(y, from - y * row, to - from, from - tile);
    }
  }

  // Filters of a token lie side by side.
  void write_tokens(int64_t filter, int64_t count, int64_t tile, const float* found) const {
    float* const out = output_of<float>(filter);
    const int64_t end = std::min(width_, lanes_in_all_ - tile);
    for (int64_t lane = 0; lane < end; lane++) {
      float* to = out + (tile + lane) * lanes_.out_column;
      int64_t f = 0;
      for (; f + FLOAT_LANES <= count; f += FLOAT_LANES) {
        const FloatLanes some = gather(found + f * width_ + lane, width_);
        __builtin_memcpy(to + f, &some, CPU_BYTES);
      }
      for (; f < count; f++) to[f] = found[f * width_ + lane];
    }
  }
};

static void run_lanes_conv(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const bool is_signed = step.lanes.in_type == INT8;
  const LaneCode* const code = (const LaneCode*)(intptr_t)step.lanes.code;
  if (code && code->vector_bytes == CPU_BYTES) {
    switch (code->lane_bytes) {
      case 4: return LanesConv<float, float, false>(step, buffers, code).run(pool);
      case 2:
        if (is_signed) return LanesConv<int16_t, int8_t, false>(step, buffers, code).run(pool);
        return LanesConv<int16_t, uint8_t, false>(step, buffers, code).run(pool);
      default: return LanesConv<int8_t, int8_t, false>(step, buffers, code).run(pool);
    }
  }
  switch (step.lanes.bytes) {
    case 4: return LanesConv<float, float, false>(step, buffers).run(pool);
    case 2:
      if (is_signed) return LanesConv<int16_t, int8_t, false>(step, buffers).run(pool);
      return LanesConv<int16_t, uint8_t, false>(step, buffers).run(pool);
    default:
      if (step.lanes.most && is_signed)
        return LanesConv<int8_t, int8_t, true>(step, buffers).run(pool);
      if (step.lanes.most) return LanesConv<uint8_t, uint8_t, true>(step, buffers).run(pool);
      return LanesConv<int8_t, int8_t, false>(step, buffers).run(pool);
  }
}
