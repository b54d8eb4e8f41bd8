// A binary layer on bit planes. Included once per instruction set, inside its namespace (see cpu.inl).
//
// A word holds BYTES * 8 output pixels of one plane. A filter's survivors come in pairs of one that is added and one that is
// subtracted, as long as there are both, so that what a pair contributes, x - y, is never negative if 1 is added to it. The
// counters start from minus the threshold and minus the number of such pairs; when all pairs have been added they hold
//
//     added - subtracted - threshold
//
// in two's complement: the topmost one is the answer. No plane needs a complemented copy, and there is one list to go through.
//
// Two planes of one weight travel as (x, x ^ y). Adding two such pairs to a counter then takes 8 operations and leaves a pair of
// carries of the same form, where two full adders take 10: Demenkov, Kojevnikov, Kulikov and Yaroslavtsev, "New upper bounds on
// the Boolean circuit complexity of symmetric functions" (2010), with complements moved to where `and not` costs nothing.

// Words of zeros, then of ones.
template <int BYTES>
struct Words {
  static constexpr int EACH = 16;
  alignas(64) uint8_t words[2 * EACH * BYTES];

  constexpr Words() : words() {
    for (int i = EACH * BYTES; i < 2 * EACH * BYTES; i++) words[i] = 255;
  }

  // From a place on at which so many are zeros, at the most 16.
  const uint8_t* zeros(int64_t count) const { return words + (EACH - count) * BYTES; }
  const uint8_t* ones() const { return words + EACH * BYTES; }
};

template <int BYTES>
static constexpr Words<BYTES> WORDS{};

// Adds planes, up to 32 at a time; which of them, says `index`, in units of UNIT bytes (if that is 0, of `unit`).
template <int BYTES, int BITS, int UNIT>
struct Counters {
  typedef uint64_t Word __attribute__((vector_size(BYTES)));
  struct Pair {
    Word one, differ;  // x and x ^ y, of x + 1 - y
  };
  Word count[BITS];
  const uint8_t* at;
  int64_t unit;

  static inline __attribute__((always_inline)) Word load(const uint8_t* from) {
    Word word;
    __builtin_memcpy(&word, from, BYTES);
    return word;
  }

  static inline __attribute__((always_inline)) void store(uint8_t* to, Word word) { __builtin_memcpy(to, &word, BYTES); }

  static inline __attribute__((always_inline)) Word all(bool ones) { return load(WORDS<BYTES>.words + ones * WORDS<BYTES>.EACH * BYTES); }

  inline __attribute__((always_inline)) Word plane(const uint16_t* index) const {
    return load(at + (int64_t)*index * (UNIT ? UNIT : unit));
  }

  // count + pair + other = 2 * (a pair) + count
  template <int LEVEL>
  inline __attribute__((always_inline)) Pair add(Pair pair, Pair other) {
    const Word before = count[LEVEL], between = before ^ pair.differ;
    const Word high = pair.differ & ~(pair.one ^ before), higher = other.differ & ~(other.one ^ between);
    count[LEVEL] = between ^ other.differ;
    return {high ^ between, high ^ higher};
  }

  // The same with one pair, whose carry goes up through the counters.
  template <int LEVEL>
  inline __attribute__((always_inline)) void add(Pair pair) {
    const Word before = count[LEVEL], between = before ^ pair.differ;
    Word carry = (pair.differ & ~(pair.one ^ before)) ^ between;
    count[LEVEL] = ~between;
    #pragma GCC unroll 16
    for (int i = LEVEL + 1; i < BITS; i++) {
      const Word next = count[i] & carry;
      count[i] ^= carry;
      carry = next;
    }
  }

  // PLANES of them as a pair of carries. Of pairs that are both added, `turns` has ones, which turn the second.
  template <int PLANES, bool TURNED>
  inline __attribute__((always_inline)) Pair carries(const uint16_t* index, const uint8_t* turns) {
    if constexpr (PLANES == 2) {
      const Word one = plane(index), differ = one ^ plane(index + 1);
      return {one, TURNED ? differ ^ load(turns) : differ};
    } else {
      constexpr int HALF = PLANES / 2, LEVEL = PLANES == 4 ? 0 : PLANES == 8 ? 1 : PLANES == 16 ? 2 : 3;
      const Pair first = carries<HALF, TURNED>(index, turns);
      const Pair second = carries<HALF, TURNED>(index + HALF, turns + HALF / 2 * BYTES);
      return add<LEVEL>(first, second);
    }
  }

  // Of 1 to 4 planes. What follows a list is another one, or room to read: its planes are hidden, not skipped.
  inline __attribute__((always_inline)) Pair carries_of_some(const uint16_t* index, int64_t some, const uint8_t* turns) {
    const uint8_t* hidden = WORDS<BYTES>.zeros(some);
    const auto shown = [&](int i) __attribute__((always_inline)) { return ~load(hidden + i * BYTES) & plane(index + i); };
    const Word a = plane(index), b = shown(1), c = shown(2), d = shown(3);
    return add<0>(Pair{a, a ^ b ^ load(turns)}, Pair{c, c ^ d ^ load(turns + BYTES)});
  }

  // Planes up to `mixed` are in pairs of one added and one subtracted; all others, up to `end`, are added.
  inline __attribute__((always_inline)) void add_list(const uint16_t* index, const uint16_t* mixed, const uint16_t* end) {
    for (; mixed - index >= 32; index += 32) add<4>(carries<32, false>(index, WORDS<BYTES>.words));
    const uint8_t* turns = WORDS<BYTES>.zeros((mixed - index) / 2);
    const auto advance = [&](int planes) __attribute__((always_inline)) {
      index += planes;
      turns = std::min(turns + planes / 2 * BYTES, WORDS<BYTES>.ones());
    };
    while (end - index >= 32) {
      add<4>(carries<32, true>(index, turns));
      advance(32);
    }
    if (end - index >= 16) {
      add<3>(carries<16, true>(index, turns));
      advance(16);
    }
    if (end - index >= 8) {
      add<2>(carries<8, true>(index, turns));
      advance(8);
    }
    const int64_t left = end - index;
    if (left > 4) {
      const Pair first = carries<4, true>(index, turns), second = carries_of_some(index + 4, left - 4, turns + 2 * BYTES);
      add<2>(add<1>(first, second));
    } else if (left > 0) {
      add<1>(carries_of_some(index, left, turns));
    }
  }
};

// Thresholds of the pixels in one word, by group of classes: a table of each subset's pixels.
template <int BYTES>
struct Starts {
  typedef uint64_t Word __attribute__((vector_size(BYTES)));
  Word pixels[MOST_GROUPS * 8];
  int64_t group[MOST_GROUPS];
  int64_t count = 0;

  Starts(const Job& job, int64_t place) {
    uint64_t left = 0;  // groups that lie in this word
    for (int64_t cell = place / 8; cell < (place + BYTES) / 8; cell++) left |= job.present[cell];
    for (; left; left &= left - 1) {
      group[count] = __builtin_ctzll(left);
      const uint8_t* from = job.unions + group[count] * 8 * job.union_stride + place;
      for (int subset = 0; subset < 8; subset++) __builtin_memcpy(&pixels[count * 8 + subset], from + subset * job.union_stride, BYTES);
      count++;
    }
  }

  // Pixels of the classes that `subsets` names: BITS of them for each group.
  template <int BITS>
  inline __attribute__((always_inline)) void set(const uint8_t* subsets, Word* bits) const {
    const uint8_t* of = subsets + group[0] * BITS;
    #pragma GCC unroll 16
    for (int i = 0; i < BITS; i++) bits[i] = pixels[of[i]];
    for (int64_t k = 1; k < count; k++) {
      of = subsets + group[k] * BITS;
      #pragma GCC unroll 16
      for (int i = 0; i < BITS; i++) bits[i] |= pixels[k * 8 + of[i]];
    }
  }
};

// The word at byte `place` of the planes, for filters [first, last): signs, or where they are asked for, counters.
template <int BYTES, int BITS, int UNIT>
static void run_with(const Job& job, int64_t place, int64_t first, int64_t last) {
  using Sum = Counters<BYTES, BITS, UNIT>;
  using Word = typename Sum::Word;
  const Job here = job;  // which nothing that is written can change
  const int64_t set = here.groups * BITS;
  const Starts<BYTES> starts(here, place);
  Sum sum;
  sum.at = here.planes + (place - here.from);
  sum.unit = here.unit;
  for (int64_t f = first; f < last; f++) {
    const uint8_t* init = here.init + f * here.sets * set;
    starts.template set<BITS>(init, sum.count);
    if (here.sets == 2) {  // where the shortcut is +1, the second threshold
      Word other[BITS];
      starts.template set<BITS>(init + set, other);
      const Word shortcut = Sum::load(here.shortcut + f * here.stride + place);
      #pragma GCC unroll 16
      for (int i = 0; i < BITS; i++) sum.count[i] ^= (sum.count[i] ^ other[i]) & shortcut;
    }
    const int32_t* lists = here.starts + 2 * f;
    sum.add_list(here.index + lists[0], here.index + lists[1], here.index + lists[2]);
    const Word turn = Sum::all(here.flipped[f]);
    if (here.odd == nullptr) {
      const Word signs = ~(sum.count[BITS - 1] ^ turn);
      uint8_t* out = here.out + f * here.stride + place;
      if (BYTES == 16 && here.stride == 8) __builtin_memcpy(out, &signs, 8);  // the next plane may be another thread's
      else Sum::store(out, signs);
    } else {
      Word odd[1];
      starts.template set<1>(here.odd + f * here.groups, odd);
      uint8_t* counters = here.counters + (f - first) * (1 + BITS) * BYTES;
      Sum::store(counters, odd[0]);
      #pragma GCC unroll 16
      for (int i = 0; i < BITS; i++) Sum::store(counters + (1 + i) * BYTES, sum.count[i] ^ turn);
    }
  }
}

template <int BYTES>
static void run_words(const Job& job, int64_t place, int64_t first, int64_t last) {
  if (job.unit != 1) return (job.bits <= 11 ? run_with<BYTES, 11, 0> : run_with<BYTES, 15, 0>)(job, place, first, last);
  switch (job.bits) {
    case 6: return run_with<BYTES, 6, 1>(job, place, first, last);
    case 8: return run_with<BYTES, 8, 1>(job, place, first, last);
    case 9: return run_with<BYTES, 9, 1>(job, place, first, last);
    case 10: return run_with<BYTES, 10, 1>(job, place, first, last);
    case 11: return run_with<BYTES, 11, 1>(job, place, first, last);
    case 12: return run_with<BYTES, 12, 1>(job, place, first, last);
    case 13: return run_with<BYTES, 13, 1>(job, place, first, last);
    default: return run_with<BYTES, 15, 1>(job, place, first, last);
  }
}
