// Four words of 64 bits, as one vector.

typedef uint64_t Four __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) Four load_four(const uint8_t* from) {
  Four words;
  __builtin_memcpy(&words, from, 32);
  return words;
}

static inline __attribute__((always_inline)) void store_four(uint8_t* to, Four words) {
  __builtin_memcpy(to, &words, 32);
}
