// ±1 from planes.

// The eight numbers of each byte.
struct NumbersOfByte {
  float numbers[256 * 8];

  constexpr NumbersOfByte() : numbers() {
    for (int i = 0; i < 256 * 8; i++) numbers[i] = i / 8 >> i % 8 & 1 ? 1.0f : -1.0f;
  }
};

static constexpr NumbersOfByte NUMBERS_OF_BYTE{};

static void run_unpack(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const ConvShape& shape = step.conv.shape;
  const uint8_t* planes = buffers.at<uint8_t>(step.input);
  float* numbers = buffers.at<float>(step.output);
  const float* table = NUMBERS_OF_BYTE.numbers;
  pool.for_each(shape.channels, 16, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++)
      for (int64_t y = 0; y < shape.height; y++) {
        const uint8_t* row = planes + channel * step.conv.in_stride + y * shape.in_bytes;
        float* to = numbers + (channel * shape.height + y) * shape.width;
        int64_t x = 0;
        for (; x + 8 <= shape.width; x += 8) std::memcpy(to + x, table + 8 * row[x / 8], 32);
        for (; x < shape.width; x++) to[x] = table[8 * row[x / 8] + x % 8];
      }
  });
}
