// The layer's loop, for one width of word; included once per instruction set and width (see packed.cpp).
//
// A word holds WORD_BYTES * 8 output pixels of one plane. For each filter it starts from the filter's thresholds, adds the
// planes of the negative survivors into bit-sliced counters, complements them, and adds those of the positive ones:
//
//     -1 - (threshold - 1) - negatives + positives  =  positives - negatives - threshold
//
// in two's complement, so that the topmost counter is the answer, and the planes need no complemented copies.

namespace WORD_NAMESPACE {

#if WORD_BYTES == 8
typedef uint64_t Word;
#else
typedef uint64_t Word __attribute__((vector_size(WORD_BYTES)));
#endif

static inline __attribute__((always_inline)) Word load(const uint8_t* from) {
  Word word;
  __builtin_memcpy(&word, from, WORD_BYTES);
  return word;
}

static inline __attribute__((always_inline)) void store(uint8_t* to, Word word) { __builtin_memcpy(to, &word, WORD_BYTES); }

// a + b + c = 2 * carry + sum, in every bit position at once
static inline __attribute__((always_inline)) void add3(Word& carry, Word& sum, Word a, Word b, Word c) {
  const Word half = a ^ b;
  carry = (a & b) | (half & c);
  sum = half ^ c;
}

// Adds planes, four to thirty-two at a time; which of them, says `index`, in units of `unit` bytes.
template <int BITS>
struct Counters {
  Word count[BITS];
  const uint8_t* at;
  int64_t unit;

  inline __attribute__((always_inline)) Word plane(const uint16_t* index) const {
    return load(at + (int64_t)*index * unit);
  }

  template <int LEVEL>
  inline __attribute__((always_inline)) void ripple(Word carry) {
    #pragma GCC unroll 16
    for (int i = LEVEL; i < BITS; i++) {
      const Word next = count[i] & carry;
      count[i] ^= carry;
      carry = next;
    }
  }

  inline __attribute__((always_inline)) Word four(const uint16_t* index) {
    Word twos_a, twos_b, fours;
    add3(twos_a, count[0], count[0], plane(index), plane(index + 1));
    add3(twos_b, count[0], count[0], plane(index + 2), plane(index + 3));
    add3(fours, count[1], count[1], twos_a, twos_b);
    return fours;
  }

  inline __attribute__((always_inline)) Word eight(const uint16_t* index) {
    Word eights;
    const Word one = four(index), two = four(index + 4);
    add3(eights, count[2], count[2], one, two);
    return eights;
  }

  inline __attribute__((always_inline)) Word sixteen(const uint16_t* index) {
    Word sixteens;
    const Word one = eight(index), two = eight(index + 8);
    add3(sixteens, count[3], count[3], one, two);
    return sixteens;
  }

  inline __attribute__((always_inline)) void add(const uint16_t* index, const uint16_t* end) {
    for (; end - index >= 32; index += 32) {
      Word carry;
      const Word one = sixteen(index), two = sixteen(index + 16);
      add3(carry, count[4], count[4], one, two);
      ripple<5>(carry);
    }
    if (end - index >= 16) {
      ripple<4>(sixteen(index));
      index += 16;
    }
    if (end - index >= 8) {
      ripple<3>(eight(index));
      index += 8;
    }
    if (index < end) ripple<2>(four(index));
  }
};

// Words from byte `begin` to byte `end` of the planes, for filters [first, last).
template <int BITS>
static void run(const Job& job, int64_t begin, int64_t end, int64_t first, int64_t last) {
  for (int64_t place = begin; place < end; place += WORD_BYTES) {
    uint64_t groups = 0;  // of classes of pixels, those that lie in this word
    for (int64_t cell = place / 8; cell < (place + WORD_BYTES) / 8; cell++) groups |= job.present[cell];
    for (int64_t f = first; f < last; f++) {
      Counters<BITS> sum;
      sum.at = job.planes + place;
      sum.unit = job.unit;
      const auto start = [&](const uint8_t* init, Word* bits) __attribute__((always_inline)) {
        uint64_t left = groups;
        const auto union_of = [&](int group, int i) __attribute__((always_inline)) {
          return load(job.unions + (group * 8 + init[group * BITS + i]) * job.stride + place);
        };
        int group = __builtin_ctzll(left);
        #pragma GCC unroll 16
        for (int i = 0; i < BITS; i++) bits[i] = union_of(group, i);
        while (left &= left - 1) {
          group = __builtin_ctzll(left);
          #pragma GCC unroll 16
          for (int i = 0; i < BITS; i++) bits[i] |= union_of(group, i);
        }
      };
      const uint8_t* init = job.init + f * job.sets * job.groups * BITS;
      start(init, sum.count);
      if (job.sets == 2) {  // where the shortcut is +1, the second threshold
        Word other[BITS];
        start(init + job.groups * BITS, other);
        const Word shortcut = load(job.shortcut + f * job.stride + place);
        #pragma GCC unroll 16
        for (int i = 0; i < BITS; i++) sum.count[i] ^= (sum.count[i] ^ other[i]) & shortcut;
      }
      const int64_t* starts = job.starts + 2 * f;
      sum.add(job.index + starts[0], job.index + starts[1]);
      #pragma GCC unroll 16
      for (int i = 0; i < BITS; i++) sum.count[i] = ~sum.count[i];
      sum.add(job.index + starts[1], job.index + starts[2]);
      if (job.counters == nullptr) {
        store(job.out + f * job.stride + place, ~sum.count[BITS - 1]);
      } else {
        #pragma GCC unroll 16
        for (int i = 0; i < BITS; i++) store(job.counters + ((f - first) * BITS + i) * job.stride + place, sum.count[i]);
      }
    }
  }
}

static void run_with(const Job& job, int64_t begin, int64_t end, int64_t first, int64_t last) {
  switch (job.bits) {
    case 6: return run<6>(job, begin, end, first, last);
    case 8: return run<8>(job, begin, end, first, last);
    case 9: return run<9>(job, begin, end, first, last);
    case 10: return run<10>(job, begin, end, first, last);
    case 11: return run<11>(job, begin, end, first, last);
    case 12: return run<12>(job, begin, end, first, last);
    case 13: return run<13>(job, begin, end, first, last);
    default: return run<15>(job, begin, end, first, last);
  }
}

}  // namespace WORD_NAMESPACE
