// Steps of a program: what each reads and writes, as numbers of arrays, so that a program can lie in a file or in another
// process; and how it is done. Included once, by packed.cpp.
#pragma once

namespace {

// A layer's tables, as Python lists them: -1 stands for none. What each is for, jobs.h says; of a layer that counts bits, `index` are its
// weights, `starts` its survivors per filter, and `present` the classes of its pixels.
struct Layer {
  Shape shape;
  int64_t index, starts, flipped, init, odd, unions, present, masks, phases, bias, scratch;  // arrays
  int64_t unit, stride, groups, sets, bits, in_stride, classes, strip, part;
  int64_t blocks;  // of filters and channels: what others call groups
  int64_t union_stride;
};

enum Kind : int64_t { CONV, SUMS, JOIN, PIXELS, POPCOUNT, PACK, UNPACK, POOL, FLATTEN, WINDOWS, COPY, MEANS };

struct Step {
  int64_t kind, filters;
  int64_t in, second, out;  // arrays; the second input is a shortcut, or what the other of two layers sees
  Layer one, other;
  int64_t table, thresholds, falling, gain, offset;  // arrays
  int64_t span, length;  // of a copy, `span` is where in the output it begins, and `length` its bytes
  int64_t steps[3];  // from a channel, row and column of numbers to the next
};

struct Arrays {  // of one image
  uint8_t* const* places;
  const int64_t* strides;
  int64_t image;

  template <class Type>
  Type* at(int64_t array) const {
    return array < 0 ? nullptr : (Type*)(places[array] + image * strides[array]);
  }
};

}  // namespace

namespace {

// From a layer's sums to its output, rounded twice, as torch does it.
struct Output {
  const float gain;
  const float* const offset;  // [filters], or null

  Output(const Step& step, const Arrays& arrays) : gain(step.gain < 0 ? 1 : *arrays.at<float>(step.gain)), offset(arrays.at<float>(step.offset)) {}

  float of(float sum, int64_t f) const { return sum * gain + (offset ? offset[f] : 0); }

  template <class Sum>
  void put(const Sum* sums, int64_t f, int64_t count, float* out) const {
    for (int64_t i = 0; i < count; i++) out[i] = of((float)sums[i], f);
  }
};

}  // namespace

#include "adding.h"

namespace {

// -- other layers -------------------------------------------------------------------------------------------------------------

// Numbers that lie `step` apart, side by side.
inline void every_nth(const float* __restrict from, int64_t step, float* __restrict to, int64_t count) {
  if (step == 1) return (void)std::memcpy(to, from, (size_t)count * sizeof(float));
  if (step == 2)
    for (int64_t i = 0; i < count; i++) to[i] = from[2 * i];  // which the compiler can do four at a time
  else
    for (int64_t i = 0; i < count; i++) to[i] = from[step * i];
}

// A first layer. `scratch` holds [channels][phases of columns][padded rows][length] floats, and 256 more that mean nothing.
void run_pixels(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const Shape& shape = step.one.shape;
  const float* image = arrays.at<float>(step.in);
  float* scratch = arrays.at<float>(step.one.scratch);
  const int64_t rows = shape.height + 2 * shape.pad_h, columns = shape.stride_w, length = step.length;
  const auto fill = [&](int64_t channel, int64_t row) {
    const int64_t y = row - shape.pad_h;
    const bool inside = y >= 0 && y < shape.height;
    const float* from = image + (channel * shape.height + (inside ? y : 0)) * shape.width;
    for (int64_t phase = 0; phase < columns; phase++) {
      float* to = scratch + ((channel * columns + phase) * rows + row) * length;
      // Pixels `first` to `last` of this row of the scratch are no padding.
      const int64_t first = std::min(length, std::max<int64_t>(0, (shape.pad_w - phase + columns - 1) / columns));
      const int64_t left = shape.width - (first * columns + phase - shape.pad_w), most = inside ? (left + columns - 1) / columns : 0;
      const int64_t last = std::min(length, first + std::max<int64_t>(0, most));
      std::fill(to, to + first, 0.0f);
      every_nth(from + (first * columns + phase - shape.pad_w), columns, to + first, last - first);
      std::fill(to + last, to + length, 0.0f);
    }
  };
  in_parts(rows, crew, 4, [&](int64_t begin, int64_t end) {
    for (int64_t channel = 0; channel < shape.channels; channel++)
      for (int64_t row = begin; row < end; row++) fill(channel, row);
  });
  const Pixels job = {scratch, arrays.at<int32_t>(step.one.index), arrays.at<int32_t>(step.one.starts), arrays.at<float>(step.thresholds),
                      arrays.at<uint8_t>(step.falling), arrays.at<uint8_t>(step.out), step.filters, shape.out_width, shape.out_bytes,
                      step.one.stride, shape.stride_h * length};
  in_parts(shape.out_height, crew, 1, [&](int64_t begin, int64_t end) { cpu.pixels(job, begin, end); });
}

// A linear layer on one vector: its sums, or with thresholds (float32, as the sums are) a vector of signs.
void run_popcount(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const float* thresholds = arrays.at<float>(step.thresholds);
  const Popcount job = {arrays.at<uint8_t>(step.in), arrays.at<uint8_t>(step.one.index), arrays.at<int32_t>(step.one.starts),
                        arrays.at<float>(thresholds ? step.one.scratch : step.out), step.length};
  const Output output(step, arrays);
  in_parts(step.filters, crew, 64, [&](int64_t begin, int64_t end) {
    cpu.popcount(job, begin, end);
    for (int64_t f = begin; f < end && thresholds == nullptr; f++) job.out[f] = output.of(job.out[f], f);
  });
  if (thresholds == nullptr) return;
  uint8_t* bits = arrays.at<uint8_t>(step.out);
  std::memset(bits, 0, (size_t)(step.filters + 7) / 8);
  for (int64_t f = 0; f < step.filters; f++) bits[f / 8] |= (uint8_t)((job.out[f] >= thresholds[f]) << f % 8);
}

// A linear layer on the mean of each plane: its survivors' sums of ±1, which are integers, divided by the pixels.
void run_means(const Step& step, const Arrays& arrays, Crew& crew) {
  const Shape& shape = step.one.shape;
  const uint8_t* planes = arrays.at<uint8_t>(step.in);
  const uint16_t* index = arrays.at<uint16_t>(step.one.index);
  const int32_t* starts = arrays.at<int32_t>(step.one.starts);
  int32_t* sums = arrays.at<int32_t>(step.one.scratch);
  float* out = arrays.at<float>(step.out);
  const int64_t pixels = shape.height * shape.width, last = (shape.width - 1) / 8;
  const unsigned last_bits = (unsigned)low_bits(shape.width - 8 * last);
  in_parts(shape.channels, crew, 64, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++) {
      int64_t set = 0;
      for (int64_t y = 0; y < shape.height; y++) {
        const uint8_t* row = planes + channel * step.one.in_stride + y * shape.in_bytes;
        for (int64_t at = 0; at <= last; at++) set += __builtin_popcount(at < last ? row[at] : row[at] & last_bits);
      }
      sums[channel] = (int32_t)(2 * set - pixels);
    }
  });
  const auto total = [&](int32_t begin, int32_t end) {
    int32_t four[4] = {0, 0, 0, 0};  // that need not wait for each other
    for (; begin + 4 <= end; begin += 4)
      for (int k = 0; k < 4; k++) four[k] += sums[index[begin + k]];
    for (; begin < end; begin++) four[0] += sums[index[begin]];
    return four[0] + four[1] + four[2] + four[3];
  };
  const Output output(step, arrays);
  in_parts(step.filters, crew, 64, [&](int64_t first, int64_t last_filter) {
    for (int64_t f = first; f < last_filter; f++) {
      const int32_t sum = total(starts[2 * f + 1], starts[2 * f + 2]) - total(starts[2 * f], starts[2 * f + 1]);
      out[f] = output.of((float)(sum / (double)pixels), f);
    }
  });
}

// A convolution that sees few pixels. Its scratch holds the channels of each input pixel, side by side, and one row of them per window.
void run_windows(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const Layer& layer = step.one;
  const Shape& shape = layer.shape;
  const uint8_t* planes = arrays.at<uint8_t>(step.in);
  const int64_t bytes = (shape.channels + 7) / 8, pixels = shape.out_height * shape.out_width, taps = shape.kernel_h * shape.kernel_w;
  const int64_t window = (taps * bytes + 31) / 32 * 32, inputs = 8 * shape.in_bytes * shape.height;
  uint8_t *channels_of = arrays.at<uint8_t>(layer.scratch), *windows = channels_of + inputs * bytes;
  for (int64_t channel = 0; channel < shape.channels; channel += 8)
    for (int64_t at = 0; at < shape.height * shape.in_bytes; at++) {  // 8 pixels of 8 channels
      uint64_t bits = 0;
      for (int64_t i = 0; i < std::min<int64_t>(8, shape.channels - channel); i++)
        bits |= (uint64_t)planes[(channel + i) * layer.in_stride + at] << 8 * i;
      bits = turned(bits);
      for (int64_t i = 0; i < 8; i++) channels_of[(8 * at + i) * bytes + channel / 8] = (uint8_t)(bits >> 8 * i);
    }
  for (int64_t p = 0; p < pixels; p++) {
    uint8_t* to = windows + p * window;
    for (int64_t tap = 0; tap < taps; tap++, to += bytes) {
      const int64_t y = p / shape.out_width * shape.stride_h + tap / shape.kernel_w * shape.dilation_h - shape.pad_h;
      const int64_t x = p % shape.out_width * shape.stride_w + tap % shape.kernel_w * shape.dilation_w - shape.pad_w;
      const bool inside = y >= 0 && y < shape.height && x >= 0 && x < shape.width;
      if (inside) std::memcpy(to, channels_of + (y * 8 * shape.in_bytes + x) * bytes, (size_t)bytes);
      else std::memset(to, 0, (size_t)bytes);
    }
    std::memset(to, 0, (size_t)(window - taps * bytes));
  }
  const Windows job = {windows, arrays.at<uint8_t>(layer.index), arrays.at<int32_t>(layer.bias), arrays.at<uint8_t>(layer.present),
                       pixels, window, taps * bytes, layer.classes};
  const Output output(step, arrays);
  const int32_t* thresholds = arrays.at<int32_t>(step.thresholds);
  const uint8_t* shortcut = arrays.at<uint8_t>(step.second);
  in_parts(step.filters, crew, 4, [&](int64_t first, int64_t last) {
    std::vector<int32_t> sums((size_t)pixels);
    for (int64_t f = first; f < last; f++) {
      cpu.sums_of_windows(job, f, sums.data());
      if (thresholds == nullptr) {
        output.put(sums.data(), f, pixels, arrays.at<float>(step.out) + f * pixels);
        continue;
      }
      uint8_t* out = arrays.at<uint8_t>(step.out) + f * layer.stride;
      for (int64_t y = 0; y < shape.out_height; y++)
        for (int64_t x = 0; x < shape.out_width; x += 8) {
          const int64_t at = y * shape.out_bytes + x / 8;
          const unsigned seen = shortcut ? shortcut[f * layer.stride + at] : 0;
          unsigned bits = 0;
          for (int64_t i = 0; i < std::min<int64_t>(8, shape.out_width - x); i++)
            bits |= (unsigned)(sums[y * shape.out_width + x + i] >= thresholds[(seen >> i & 1) * step.filters + f]) << i;
          out[at] = (uint8_t)bits;
        }
    }
  });
}

// -- planes -------------------------------------------------------------------------------------------------------------------

// Planes from numbers: a bit is 1 where the number is at least 0.
void run_pack(const Step& step, const Arrays& arrays, Crew& crew) {
  const Shape& shape = step.one.shape;
  const float* numbers = arrays.at<float>(step.in);
  uint8_t* planes = arrays.at<uint8_t>(step.out);
  in_parts(shape.channels, crew, 16, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++)
      for (int64_t y = 0; y < shape.height; y++) {
        const float* from = numbers + channel * step.steps[0] + y * step.steps[1];
        uint8_t* row = planes + channel * step.one.stride + y * shape.in_bytes;
        int64_t x = 0;
        if (step.steps[2] == 1)
          for (; x + 8 <= shape.width; x += 8) row[x / 8] = reached(0, from + x, false);
        for (; x < shape.width; x += 8) {
          unsigned bits = 0;
          for (int64_t k = 0; k < std::min<int64_t>(8, shape.width - x); k++) bits |= (unsigned)(0 <= from[(x + k) * step.steps[2]]) << k;
          row[x / 8] = (uint8_t)bits;
        }
      }
  });
}

// ±1 from planes.
void run_unpack(const Step& step, const Arrays& arrays, Crew& crew) {
  static const std::vector<float> numbers_of_byte = [] {
    std::vector<float> all(256 * 8);
    for (int i = 0; i < 256 * 8; i++) all[i] = i / 8 >> i % 8 & 1 ? 1.0f : -1.0f;
    return all;
  }();
  const Shape& shape = step.one.shape;
  const uint8_t* planes = arrays.at<uint8_t>(step.in);
  float* numbers = arrays.at<float>(step.out);
  in_parts(shape.channels, crew, 16, [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; channel++)
      for (int64_t y = 0; y < shape.height; y++) {
        const uint8_t* row = planes + channel * step.one.in_stride + y * shape.in_bytes;
        float* to = numbers + (channel * shape.height + y) * shape.width;
        int64_t x = 0;
        for (; x + 8 <= shape.width; x += 8) std::memcpy(to + x, &numbers_of_byte[8 * row[x / 8]], 32);
        for (; x < shape.width; x++) to[x] = numbers_of_byte[8 * row[x / 8] + x % 8];
      }
  });
}

// Largest value in each window, of planes that are thresholds of falling functions (`falling`) the smallest.
void run_pool(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  const Shape& shape = step.one.shape;
  const Pooling job = {arrays.at<uint8_t>(step.in), arrays.at<uint8_t>(step.falling), arrays.at<uint8_t>(step.out), &shape,
                       step.one.in_stride, step.one.stride};
  const auto pool_row = [&](PaddedRow& most, int64_t channel, int64_t y) {
    const uint64_t turned = job.falling && job.falling[channel] ? ~0ull : 0;  // min is not max of not
    bool first = true;
    for (int64_t kh = 0; kh < shape.kernel_h; kh++) {
      const int64_t from = y * shape.stride_h + kh * shape.dilation_h - shape.pad_h;
      if (from < 0 || from >= shape.height) continue;
      most.take(job.planes + channel * job.in_stride + from * shape.in_bytes, [&](uint64_t before, uint64_t bits) {
        return (first ? 0 : before) | (bits ^ turned);
      });
      first = false;
    }
    if (first) most.clear();  // a window of nothing but padding
    const auto window = [&](int64_t bit) {  // the most in windows that begin at each of 64 pixels
      uint64_t bits = 0;
      for (int64_t kw = 0; kw < shape.kernel_w; kw++) bits |= most.at(bit + kw * shape.dilation_w - shape.pad_w);
      return bits;
    };
    for (int64_t x = 0; x < shape.out_width; x += 64) {
      const uint64_t bits = every(shape.stride_w, x * shape.stride_w, window);
      write_row(job.out + channel * job.stride + y * shape.out_bytes, shape.out_bytes, x, turned ? ~bits : bits);
    }
  };
  in_parts(shape.out_height, crew, 2, [&](int64_t begin, int64_t end) {  // rows, as the layers around it share them
    if (job.is_short()) return cpu.pool_short(job, begin, end);
    PaddedRow most(shape.width, shape.pad_w + shape.kernel_w * shape.dilation_w + 64 * shape.stride_w);  // over a window's rows
    for (int64_t channel = 0; channel < shape.channels; channel++)
      for (int64_t y = begin; y < end; y++) pool_row(most, channel, y);
  });
}

// One row of bits from all planes: channel by channel, row by row.
void run_flatten(const Step& step, const Arrays& arrays) {
  const Shape& shape = step.one.shape;
  const uint8_t* planes = arrays.at<uint8_t>(step.in);
  uint8_t* out = arrays.at<uint8_t>(step.out);
  std::memset(out, 0, (size_t)step.one.stride);
  int64_t bit = 0;
  for (int64_t channel = 0; channel < shape.channels; channel++)
    for (int64_t y = 0; y < shape.height; y++)
      for (int64_t x = 0; x < shape.width; x += 8) {
        const int64_t count = std::min<int64_t>(8, shape.width - x);
        const unsigned bits = planes[channel * step.one.in_stride + y * shape.in_bytes + x / 8] & (unsigned)low_bits(count);
        out[bit / 8] |= (uint8_t)(bits << bit % 8);
        if (bit % 8 + count > 8) out[bit / 8 + 1] |= (uint8_t)(bits >> (8 - bit % 8));
        bit += count;
      }
}

void run_step(const Cpu& cpu, const Step& step, const Arrays& arrays, Crew& crew) {
  switch (step.kind) {
    case CONV: return run_conv(cpu, step, arrays, crew);
    case SUMS: return run_sums(cpu, step, arrays, crew);
    case JOIN: return run_join(cpu, step, arrays, crew);
    case PIXELS: return run_pixels(cpu, step, arrays, crew);
    case POPCOUNT: return run_popcount(cpu, step, arrays, crew);
    case PACK: return run_pack(step, arrays, crew);
    case UNPACK: return run_unpack(step, arrays, crew);
    case POOL: return run_pool(cpu, step, arrays, crew);
    case FLATTEN: return run_flatten(step, arrays);
    case COPY: return (void)std::memcpy(arrays.at<uint8_t>(step.out) + step.span, arrays.at<uint8_t>(step.in), (size_t)step.length);
    case WINDOWS: return run_windows(cpu, step, arrays, crew);
    case MEANS: return run_means(step, arrays, crew);
  }
}

}  // namespace
