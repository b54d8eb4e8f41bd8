// Planes from numbers: a bit is 1 where the number is at least 0.

static void run_pack(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const ConvShape& shape = step.conv.shape;
  const float* numbers = buffers.at<float>(step.input);
  uint8_t* planes = buffers.at<uint8_t>(step.output);
  const auto pack_row = [&](const float* from, uint8_t* row) {
    const int64_t stride = step.strides[2];
    int64_t x = 0;
    if (stride == 1)
      for (; x + 8 <= shape.width; x += 8) row[x / 8] = compare_eight(0, from + x, false);
    for (; x < shape.width; x += 8) {
      unsigned bits = 0;
      for (int64_t k = 0; k < std::min<int64_t>(8, shape.width - x); k++)
        bits |= (unsigned)(0 <= from[(x + k) * stride]) << k;
      row[x / 8] = (uint8_t)bits;
    }
  };
  pool.for_each(shape.channels, 16, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++)
      for (int64_t y = 0; y < shape.height; y++)
        pack_row(numbers + channel * step.strides[0] + y * step.strides[1],
                 planes + channel * step.conv.stride + y * shape.in_bytes);
  });
}
