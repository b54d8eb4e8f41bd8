// A pruned convolution of numbers with weights of ±1, as a network's first layer: additions and
// subtractions only.

struct InputConvArguments {
  const float* numbers;     // padded; columns that a stride reads together lie side by side
  const int32_t* index;     // where each survivor finds its numbers, from the start of a row
  const int32_t* starts;    // where in `index` filter f's negative survivors start [2 f], and its
                            // positive ones [2 f + 1]
  const float* thresholds;  // [filters]
  const uint8_t* falling;   // [filters]
  uint8_t* out;             // planes [filters]
  int64_t filters, width, row_bytes, stride;
  int64_t next_row;  // from the numbers of an output row to those of the next
};

typedef float Floats __attribute__((vector_size(CPU_BYTES)));
static constexpr int FLOATS = CPU_BYTES / 4;  // in a vector

static inline __attribute__((always_inline)) Floats load_floats(const float* from) {
  Floats floats;
  __builtin_memcpy(&floats, from, sizeof(Floats));
  return floats;
}

// VECTORS * FLOATS sums side by side: of one filter, in one row.
template <int VECTORS>
static inline __attribute__((always_inline)) void add_survivors(
    const InputConvArguments& arguments, const float* at, int64_t f, float* sums) {
  Floats sum[VECTORS] = {};
  const int32_t* starts = arguments.starts + 2 * f;
  const int32_t* index = arguments.index;
  for (int64_t k = starts[0]; k < starts[1]; k++)
    #pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) sum[i] -= load_floats(at + index[k] + i * FLOATS);
  for (int64_t k = starts[1]; k < starts[2]; k++)
    #pragma GCC unroll 16
    for (int i = 0; i < VECTORS; i++) sum[i] += load_floats(at + index[k] + i * FLOATS);
  __builtin_memcpy(sums, sum, sizeof(sum));
}

// Rows [begin, end) of all filters: a bit is 1 where the sum reaches the threshold; for falling
// filters, where it does not exceed it.
static void convolve_rows(const InputConvArguments& given, int64_t begin, int64_t end) {
  const InputConvArguments arguments = given;  // a copy, which no write can change
  constexpr int64_t MAX_SUMS = 14 * FLOATS;
  constexpr int64_t WHOLE = FLOATS < 8 ? 8 : FLOATS;  // bits are written by the byte
  for (int64_t y = begin; y < end; y++)
    for (int64_t f = 0; f < arguments.filters; f++) {
      uint8_t* row = arguments.out + f * arguments.stride + y * arguments.row_bytes;
      for (int64_t x = 0; x < arguments.width; x += MAX_SUMS) {
        float sums[MAX_SUMS];
        const float* at = arguments.numbers + y * arguments.next_row + x;
        const int64_t left = arguments.width - x;
        const int64_t vectors = (left + WHOLE - 1) / WHOLE * (WHOLE / FLOATS);
        switch (std::min<int64_t>(14, vectors)) {
          case 1: add_survivors<1>(arguments, at, f, sums); break;
          case 2: add_survivors<2>(arguments, at, f, sums); break;
          case 3: case 4: add_survivors<4>(arguments, at, f, sums); break;
          case 5: case 6: case 7: add_survivors<7>(arguments, at, f, sums); break;
          case 8: case 9: case 10: add_survivors<10>(arguments, at, f, sums); break;
          default: add_survivors<14>(arguments, at, f, sums);
        }
        const float threshold = arguments.thresholds[f];
        const bool falling = arguments.falling[f];
        for (int64_t i = 0; i < std::min(MAX_SUMS, left); i += 8)
          row[(x + i) / 8] = compare_eight(threshold, sums + i, falling);
      }
    }
}

// Every `step`-th number.
static inline void gather(
    const float* __restrict from, int64_t step, float* __restrict to, int64_t count) {
  if (step == 1) return (void)std::memcpy(to, from, (size_t)count * sizeof(float));
  if (step == 2)
    for (int64_t i = 0; i < count; i++) to[i] = from[2 * i];  // which compilers vectorize
  else
    for (int64_t i = 0; i < count; i++) to[i] = from[step * i];
}

// The workspace holds [channels][columns modulo the stride][padded rows][length] numbers, and 256
// more that vectors read past the last row.
static void run_input_conv(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const ConvArguments& conv = step.conv;
  const ConvShape& shape = conv.shape;
  const float* image = buffers.at<float>(step.input);
  float* padded = buffers.at<float>(conv.workspace);
  const int64_t rows = shape.height + 2 * shape.pad_h, columns = shape.stride_w;
  const int64_t length = step.length;
  const auto pad_row = [&](int64_t channel, int64_t row) {
    const int64_t y = row - shape.pad_h;
    const bool inside = y >= 0 && y < shape.height;
    const float* from = image + (channel * shape.height + (inside ? y : 0)) * shape.width;
    for (int64_t phase = 0; phase < columns; phase++) {
      float* to = padded + ((channel * columns + phase) * rows + row) * length;
      // Numbers `first` to `last` are pixels, the others padding.
      const int64_t before = (shape.pad_w - phase + columns - 1) / columns;
      const int64_t first = std::min(length, std::max<int64_t>(0, before));
      const int64_t start = first * columns + phase - shape.pad_w;
      const int64_t pixels = inside ? (shape.width - start + columns - 1) / columns : 0;
      const int64_t last = std::min(length, first + std::max<int64_t>(0, pixels));
      std::fill(to, to + first, 0.0f);
      gather(from + start, columns, to + first, last - first);
      std::fill(to + last, to + length, 0.0f);
    }
  };
  pool.for_each(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t channel = 0; channel < shape.channels; channel++)
      for (int64_t row = begin; row < end; row++) pad_row(channel, row);
  });
  const InputConvArguments arguments = {
      padded,
      buffers.at<int32_t>(conv.index),
      buffers.at<int32_t>(conv.starts),
      buffers.at<float>(step.thresholds),
      buffers.at<uint8_t>(step.falling),
      buffers.at<uint8_t>(step.output),
      step.filters,
      shape.out_width,
      shape.out_bytes,
      conv.stride,
      shape.stride_h * length,
  };
  pool.for_each(shape.out_height, 1, [&](int64_t begin, int64_t end) {
    convolve_rows(arguments, begin, end);
  });
}
