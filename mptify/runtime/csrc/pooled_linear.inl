// A linear layer on the mean of each plane: it adds the planes' sums of ±1, which are integers, and
// divides by the number of pixels at the end.

static void run_pooled_linear(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const ConvArguments& conv = step.conv;
  const ConvShape& shape = conv.shape;
  const uint8_t* planes = buffers.at<uint8_t>(step.input);
  const uint16_t* index = buffers.at<uint16_t>(conv.index);
  const int32_t* starts = buffers.at<int32_t>(conv.starts);
  int32_t* sums = buffers.at<int32_t>(conv.workspace);
  float* out = buffers.at<float>(step.output);
  const int64_t pixels = shape.height * shape.width, last = (shape.width - 1) / 8;
  const unsigned last_bits = (unsigned)low_bits(shape.width - 8 * last);
  pool.for_each(shape.channels, 64, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++) {
      int64_t positive = 0;
      for (int64_t y = 0; y < shape.height; y++) {
        const uint8_t* row = planes + channel * conv.in_stride + y * shape.in_bytes;
        for (int64_t at = 0; at <= last; at++)
          positive += __builtin_popcount(at < last ? row[at] : row[at] & last_bits);
      }
      sums[channel] = (int32_t)(2 * positive - pixels);
    }
  });
  const auto total = [&](int32_t begin, int32_t end) {
    int32_t four[4] = {0, 0, 0, 0};  // independent sums, which need not wait for each other
    for (; begin + 4 <= end; begin += 4)
      for (int k = 0; k < 4; k++) four[k] += sums[index[begin + k]];
    for (; begin < end; begin++) four[0] += sums[index[begin]];
    return four[0] + four[1] + four[2] + four[3];
  };
  const Scale scale(step, buffers);
  pool.for_each(step.filters, 64, [&](int64_t begin, int64_t end) {
    for (int64_t f = begin; f < end; f++) {
      const int32_t* at = starts + 2 * f;
      const int32_t sum = total(at[1], at[2]) - total(at[0], at[1]);
      out[f] = scale.of((float)(sum / (double)pixels), f);
    }
  });
}
