// Max-pools of planes: OR over each window; for falling channels, AND.

struct MaxPoolArguments {
  const uint8_t* planes;   // [channels], `in_stride` bytes apart
  const uint8_t* falling;  // [channels]; or null
  uint8_t* out;            // [channels], `stride` bytes apart
  const ConvShape* shape;
  int64_t in_stride, stride;

  // min is max of the complement, complemented.
  uint64_t complement(int64_t channel) const { return falling && falling[channel] ? ~0ull : 0; }

  // Whether 128 bits hold a row with its padding, so that we can pool four channels at a time.
  bool is_short() const {
    return shape->pad_w + shape->width <= 128 && shape->pad_w < 64 &&
           (shape->kernel_w - 1) * shape->dilation_w < 64 && shape->stride_w <= 2 &&
           shape->out_width <= 64;
  }
};

// Rows [begin, end) of the output, four channels at a time.
static void pool_short(const MaxPoolArguments& given, int64_t begin, int64_t end) {
  const MaxPoolArguments arguments = given;  // copies, which no write can change
  const ConvShape shape = *arguments.shape;
  const uint64_t low_mask = low_bits(shape.width), high_mask = low_bits(shape.width - 64);
  const int pad = (int)shape.pad_w;
  for (int64_t first = 0; first < shape.channels; first += 4) {
    const int64_t left = shape.channels - first;
    // Lanes without a channel repeat the last one.
    const auto channel = [&](int64_t lane) { return first + std::min(lane, left - 1); };
    const auto of_lanes = [&](const auto& each) __attribute__((always_inline)) {
      return Four{each(channel(0)), each(channel(1)), each(channel(2)), each(channel(3))};
    };
    const Four flip = of_lanes([&](int64_t c) { return arguments.complement(c); });
    for (int64_t y = begin; y < end; y++) {
      Four low = {}, high = {};
      for (int64_t kh = 0; kh < shape.kernel_h; kh++) {
        const int64_t from = y * shape.stride_h + kh * shape.dilation_h - shape.pad_h;
        if (from < 0 || from >= shape.height) continue;
        const uint8_t* row = arguments.planes + from * shape.in_bytes;
        const auto word = [&](int64_t at) __attribute__((always_inline)) {
          return of_lanes([&](int64_t c) { return load_word(row + c * arguments.in_stride + at); });
        };
        low |= (word(0) ^ flip) & low_mask;
        if (high_mask) high |= (word(8) ^ flip) & high_mask;
      }
      high = high << pad | (low >> 1) >> (63 - pad), low <<= pad;
      Four most = {}, more = {};  // the maximum of windows that start at each of 128 pixels
      for (int64_t kw = 0; kw < shape.kernel_w; kw++) {
        const int by = (int)(kw * shape.dilation_w);
        most |= low >> by | (high << 1) << (63 - by), more |= high >> by;
      }
      const Four every_second = even_bits(most) | even_bits(more) << 32;
      const Four bits = (shape.stride_w == 1 ? most : every_second) ^ flip;
      uint8_t* out = arguments.out + first * arguments.stride + y * shape.out_bytes;
      for (int lane = 0; lane < std::min<int64_t>(4, left); lane++)
        write_row(out + lane * arguments.stride, shape.out_bytes, 0, bits[lane]);
    }
  }
}

// One row of the output of one channel. `most` is workspace: the maximum over a window's rows.
static void pool_row(
    const MaxPoolArguments& arguments, PaddedRow& most, int64_t channel, int64_t y) {
  const ConvShape& shape = *arguments.shape;
  const uint64_t flip = arguments.complement(channel);
  bool is_first = true;
  for (int64_t kh = 0; kh < shape.kernel_h; kh++) {
    const int64_t from = y * shape.stride_h + kh * shape.dilation_h - shape.pad_h;
    if (from < 0 || from >= shape.height) continue;
    const uint8_t* row = arguments.planes + channel * arguments.in_stride + from * shape.in_bytes;
    most.combine(row, [&](uint64_t before, uint64_t bits) {
      return (is_first ? 0 : before) | (bits ^ flip);
    });
    is_first = false;
  }
  if (is_first) most.clear();  // a window of padding alone
  const auto window = [&](int64_t bit) {  // the maximum of windows that start at each of 64 pixels
    uint64_t bits = 0;
    for (int64_t kw = 0; kw < shape.kernel_w; kw++)
      bits |= most.at(bit + kw * shape.dilation_w - shape.pad_w);
    return bits;
  };
  uint8_t* out = arguments.out + channel * arguments.stride + y * shape.out_bytes;
  for (int64_t x = 0; x < shape.out_width; x += 64) {
    const uint64_t bits = every_nth(shape.stride_w, x * shape.stride_w, window);
    write_row(out, shape.out_bytes, x, bits ^ flip);
  }
}

static void run_max_pool(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const ConvShape& shape = step.conv.shape;
  const MaxPoolArguments arguments = {
      buffers.at<uint8_t>(step.input), buffers.at<uint8_t>(step.falling),
      buffers.at<uint8_t>(step.output), &shape, step.conv.in_stride, step.conv.stride,
  };
  const int64_t reach = shape.pad_w + shape.kernel_w * shape.dilation_w + 64 * shape.stride_w;
  // Threads share rows, as in the layers before and behind it.
  pool.for_each(shape.out_height, 2, [&](int64_t begin, int64_t end) {
    if (arguments.is_short()) return pool_short(arguments, begin, end);
    PaddedRow most(shape.width, reach);
    for (int64_t channel = 0; channel < shape.channels; channel++)
      for (int64_t y = begin; y < end; y++) pool_row(arguments, most, channel, y);
  });
}
