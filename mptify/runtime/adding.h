// Steps that add planes: the signs of a layer, its sums, and the signs of two layers' sums. Included once, by steps.h.
#pragma once

namespace {

// A layer of an image, as the kernels are told.
struct Prepared {
  Job job;
  Conv conv;
  int64_t block_filters, block_channels;  // of filters that see the same channels, and of these

  Prepared(const Layer& layer, int64_t filters, const Arrays& arrays, int64_t in) {
    job = {};
    job.index = arrays.at<uint16_t>(layer.index);
    job.starts = arrays.at<int32_t>(layer.starts);
    job.flipped = arrays.at<uint8_t>(layer.flipped);
    job.init = arrays.at<uint8_t>(layer.init);
    job.odd = arrays.at<uint8_t>(layer.odd);
    job.unions = arrays.at<uint8_t>(layer.unions);
    job.present = arrays.at<uint64_t>(layer.present);
    job.unit = layer.unit, job.stride = layer.stride, job.groups = layer.groups, job.sets = layer.sets, job.bits = layer.bits;
    conv = {arrays.at<uint8_t>(in), &layer.shape, arrays.at<int64_t>(layer.phases), arrays.at<uint8_t>(layer.masks),
            layer.in_stride, layer.strip, layer.part};
    block_filters = filters / layer.blocks, block_channels = layer.shape.channels / layer.blocks;
  }
};

// One thread's strip of a layer's planes. Each thread makes its own: that takes less time than to get them from another core.
class Planes {
 public:
  Planes(const Cpu& cpu, const Prepared& layer)
      : cpu_(cpu), layer_(layer), planes_(new (std::align_val_t(64)) uint8_t[(size_t)(layer.conv.planes() * layer.conv.part + 128)]) {}
  ~Planes() { ::operator delete[](planes_, std::align_val_t(64)); }
  Planes(const Planes&) = delete;

  // What is to be done for words from byte `begin` on, in the strip that they lie in, by filters [first, last).
  Job job(int64_t begin, int64_t first, int64_t last) {
    const Conv& conv = layer_.conv;
    const int64_t strip = begin / conv.strip;
    const int64_t seen = first / layer_.block_filters * layer_.block_channels;
    const int64_t end = ((last - 1) / layer_.block_filters + 1) * layer_.block_channels;
    if (strip != strip_ || seen < begin_ || seen > end_) begin_ = end_ = seen;
    if (end > end_) cpu_.expand(conv, strip, end_, end, planes_), end_ = end;
    strip_ = strip;
    Job here = layer_.job;
    here.planes = planes_;
    here.from = strip * conv.strip;
    return here;
  }

 private:
  const Cpu& cpu_;
  const Prepared& layer_;
  uint8_t* const planes_;
  int64_t strip_ = -1, begin_ = 0, end_ = 0;  // of which strip there are which channels
};

constexpr int64_t WIDEST = 64;  // bytes of a word

// The sums of one word's pixels, of filters up to `last`, one after the other.
class Sums {
 public:
  Sums(const Cpu& cpu, const Job& job, const Width& width, int64_t begin, int64_t last)
      : cpu_(cpu), width_(width), job_(job), begin_(begin), last_(last) {
    job_.counters = counters_;
  }

  const int16_t* of(int64_t f) {
    if (f >= ready_) {
      first_ = f, ready_ = std::min(last_, f + AT_ONCE);
      width_.run(job_, begin_, begin_ + width_.bytes, first_, ready_);
    }
    const int bits = 1 + (int)job_.bits;
    cpu_.numbers_of(counters_ + (f - first_) * bits * width_.bytes, width_.bytes, bits, numbers_);
    return numbers_;
  }

 private:
  static constexpr int64_t AT_ONCE = 8;

  const Cpu& cpu_;
  const Width& width_;
  Job job_;
  const int64_t begin_, last_;
  int64_t first_ = 0, ready_ = 0;
  alignas(64) uint8_t counters_[AT_ONCE * 16 * WIDEST];
  int16_t numbers_[8 * WIDEST];
};

// What a thread gets of all strips, each from byte `begin` to byte `end` of the planes, and in each of all filters, [first, last).
class Pieces {
 public:
  int64_t begin, end, first, last;

  Pieces(Ranges& ranges, int64_t bytes, int64_t strip, int64_t filters) : ranges_(ranges), bytes_(bytes), strip_(strip), filters_(filters) {}

  bool next() {
    if (at_ == to_ && !ranges_.next(at_, to_)) return false;
    begin = at_ / filters_ * strip_, end = std::min(bytes_, begin + strip_);
    first = at_ % filters_, last = std::min(filters_, first + to_ - at_);
    at_ += last - first;
    return true;
  }

 private:
  Ranges& ranges_;
  const int64_t bytes_, strip_, filters_;
  int64_t at_ = 0, to_ = 0;
};

// work(width, begin) for each word of a piece.
template <class Work>
void for_each_word(const Cpu& cpu, const Pieces& piece, int64_t strip, const Work& work) {
  for_words(cpu, piece.begin, piece.end, strip, [&](const Width& width, int64_t from, int64_t to) {
    for (; from < to; from += width.bytes) work(width, from);
  });
}

// work(pieces) on each thread.
template <class Work>
void in_pieces(const Shape& shape, int64_t strip, int64_t filters, Crew& crew, const Work& work) {
  const int64_t bytes = shape.out_height * shape.out_bytes;
  in_ranges((bytes + strip - 1) / strip * filters, crew, 4, [&](Ranges& ranges) {
    Pieces pieces(ranges, bytes, strip, filters);
    work(pieces);
  });
}

// Planes of signs.
void run_conv(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  Prepared layer(step.one, step.filters, arrays, step.in);
  layer.job.shortcut = arrays.at<uint8_t>(step.second);
  layer.job.out = arrays.at<uint8_t>(step.out);
  const int64_t strip = layer.conv.strip;
  in_pieces(step.one.shape, strip, step.filters, crew, [&](Pieces& pieces) {
    Planes planes(cpu, layer);
    while (pieces.next()) {
      const Job job = planes.job(pieces.begin, pieces.first, pieces.last);
      for_words(cpu, pieces.begin, pieces.end, strip, [&](const Width& width, int64_t from, int64_t to) {
        width.run(job, from, to, pieces.first, pieces.last);
      });
    }
  });
}

// The sums themselves: float32, [filters][height][width].
void run_sums(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const Prepared layer(step.one, step.filters, arrays, step.in);
  const Shape& shape = step.one.shape;
  const int64_t row = 8 * shape.out_bytes;  // pixels, with those behind its end
  in_pieces(shape, layer.conv.strip, step.filters, crew, [&](Pieces& pieces) {
    Planes planes(cpu, layer);
    while (pieces.next()) {
      const Job job = planes.job(pieces.begin, pieces.first, pieces.last);
      for_each_word(cpu, pieces, layer.conv.strip, [&](const Width& width, int64_t begin) {
        Sums sums(cpu, job, width, begin, pieces.last);
        const int64_t from = 8 * begin, to = std::min(from + 8 * width.bytes, row * shape.out_height);
        for (int64_t f = pieces.first; f < pieces.last; f++) {
          const int16_t* numbers = sums.of(f);
          float* out = arrays.at<float>(step.out) + f * shape.out_height * shape.out_width;
          for (int64_t y = from / row; y * row < to; y++) {
            const int64_t end = std::min(to, y * row + shape.out_width);
            for (int64_t i = std::max(from, y * row); i < end; i++) out[y * shape.out_width + i - y * row] = (float)numbers[i - from];
          }
        }
      });
    }
  });
}

// Two layers, and the signs of what their outputs add up to: `table` [filters][span] has what the first one's sum must reach, for sums of
// the second from -(span / 2) on.
void run_join(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const Prepared one(step.one, step.filters, arrays, step.in), other(step.other, step.filters, arrays, step.second);
  const int16_t* table = arrays.at<int16_t>(step.table) + step.span / 2;
  uint8_t* out = arrays.at<uint8_t>(step.out);
  const int64_t strip = std::gcd(one.conv.strip, other.conv.strip);
  in_pieces(step.one.shape, strip, step.filters, crew, [&](Pieces& pieces) {
    Planes planes(cpu, one), others_planes(cpu, other);
    while (pieces.next()) {
      const Job job = planes.job(pieces.begin, pieces.first, pieces.last);
      const Job others_job = others_planes.job(pieces.begin, pieces.first, pieces.last);
      for_each_word(cpu, pieces, strip, [&](const Width& width, int64_t begin) {
        Sums ones(cpu, job, width, begin, pieces.last), others(cpu, others_job, width, begin, pieces.last);
        int16_t room[8 * WIDEST];
        for (int64_t f = pieces.first; f < pieces.last; f++)
          cpu.compare_sums(ones.of(f), others.of(f), table + f * step.span, (int16_t)(step.span / 2), width.bytes, room,
                           out + f * step.one.stride + begin);
      });
    }
  });
}

}  // namespace
