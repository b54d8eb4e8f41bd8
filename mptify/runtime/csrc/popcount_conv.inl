// A convolution of few pixels: each window is a row of bits, and the kernel counts which of them
// differ from a filter's signs.

struct PopcountArguments {
  const uint8_t* windows;  // [pixels], `stride` bytes apart (a multiple of 32), and three more
  const uint8_t* weights;  // [filters]: `bytes` of the mask, and as many of signs under the mask
  const int32_t* base;     // [filters][classes]: the sum if no bit differs; padding is 0
  const uint8_t* classes;  // [pixels]
  int64_t pixels, stride, bytes, class_count;
};

static constexpr int WINDOWS_AT_ONCE = 4;

// Adds to `differing` the differing bits in `blocks` blocks of 32 bytes of each window.
static inline __attribute__((always_inline)) void count_windows(
    const uint8_t* mask, const uint8_t* signs, const uint8_t* windows, int64_t stride,
    int64_t blocks, int64_t* differing) {
  for (int64_t at = 0; at < 32 * blocks;) {
    Count count[WINDOWS_AT_ONCE] = {};
    for (const int64_t end = std::min(32 * blocks, at + MAX_BLOCKS * 32); at < end; at += 32)
      #pragma GCC unroll 4
      for (int i = 0; i < WINDOWS_AT_ONCE; i++)
        count[i] = add_counts(
            count[i], count_block(mask + at, signs + at, windows + i * stride + at));
    for (int i = 0; i < WINDOWS_AT_ONCE; i++) differing[i] += (int64_t)total_of(count[i]);
  }
}

// The sums of one filter over all windows.
static void sum_windows(const PopcountArguments& arguments, int64_t f, int32_t* sums) {
  const uint8_t* mask = arguments.weights + f * 2 * arguments.bytes;
  const uint8_t* signs = mask + arguments.bytes;
  const int32_t* base = arguments.base + f * arguments.class_count;
  const int64_t whole = arguments.bytes / 32, rest = arguments.bytes % 32;
  uint8_t ends[2][32] = {};
  std::memcpy(ends[0], mask + 32 * whole, (size_t)rest);
  std::memcpy(ends[1], signs + 32 * whole, (size_t)rest);
  for (int64_t p = 0; p < arguments.pixels; p += WINDOWS_AT_ONCE) {
    int64_t differing[WINDOWS_AT_ONCE] = {};
    const uint8_t* windows = arguments.windows + p * arguments.stride;
    count_windows(mask, signs, windows, arguments.stride, whole, differing);
    if (rest)
      count_windows(ends[0], ends[1], windows + 32 * whole, arguments.stride, 1, differing);
    for (int i = 0; i < WINDOWS_AT_ONCE; i++)
      if (p + i < arguments.pixels)
        sums[p + i] = base[arguments.classes[p + i]] - 2 * (int32_t)differing[i];
  }
}

// The channels of each pixel side by side, from planes.
static void transpose_planes(const uint8_t* planes, const ConvArguments& conv, uint8_t* pixels) {
  const ConvShape& shape = conv.shape;
  const int64_t bytes = (shape.channels + 7) / 8;
  for (int64_t channel = 0; channel < shape.channels; channel += 8)
    for (int64_t at = 0; at < shape.height * shape.in_bytes; at++) {  // 8 pixels of 8 channels
      uint64_t bits = 0;
      for (int64_t i = 0; i < std::min<int64_t>(8, shape.channels - channel); i++)
        bits |= (uint64_t)planes[(channel + i) * conv.in_stride + at] << 8 * i;
      bits = transpose_bits(bits);
      for (int64_t i = 0; i < 8; i++)
        pixels[(8 * at + i) * bytes + channel / 8] = (uint8_t)(bits >> 8 * i);
    }
}

// One row of bits per window, `stride` bytes apart.
static void collect_windows(
    const uint8_t* pixels, const ConvShape& shape, int64_t stride, uint8_t* windows) {
  const int64_t bytes = (shape.channels + 7) / 8, taps = shape.kernel_h * shape.kernel_w;
  for (int64_t p = 0; p < shape.out_height * shape.out_width; p++) {
    const int64_t top = p / shape.out_width * shape.stride_h - shape.pad_h;
    const int64_t left = p % shape.out_width * shape.stride_w - shape.pad_w;
    uint8_t* to = windows + p * stride;
    for (int64_t tap = 0; tap < taps; tap++, to += bytes) {
      const int64_t y = top + tap / shape.kernel_w * shape.dilation_h;
      const int64_t x = left + tap % shape.kernel_w * shape.dilation_w;
      const bool inside = y >= 0 && y < shape.height && x >= 0 && x < shape.width;
      if (inside) std::memcpy(to, pixels + (y * 8 * shape.in_bytes + x) * bytes, (size_t)bytes);
      else std::memset(to, 0, (size_t)bytes);
    }
    std::memset(to, 0, (size_t)(stride - taps * bytes));
  }
}

// Signs of one filter's sums. With a shortcut, the second set of thresholds holds where it is +1.
static void threshold_sums(
    const int32_t* sums, const int32_t* thresholds, const Step& step, int64_t f,
    const uint8_t* shortcut, uint8_t* out) {
  const ConvShape& shape = step.conv.shape;
  for (int64_t y = 0; y < shape.out_height; y++)
    for (int64_t x = 0; x < shape.out_width; x += 8) {
      const int64_t at = y * shape.out_bytes + x / 8;
      const unsigned added = shortcut ? shortcut[at] : 0;
      unsigned bits = 0;
      for (int64_t i = 0; i < std::min<int64_t>(8, shape.out_width - x); i++) {
        const int32_t threshold = thresholds[(added >> i & 1) * step.filters + f];
        bits |= (unsigned)(sums[y * shape.out_width + x + i] >= threshold) << i;
      }
      out[at] = (uint8_t)bits;
    }
}

// The workspace holds the channels of each input pixel, and then the windows.
static void run_popcount_conv(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const ConvArguments& conv = step.conv;
  const ConvShape& shape = conv.shape;
  const int64_t bytes = (shape.channels + 7) / 8, pixels = shape.out_height * shape.out_width;
  const int64_t window = shape.kernel_h * shape.kernel_w * bytes;
  const int64_t stride = (window + 31) / 32 * 32;
  uint8_t* input_pixels = buffers.at<uint8_t>(conv.workspace);
  uint8_t* windows = input_pixels + 8 * shape.in_bytes * shape.height * bytes;
  transpose_planes(buffers.at<uint8_t>(step.input), conv, input_pixels);
  collect_windows(input_pixels, shape, stride, windows);
  const PopcountArguments arguments = {
      windows,
      buffers.at<uint8_t>(conv.weights),
      buffers.at<int32_t>(conv.base),
      buffers.at<uint8_t>(conv.pixel_classes),
      pixels,
      stride,
      window,
      conv.class_count,
  };
  const Scale scale(step, buffers);
  const int32_t* thresholds = buffers.at<int32_t>(step.thresholds);
  const uint8_t* shortcut = buffers.at<uint8_t>(step.second_input);
  pool.for_each(step.filters, 4, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> sums((size_t)pixels);
    for (int64_t f = begin; f < end; f++) {
      sum_windows(arguments, f, sums.data());
      if (thresholds == nullptr) {
        scale.write(sums.data(), f, pixels, buffers.at<float>(step.output) + f * pixels);
      } else {
        const uint8_t* added = shortcut ? shortcut + f * conv.stride : nullptr;
        uint8_t* out = buffers.at<uint8_t>(step.output) + f * conv.stride;
        threshold_sums(sums.data(), thresholds, step, f, added, out);
      }
    }
  });
}
