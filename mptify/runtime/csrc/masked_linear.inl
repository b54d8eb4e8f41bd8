// A linear layer on one vector of numbers, with weights of ±1: two masks for each filter say which
// numbers it adds and which it subtracts.

class MaskedLinear {
 public:
  MaskedLinear(const Step& step, const Buffers& buffers)
      : inputs_(step.length),
        input_(buffers.at<float>(step.input)),
        range_(step.lanes.levels < 0 ? nullptr : buffers.at<LevelRange>(step.lanes.levels)),
        masks_(buffers.at<uint8_t>(step.conv.weights)),
        mask_bytes_(step.conv.stride),
        scale_(step, buffers),
        factors_(*buffers.at<LaneFactors>(step.lanes.factors)),
        output_(buffers.at<float>(step.output)) {}

  void run(ThreadPool& pool, int64_t filters) const {
    pool.share(filters, 16, [&](Chunks& chunks) {
      AlignedBuffer<float> vector(8 * mask_bytes_);
      read(vector.data());
      for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t f = begin; f < end; f++) {
          const float y = scale_.of(sum(vector.data(), f), f);
          output_[f] = std::min(std::max(y, factors_.low), factors_.high);
        }
    });
  }

 private:
  const int64_t inputs_;
  const float* const input_;
  const LevelRange* const range_;  // null if it adds the numbers as they are
  const uint8_t* const masks_;
  const int64_t mask_bytes_;
  const Scale scale_;
  const LaneFactors factors_;
  float* const output_;

  void read(float* to) const {
    std::memcpy(to, input_, (size_t)inputs_ * sizeof(float));
    std::fill(to + inputs_, to + 8 * mask_bytes_, 0.0f);
    for (int64_t i = 0; range_ && i < inputs_; i += FLOAT_LANES) {
      FloatLanes x = *(const FloatLanes*)(to + i) * range_->inverse;
      x = clip(x, range_->lowest, range_->highest);
      *(FloatLanes*)(to + i) = __builtin_convertvector(round_lanes(x), FloatLanes);
    }
  }

  float sum(const float* vector, int64_t f) const {
    const uint8_t* added = masks_ + 2 * f * mask_bytes_;
    const uint8_t* subtracted = added + mask_bytes_;
    FloatLanes sums[2] = {};
    for (int64_t i = 0; i < 8 * mask_bytes_; i += FLOAT_LANES) {
      const FloatLanes x = *(const FloatLanes*)(vector + i);
#if CPU_BYTES == 64
      uint16_t plus, minus;
      __builtin_memcpy(&plus, added + i / 8, 2);
      __builtin_memcpy(&minus, subtracted + i / 8, 2);
      sums[0] = (FloatLanes)_mm512_mask_add_ps((__m512)sums[0], plus, (__m512)sums[0], (__m512)x);
      sums[1] = (FloatLanes)_mm512_mask_add_ps((__m512)sums[1], minus, (__m512)sums[1], (__m512)x);
#else
      sums[0] += masked(x, added[i / 8] >> i % 8);
      sums[1] += masked(x, subtracted[i / 8] >> i % 8);
#endif
    }
    float total = 0;
    for (int i = 0; i < FLOAT_LANES; i++) total += sums[0][i] - sums[1][i];
    return total;
  }

  // The numbers whose bits are set; 0 in place of others.
  static inline __attribute__((always_inline)) FloatLanes masked(FloatLanes x, int bits) {
    IntLanes each;
    for (int i = 0; i < FLOAT_LANES; i++) each[i] = 1 << i;
    return (FloatLanes)((IntLanes)x & (((IntLanes{} + bits) & each) != 0));
  }
};

static void run_masked_linear(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  MaskedLinear(step, buffers).run(pool, step.filters);
}
