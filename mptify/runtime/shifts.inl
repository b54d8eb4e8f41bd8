// The planes that a layer of stride 1 adds, from its image: whole planes are shifted, not row by row. Included once per
// instruction set, inside its namespace (see cpu.inl).

// `bytes` bytes of `from`, whose bits move down by `by` places (up if negative; less than 64), under a mask.
static void shift_plane(const uint8_t* from, int64_t bytes, int by, const uint8_t* mask, uint8_t* to) {
  const int up = by < 0 ? -by : 0, down = by > 0 ? by : 0;
  const auto behind = [&](int64_t at) { return down ? eight_bytes(from + at + 8) << (64 - down) : 0; };
  const auto before = [&](int64_t at) { return up && at ? eight_bytes(from + at - 8) >> (64 - up) : 0; };
  const auto word = [&](int64_t at) {
    return ((eight_bytes(from + at) << up >> down) | before(at) | behind(at)) & eight_bytes(mask + at);
  };
  const uint64_t first = word(0);
  std::memcpy(to, &first, (size_t)std::min<int64_t>(bytes, 8));
  int64_t at = 8;  // the same without questions, for a compiler to make vectors of
  if (up)
    for (; at + 8 <= bytes; at += 8) {
      const uint64_t bits = (eight_bytes(from + at) << up | eight_bytes(from + at - 8) >> (64 - up)) & eight_bytes(mask + at);
      std::memcpy(to + at, &bits, 8);
    }
  else if (down)
    for (; at + 8 <= bytes; at += 8) {
      const uint64_t bits = (eight_bytes(from + at) >> down | eight_bytes(from + at + 8) << (64 - down)) & eight_bytes(mask + at);
      std::memcpy(to + at, &bits, 8);
    }
  else
    for (; at + 8 <= bytes; at += 8) {
      const uint64_t bits = eight_bytes(from + at) & eight_bytes(mask + at);
      std::memcpy(to + at, &bits, 8);
    }
  if (at < bytes) {
    const uint64_t last = word(at);
    std::memcpy(to + at, &last, (size_t)(bytes - at));
  }
}

static void expand_whole(const Conv& conv, int64_t begin, int64_t end) {
  const Shape& shape = *conv.shape;
  const int64_t plane = shape.rows * shape.out_bytes, above = shape.pad_h * shape.out_bytes, bytes = shape.height * shape.in_bytes;
  const int64_t mask_bytes = (bytes + 15) / 8 * 8;
  for (int64_t channel = begin; channel < end; channel++)
    for (int64_t kw = 0; kw < shape.kernel_w; kw++) {
      uint8_t* to = conv.scratch + (channel * shape.kernel_w + kw) * plane;
      std::memset(to, 0, (size_t)above);
      shift_plane(conv.image + channel * conv.in_stride, bytes, (int)(kw * shape.dilation_w - shape.pad_w), conv.masks + kw * mask_bytes, to + above);
      std::memset(to + above + bytes, 0, (size_t)(plane - above - bytes));
    }
}
