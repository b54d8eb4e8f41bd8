// The largest number in each window; NaN if there is one, as in torch.

static inline __attribute__((always_inline)) float larger(float one, float other) {
  return other > one || other != other ? other : one;
}

static void run_number_max_pool(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const ConvShape& shape = step.conv.shape;
  const float* input = buffers.at<float>(step.input);
  float* output = buffers.at<float>(step.output);
  const float lowest = -std::numeric_limits<float>::infinity();
  pool.for_each(shape.channels, 1, [&](int64_t begin, int64_t end) {
    const int64_t width = shape.width, pad = shape.pad_w, step_w = shape.stride_w;
    std::vector<float> row((size_t)(width + 2 * pad), lowest);  // padded on both sides
    float* const inner = row.data() + pad;
    for (int64_t channel = begin; channel < end; channel++)
      for (int64_t y = 0; y < shape.out_height; y++) {
        std::fill(inner, inner + width, lowest);
        for (int64_t kh = 0; kh < shape.kernel_h; kh++) {
          const int64_t at = y * shape.stride_h - shape.pad_h + kh * shape.dilation_h;
          if ((uint64_t)at >= (uint64_t)shape.height) continue;
          const float* from = input + (channel * shape.height + at) * width;
          for (int64_t x = 0; x < width; x++) inner[x] = larger(inner[x], from[x]);
        }
        float* to = output + (channel * shape.out_height + y) * shape.out_width;
        for (int64_t x = 0; x < shape.out_width; x++) to[x] = row[(size_t)(x * step_w)];
        for (int64_t kw = 1; kw < shape.kernel_w; kw++) {
          const float* from = row.data() + kw * shape.dilation_w;
          for (int64_t x = 0; x < shape.out_width; x++) to[x] = larger(to[x], from[x * step_w]);
        }
      }
  });
}
