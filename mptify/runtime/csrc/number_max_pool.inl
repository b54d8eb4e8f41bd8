// The largest number, or level, in each window; NaN if there is one, as in torch. The smallest for
// falling channels.

template <bool FALLING, class Numbers>
static inline __attribute__((always_inline)) Numbers better(Numbers one, Numbers other) {
  const auto is_better = FALLING ? other < one : other > one;
  return (is_better | (other != other)) ? other : one;
}

template <class Number>
class NumberMaxPool {
 public:
  NumberMaxPool(const Step& step, const Buffers& buffers)
      : shape_(step.conv.shape),
        lanes_(step.lanes),
        strides_(step.strides),
        input_(buffers.at<Number>(step.input) + lanes_.in_origin),
        output_(buffers.at<Number>(step.output) + lanes_.out_origin),
        falling_(buffers.at<uint8_t>(step.falling)),
        width_(whole_vectors(shape_.width + 2 * shape_.pad_w) + shape_.stride_w * LANES),
        length_(whole_vectors(
            shape_.out_width + shape_.kernel_w * shape_.dilation_w / shape_.stride_w)) {}

  void run(ThreadPool& pool) const {
    pool.for_each(shape_.channels, 1, [&](int64_t begin, int64_t end) {
      Workspace workspace(*this);
      for (int64_t channel = begin; channel < end; channel++) {
        if (falling_ && falling_[channel]) pool_channel<true>(channel, workspace);
        else pool_channel<false>(channel, workspace);
      }
    });
  }

 private:
  typedef typename VectorOf<Number>::type Lanes;
  static constexpr int64_t LANES = CPU_BYTES / sizeof(Number);

  const ConvShape& shape_;
  const LaneArguments& lanes_;
  const int64_t* const strides_;
  const Number* const input_;
  Number* const output_;
  const uint8_t* const falling_;
  const int64_t width_;   // of a row of columns
  const int64_t length_;  // of a phase of such a row

  static int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

  struct Workspace {
    explicit Workspace(const NumberMaxPool& pool)
        : columns((size_t)(pool.shape_.out_height * pool.width_)),
          phases((size_t)(pool.shape_.stride_w * pool.length_)) {}
    std::vector<Number> columns;  // the best of each column of the windows of a row
    std::vector<Number> phases;   // columns p, p + stride, p + 2 · stride, … of a row
  };

  template <bool FALLING>
  void pool_channel(int64_t channel, Workspace& workspace) const {
    typedef std::numeric_limits<Number> Limits;
    const Number lowest = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    const Number highest = Limits::has_infinity ? Limits::infinity() : Limits::max();
    std::vector<Number>& columns = workspace.columns;
    std::fill(columns.begin(), columns.end(), FALLING ? highest : lowest);
    const Number* const plane = input_ + channel * strides_[0];
    for (int64_t y = 0; y < shape_.out_height; y++)
      pool_columns<FALLING>(plane, y, columns.data() + y * width_ + shape_.pad_w);
    Number* to = output_ + channel * lanes_.out_channel;
    clear(to, -lanes_.out_margin * (lanes_.out_row + 1), 0);
    for (int64_t y = 0; y < shape_.out_height; y++, to += lanes_.out_row) {
      pool_row<FALLING>(columns.data() + y * width_, workspace.phases.data(), to);
      clear(to, shape_.out_width, lanes_.out_row);
    }
    clear(to, 0, lanes_.out_margin * (lanes_.out_row + 1));
  }

  // The best of each column of the windows of an output row.
  template <bool FALLING>
  void pool_columns(const Number* plane, int64_t y, Number* __restrict to) const {
    const int64_t top = y * shape_.stride_h - shape_.pad_h, down = shape_.dilation_h;
    const int64_t first = top >= 0 ? 0 : (-top + down - 1) / down;
    const int64_t last = std::min(shape_.kernel_h, (shape_.height - top + down - 1) / down);
    const int64_t row = strides_[1], width = shape_.width;
    const Number* __restrict from = plane + (top + first * down) * row;
    for (int64_t x = 0; x < width && width >= LANES; x += LANES) {
      const int64_t at = std::min(x, width - LANES);  // the last vectors may overlap
      Lanes best = *(const Lanes*)(from + at);
      for (int64_t kh = 1; kh < last - first; kh++)
        best = better<FALLING>(best, *(const Lanes*)(from + kh * down * row + at));
      *(Lanes*)(to + at) = best;
    }
    for (int64_t x = 0; x < width && width < LANES; x++) {
      Number best = from[x];
      for (int64_t kh = 1; kh < last - first; kh++)
        best = better<FALLING>(best, from[kh * down * row + x]);
      to[x] = best;
    }
  }

  template <bool FALLING>
  void pool_row(const Number* columns, Number* __restrict phases, Number* __restrict to) const {
    const int64_t stride = shape_.stride_w, count = shape_.out_width;
    for (int64_t phase = 0; stride > 1 && phase < stride; phase++)
      pick(columns + phase, stride, length_, phases + phase * length_);
    const auto seen = [&](int64_t kw) {
      const int64_t at = kw * shape_.dilation_w;
      return stride == 1 ? columns + at : phases + at % stride * length_ + at / stride;
    };
    int64_t x = 0;
    for (; x + LANES <= count; x += LANES) {
      Lanes best = *(const Lanes*)(seen(0) + x);
      for (int64_t kw = 1; kw < shape_.kernel_w; kw++)
        best = better<FALLING>(best, *(const Lanes*)(seen(kw) + x));
      *(Lanes*)(to + x) = best;
    }
    if (x == count) return;
    Lanes best = *(const Lanes*)(seen(0) + x);  // there is memory behind the columns
    for (int64_t kw = 1; kw < shape_.kernel_w; kw++)
      best = better<FALLING>(best, *(const Lanes*)(seen(kw) + x));
    if (lanes_.flat) *(Lanes*)(to + x) = best;  // what is behind the row is written later
    else std::memcpy(to + x, &best, (size_t)(count - x) * sizeof(Number));
  }

  // The zeros around planes.
  void clear(Number* plane, int64_t begin, int64_t end) const {
    if (lanes_.out_margin) std::fill(plane + begin, plane + end, Number{});
  }
};

static void run_number_max_pool(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  if (step.lanes.in_type == FLOAT32) NumberMaxPool<float>(step, buffers).run(pool);
  else if (step.lanes.in_type == UINT8) NumberMaxPool<uint8_t>(step, buffers).run(pool);
  else NumberMaxPool<int8_t>(step, buffers).run(pool);
}
