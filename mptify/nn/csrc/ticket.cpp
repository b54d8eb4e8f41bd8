// The passes over a layer's weights that a search makes in every step, each reading its arrays once. (Torch, an operation
// at a time, reads and writes them a dozen times.) Plain C++ with C names: no torch, no Python.
//
// Magnitudes are compared as the integers that their float32 bits spell: the order is that of the floats, is total, and
// puts a NaN above everything.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "parallel.h"

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__) && !defined(MPTIFY_ONE_CPU)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

namespace {

constexpr int64_t kBlock = 4096;      // of weights, whose sums are added up in order: the same for any number of threads
constexpr int64_t kGrain = 1 << 16;   // below so many weights per thread, a thread costs more than it saves
constexpr int kLanes = 16;            // partial sums side by side, the same on every CPU
constexpr int kGroup = 4 * kLanes;    // of weights that are searched one by one if any of them lies near the threshold
constexpr int kDigit = 12;            // bits of a magnitude that are counted at a time where there is no hint
constexpr int kBuckets = 1 << kDigit;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

constexpr uint32_t kSign = 0x80000000u;

inline uint32_t magnitude(float value) { return bits_of(value) & ~kSign; }

// work(part, begin, end) on consecutive parts of [0, count), each a whole number of blocks.
template <class Work>
void in_parts(int64_t count, int parts, const Work& work) {
  const int64_t share = (count / parts + kBlock) / kBlock * kBlock;
  run_parallel(parts, [&](int part) { work(part, std::min(count, part * share), std::min(count, (part + 1) * share)); });
}

int parts_for(int64_t count, int threads) { return (int)std::max<int64_t>(1, std::min<int64_t>(threads, count / kGrain)); }

struct Above {
  int64_t count = 0;
  std::vector<int32_t> near;  // indices of the magnitudes in [low, high)
};

// Four at a time, since GCC takes wider vectors apart, number by number, where they become doubles: three times slower.
constexpr int kWide = 4;
typedef int32_t Ints __attribute__((vector_size(4 * kWide)));  // signed: magnitudes have no sign bit, and few CPUs compare unsigned
typedef int64_t Words __attribute__((vector_size(4 * kWide)));
typedef float Floats __attribute__((vector_size(4 * kWide)));
typedef double Doubles __attribute__((vector_size(8 * kWide)));

// How many magnitudes reach `high`, the sums of |weight| over them, block by block, and who lies between `low` and `high`.
FOR_EACH_CPU void look(
    const float* scores, const float* weight, int64_t begin, int64_t end, uint32_t low, uint32_t high, Above* above, double* sums) {
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
          total[lane / kWide] += __builtin_convertvector((Floats)(value & (int32_t)~kSign & mask), Doubles);
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
      above->count += reaching[lane / kWide][lane % kWide], sum += total[lane / kWide][lane % kWide];
    sums[start / kBlock] = sum;
  }
}

// How often each next digit comes behind `prefix`, the digits that are known already.
FOR_EACH_CPU void count_digits(const float* scores, int64_t begin, int64_t end, int shift, uint32_t prefix, int64_t* buckets) {
  for (int64_t i = begin; i < end; i++) {
    const uint32_t digits = magnitude(scores[i]) >> shift;
    if (digits >> kDigit == prefix) buckets[digits & (kBuckets - 1)]++;
  }
}

// A narrow range, [low, high), that holds the kept-th largest magnitude: its first two digits, one pass each.
void bracket(const float* scores, int64_t count, int64_t kept, int parts, uint32_t* low, uint32_t* high) {
  uint32_t prefix = 0;
  int shift = 31;
  for (int64_t above = 0; shift > kDigit;) {
    shift -= kDigit;
    std::vector<int64_t> buckets((int64_t)kBuckets * parts);
    in_parts(count, parts, [&](int part, int64_t begin, int64_t end) {
      count_digits(scores, begin, end, shift, prefix, &buckets[part * kBuckets]);
    });
    uint32_t digit = kBuckets;
    for (int64_t reached = above; reached < kept;) {
      above = reached;
      digit--;
      for (int part = 0; part < parts; part++) reached += buckets[part * kBuckets + digit];
    }
    prefix = prefix << kDigit | digit;
  }
  *low = prefix << shift;
  *high = (prefix + 1) << shift;
}

enum Kind { kScaled = 0, kSigns = 1, kWeights = 2 };  // gain * M * B, M * B, M * W

FOR_EACH_CPU void write(
    const float* scores, const float* weight, float* out, int64_t begin, int64_t end, uint32_t threshold, float gain, Kind kind) {
  const uint32_t size = bits_of(kind == kScaled ? gain : 1.0f);
  if (kind == kWeights)
    for (int64_t i = begin; i < end; i++) out[i] = float_of(magnitude(scores[i]) >= threshold ? bits_of(weight[i]) : 0);
  else
    for (int64_t i = begin; i < end; i++)
      out[i] = float_of(magnitude(scores[i]) >= threshold ? (bits_of(weight[i]) & kSign) | size : 0);
}

FOR_EACH_CPU void pull(const float* grad, const float* weight, const float* scores, float* out, int64_t begin, int64_t end, float by) {
  for (int64_t i = begin; i < end; i++) {
    const float pulled = grad[i] * weight[i] * by;
    out[i] = scores[i] < 0 ? -pulled : pulled;
  }
}

FOR_EACH_CPU void pull_signs(
    const float* grad, const float* weight, const float* scores, float* out, int64_t begin, int64_t end, float by) {
  for (int64_t i = begin; i < end; i++) {
    const float pulled = grad[i] * by;
    out[i] = (scores[i] < 0) != (weight[i] < 0) ? -pulled : pulled;
  }
}

FOR_EACH_CPU void signs(const float* x, float* out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) out[i] = x[i] < 0 ? -1.0f : 1.0f;
}

FOR_EACH_CPU void pull_spline(const float* grad, const float* x, float* out, int64_t begin, int64_t end, float width) {
  const float height = 2 / width, fall = height / width;
  for (int64_t i = begin; i < end; i++) {
    const float slope = height - fall * float_of(magnitude(x[i]));
    out[i] = slope > 0 ? grad[i] * slope : 0.0f;
  }
}

}  // namespace

extern "C" {

// Raised when the functions below change, so that a library of an older build is not taken for this one.
int mptify_edition() { return 2; }

// Write the effective weight into `out`: of the `kept` largest |scores|, the lower index first among equals. `guess` is
// where to look for the threshold first, as bits, and `reach` how far around it. Returns the threshold; *gain is the mean |weight| kept.
uint32_t mptify_select(
    const float* scores, const float* weight, float* out, int64_t count, int64_t kept, int kind, uint32_t guess, uint32_t reach, int threads,
    float* gain) {
  const int parts = parts_for(count, threads);
  std::vector<double> sums((count + kBlock - 1) / kBlock);
  std::vector<Above> above(parts);
  int64_t reached = 0, near = 0;
  auto look_between = [&](uint32_t low, uint32_t high) {
    for (auto& one : above) one = Above();
    in_parts(count, parts, [&](int part, int64_t begin, int64_t end) {
      look(scores, weight, begin, end, low, high, &above[part], sums.data());
    });
    reached = near = 0;
    for (auto& one : above) reached += one.count, near += (int64_t)one.near.size();
  };
  auto is_found = [&] { return reached < kept && kept <= reached + near; };
  for (int tries = 0; tries < 2 && !is_found(); tries++, reach *= 8)
    if (reach < guess && guess < kSign - reach) look_between(guess - reach, guess + reach);
  if (!is_found()) {
    uint32_t low, high;
    bracket(scores, count, kept, parts, &low, &high);
    look_between(low, high);
  }
  std::vector<int32_t> candidates;
  candidates.reserve(near);
  for (auto& one : above) candidates.insert(candidates.end(), one.near.begin(), one.near.end());
  std::vector<uint32_t> magnitudes(near);
  for (int64_t i = 0; i < near; i++) magnitudes[i] = magnitude(scores[candidates[i]]);
  const int64_t wanted = kept - reached;
  std::nth_element(magnitudes.begin(), magnitudes.begin() + (wanted - 1), magnitudes.end(), std::greater<uint32_t>());
  const uint32_t threshold = magnitudes[wanted - 1];
  int64_t equals = wanted;  // how many of those that equal the threshold may stay
  for (int32_t one : candidates) equals -= magnitude(scores[one]) > threshold;
  std::vector<int32_t> losers;
  double sum = 0;
  for (double one : sums) sum += one;
  for (int32_t one : candidates) {
    const uint32_t size = magnitude(scores[one]);
    if (size < threshold) continue;
    if (size == threshold && equals-- <= 0)
      losers.push_back(one);
    else
      sum += float_of(magnitude(weight[one]));
  }
  *gain = (float)(sum / (double)kept);
  in_parts(count, parts, [&](int, int64_t begin, int64_t end) { write(scores, weight, out, begin, end, threshold, *gain, (Kind)kind); });
  for (int32_t one : losers) out[one] = 0.0f;
  return threshold;
}

// sign(x), with sign(0) = +1, and the gradient that stands in for its own: grad * max(0, 2/t * (1 - |x|/t)), t = width.
void mptify_sign(const float* x, float* out, int64_t count, int threads) {
  in_parts(count, parts_for(count, threads), [&](int, int64_t begin, int64_t end) { signs(x, out, begin, end); });
}

void mptify_sign_gradient(const float* grad, const float* x, float* out, int64_t count, float width, int threads) {
  in_parts(count, parts_for(count, threads), [&](int, int64_t begin, int64_t end) { pull_spline(grad, x, out, begin, end, width); });
}

// The scores' gradient: grad * weight * by * sgn(scores), or, with `signs`, grad * sign(weight) * by * sgn(scores).
void mptify_score_gradient(
    const float* grad, const float* weight, const float* scores, float* out, int64_t count, float by, int signs, int threads) {
  in_parts(count, parts_for(count, threads), [&](int, int64_t begin, int64_t end) {
    (signs ? pull_signs : pull)(grad, weight, scores, out, begin, end, by);
  });
}
}
