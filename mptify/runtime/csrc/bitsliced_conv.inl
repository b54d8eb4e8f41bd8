// A binary, pruned convolution that adds one plane per survivor (bit_counters.inl): makes signs, or
// its sums.

// A layer on one image.
struct BitslicedLayer {
  BitslicedArguments arguments;
  Expansion expansion;
  int64_t group_filters, group_channels;  // filters that see the same channels, and those channels

  BitslicedLayer(const ConvArguments& conv, int64_t filters, const Buffers& buffers, int64_t input)
      : arguments() {
    arguments.index = buffers.at<uint16_t>(conv.index);
    arguments.starts = buffers.at<int32_t>(conv.starts);
    arguments.flipped = buffers.at<uint8_t>(conv.flipped);
    arguments.init = buffers.at<uint8_t>(conv.init);
    arguments.odd = buffers.at<uint8_t>(conv.odd);
    arguments.unions = buffers.at<uint8_t>(conv.unions);
    arguments.present = buffers.at<uint64_t>(conv.present);
    arguments.unit = conv.unit, arguments.stride = conv.stride;
    arguments.union_stride = conv.union_stride, arguments.groups = conv.class_groups;
    arguments.sets = conv.sets, arguments.bits = conv.bits;
    expansion = {
        buffers.at<uint8_t>(input), &conv.shape, buffers.at<int64_t>(conv.phases),
        buffers.at<uint8_t>(conv.masks), conv.in_stride, conv.tile, conv.plane,
    };
    group_filters = filters / conv.groups;
    group_channels = conv.shape.channels / conv.groups;
  }
};

// The work that one thread gets of a layer, piece by piece: one word of the output, and some of the
// filters, [begin, end).
class Pieces {
 public:
  const WordKernel* kernel;
  int64_t at, begin, end;  // the word's first byte; filters

  // Planes of `bytes` bytes, in words of `widest`; the last word may be narrower.
  Pieces(Chunks& chunks, const WordKernel& widest, int64_t bytes, int64_t filters)
      : chunks_(chunks), widest_(widest), bytes_(bytes), filters_(filters) {}

  bool next() {
    if (next_ == last_ && !chunks_.next(next_, last_)) return false;
    at = next_ / filters_ * widest_.bytes;
    kernel = bytes_ - at < widest_.bytes ? &narrowest_kernel(bytes_ - at) : &widest_;
    begin = next_ % filters_, end = std::min(filters_, begin + last_ - next_);
    next_ += end - begin;
    return true;
  }

 private:
  Chunks& chunks_;
  const WordKernel& widest_;
  const int64_t bytes_, filters_;
  int64_t next_ = 0, last_ = 0;
};

// work(pieces) on each thread, for words that lie in tiles of `tile` bytes.
template <class Work>
static void share_pieces(
    const ConvShape& shape, int64_t tile, int64_t filters, ThreadPool& pool, const Work& work) {
  const int64_t bytes = shape.out_height * shape.out_bytes;
  const WordKernel& widest = widest_kernel(tile);
  const int64_t words = (bytes + widest.bytes - 1) / widest.bytes;
  pool.share(words * filters, 4, [&](Chunks& chunks) {
    Pieces pieces(chunks, widest, bytes, filters);
    work(pieces);
  });
}

// One thread's tile of expanded planes. Each thread expands its own: that takes less time than to
// get them from another core.
class TilePlanes {
 public:
  explicit TilePlanes(const BitslicedLayer& layer)
      : layer_(layer),
        planes_(new (std::align_val_t(64)) uint8_t[(size_t)(
            layer.expansion.planes() * layer.expansion.plane + 128)]) {}
  ~TilePlanes() { ::operator delete[](planes_, std::align_val_t(64)); }
  TilePlanes(const TilePlanes&) = delete;

  // The arguments for a piece, with the tile that it lies in.
  BitslicedArguments arguments_for(const Pieces& piece) {
    const Expansion& expansion = layer_.expansion;
    const int64_t tile = piece.at / expansion.tile;
    const int64_t first = piece.begin / layer_.group_filters * layer_.group_channels;
    const int64_t last = ((piece.end - 1) / layer_.group_filters + 1) * layer_.group_channels;
    if (tile != tile_ || first < begin_ || first > end_) begin_ = end_ = first;
    if (last > end_) expand(expansion, tile, end_, last, planes_), end_ = last;
    tile_ = tile;
    BitslicedArguments arguments = layer_.arguments;
    arguments.planes = planes_;
    arguments.from = tile * expansion.tile;
    return arguments;
  }

 private:
  const BitslicedLayer& layer_;
  uint8_t* const planes_;
  int64_t tile_ = -1, begin_ = 0, end_ = 0;  // the tile, and which channels of it are expanded
};

// 16-bit numbers from `bits` counters of a word of `bytes` bytes, pixel by pixel. The last counter
// is the sign.
static void numbers_of(const uint8_t* counters, int64_t bytes, int bits, int16_t* numbers) {
#if CPU_BYTES >= 32
  const __m256i spread = _mm256_setr_epi64x(
      0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);  // 8 pixels per byte
  const __m256i each = _mm256_set1_epi64x((int64_t)0x8040201008040201);
  for (int64_t at = 0; at < bytes; at += 4) {  // 32 pixels
    const auto bit_of = [&](int i) __attribute__((always_inline)) {  // -1 where it is set
      int32_t word;
      __builtin_memcpy(&word, counters + i * bytes + at, 4);
      const __m256i copies = _mm256_shuffle_epi8(_mm256_set1_epi32(word), spread);
      return _mm256_cmpeq_epi8(_mm256_and_si256(copies, each), each);
    };
    const auto append = [&](__m256i number, int i) __attribute__((always_inline)) {
      return _mm256_sub_epi8(_mm256_add_epi8(number, number), bit_of(i));
    };
    __m256i high = bit_of(bits - 1), low = _mm256_setzero_si256();
    for (int i = bits - 2; i >= 8; i--) high = append(high, i);
    if (bits <= 8) low = high;  // the low byte is the number, and the sign fills the high byte
    for (int i = bits <= 8 ? bits - 2 : 7; i >= 0; i--) low = append(low, i);
    const __m256i one = _mm256_unpacklo_epi8(low, high), other = _mm256_unpackhi_epi8(low, high);
    __m256i* to = (__m256i*)(numbers + 8 * at);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(one, other, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(one, other, 0x31));
  }
#else
  typedef uint16_t Lanes __attribute__((vector_size(32)));
  typedef int16_t Signed __attribute__((vector_size(32)));
  const Lanes lane = {1,   2,   4,    8,    16,   32,   64,    128,
                      256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  for (int64_t at = 0; at < bytes; at += 2) {  // 16 pixels
    Signed found = {};
    for (int i = bits - 1; i >= 0; i--) {
      uint16_t word;
      __builtin_memcpy(&word, counters + i * bytes + at, 2);
      const Signed bit = (Signed)(((Lanes{} + word) & lane) != 0);  // -1 where it is set
      found = i == bits - 1 ? bit : found + found - bit;
    }
    __builtin_memcpy(numbers + 8 * at, &found, 32);
  }
#endif
}

static constexpr int64_t MAX_WORD = 64;  // bytes

// The sums of a piece's pixels, filter by filter.
class PieceSums {
 public:
  PieceSums(const BitslicedArguments& arguments, const Pieces& piece)
      : kernel_(*piece.kernel), arguments_(arguments), at_(piece.at), last_(piece.end) {
    arguments_.counters = counters_;
  }

  // Call with rising f.
  const int16_t* of(int64_t f) {
    if (f >= end_) {
      begin_ = f, end_ = std::min(last_, f + FILTERS_AT_ONCE);
      kernel_.run(arguments_, at_, begin_, end_);
    }
    const int bits = 1 + (int)arguments_.bits;
    const uint8_t* counters = counters_ + (f - begin_) * bits * kernel_.bytes;
    numbers_of(counters, kernel_.bytes, bits, numbers_);
    return numbers_;
  }

 private:
  static constexpr int64_t FILTERS_AT_ONCE = 8;

  const WordKernel& kernel_;
  BitslicedArguments arguments_;
  const int64_t at_, last_;
  int64_t begin_ = 0, end_ = 0;  // the filters whose counters are there
  alignas(64) uint8_t counters_[FILTERS_AT_ONCE * 16 * MAX_WORD];
  int16_t numbers_[8 * MAX_WORD];
};

// Planes of signs.
static void make_signs(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  BitslicedLayer layer(step.conv, step.filters, buffers, step.input);
  layer.arguments.shortcut = buffers.at<uint8_t>(step.second_input);
  layer.arguments.out = buffers.at<uint8_t>(step.output);
  share_pieces(step.conv.shape, step.conv.tile, step.filters, pool, [&](Pieces& pieces) {
    TilePlanes planes(layer);
    while (pieces.next())
      pieces.kernel->run(planes.arguments_for(pieces), pieces.at, pieces.begin, pieces.end);
  });
}

// The layer's output: float32, [filters][height][width].
static void make_numbers(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const BitslicedLayer layer(step.conv, step.filters, buffers, step.input);
  const ConvShape& shape = step.conv.shape;
  const int64_t row = 8 * shape.out_bytes;  // pixels, with those behind its end
  const Scale scale(step, buffers);
  share_pieces(shape, step.conv.tile, step.filters, pool, [&](Pieces& pieces) {
    TilePlanes planes(layer);
    while (pieces.next()) {
      PieceSums sums(planes.arguments_for(pieces), pieces);
      const int64_t from = 8 * pieces.at;
      const int64_t to = std::min(from + 8 * pieces.kernel->bytes, row * shape.out_height);
      for (int64_t f = pieces.begin; f < pieces.end; f++) {
        const int16_t* numbers = sums.of(f);
        float* out = buffers.at<float>(step.output) + f * shape.out_height * shape.out_width;
        for (int64_t y = from / row; y * row < to; y++) {
          const int64_t first = std::max(from, y * row);
          const int64_t last = std::min(to, y * row + shape.out_width);
          float* at = out + y * shape.out_width + first - y * row;
          scale.write(numbers + (first - from), f, last - first, at);
        }
      }
    }
  });
}

static void run_bitsliced_conv(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  (step.conv.odd < 0 ? make_signs : make_numbers)(step, buffers, pool);
}
