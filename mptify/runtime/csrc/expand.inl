// Expands an image into the planes that a convolution adds.
//
// The expanded plane [channel][kw][phase] is what the taps of one kernel column see of a channel,
// row by row of the output. Taps above each other see rows of one plane, `stride_h` input rows
// apart; `phases` lists the first rows that occur. The kernel adds planes word by word, so we
// expand them in tiles: first what the first words read of all planes, and when all filters have
// added that, what the next words read. A tile stays in the L1 cache. Tiles overlap: a word of the
// output also reads some rows below it.

struct Expansion {
  const uint8_t* image;
  const ConvShape* shape;
  const int64_t* phases;
  // [kernel_w]: which pixels are valid in a plane that is shifted as a whole, rounded up to 32
  // bytes, and 32 zeros. Null unless the stride is 1 and rows keep their number of bytes.
  const uint8_t* masks;
  int64_t in_stride;
  int64_t tile;   // the bytes of the output that one tile is for
  int64_t plane;  // the bytes of an expanded plane in a tile

  int64_t planes() const { return shape->channels * shape->kernel_w * shape->phases; }
};

// The rows [first, last) of one tile, and where they go. Holds copies, which no write can change.
struct TileRows {
  const Expansion expansion;
  const ConvShape shape;
  const int64_t start, first, last, next_tap;

  TileRows(const Expansion& of, int64_t tile)
      : expansion(of),
        shape(*of.shape),
        start(tile * expansion.tile),
        first(start / shape.out_bytes),
        last((start + expansion.plane + shape.out_bytes - 1) / shape.out_bytes),
        next_tap(shape.phases * expansion.plane) {}

  // Row y of a channel; null if it lies outside of the image.
  inline __attribute__((always_inline)) const uint8_t* input_row(int64_t channel, int64_t y) const {
    if ((uint64_t)y >= (uint64_t)shape.height) return nullptr;
    return expansion.image + channel * expansion.in_stride + y * shape.in_bytes;
  }

  // The input row that the tile's first row sees in a phase.
  int64_t first_input_row(int64_t phase) const {
    return first * shape.stride_h + expansion.phases[phase] - shape.pad_h;
  }

  // The plane of the first kernel column.
  uint8_t* plane(uint8_t* planes, int64_t channel, int64_t phase) const {
    return planes + (channel * shape.kernel_w * shape.phases + phase) * expansion.plane;
  }

  // Writes pixels x to x + 63 of row j of a plane. The tile may cut its first and its last row.
  inline __attribute__((always_inline)) void write(
      uint8_t* plane, int64_t j, int64_t x, uint64_t bits) const {
    const int64_t at = j * shape.out_bytes - start;
    if (at >= 0 && at + shape.out_bytes <= expansion.plane)
      return write_row(plane + at, shape.out_bytes, x, bits);
    const int64_t end = at + std::min(x / 8 + 8, shape.out_bytes);
    for (int64_t i = at + x / 8; i < end; i++, bits >>= 8)
      if (i >= 0 && i < expansion.plane) plane[i] = (uint8_t)bits;
  }
};

// Rows that have up to 64 pixels with their padding, and a stride of 1 or 2: four rows at a time.
// Rows of BYTES bytes (unless that is 0) are written together. The last ones reach a little beyond
// their plane; the next plane is written later.
template <int BYTES>
static void expand_short(const TileRows& given, int64_t begin, int64_t end, uint8_t* planes) {
  const TileRows rows = given;
  const ConvShape shape = rows.shape;
  const Expansion& expansion = rows.expansion;
  const uint64_t in_mask = low_bits(shape.width), out_mask = low_bits(shape.out_width);
  const bool is_thinned = shape.stride_w == 2;
  const bool is_aligned = BYTES && rows.start == rows.first * BYTES;
  const int64_t fours = (rows.last - rows.first + 3) / 4;
  // Of four rows each: the even and the odd columns, or all columns and nothing.
  std::vector<uint8_t> input((size_t)(shape.phases * fours * 64));
  for (int64_t channel = begin; channel < end; channel++) {
    uint8_t* to = input.data();
    for (int64_t phase = 0; phase < shape.phases; phase++) {
      int64_t y = rows.first_input_row(phase);
      for (int64_t i = 0; i < fours; i++, to += 64, y += 4 * shape.stride_h) {
        const uint8_t* from =
            expansion.image + channel * expansion.in_stride + y * shape.in_bytes;
        const int64_t step = shape.stride_h * shape.in_bytes;
        const auto row = [&](int64_t k) __attribute__((always_inline)) {
          const bool inside = (uint64_t)(y + k * shape.stride_h) < (uint64_t)shape.height;
          return inside ? load_word(from + k * step) : 0;
        };
        const auto inner_row = [&](int64_t k) __attribute__((always_inline)) {
          return load_word(from + k * step);
        };
        const bool all_inside = y >= 0 && y + 3 * shape.stride_h < shape.height;
        const Four read = all_inside
                              ? Four{inner_row(0), inner_row(1), inner_row(2), inner_row(3)}
                              : Four{row(0), row(1), row(2), row(3)};
        const Four bits = (read & in_mask) << shape.pad_w;
        store_four(to, is_thinned ? even_bits(bits) : bits);
        if (is_thinned) store_four(to + 32, even_bits(bits >> 1));
      }
    }
    uint8_t* plane = rows.plane(planes, channel, 0);
    for (int64_t kw = 0; kw < shape.kernel_w; kw++) {
      const int by = (int)(kw * shape.dilation_w);
      const uint8_t* from = input.data() + (is_thinned && by % 2 ? 32 : 0);
      for (int64_t phase = 0; phase < shape.phases; phase++, plane += expansion.plane)
        for (int64_t i = 0; i < fours; i++, from += 64) {
          const Four found = load_four(from) >> (is_thinned ? by / 2 : by) & out_mask;
          if (is_aligned) {
            const Four moved = found << Four{0, 8 * BYTES, 16 * BYTES % 64, 24 * BYTES % 64};
            const Four swapped = {moved[1], moved[0], moved[3], moved[2]};
            const Four both = moved | swapped;
            const uint64_t all[2] = {BYTES < 4 ? both[0] | both[2] : both[0], both[2]};
            std::memcpy(plane + 4 * BYTES * i, all, 4 * BYTES);
          } else {
            #pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
              const int64_t j = rows.first + 4 * i + k;
              if (j < rows.last) rows.write(plane, j, 0, found[k]);
            }
          }
        }
    }
  }
}

// Row by row, for any stride.
static void expand_rows(
    const Expansion& expansion, int64_t tile, int64_t begin, int64_t end, uint8_t* planes) {
  const TileRows rows(expansion, tile);
  const ConvShape& shape = rows.shape;
  const int64_t reach = shape.pad_w + shape.kernel_w * shape.dilation_w;
  if (shape.stride_w <= 2 && shape.width + reach <= 64 && shape.out_width <= 64)
    switch (shape.out_bytes) {
      case 1: return expand_short<1>(rows, begin, end, planes);
      case 2: return expand_short<2>(rows, begin, end, planes);
      case 4: return expand_short<4>(rows, begin, end, planes);
      default: return expand_short<0>(rows, begin, end, planes);
    }
  PaddedRow padded(shape.width, reach + 64 * shape.stride_w);
  const auto at = [&](int64_t bit) { return padded.at(bit); };
  for (int64_t channel = begin; channel < end; channel++)
    for (int64_t phase = 0; phase < shape.phases; phase++) {
      int64_t y = rows.first_input_row(phase);
      for (int64_t j = rows.first; j < rows.last; j++, y += shape.stride_h) {
        const uint8_t* from = rows.input_row(channel, y);
        if (from) padded.combine(from, [](uint64_t, uint64_t bits) { return bits; });
        else padded.clear();
        uint8_t* plane = rows.plane(planes, channel, phase);
        for (int64_t kw = 0; kw < shape.kernel_w; kw++, plane += rows.next_tap)
          for (int64_t x = 0; x < shape.out_width; x += 64) {
            const int64_t first = x * shape.stride_w + kw * shape.dilation_w - shape.pad_w;
            const uint64_t bits = every_nth(shape.stride_w, first, at);
            rows.write(plane, j, x, bits & low_bits(shape.out_width - x));
          }
      }
    }
}

// Bytes [begin, end) of a plane, rounded up to 32, with bits moved down by `by` places (up if it is
// negative; less than 64), under a mask that hides what comes from another row. Reads up to 40
// bytes beyond.
static inline __attribute__((always_inline)) void shift_plane(
    const uint8_t* plane, int64_t begin, int64_t end, int by, const uint8_t* mask, uint8_t* to) {
  const auto write = [&](int64_t at, Four words) __attribute__((always_inline)) {
    store_four(to + (at - begin), words & load_four(mask + at));
  };
  if (by == 0) {
    for (int64_t at = begin; at < end; at += 32) write(at, load_four(plane + at));
  } else if (by > 0) {
    for (int64_t at = begin; at < end; at += 32)
      write(at, load_four(plane + at) >> by | load_four(plane + at + 8) << (64 - by));
  } else {
    int64_t at = begin;
    if (at < 8) {  // less than a word lies before it
      const Four first = load_four(plane + at);
      const uint64_t previous = at ? load_word(plane) << 8 * (8 - at) : 0;
      const Four before = {previous, first[0], first[1], first[2]};
      write(at, first << -by | before >> (64 + by));
      at += 32;
    }
    for (; at < end; at += 32)
      write(at, load_four(plane + at) << -by | load_four(plane + at - 8) >> (64 + by));
  }
}

static inline __attribute__((always_inline)) void clear_plane(
    uint8_t* plane, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += 32) store_four(plane + at, Four{});
}

// For layers of stride 1 whose rows keep their number of bytes: shifts all rows at once. Each plane
// is written a little beyond its end; the next plane is written later.
static void expand_whole(
    const Expansion& expansion, int64_t tile, int64_t begin, int64_t end, uint8_t* planes) {
  const ConvShape& shape = *expansion.shape;
  const int64_t bytes = shape.height * shape.in_bytes, mask = (bytes + 31) / 32 * 32 + 32;
  const int64_t size = expansion.plane;
  // Bytes of the image, before which there is padding: the tile's [above, below) are not padding.
  const int64_t first = tile * expansion.tile - shape.pad_h * shape.out_bytes;
  const int64_t above = std::min(size, std::max<int64_t>(0, -first)), from = first + above;
  const int64_t to = std::max(from, std::min(first + size, bytes));
  const int64_t below = above + (to - from + 31) / 32 * 32;
  uint8_t* plane = planes + begin * shape.kernel_w * size;
  for (int64_t channel = begin; channel < end; channel++)
    for (int64_t kw = 0; kw < shape.kernel_w; kw++, plane += size) {
      clear_plane(plane, 0, above);
      if (from < to) {
        const uint8_t* image = expansion.image + channel * expansion.in_stride;
        const int by = (int)(kw * shape.dilation_w - shape.pad_w);
        shift_plane(image, from, to, by, expansion.masks + kw * mask, plane + above);
      }
      clear_plane(plane, below, size);
    }
}

// One tile of the planes of channels [begin, end); `planes` holds those of all channels. Up to 32
// bytes behind the last plane of these channels may be written.
static void expand(
    const Expansion& expansion, int64_t tile, int64_t begin, int64_t end, uint8_t* planes) {
  (expansion.masks ? expand_whole : expand_rows)(expansion, tile, begin, end, planes);
}
