// Max-pools of planes with short rows, as most have: four channels at a time. Included once per instruction set, inside its namespace
// (see cpu.inl).

// Rows [begin, end) of what comes out, whose windows lie, with the padding before them, in 128 pixels: see `is_short`.
static void pool_short(const Pooling& of, int64_t begin, int64_t end) {
  const Pooling job = of;  // which nothing that is written can change
  const Shape shape = *job.shape;
  const uint64_t low_mask = low_bits(shape.width), high_mask = low_bits(shape.width - 64);
  const int pad = (int)shape.pad_w;
  for (int64_t first = 0; first < shape.channels; first += 4) {
    const int64_t left = shape.channels - first;
    const auto channel = [&](int64_t lane) { return first + std::min(lane, left - 1); };  // the last one for lanes that have none
    const auto of_lanes = [&](const auto& each) __attribute__((always_inline)) {
      return Four{each(channel(0)), each(channel(1)), each(channel(2)), each(channel(3))};
    };
    const Four turned = of_lanes([&](int64_t c) { return job.falling && job.falling[c] ? ~0ull : 0ull; });  // min is not max of not
    for (int64_t y = begin; y < end; y++) {
      Four low = {}, high = {};
      for (int64_t kh = 0; kh < shape.kernel_h; kh++) {
        const int64_t from = y * shape.stride_h + kh * shape.dilation_h - shape.pad_h;
        if (from < 0 || from >= shape.height) continue;
        const uint8_t* row = job.planes + from * shape.in_bytes;
        low |= (of_lanes([&](int64_t c) { return eight_bytes(row + c * job.in_stride); }) ^ turned) & low_mask;
        if (high_mask) high |= (of_lanes([&](int64_t c) { return eight_bytes(row + c * job.in_stride + 8); }) ^ turned) & high_mask;
      }
      high = high << pad | (low >> 1) >> (63 - pad), low <<= pad;
      Four most = {}, more = {};  // in windows that begin at each of 128 pixels
      for (int64_t kw = 0; kw < shape.kernel_w; kw++) {
        const int by = (int)(kw * shape.dilation_w);
        most |= low >> by | (high << 1) << (63 - by), more |= high >> by;
      }
      const Four bits = (shape.stride_w == 1 ? most : even_bits(most) | even_bits(more) << 32) ^ turned;
      uint8_t* out = job.out + first * job.stride + y * shape.out_bytes;
      for (int lane = 0; lane < std::min<int64_t>(4, left); lane++) write_row(out + lane * job.stride, shape.out_bytes, 0, bits[lane]);
    }
  }
}
