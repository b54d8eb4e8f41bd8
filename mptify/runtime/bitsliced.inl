// A binary layer on bit planes. Included once per instruction set, inside its namespace (see cpu.inl).
//
// A word holds BYTES * 8 output pixels of one plane. For each filter it starts from the filter's thresholds, adds the
// planes of the negative survivors into bit-sliced counters, complements them, and adds those of the positive ones:
//
//     -1 - (threshold - 1) - negatives + positives  =  positives - negatives - threshold
//
// in two's complement, so that the topmost counter is the answer, and the planes need no complemented copies.

// a + b + c = 2 * carry + sum, in every bit position at once
template <class Word>
static inline __attribute__((always_inline)) void add3(Word& carry, Word& sum, Word a, Word b, Word c) {
  const Word half = a ^ b;
  carry = (a & b) | (half & c);
  sum = half ^ c;
}

// Adds planes, up to thirty-two at a time; which of them, says `index`, in units of UNIT bytes (if that is 0, of `unit`).
template <int BYTES, int BITS, int UNIT>
struct Counters {
  typedef uint64_t Word __attribute__((vector_size(BYTES)));
  Word count[BITS];
  const uint8_t* at;
  int64_t unit;

  static inline __attribute__((always_inline)) Word load(const uint8_t* from) {
    Word word;
    __builtin_memcpy(&word, from, BYTES);
    return word;
  }

  static inline __attribute__((always_inline)) void store(uint8_t* to, Word word) { __builtin_memcpy(to, &word, BYTES); }

  inline __attribute__((always_inline)) Word plane(const uint16_t* index) const {
    return load(at + (int64_t)*index * (UNIT ? UNIT : unit));
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

  inline __attribute__((always_inline)) Word four(Word a, Word b, Word c, Word d) {
    Word twos_a, twos_b, fours;
    add3(twos_a, count[0], count[0], a, b);
    add3(twos_b, count[0], count[0], c, d);
    add3(fours, count[1], count[1], twos_a, twos_b);
    return fours;
  }

  inline __attribute__((always_inline)) Word four(const uint16_t* index) {
    return four(plane(index), plane(index + 1), plane(index + 2), plane(index + 3));
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
    if (end - index >= 4) {
      ripple<2>(four(index));
      index += 4;
    }
    const int64_t left = end - index;  // what follows a list is another one, or room to read: its planes are masked, not skipped
    if (left) ripple<2>(four(plane(index), plane(index + 1) & all(left > 1), plane(index + 2) & all(left > 2), Word{}));
  }

  static inline __attribute__((always_inline)) Word all(bool ones) { return Word{} - (uint64_t)ones; }
};

// Words from byte `begin` to byte `end` of the planes, for filters [first, last).
template <int BYTES, int BITS, int UNIT>
static void run_with(const Job& job, int64_t begin, int64_t end, int64_t first, int64_t last) {
  using Sum = Counters<BYTES, BITS, UNIT>;
  using Word = typename Sum::Word;
  for (int64_t place = begin; place < end; place += BYTES) {
    uint64_t groups = 0;  // of classes of pixels, those that lie in this word
    for (int64_t cell = place / 8; cell < (place + BYTES) / 8; cell++) groups |= job.present[cell];
    for (int64_t f = first; f < last; f++) {
      Sum sum;
      sum.at = job.planes + place;
      sum.unit = job.unit;
      const auto start = [&](const uint8_t* init, Word* bits) __attribute__((always_inline)) {
        uint64_t left = groups;
        const auto union_of = [&](int group, int i) __attribute__((always_inline)) {
          return Sum::load(job.unions + (group * 8 + init[group * BITS + i]) * job.stride + place);
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
      if (job.init == nullptr) {  // the sums themselves are asked for: -1 - (-1) - negatives + positives
        #pragma GCC unroll 16
        for (int i = 0; i < BITS; i++) sum.count[i] = Sum::all(true);
      } else {
        const uint8_t* init = job.init + f * job.sets * job.groups * BITS;
        start(init, sum.count);
        if (job.sets == 2) {  // where the shortcut is +1, the second threshold
          Word other[BITS];
          start(init + job.groups * BITS, other);
          const Word shortcut = Sum::load(job.shortcut + f * job.stride + place);
          #pragma GCC unroll 16
          for (int i = 0; i < BITS; i++) sum.count[i] ^= (sum.count[i] ^ other[i]) & shortcut;
        }
      }
      const int32_t* starts = job.starts + 2 * f;
      sum.add(job.index + starts[0], job.index + starts[1]);
      #pragma GCC unroll 16
      for (int i = 0; i < BITS; i++) sum.count[i] = ~sum.count[i];
      sum.add(job.index + starts[1], job.index + starts[2]);
      if (job.counters == nullptr) {
        Sum::store(job.out + f * job.stride + place, ~sum.count[BITS - 1]);
      } else {
        #pragma GCC unroll 16
        for (int i = 0; i < BITS; i++) Sum::store(job.counters + ((f - first) * BITS + i) * job.stride + place, sum.count[i]);
      }
    }
  }
}

template <int BYTES, int UNIT>
static void run_words_with(const Job& job, int64_t begin, int64_t end, int64_t first, int64_t last) {
  switch (job.bits) {
    case 6: return run_with<BYTES, 6, UNIT>(job, begin, end, first, last);
    case 8: return run_with<BYTES, 8, UNIT>(job, begin, end, first, last);
    case 9: return run_with<BYTES, 9, UNIT>(job, begin, end, first, last);
    case 10: return run_with<BYTES, 10, UNIT>(job, begin, end, first, last);
    case 11: return run_with<BYTES, 11, UNIT>(job, begin, end, first, last);
    case 12: return run_with<BYTES, 12, UNIT>(job, begin, end, first, last);
    case 13: return run_with<BYTES, 13, UNIT>(job, begin, end, first, last);
    default: return run_with<BYTES, 15, UNIT>(job, begin, end, first, last);
  }
}

template <int BYTES>
static void run_words(const Job& job, int64_t begin, int64_t end, int64_t first, int64_t last) {
  if (BYTES == 16 && job.unit == 1) return run_words_with<BYTES, BYTES == 16 ? 1 : 0>(job, begin, end, first, last);  // small images
  run_words_with<BYTES, 0>(job, begin, end, first, last);
}
