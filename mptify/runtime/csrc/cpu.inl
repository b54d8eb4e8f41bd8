// All kernels for one instruction set: included once for each, inside its namespace, with CPU_BYTES, the width of its vectors.

#include "bitsliced.inl"
#include "pixels.inl"
#include "popcount.inl"
#include "strips.inl"
#include "pools.inl"
#include "sums.inl"

static Cpu kernels(const char* name) {
  Cpu cpu = {name, run_pixels, run_popcount, expand, pool_short, numbers_of, compare_sums, sums_of_windows, {}};
#if CPU_BYTES >= 64
  cpu.widths.push_back({64, run_words<64>});
#endif
#if CPU_BYTES >= 32
  cpu.widths.push_back({32, run_words<32>});
#endif
  cpu.widths.push_back({16, run_words<16>});  // for fewer pixels too: there are more vector registers than others
  return cpu;
}
