// Adds bit planes into bit-sliced counters.
//
// A word holds BYTES * 8 output pixels of one plane. A filter's survivors come in pairs of one that
// is added and one that is subtracted, as long as there are both, so that what a pair contributes,
// x - y, is never negative once 1 is added to it. The counters start from minus the threshold and
// minus the number of such pairs. When all pairs are added they hold
//
//     added - subtracted - threshold
//
// in two's complement: the topmost counter is the answer. No plane needs a complemented copy, and
// there is one list per filter.
//
// Two planes of equal weight travel as (x, x ^ y). Adding two such pairs to a counter then takes 8
// operations and leaves a pair of carries of the same form, where two full adders take 10:
// Demenkov, Kojevnikov, Kulikov and Yaroslavtsev, "New upper bounds on the Boolean circuit
// complexity of symmetric functions" (2010), with complements moved to where `and not` is free.

static constexpr int MAX_GROUPS = 64;  // of classes of pixels

// A bit-sliced layer on one image. Planes of the output and of the shortcut lie `stride` bytes
// apart: 8, 16, 32, or a multiple of 64. Bytes behind a plane are read but never written: they may
// belong to another thread.
struct BitslicedArguments {
  const uint8_t* planes;    // one tile of the expanded input, see expand.inl
  const uint16_t* index;    // which planes each filter adds, in units of `unit` bytes; three more
                            // can be read behind the last one
  const int32_t* starts;    // where in `index` filter f starts [2 f], and its pairs end [2 f + 1]
  const uint8_t* flipped;   // [filters]: more survivors are negative than positive, so that the
                            // complement is counted, with all signs flipped
  const uint8_t* init;      // [filters][sets][groups][bits]: which classes start with this bit set
  const uint8_t* odd;       // [filters][groups]: which classes have odd sums; null to make signs
  const uint8_t* unions;    // [groups][8]: planes of the pixels in each subset of a group's (up to
                            // three) classes, `union_stride` bytes apart
  const uint64_t* present;  // for each 8 bytes of a plane, the groups that lie in them, as bits
  const uint8_t* shortcut;  // [filters], or null
  uint8_t* out;             // [filters]
  uint8_t* counters;        // [filters][1 + bits] words instead of `out`: sums, two's complement
  int64_t from;             // the byte of a plane at which the tile starts
  int64_t unit, stride, union_stride, groups, sets, bits;
};

// Words of zeros, then of ones.
template <int BYTES>
struct Words {
  static constexpr int EACH = 16;
  alignas(64) uint8_t words[2 * EACH * BYTES];

  constexpr Words() : words() {
    for (int i = EACH * BYTES; i < 2 * EACH * BYTES; i++) words[i] = 255;
  }

  // Words of which the first `count` (up to 16) are zeros and the others ones.
  const uint8_t* zeros(int64_t count) const { return words + (EACH - count) * BYTES; }
  const uint8_t* ones() const { return words + EACH * BYTES; }
};

template <int BYTES>
static constexpr Words<BYTES> WORDS{};

// Adds planes, up to 32 at a time. `index` says which, in units of UNIT bytes, or of `unit` if that
// is 0.
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

  static inline __attribute__((always_inline)) void store(uint8_t* to, Word word) {
    __builtin_memcpy(to, &word, BYTES);
  }

  static inline __attribute__((always_inline)) Word all(bool ones) {
    return load(ones ? WORDS<BYTES>.ones() : WORDS<BYTES>.words);
  }

  inline __attribute__((always_inline)) Word plane(const uint16_t* index) const {
    return load(at + (int64_t)*index * (UNIT ? UNIT : unit));
  }

  // count + pair + other = 2 * (a pair) + count
  template <int LEVEL>
  inline __attribute__((always_inline)) Pair add(Pair pair, Pair other) {
    const Word before = count[LEVEL], between = before ^ pair.differ;
    const Word high = pair.differ & ~(pair.one ^ before);
    const Word higher = other.differ & ~(other.one ^ between);
    count[LEVEL] = between ^ other.differ;
    return {high ^ between, high ^ higher};
  }

  // The same with one pair, whose carry ripples through the counters.
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

  // PLANES planes as a pair of carries. `flips` has a word for each pair: ones if both of its
  // planes are added, which flip the second one.
  template <int PLANES, bool FLIPS>
  inline __attribute__((always_inline)) Pair carries(const uint16_t* index, const uint8_t* flips) {
    if constexpr (PLANES == 2) {
      const Word one = plane(index), differ = one ^ plane(index + 1);
      return {one, FLIPS ? differ ^ load(flips) : differ};
    } else {
      constexpr int HALF = PLANES / 2;
      constexpr int LEVEL = PLANES == 4 ? 0 : PLANES == 8 ? 1 : PLANES == 16 ? 2 : 3;
      const Pair first = carries<HALF, FLIPS>(index, flips);
      const Pair second = carries<HALF, FLIPS>(index + HALF, flips + HALF / 2 * BYTES);
      return add<LEVEL>(first, second);
    }
  }

  // The same for 1 to 4 planes. Those behind the list's end are read and masked, not skipped.
  inline __attribute__((always_inline)) Pair carries_of_some(
      const uint16_t* index, int64_t count, const uint8_t* flips) {
    const uint8_t* masked = WORDS<BYTES>.zeros(count);
    const auto shown = [&](int i) __attribute__((always_inline)) {
      return ~load(masked + i * BYTES) & plane(index + i);
    };
    const Word a = plane(index), b = shown(1), c = shown(2), d = shown(3);
    return add<0>(Pair{a, a ^ b ^ load(flips)}, Pair{c, c ^ d ^ load(flips + BYTES)});
  }

  // Adds a filter's list. Planes up to `paired` are in pairs of one added and one subtracted; all
  // others, up to `end`, are added.
  inline __attribute__((always_inline)) void add_list(
      const uint16_t* index, const uint16_t* paired, const uint16_t* end) {
    for (; paired - index >= 32; index += 32) add<4>(carries<32, false>(index, WORDS<BYTES>.words));
    const uint8_t* flips = WORDS<BYTES>.zeros((paired - index) / 2);
    const auto advance = [&](int planes) __attribute__((always_inline)) {
      index += planes;
      flips = std::min(flips + planes / 2 * BYTES, WORDS<BYTES>.ones());
    };
    while (end - index >= 32) {
      add<4>(carries<32, true>(index, flips));
      advance(32);
    }
    if (end - index >= 16) {
      add<3>(carries<16, true>(index, flips));
      advance(16);
    }
    if (end - index >= 8) {
      add<2>(carries<8, true>(index, flips));
      advance(8);
    }
    const int64_t left = end - index;
    if (left > 4) {
      const Pair first = carries<4, true>(index, flips);
      const Pair second = carries_of_some(index + 4, left - 4, flips + 2 * BYTES);
      add<2>(add<1>(first, second));
    } else if (left > 0) {
      add<1>(carries_of_some(index, left, flips));
    }
  }
};

// What the counters of one word start from: for each group of classes that lies in the word, the
// pixels of each subset of its classes.
template <int BYTES>
struct Starts {
  typedef uint64_t Word __attribute__((vector_size(BYTES)));
  Word pixels[MAX_GROUPS * 8];
  int64_t group[MAX_GROUPS];
  int64_t count = 0;

  Starts(const BitslicedArguments& arguments, int64_t at) {
    const int64_t stride = arguments.union_stride;
    uint64_t left = 0;  // groups that lie in this word
    for (int64_t cell = at / 8; cell < (at + BYTES) / 8; cell++) left |= arguments.present[cell];
    for (; left; left &= left - 1) {
      group[count] = __builtin_ctzll(left);
      const uint8_t* from = arguments.unions + group[count] * 8 * stride + at;
      for (int subset = 0; subset < 8; subset++)
        __builtin_memcpy(&pixels[count * 8 + subset], from + subset * stride, BYTES);
      count++;
    }
  }

  // Pixels of the classes in `subsets`, which has BITS of them for each group.
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

// The word at byte `at` of the planes, for filters [begin, end): signs, or counters if there is
// `odd`.
template <int BYTES, int BITS, int UNIT>
static void add_planes_with(
    const BitslicedArguments& given, int64_t at, int64_t begin, int64_t end) {
  using Sum = Counters<BYTES, BITS, UNIT>;
  using Word = typename Sum::Word;
  const BitslicedArguments arguments = given;  // a copy, which no write can change
  const int64_t set = arguments.groups * BITS;
  const Starts<BYTES> starts(arguments, at);
  Sum sum;
  sum.at = arguments.planes + (at - arguments.from);
  sum.unit = arguments.unit;
  for (int64_t f = begin; f < end; f++) {
    const uint8_t* init = arguments.init + f * arguments.sets * set;
    starts.template set<BITS>(init, sum.count);
    if (arguments.sets == 2) {  // where the shortcut is +1, the second threshold
      Word other[BITS];
      starts.template set<BITS>(init + set, other);
      const Word shortcut = Sum::load(arguments.shortcut + f * arguments.stride + at);
      #pragma GCC unroll 16
      for (int i = 0; i < BITS; i++) sum.count[i] ^= (sum.count[i] ^ other[i]) & shortcut;
    }
    const int32_t* lists = arguments.starts + 2 * f;
    const uint16_t* index = arguments.index;
    sum.add_list(index + lists[0], index + lists[1], index + lists[2]);
    const Word flip = Sum::all(arguments.flipped[f]);
    if (arguments.odd == nullptr) {
      const Word signs = ~(sum.count[BITS - 1] ^ flip);
      uint8_t* out = arguments.out + f * arguments.stride + at;
      const bool is_half = BYTES == 16 && arguments.stride == 8;  // the rest is the next plane
      if (is_half) __builtin_memcpy(out, &signs, 8);
      else Sum::store(out, signs);
    } else {
      Word odd[1];
      starts.template set<1>(arguments.odd + f * arguments.groups, odd);
      uint8_t* counters = arguments.counters + (f - begin) * (1 + BITS) * BYTES;
      Sum::store(counters, odd[0]);
      #pragma GCC unroll 16
      for (int i = 0; i < BITS; i++) Sum::store(counters + (1 + i) * BYTES, sum.count[i] ^ flip);
    }
  }
}

// The same, with as many counters as the layer needs.
template <int BYTES>
static void add_planes(
    const BitslicedArguments& arguments, int64_t at, int64_t begin, int64_t end) {
  if (arguments.unit != 1) {
    if (arguments.bits <= 11) return add_planes_with<BYTES, 11, 0>(arguments, at, begin, end);
    return add_planes_with<BYTES, 15, 0>(arguments, at, begin, end);
  }
  switch (arguments.bits) {
    case 6: return add_planes_with<BYTES, 6, 1>(arguments, at, begin, end);
    case 8: return add_planes_with<BYTES, 8, 1>(arguments, at, begin, end);
    case 9: return add_planes_with<BYTES, 9, 1>(arguments, at, begin, end);
    case 10: return add_planes_with<BYTES, 10, 1>(arguments, at, begin, end);
    case 11: return add_planes_with<BYTES, 11, 1>(arguments, at, begin, end);
    case 12: return add_planes_with<BYTES, 12, 1>(arguments, at, begin, end);
    case 13: return add_planes_with<BYTES, 13, 1>(arguments, at, begin, end);
    default: return add_planes_with<BYTES, 15, 1>(arguments, at, begin, end);
  }
}

// The kernel above for words of one width.
struct WordKernel {
  int64_t bytes;
  void (*run)(const BitslicedArguments&, int64_t at, int64_t begin, int64_t end);
};

// The widest first. Words of 16 bytes serve smaller planes too: there are more vector registers
// than others.
static constexpr WordKernel WORD_KERNELS[] = {
#if CPU_BYTES >= 64
    {64, add_planes<64>},
#endif
#if CPU_BYTES >= 32
    {32, add_planes<32>},
#endif
    {16, add_planes<16>},
};

// The kernel with the widest words that divide a tile of `tile` bytes.
static inline const WordKernel& widest_kernel(int64_t tile) {
  const WordKernel* kernel = std::begin(WORD_KERNELS);
  while (tile % kernel->bytes) kernel++;
  return *kernel;
}

// The kernel with the narrowest words that hold `bytes` bytes.
static inline const WordKernel& narrowest_kernel(int64_t bytes) {
  const WordKernel* kernel = std::end(WORD_KERNELS) - 1;
  while (kernel->bytes < bytes) kernel--;
  return *kernel;
}
