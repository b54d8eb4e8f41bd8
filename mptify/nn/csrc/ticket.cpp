// The passes over scores and weights of each search step. Each pass reads its arrays once, where
// torch's operations would read and write them a dozen times. Plain C++ without torch or Python.
//
// Magnitudes are compared as the integers that their float32 bits spell. This order is total,
// agrees with that of the floats, and puts NaN above everything.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "codes.h"
#include "parallel.h"
#include "source.h"

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__) && !defined(MPTIFY_ONE_CPU)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif


namespace {

// Weights per block. Sums of blocks are added in order, so they do not depend on the threads.
constexpr int64_t kBlock = 4096;
constexpr int64_t kGrain = 1 << 16;  // the fewest weights for which a thread pays
constexpr int kLanes = 16;           // partial sums side by side, the same on every CPU
constexpr int kGroup = 4 * kLanes;   // weights that are rescanned if one is near the threshold
constexpr int kDigit = 12;           // bits of a radix digit, where there is no hint
constexpr int kBuckets = 1 << kDigit;

inline uint32_t bits_of(float value) { return word_of(value); }

inline float float_of(uint32_t bits) { return number_of(bits); }

constexpr uint32_t kSign = 0x80000000u;

inline uint32_t magnitude(float value) { return bits_of(value) & ~kSign; }

// Run work(chunk, begin, end) on consecutive chunks of [0, count), each a whole number of blocks.
template <class Work>
void for_chunks(int64_t count, int chunks, const Work& work) {
  const int64_t size = (count / chunks + kBlock) / kBlock * kBlock;
  run_parallel(chunks, [&](int chunk) {
    work(chunk, std::min(count, chunk * size), std::min(count, (chunk + 1) * size));
  });
}

int chunks_for(int64_t count, int threads) {
  return (int)std::max<int64_t>(1, std::min<int64_t>(threads, count / kGrain));
}

struct Above {
  int64_t count = 0;
  std::vector<int32_t> near;  // indices of the magnitudes in [low, high)
};

// Four lanes, since GCC converts wider vectors to doubles one number at a time: three times slower.
constexpr int kWide = 4;
// Signed, since magnitudes have no sign bit, and few CPUs compare unsigned vectors.
typedef int32_t Ints __attribute__((vector_size(4 * kWide)));
typedef int64_t Words __attribute__((vector_size(4 * kWide)));
typedef float Floats __attribute__((vector_size(4 * kWide)));
typedef double Doubles __attribute__((vector_size(8 * kWide)));

// Count the magnitudes from `high` on, sum |weight| over them by block, and list those in
// [low, high).
FOR_EACH_CPU void scan(
    const float* scores, const float* weight, int64_t begin, int64_t end, uint32_t low,
    uint32_t high, Above* above, double* sums) {
  const int32_t below_low = (int32_t)(low - 1), below_high = (int32_t)(high - 1);
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t stop = std::min(end, start + kBlock);
    Doubles total[kLanes / kWide] = {};
    Ints reaching[kLanes / kWide] = {};
    int64_t i = start;
    for (; i + kGroup <= stop; i += kGroup) {
      Ints any = {};
      for (int part = 0; part < kGroup; part += kLanes)
        for (int lane = 0; lane < kLanes; lane += kWide) {
          Ints score, value;
          std::memcpy(&score, scores + i + part + lane, sizeof score);
          std::memcpy(&value, weight + i + part + lane, sizeof value);
          score &= (int32_t)~kSign;
          const Ints mask = score > below_high;
          reaching[lane / kWide] -= mask;
          any |= (score > below_low) ^ mask;
          const Floats survivors = (Floats)(value & (int32_t)~kSign & mask);
          total[lane / kWide] += __builtin_convertvector(survivors, Doubles);
        }
      const Words found = (Words)any;
      if (found[0] | found[1])
        for (int64_t at = i; at < i + kGroup; at++)
          if (magnitude(scores[at]) - low < high - low) above->near.push_back((int32_t)at);
    }
    double sum = 0;
    for (; i < stop; i++) {
      const uint32_t size = magnitude(scores[i]);
      if (size >= high) above->count++, sum += float_of(magnitude(weight[i]));
      if (size - low < high - low) above->near.push_back((int32_t)i);
    }
    for (int lane = 0; lane < kLanes; lane++)
      above->count += reaching[lane / kWide][lane % kWide],
          sum += total[lane / kWide][lane % kWide];
    sums[start / kBlock] = sum;
  }
}

// Count the values of the digit after `prefix`, the digits that are known already.
FOR_EACH_CPU void count_digits(
    const float* scores, int64_t begin, int64_t end, int shift, uint32_t prefix, int64_t* buckets) {
  for (int64_t i = begin; i < end; i++) {
    const uint32_t digits = magnitude(scores[i]) >> shift;
    if (digits >> kDigit == prefix) buckets[digits & (kBuckets - 1)]++;
  }
}

// Find a narrow range [low, high) around the kept-th largest magnitude: its first two digits.
void bracket(
    const float* scores, int64_t count, int64_t kept, int chunks, uint32_t* low, uint32_t* high) {
  uint32_t prefix = 0;
  int shift = 31;
  for (int64_t above = 0; shift > kDigit;) {
    shift -= kDigit;
    std::vector<int64_t> buckets((int64_t)kBuckets * chunks);
    for_chunks(count, chunks, [&](int chunk, int64_t begin, int64_t end) {
      count_digits(scores, begin, end, shift, prefix, &buckets[chunk * kBuckets]);
    });
    uint32_t digit = kBuckets;
    for (int64_t reached = above; reached < kept;) {
      above = reached;
      digit--;
      for (int chunk = 0; chunk < chunks; chunk++) reached += buckets[chunk * kBuckets + digit];
    }
    prefix = prefix << kDigit | digit;
  }
  *low = prefix << shift;
  *high = (prefix + 1) << shift;
}

enum Kind { kScaled = 0, kSigns = 1, kWeights = 2 };  // gain * M * B, M * B, M * W

FOR_EACH_CPU void write(
    const float* scores, const float* weight, float* out, int64_t begin, int64_t end,
    uint32_t threshold, float gain, Kind kind) {
  const uint32_t size = bits_of(kind == kScaled ? gain : 1.0f);
  if (kind == kWeights)
    for (int64_t i = begin; i < end; i++)
      out[i] = float_of(magnitude(scores[i]) >= threshold ? bits_of(weight[i]) : 0);
  else
    for (int64_t i = begin; i < end; i++)
      out[i] = float_of(
          magnitude(scores[i]) >= threshold ? (bits_of(weight[i]) & kSign) | size : 0);
}

FOR_EACH_CPU void write_survivors(
    const float* scores, uint8_t* survivors, int64_t begin, int64_t end, uint32_t threshold) {
  uint8_t codes[kCodes] = {};
  for (int64_t start = begin; start < end; start += kCodes) {
    const int count = (int)std::min(kCodes, end - start);
    for (int i = 0; i < count; i++) codes[i] = magnitude(scores[start + i]) >= threshold;
    pack_codes<1>(codes, survivors + start / 8);
  }
}

FOR_EACH_CPU void expand(
    const uint8_t* survivors, const float* weight, float* out, int64_t begin, int64_t end,
    float gain, Kind kind) {
  uint8_t codes[kCodes];
  const uint32_t size = bits_of(kind == kScaled ? gain : 1.0f);
  for (int64_t start = begin; start < end; start += kCodes) {
    const int count = (int)std::min(kCodes, end - start);
    unpack_codes<1>(survivors + start / 8, codes);
    for (int i = 0; i < count; i++) {
      const uint32_t value = bits_of(weight[start + i]);
      const uint32_t kept = kind == kWeights ? value : (value & kSign) | size;
      out[start + i] = float_of(codes[i] ? kept : 0);
    }
  }
}

FOR_EACH_CPU void score_gradient(
    const float* grad, const float* weight, const float* scores, float* out, int64_t begin,
    int64_t end, float factor) {
  for (int64_t i = begin; i < end; i++) {
    const float value = grad[i] * weight[i] * factor;
    out[i] = scores[i] < 0 ? -value : value;
  }
}

FOR_EACH_CPU void score_gradient_by_sign(
    const float* grad, const float* weight, const float* scores, float* out, int64_t begin,
    int64_t end, float factor) {
  for (int64_t i = begin; i < end; i++) {
    const float value = grad[i] * factor;
    out[i] = (scores[i] < 0) != (weight[i] < 0) ? -value : value;
  }
}

#include "quantize.inl"

}  // namespace

extern "C" {

// Write the effective weight of the `kept` largest |scores| into `out`, and which they are into
// `survivors`, a bit per weight (see codes.h); ties go to the lower index. The search for the threshold starts within `reach` of `guess`, both as bits. Return the
// threshold; *gain is the mean |weight| of the survivors.
uint32_t mptify_select(
    const float* scores, const float* weight, float* out, uint8_t* survivors, int64_t count,
    int64_t kept, int kind, uint32_t guess, uint32_t reach, int threads, float* gain) {
  const int chunks = chunks_for(count, threads);
  std::vector<double> sums((count + kBlock - 1) / kBlock);
  std::vector<Above> above(chunks);
  int64_t reached = 0, near = 0;
  auto scan_between = [&](uint32_t low, uint32_t high) {
    for (auto& one : above) one = Above();
    for_chunks(count, chunks, [&](int chunk, int64_t begin, int64_t end) {
      scan(scores, weight, begin, end, low, high, &above[chunk], sums.data());
    });
    reached = near = 0;
    for (auto& one : above) reached += one.count, near += (int64_t)one.near.size();
  };
  auto is_found = [&] { return reached < kept && kept <= reached + near; };
  for (int tries = 0; tries < 2 && !is_found(); tries++, reach *= 8)
    if (reach < guess && guess < kSign - reach) scan_between(guess - reach, guess + reach);
  if (!is_found()) {
    uint32_t low, high;
    bracket(scores, count, kept, chunks, &low, &high);
    scan_between(low, high);
  }
  std::vector<int32_t> candidates;
  candidates.reserve(near);
  for (auto& one : above) candidates.insert(candidates.end(), one.near.begin(), one.near.end());
  std::vector<uint32_t> magnitudes(near);
  for (int64_t i = 0; i < near; i++) magnitudes[i] = magnitude(scores[candidates[i]]);
  const int64_t wanted = kept - reached;
  std::nth_element(
      magnitudes.begin(), magnitudes.begin() + (wanted - 1), magnitudes.end(),
      std::greater<uint32_t>());
  const uint32_t threshold = magnitudes[wanted - 1];
  int64_t equals = wanted;  // how many of those that equal the threshold survive
  for (int32_t one : candidates) equals -= magnitude(scores[one]) > threshold;
  std::vector<int32_t> pruned_ties;
  double sum = 0;
  for (double one : sums) sum += one;
  for (int32_t one : candidates) {
    const uint32_t size = magnitude(scores[one]);
    if (size < threshold) continue;
    if (size == threshold && equals-- <= 0)
      pruned_ties.push_back(one);
    else
      sum += float_of(magnitude(weight[one]));
  }
  *gain = (float)(sum / (double)kept);
  for_chunks(count, chunks, [&](int, int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += kBlock) {  // while the scores are in a cache
      const int64_t stop = std::min(end, start + kBlock);
      write(scores, weight, out, start, stop, threshold, *gain, (Kind)kind);
      write_survivors(scores, survivors, start, stop, threshold);
    }
  });
  for (int32_t one : pruned_ties) {
    out[one] = 0.0f;
    clear_bit(survivors, one);
  }
  return threshold;
}

// Write the effective weight of `survivors` into `out`, the same that `mptify_select` wrote.
void mptify_expand(
    const uint8_t* survivors, const float* weight, float* out, int64_t count, int kind, float gain,
    int threads) {
  for_chunks(count, chunks_for(count, threads), [&](int, int64_t begin, int64_t end) {
    expand(survivors, weight, out, begin, end, gain, (Kind)kind);
  });
}

// Pack numbers that are `step` times whole numbers from `lowest` on, or ±1 where `bits` is 1, in
// `bits` bits each. Return whether all of them are.
int mptify_pack_levels(
    const float* x, uint8_t* packed, int64_t count, int bits, int lowest, float step,
    int threads) {
  const Levels levels = {bits, lowest, step};
  std::atomic<bool> fits{true};
  for_chunks(count, chunks_for(count, threads), [&](int, int64_t begin, int64_t end) {
    const auto pack = bits == 1   ? pack_levels<1>
                      : bits == 2 ? pack_levels<2>
                      : bits == 4 ? pack_levels<4>
                                  : pack_levels<8>;
    if (!pack(x, packed, begin, end, levels)) fits = false;
  });
  return fits;
}

// The numbers that `mptify_pack_levels` packed.
void mptify_unpack_levels(
    const uint8_t* packed, float* out, int64_t count, int bits, int lowest, float step,
    int threads) {
  const Levels levels = {bits, lowest, step};
  for_chunks(count, chunks_for(count, threads), [&](int, int64_t begin, int64_t end) {
    const auto unpack = bits == 1   ? unpack_levels<1>
                        : bits == 2 ? unpack_levels<2>
                        : bits == 4 ? unpack_levels<4>
                                    : unpack_levels<8>;
    unpack(packed, out, begin, end, levels);
  });
}

// step * round(clip(x * inverse, lowest, highest)), and a bit for each number that was not clipped.
void mptify_round(
    const float* x, float* out, uint8_t* inside, int64_t count, float inverse, float lowest,
    float highest, float step, int threads) {
  for_chunks(count, chunks_for(count, threads), [&](int, int64_t begin, int64_t end) {
    round_levels(x, out, inside, begin, end, inverse, lowest, highest, step);
  });
}

// Its estimator: grad * step * inside * inverse, in this order.
void mptify_round_gradient(
    const float* grad, const uint8_t* inside, float* out, int64_t count, float inverse, float step,
    int threads) {
  for_chunks(count, chunks_for(count, threads), [&](int, int64_t begin, int64_t end) {
    round_gradient(grad, inside, out, begin, end, inverse, step);
  });
}

// sign(x), with sign(0) = +1.
void mptify_sign(const float* x, float* out, int64_t count, int threads) {
  for_chunks(count, chunks_for(count, threads), [&](int, int64_t begin, int64_t end) {
    signs(x, out, begin, end);
  });
}

// The sign's estimator: grad * max(0, 2/t * (1 - |x|/t)), t = width.
void mptify_sign_gradient(
    const float* grad, const float* x, float* out, int64_t count, float width, int threads) {
  for_chunks(count, chunks_for(count, threads), [&](int, int64_t begin, int64_t end) {
    sign_gradient(grad, x, out, begin, end, width);
  });
}

// The score gradient: grad * weight * factor * sgn(scores), with sign(weight) if `by_sign`.
void mptify_score_gradient(
    const float* grad, const float* weight, const float* scores, float* out, int64_t count,
    float factor, int by_sign, int threads) {
  for_chunks(count, chunks_for(count, threads), [&](int, int64_t begin, int64_t end) {
    (by_sign ? score_gradient_by_sign : score_gradient)(
        grad, weight, scores, out, begin, end, factor);
  });
}
}
