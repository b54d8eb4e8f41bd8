// Steps that add planes: the signs of a layer, its sums, and the signs of two layers' sums. Included once, by steps.h.
#pragma once

namespace {

// A layer of an image, as the kernels are told.
struct Prepared {
  Job job;
  Conv conv;

  Prepared(const Layer& layer, const Arrays& arrays, int64_t in) {
    job = {};
    job.index = arrays.at<uint16_t>(layer.index);
    job.starts = arrays.at<int32_t>(layer.starts);
    job.flipped = arrays.at<uint8_t>(layer.flipped);
    job.init = arrays.at<uint8_t>(layer.init);
    job.odd = arrays.at<uint8_t>(layer.odd);
    job.unions = arrays.at<uint8_t>(layer.unions);
    job.present = arrays.at<uint64_t>(layer.present);
    job.unit = layer.unit, job.stride = layer.stride, job.groups = layer.groups, job.sets = layer.sets, job.bits = layer.bits;
    conv = {arrays.at<uint8_t>(in), &layer.shape, arrays.at<int64_t>(layer.phases), arrays.at<uint8_t>(layer.scratch),
            arrays.at<uint8_t>(layer.masks), layer.in_stride, layer.strip, layer.part};
  }

  // The job of words from byte `begin` on, in the strip that they lie in.
  Job at(int64_t begin) const {
    Job here = job;
    const int64_t strip = begin / conv.strip;
    here.planes = conv.scratch + strip * conv.planes() * conv.part;
    here.from = strip * conv.strip;
    return here;
  }

  // Makes the planes, from the image.
  void expand_image(const Cpu& cpu, Crew& crew) const {
    in_parts(conv.shape->channels, crew, 16, [&](int64_t begin, int64_t end) { cpu.expand(conv, begin, end); });
  }
};

constexpr int64_t WIDEST = 64;  // bytes of a word

// The sums of one word's pixels, of filters up to `last`, one after the other.
class Sums {
 public:
  Sums(const Cpu& cpu, const Prepared& layer, const Width& width, int64_t begin, int64_t last)
      : cpu_(cpu), width_(width), job_(layer.at(begin)), begin_(begin), last_(last) {
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

// work(begin, end, first, last) on all strips, from byte `begin` to byte `end` of the planes, and in each on all filters [first, last).
// Threads work on the same strip, each on some of the filters: so it comes into each one's cache once.
template <class Work>
void for_strips(const Shape& shape, int64_t strip, int64_t filters, Crew& crew, const Work& work) {
  const int64_t bytes = shape.out_height * shape.out_bytes;
  in_parts((bytes + strip - 1) / strip * filters, crew, 4, [&](int64_t at, int64_t end) {
    while (at < end) {
      const int64_t begin = at / filters * strip, first = at % filters, last = std::min(filters, first + end - at);
      work(begin, std::min(bytes, begin + strip), first, last);
      at += last - first;
    }
  });
}

// The same word by word: work(width, begin, first, last).
template <class Work>
void for_each_word(const Cpu& cpu, const Shape& shape, int64_t strip, int64_t filters, Crew& crew, const Work& work) {
  for_strips(shape, strip, filters, crew, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
    for_words(cpu, begin, end, strip, [&](const Width& width, int64_t from, int64_t to) {
      for (; from < to; from += width.bytes) work(width, from, first, last);
    });
  });
}

// Planes of signs.
void run_conv(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  Prepared layer(step.one, arrays, step.in);
  layer.job.shortcut = arrays.at<uint8_t>(step.second);
  layer.job.out = arrays.at<uint8_t>(step.out);
  layer.expand_image(cpu, crew);
  for_strips(step.one.shape, layer.conv.strip, step.filters, crew, [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
    const Job job = layer.at(begin);
    for_words(cpu, begin, end, layer.conv.strip, [&](const Width& width, int64_t from, int64_t to) { width.run(job, from, to, first, last); });
  });
}

// The sums themselves: float32, [filters][height][width].
void run_sums(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const Prepared layer(step.one, arrays, step.in);
  const Shape& shape = step.one.shape;
  const int64_t row = 8 * shape.out_bytes;  // pixels, with those behind its end
  layer.expand_image(cpu, crew);
  for_each_word(cpu, shape, layer.conv.strip, step.filters, crew, [&](const Width& width, int64_t begin, int64_t first, int64_t last) {
    Sums sums(cpu, layer, width, begin, last);
    const int64_t from = 8 * begin, to = std::min(from + 8 * width.bytes, row * shape.out_height);
    for (int64_t f = first; f < last; f++) {
      const int16_t* numbers = sums.of(f);
      float* out = arrays.at<float>(step.out) + f * shape.out_height * shape.out_width;
      for (int64_t y = from / row; y * row < to; y++) {
        const int64_t end = std::min(to, y * row + shape.out_width);
        for (int64_t i = std::max(from, y * row); i < end; i++) out[y * shape.out_width + i - y * row] = (float)numbers[i - from];
      }
    }
  });
}

// Two layers, and the signs of what their outputs add up to: `table` [filters][span] has what the first one's sum must reach, for sums of
// the second from -(span / 2) on.
void run_join(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const Prepared one(step.one, arrays, step.in), other(step.other, arrays, step.second);
  const int16_t* table = arrays.at<int16_t>(step.table) + step.span / 2;
  uint8_t* out = arrays.at<uint8_t>(step.out);
  one.expand_image(cpu, crew);
  other.expand_image(cpu, crew);
  const int64_t strip = std::gcd(one.conv.strip, other.conv.strip);
  for_each_word(cpu, step.one.shape, strip, step.filters, crew, [&](const Width& width, int64_t begin, int64_t first, int64_t last) {
    Sums ones(cpu, one, width, begin, last), others(cpu, other, width, begin, last);
    int16_t room[8 * WIDEST];
    for (int64_t f = first; f < last; f++)
      cpu.compare_sums(ones.of(f), others.of(f), table + f * step.span, (int16_t)(step.span / 2), width.bytes, room,
                       out + f * step.one.stride + begin);
  });
}

}  // namespace
