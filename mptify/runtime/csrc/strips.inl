// The planes that a convolution adds, as the kernel reads them. Included once per instruction set, inside its namespace (see cpu.inl).
//
// A plane [channel][kw][phase] is what the taps of one column see of a channel, row by row of the output: rows of taps above each
// other are rows of one plane, `stride_h` input rows apart; `phases` says which first rows occur. The kernel adds planes word by
// word, so they are made in strips: of all planes first the part that the first words read, and when all filters have added that, of all
// planes the next one. A strip lies in the cache that is nearest. Parts overlap: a word of the output reads some rows below it, too.

typedef uint64_t Four __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) Four four_at(const uint8_t* from) {
  Four words;
  __builtin_memcpy(&words, from, 32);
  return words;
}

static inline __attribute__((always_inline)) void put_four(uint8_t* to, Four words) { __builtin_memcpy(to, &words, 32); }

// Rows of one strip, [first, last) of the planes before they are cut, and where they go. Holds copies: what is written might be anything.
struct Rows {
  const Conv conv;
  const Shape shape;
  const int64_t start, first, last, next_tap;

  Rows(const Conv& of, int64_t strip)
      : conv(of),
        shape(*of.shape),
        start(strip * conv.strip),
        first(start / shape.out_bytes),
        last((start + conv.part + shape.out_bytes - 1) / shape.out_bytes),
        next_tap(shape.phases * conv.part) {}

  // Row y of a channel; null if there is none.
  inline __attribute__((always_inline)) const uint8_t* seen(int64_t channel, int64_t y) const {
    return (uint64_t)y < (uint64_t)shape.height ? conv.image + channel * conv.in_stride + y * shape.in_bytes : nullptr;
  }

  // The row that the first row of the strip sees, of a phase.
  int64_t first_seen(int64_t phase) const { return first * shape.stride_h + conv.phases[phase] - shape.pad_h; }

  // Of the first tap.
  uint8_t* plane(uint8_t* planes, int64_t channel, int64_t phase) const {
    return planes + (channel * shape.kernel_w * shape.phases + phase) * conv.part;
  }

  // Pixels x to x + 63 of row j of a plane. The first and the last row of a strip may be cut.
  inline __attribute__((always_inline)) void put(uint8_t* plane, int64_t j, int64_t x, uint64_t bits) const {
    const int64_t at = j * shape.out_bytes - start;
    if (at >= 0 && at + shape.out_bytes <= conv.part) return write_row(plane + at, shape.out_bytes, x, bits);
    for (int64_t i = at + x / 8; i < at + std::min(x / 8 + 8, shape.out_bytes); i++, bits >>= 8)
      if (i >= 0 && i < conv.part) plane[i] = (uint8_t)bits;
  }
};

// Rows that have, with their padding, up to 64 pixels, with a stride of 1 or 2: four of them at a time. Those of BYTES bytes (unless
// that is 0) are written together, the last ones a little beyond the end of their plane, and the one behind it later.
template <int BYTES>
static void expand_short(const Rows& of, int64_t begin, int64_t end, uint8_t* planes) {
  const Rows rows = of;
  const Shape shape = rows.shape;
  const uint64_t in_mask = low_bits(shape.width), out_mask = low_bits(shape.out_width);
  const bool thinned = shape.stride_w == 2, together = BYTES && rows.start == rows.first * BYTES;
  const int64_t fours = (rows.last - rows.first + 3) / 4;
  std::vector<uint8_t> seen((size_t)(shape.phases * fours * 64));  // of four rows each, the even columns and the odd ones, or all and none
  for (int64_t channel = begin; channel < end; channel++) {
    uint8_t* to = seen.data();
    for (int64_t phase = 0; phase < shape.phases; phase++) {
      int64_t y = rows.first_seen(phase);
      for (int64_t i = 0; i < fours; i++, to += 64, y += 4 * shape.stride_h) {
        const uint8_t* from = rows.conv.image + channel * rows.conv.in_stride + y * shape.in_bytes;
        const int64_t step = shape.stride_h * shape.in_bytes;
        const auto row = [&](int64_t down) __attribute__((always_inline)) {
          return (uint64_t)(y + down * shape.stride_h) < (uint64_t)shape.height ? eight_bytes(from + down * step) : 0;
        };
        const bool inside = y >= 0 && y + 3 * shape.stride_h < shape.height;
        const Four read = inside ? Four{eight_bytes(from), eight_bytes(from + step), eight_bytes(from + 2 * step), eight_bytes(from + 3 * step)}
                                 : Four{row(0), row(1), row(2), row(3)};
        const Four bits = (read & in_mask) << shape.pad_w;
        put_four(to, thinned ? even_bits(bits) : bits);
        if (thinned) put_four(to + 32, even_bits(bits >> 1));
      }
    }
    uint8_t* plane = rows.plane(planes, channel, 0);
    for (int64_t kw = 0; kw < shape.kernel_w; kw++) {
      const int by = (int)(kw * shape.dilation_w);
      const uint8_t* from = seen.data() + (thinned && by % 2 ? 32 : 0);
      for (int64_t phase = 0; phase < shape.phases; phase++, plane += rows.conv.part)
        for (int64_t i = 0; i < fours; i++, from += 64) {
          const Four found = four_at(from) >> (thinned ? by / 2 : by) & out_mask;
          if (together) {
            const Four moved = found << Four{0, 8 * BYTES, 16 * BYTES % 64, 24 * BYTES % 64};
            const Four swapped = {moved[1], moved[0], moved[3], moved[2]}, both = moved | swapped;
            const uint64_t all[2] = {BYTES < 4 ? both[0] | both[2] : both[0], both[2]};
            std::memcpy(plane + 4 * BYTES * i, all, 4 * BYTES);
          } else {
            #pragma GCC unroll 4
            for (int k = 0; k < 4; k++)
              if (rows.first + 4 * i + k < rows.last) rows.put(plane, rows.first + 4 * i + k, 0, found[k]);
          }
        }
    }
  }
}

// Row by row, for any stride.
static void expand_rows(const Conv& conv, int64_t strip, int64_t begin, int64_t end, uint8_t* planes) {
  const Rows rows(conv, strip);
  const Shape& shape = rows.shape;
  const int64_t reach = shape.pad_w + shape.kernel_w * shape.dilation_w;
  if (shape.stride_w <= 2 && shape.width + reach <= 64 && shape.out_width <= 64) switch (shape.out_bytes) {
    case 1: return expand_short<1>(rows, begin, end, planes);
    case 2: return expand_short<2>(rows, begin, end, planes);
    case 4: return expand_short<4>(rows, begin, end, planes);
    default: return expand_short<0>(rows, begin, end, planes);
  }
  PaddedRow padded(shape.width, reach + 64 * shape.stride_w);
  for (int64_t channel = begin; channel < end; channel++)
    for (int64_t phase = 0; phase < shape.phases; phase++) {
      int64_t y = rows.first_seen(phase);
      for (int64_t j = rows.first; j < rows.last; j++, y += shape.stride_h) {
        if (const uint8_t* from = rows.seen(channel, y)) padded.take(from, [](uint64_t, uint64_t bits) { return bits; });
        else padded.clear();
        uint8_t* plane = rows.plane(planes, channel, phase);
        for (int64_t kw = 0; kw < shape.kernel_w; kw++, plane += rows.next_tap)
          for (int64_t x = 0; x < shape.out_width; x += 64) {
            const int64_t first = x * shape.stride_w + kw * shape.dilation_w - shape.pad_w;
            const uint64_t bits = every(shape.stride_w, first, [&](int64_t bit) { return padded.at(bit); });
            rows.put(plane, j, x, bits & low_bits(shape.out_width - x));
          }
      }
    }
}

// Bytes from `begin` to `end` of a plane, rounded up to 32, whose bits move down by `by` places (up if negative; less than 64), under
// a mask that hides what comes from another row. Behind them, 40 more may be read.
static inline __attribute__((always_inline)) void shift_plane(
    const uint8_t* plane, int64_t begin, int64_t end, int by, const uint8_t* mask, uint8_t* to) {
  const auto put = [&](int64_t at, Four words) __attribute__((always_inline)) {
    put_four(to + (at - begin), words & four_at(mask + at));
  };
  if (by == 0) {
    for (int64_t at = begin; at < end; at += 32) put(at, four_at(plane + at));
  } else if (by > 0) {
    for (int64_t at = begin; at < end; at += 32) put(at, four_at(plane + at) >> by | four_at(plane + at + 8) << (64 - by));
  } else {
    int64_t at = begin;
    if (at < 8) {  // there is less than a word before it
      const Four first = four_at(plane + at), before = {at ? eight_bytes(plane) << 8 * (8 - at) : 0, first[0], first[1], first[2]};
      put(at, first << -by | before >> (64 + by));
      at += 32;
    }
    for (; at < end; at += 32) put(at, four_at(plane + at) << -by | four_at(plane + at - 8) >> (64 + by));
  }
}

static inline __attribute__((always_inline)) void clear(uint8_t* plane, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += 32) put_four(plane + at, Four{});
}

// For layers of stride 1 whose rows keep their bytes, all rows are shifted at once. Each plane is written a little beyond its end, and
// the one behind it later.
static void expand_whole(const Conv& conv, int64_t strip, int64_t begin, int64_t end, uint8_t* planes) {
  const Shape& shape = *conv.shape;
  const int64_t bytes = shape.height * shape.in_bytes, mask = (bytes + 31) / 32 * 32 + 32;
  const int64_t first = strip * conv.strip - shape.pad_h * shape.out_bytes;  // of the image's bytes; before it there is padding
  const int64_t above = std::min(conv.part, std::max<int64_t>(0, -first)), from = first + above;
  const int64_t to = std::max(from, std::min(first + conv.part, bytes)), below = above + (to - from + 31) / 32 * 32;
  uint8_t* plane = planes + begin * shape.kernel_w * conv.part;
  for (int64_t channel = begin; channel < end; channel++)
    for (int64_t kw = 0; kw < shape.kernel_w; kw++, plane += conv.part) {
      clear(plane, 0, above);
      if (from < to) {  // there is something but padding
        const int by = (int)(kw * shape.dilation_w - shape.pad_w);
        shift_plane(conv.image + channel * conv.in_stride, from, to, by, conv.masks + kw * mask, plane + above);
      }
      clear(plane, below, conv.part);
    }
}

// One strip of the planes of channels [begin, end), from the image; `planes` are those of all channels. Behind the last one of these
// channels, 32 bytes may be written.
static void expand(const Conv& conv, int64_t strip, int64_t begin, int64_t end, uint8_t* planes) {
  (conv.masks ? expand_whole : expand_rows)(conv, strip, begin, end, planes);
}
