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
    job.unit = layer.unit, job.stride = layer.stride, job.union_stride = layer.union_stride;
    job.groups = layer.groups, job.sets = layer.sets, job.bits = layer.bits;
    conv = {arrays.at<uint8_t>(in), &layer.shape, arrays.at<int64_t>(layer.phases), arrays.at<uint8_t>(layer.masks),
            layer.in_stride, layer.strip, layer.part};
    block_filters = filters / layer.blocks, block_channels = layer.shape.channels / layer.blocks;
  }
};

// What a thread gets of a layer, piece by piece: a word of the output, and of all filters some, [first, last).
class Pieces {
 public:
  const Width* width;
  int64_t begin, first, last;  // the word's first byte; filters

  // Words of `widest`, of planes of `bytes` bytes; the last one may be narrower.
  Pieces(Ranges& ranges, const Cpu& cpu, const Width& widest, int64_t bytes, int64_t filters)
      : ranges_(ranges), cpu_(cpu), widest_(widest), bytes_(bytes), filters_(filters) {}

  bool next() {
    if (at_ == to_ && !ranges_.next(at_, to_)) return false;
    begin = at_ / filters_ * widest_.bytes;
    width = bytes_ - begin < widest_.bytes ? &narrowest_for(cpu_, bytes_ - begin) : &widest_;
    first = at_ % filters_, last = std::min(filters_, first + to_ - at_);
    at_ += last - first;
    return true;
  }

 private:
  Ranges& ranges_;
  const Cpu& cpu_;
  const Width& widest_;
  const int64_t bytes_, filters_;
  int64_t at_ = 0, to_ = 0;
};

// work(pieces) on each thread, for words that lie in strips of `strip` bytes.
template <class Work>
void in_pieces(const Cpu& cpu, const Shape& shape, int64_t strip, int64_t filters, Crew& crew, const Work& work) {
  const int64_t bytes = shape.out_height * shape.out_bytes;
  const Width& widest = widest_in(cpu, strip);
  const uint32_t least = bytes > strip ? 8 : 1;  // parts: who takes some of another thread's must make a strip of planes first
  in_ranges((bytes + widest.bytes - 1) / widest.bytes * filters, crew, 4, least, [&](Ranges& ranges) {
    Pieces pieces(ranges, cpu, widest, bytes, filters);
    work(pieces);
  });
}

// One thread's strip of a layer's planes. Each thread makes its own: that takes less time than to get them from another core. And each has
// a copy of `layer`, which lies beside what the calling thread writes.
class Planes {
 public:
  Planes(const Cpu& cpu, const Prepared& layer)
      : cpu_(cpu), layer_(layer), planes_(new (std::align_val_t(64)) uint8_t[(size_t)(layer.conv.planes() * layer.conv.part + 128)]) {}
  ~Planes() { ::operator delete[](planes_, std::align_val_t(64)); }
  Planes(const Planes&) = delete;

  // What is to be done for a piece, in the strip that it lies in.
  Job job(const Pieces& piece) {
    const Conv& conv = layer_.conv;
    const int64_t strip = piece.begin / conv.strip;
    const int64_t seen = piece.first / layer_.block_filters * layer_.block_channels;
    const int64_t end = ((piece.last - 1) / layer_.block_filters + 1) * layer_.block_channels;
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
  const Prepared layer_;
  uint8_t* const planes_;
  int64_t strip_ = -1, begin_ = 0, end_ = 0;  // of which strip there are which channels
};

constexpr int64_t WIDEST = 64;  // bytes of a word

// The sums of a piece's pixels, filter by filter.
class Sums {
 public:
  Sums(const Cpu& cpu, const Job& job, const Pieces& piece) : cpu_(cpu), width_(*piece.width), job_(job), begin_(piece.begin), last_(piece.last) {
    job_.counters = counters_;
  }

  const int16_t* of(int64_t f) {
    if (f >= ready_) {
      first_ = f, ready_ = std::min(last_, f + AT_ONCE);
      width_.run(job_, begin_, first_, ready_);
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

// Planes of signs.
void run_conv(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  Prepared layer(step.one, step.filters, arrays, step.in);
  layer.job.shortcut = arrays.at<uint8_t>(step.second);
  layer.job.out = arrays.at<uint8_t>(step.out);
  in_pieces(cpu, step.one.shape, layer.conv.strip, step.filters, crew, [&](Pieces& pieces) {
    Planes planes(cpu, layer);
    while (pieces.next()) pieces.width->run(planes.job(pieces), pieces.begin, pieces.first, pieces.last);
  });
}

// What a layer gives, as numbers: float32, [filters][height][width].
void run_sums(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const Prepared layer(step.one, step.filters, arrays, step.in);
  const Shape& shape = step.one.shape;
  const int64_t row = 8 * shape.out_bytes;  // pixels, with those behind its end
  const Output output(step, arrays);
  in_pieces(cpu, shape, layer.conv.strip, step.filters, crew, [&](Pieces& pieces) {
    Planes planes(cpu, layer);
    while (pieces.next()) {
      Sums sums(cpu, planes.job(pieces), pieces);
      const int64_t from = 8 * pieces.begin, to = std::min(from + 8 * pieces.width->bytes, row * shape.out_height);
      for (int64_t f = pieces.first; f < pieces.last; f++) {
        const int16_t* numbers = sums.of(f);
        float* out = arrays.at<float>(step.out) + f * shape.out_height * shape.out_width;
        for (int64_t y = from / row; y * row < to; y++) {
          const int64_t first = std::max(from, y * row), last = std::min(to, y * row + shape.out_width);
          output.put(numbers + (first - from), f, last - first, out + y * shape.out_width + first - y * row);
        }
      }
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
  in_pieces(cpu, step.one.shape, strip, step.filters, crew, [&](Pieces& pieces) {
    Planes planes(cpu, one), others_planes(cpu, other);
    const int64_t span = step.span, stride = step.one.stride;
    while (pieces.next()) {
      Sums ones(cpu, planes.job(pieces), pieces), others(cpu, others_planes.job(pieces), pieces);
      int16_t room[8 * WIDEST];
      for (int64_t f = pieces.first; f < pieces.last; f++)
        cpu.compare_sums(ones.of(f), others.of(f), table + f * span, (int16_t)(span / 2), std::min(pieces.width->bytes, stride), room,
                         out + f * stride + pieces.begin);
    }
  });
}

}  // namespace
