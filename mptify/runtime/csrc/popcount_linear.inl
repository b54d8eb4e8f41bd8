// A linear layer on one vector of bits: kept - 2 * popcount(mask & (input ^ sign)).

struct PopcountLinearArguments {
  const uint8_t* input;    // one bit per input, 1 for +1
  const uint8_t* weights;  // [filters]: `bytes` of the mask, and as many of signs under the mask
  const int32_t* kept;     // [filters]
  float* out;              // [filters]
  int64_t bytes;
};

static void count_filters(const PopcountLinearArguments& arguments, int64_t begin, int64_t end) {
  const int64_t whole = arguments.bytes / 32 * 32, rest = arguments.bytes - whole;
  for (int64_t f = begin; f < end; f++) {
    const uint8_t* mask = arguments.weights + f * 2 * arguments.bytes;
    const uint8_t* signs = mask + arguments.bytes;
    uint64_t differing = 0;
    for (int64_t at = 0; at < whole;) {
      Count count = {};
      for (const int64_t stop = std::min(whole, at + MAX_BLOCKS * 32); at < stop; at += 32)
        count = add_counts(count, count_block(mask + at, signs + at, arguments.input + at));
      differing += total_of(count);
    }
    if (rest) {
      uint8_t ends[3][32] = {};
      const uint8_t* from[3] = {mask, signs, arguments.input};
      for (int i = 0; i < 3; i++) std::memcpy(ends[i], from[i] + whole, (size_t)rest);
      differing += total_of(count_block(ends[0], ends[1], ends[2]));
    }
    arguments.out[f] = (float)(arguments.kept[f] - 2 * (int64_t)differing);
  }
}

// Makes the layer's output; with thresholds (float32, as the sums) a vector of signs.
static void run_popcount_linear(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const float* thresholds = buffers.at<float>(step.thresholds);
  const PopcountLinearArguments arguments = {
      buffers.at<uint8_t>(step.input),
      buffers.at<uint8_t>(step.conv.weights),
      buffers.at<int32_t>(step.conv.kept),
      buffers.at<float>(thresholds ? step.conv.workspace : step.output),
      step.length,
  };
  float* sums = arguments.out;
  const Scale scale(step, buffers);
  pool.for_each(step.filters, 64, [&](int64_t begin, int64_t end) {
    count_filters(arguments, begin, end);
    if (thresholds) return;
    for (int64_t f = begin; f < end; f++) sums[f] = scale.of(sums[f], f);
  });
  if (thresholds == nullptr) return;
  uint8_t* bits = buffers.at<uint8_t>(step.output);
  std::memset(bits, 0, (size_t)(step.filters + 7) / 8);
  for (int64_t f = 0; f < step.filters; f++)
    bits[f / 8] |= (uint8_t)((sums[f] >= thresholds[f]) << f % 8);
}
