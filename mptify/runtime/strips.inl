// The planes that a convolution adds, as the kernel reads them. Included once per instruction set, inside its namespace (see cpu.inl).
//
// A plane [channel][kw][phase] is what the taps of one column see of a channel, row by row of the output: rows of taps above each
// other are rows of one plane, `stride_h` input rows apart; `phases` says which first rows occur. The kernel adds planes word by
// word, so they are cut into strips: of all planes first the part that the first words read, then of all planes the next one.
// A strip of a layer then lies in the cache that is nearest. Parts overlap: a word of the output reads some rows below it, too.

typedef uint64_t Four __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) Four four_at(const uint8_t* from) {
  Four words;
  __builtin_memcpy(&words, from, 32);
  return words;
}

static inline __attribute__((always_inline)) void put_four(uint8_t* to, Four words) { __builtin_memcpy(to, &words, 32); }

// The planes of channels [begin, end). Each is written as a line, as long as it is before it is cut; lines are cut when several have
// been written, since what was just stored in one place is not to be had in another before it has reached the cache.
class Strips {
 public:
  const int64_t line;  // bytes from one line to the next

  Strips(const Conv& conv, int64_t begin, int64_t end)
      : line(conv.shape->rows * conv.shape->out_bytes + conv.part + 64),
        strip_(conv.strip),
        part_(conv.part),
        size_(conv.planes() * conv.part),
        count_((conv.shape->out_height * conv.shape->out_bytes + conv.strip - 1) / conv.strip),
        per_channel_(conv.planes() / conv.shape->channels),
        left_((end - begin) * per_channel_),
        to_(conv.scratch + begin * per_channel_ * conv.part),
        channels_(std::max<int64_t>(1, std::min<int64_t>(end - begin, NEAR / (per_channel_ * line)))),
        lines_((size_t)(channels_ * per_channel_ * line)) {}

  ~Strips() { cut(); }
  Strips(const Strips&) = delete;

  // The lines of the next channel: zeros, but for the pixels that lines before them had.
  uint8_t* next() {
    if (filled_ == channels_) cut();
    return lines_.data() + filled_++ * per_channel_ * line;
  }

 private:
  static constexpr int64_t NEAR = 8192;

  const int64_t strip_, part_, size_, count_, per_channel_;
  int64_t left_;  // planes that were not cut yet
  uint8_t* to_;
  const int64_t channels_;
  std::vector<uint8_t> lines_;
  int64_t filled_ = 0;

  void cut() {
    const uint8_t* from = lines_.data();
    for (int64_t i = filled_ * per_channel_; i > 0; i--, from += line, to_ += part_, left_--) {
      const bool roomy = left_ * part_ >= part_ + 32;  // else what lies behind may be another thread's
      for (int64_t strip = 0; strip < count_; strip++) {
        uint8_t* to = to_ + strip * size_;
        const uint8_t* begin = from + strip * strip_;
        if (!roomy) std::memcpy(to, begin, (size_t)part_);
        else for (int64_t at = 0; at < part_; at += 32) put_four(to + at, four_at(begin + at));
      }
    }
    filled_ = 0;
  }
};

// Row by row, for any stride.
static void expand_rows(const Conv& conv, int64_t begin, int64_t end) {
  const Shape& shape = *conv.shape;
  const int64_t taps = shape.kernel_w, reach = shape.pad_w + taps * shape.dilation_w;
  const uint64_t in_mask = low_bits(shape.width), out_mask = low_bits(shape.out_width);
  const bool one_number = shape.stride_w <= 2 && shape.width + reach <= 64 && shape.out_width <= 64;  // a row with its padding
  PaddedRow padded(shape.width, reach + 64 * shape.stride_w);
  Strips strips(conv, begin, end);
  const int64_t next_tap = shape.phases * strips.line;
  for (int64_t channel = begin; channel < end; channel++) {
    uint8_t* lines = strips.next();
    for (int64_t phase = 0; phase < shape.phases; phase++)
      for (int64_t j = 0; j < shape.rows; j++) {
        const int64_t y = j * shape.stride_h + conv.phases[phase] - shape.pad_h;
        if (y < 0 || y >= shape.height) continue;
        uint8_t* row = lines + phase * strips.line + j * shape.out_bytes;  // of the first tap
        const uint8_t* from = conv.image + channel * conv.in_stride + y * shape.in_bytes;
        if (one_number) {
          uint64_t bits = (eight_bytes(from) & in_mask) << shape.pad_w;
          for (int64_t kw = 0; kw < taps; kw++, row += next_tap, bits >>= shape.dilation_w)
            write_row(row, shape.out_bytes, 0, (shape.stride_w == 2 ? even_bits(bits) : bits) & out_mask);
          continue;
        }
        padded.take(from, [](uint64_t, uint64_t bits) { return bits; });  // behind the last plane there is room to read
        for (int64_t kw = 0; kw < taps; kw++, row += next_tap)
          for (int64_t x = 0; x < shape.out_width; x += 64)
            write_row(
                row, shape.out_bytes, x,
                every(shape.stride_w, x * shape.stride_w + kw * shape.dilation_w - shape.pad_w, [&](int64_t bit) { return padded.at(bit); }) &
                    low_bits(shape.out_width - x));
      }
  }
}

// `bytes` bytes of `from`, rounded up to 32, whose bits move down by `by` places (up if negative; less than 64), under a mask that
// hides what comes from before the first and behind the last. Behind them, 8 more may be read.
static inline __attribute__((always_inline)) void shift_plane(const uint8_t* from, int64_t bytes, int by, const uint8_t* mask, uint8_t* to) {
  const auto put = [&](int64_t at, Four words) __attribute__((always_inline)) {
    put_four(to + at, words & four_at(mask + at));
  };
  if (by == 0) {
    for (int64_t at = 0; at < bytes; at += 32) put(at, four_at(from + at));
  } else if (by > 0) {
    for (int64_t at = 0; at < bytes; at += 32) put(at, four_at(from + at) >> by | four_at(from + at + 8) << (64 - by));
  } else {
    const Four first = four_at(from), before = {0, first[0], first[1], first[2]};
    put(0, first << -by | before >> (64 + by));
    for (int64_t at = 32; at < bytes; at += 32) put(at, four_at(from + at) << -by | four_at(from + at - 8) >> (64 + by));
  }
}

// For layers of stride 1 whose rows keep their bytes, whole planes are shifted.
static void expand_whole(const Conv& conv, int64_t begin, int64_t end) {
  const Shape& shape = *conv.shape;
  const int64_t above = shape.pad_h * shape.out_bytes, bytes = shape.height * shape.in_bytes, whole = (bytes + 31) / 32 * 32;
  Strips strips(conv, begin, end);
  for (int64_t channel = begin; channel < end; channel++) {
    uint8_t* lines = strips.next() + above;
    for (int64_t kw = 0; kw < shape.kernel_w; kw++, lines += strips.line)
      shift_plane(conv.image + channel * conv.in_stride, bytes, (int)(kw * shape.dilation_w - shape.pad_w), conv.masks + kw * whole, lines);
  }
}

// The planes of channels [begin, end), from the image.
static void expand(const Conv& conv, int64_t begin, int64_t end) { (conv.masks ? expand_whole : expand_rows)(conv, begin, end); }
