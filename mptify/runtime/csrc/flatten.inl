// All planes of an image as one row of bits: channel by channel, row by row.

static void run_flatten(const Step& step, const Buffers& buffers, ThreadPool&) {
  const ConvShape& shape = step.conv.shape;
  const uint8_t* planes = buffers.at<uint8_t>(step.input);
  uint8_t* out = buffers.at<uint8_t>(step.output);
  std::memset(out, 0, (size_t)step.conv.stride);
  int64_t bit = 0;
  for (int64_t channel = 0; channel < shape.channels; channel++)
    for (int64_t y = 0; y < shape.height; y++) {
      const uint8_t* row = planes + channel * step.conv.in_stride + y * shape.in_bytes;
      for (int64_t x = 0; x < shape.width; x += 8) {
        const int64_t count = std::min<int64_t>(8, shape.width - x);
        const unsigned bits = row[x / 8] & (unsigned)low_bits(count);
        out[bit / 8] |= (uint8_t)(bits << bit % 8);
        if (bit % 8 + count > 8) out[bit / 8 + 1] |= (uint8_t)(bits >> (8 - bit % 8));
        bit += count;
      }
    }
}
