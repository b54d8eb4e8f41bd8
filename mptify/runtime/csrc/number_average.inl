// The mean of each plane of numbers or levels.

template <class Number>
static void average_planes(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  typedef typename std::conditional<std::is_same<Number, float>::value, float, int32_t>::type Sum;
  const ConvShape& shape = step.conv.shape;
  const int64_t* const strides = step.strides;
  const Number* const input = buffers.at<Number>(step.input) + step.lanes.in_origin;
  const double share = *buffers.at<float>(step.gain) / (double)(shape.height * shape.width);
  float* const output = buffers.at<float>(step.output);
  pool.for_each(shape.channels, 16, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++) {
      double sum = 0;
      for (int64_t y = 0; y < shape.height; y++) {
        const Number* row = input + channel * strides[0] + y * strides[1];
        Sum of_row = 0;
        for (int64_t x = 0; x < shape.width; x++) of_row += row[x];
        sum += of_row;
      }
      output[channel] = (float)(sum * share);
    }
  });
}

static void run_number_average(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  if (step.lanes.in_type == FLOAT32) average_planes<float>(step, buffers, pool);
  else if (step.lanes.in_type == UINT8) average_planes<uint8_t>(step, buffers, pool);
  else average_planes<int8_t>(step, buffers, pool);
}
