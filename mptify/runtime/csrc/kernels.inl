// All kernels for one instruction set: included once for each, inside its namespace, with
// CPU_BYTES, the width of its vector registers. A new kernel is one file and its two lines here.

#include "four_words.inl"
#include "bit_counters.inl"
#include "expand.inl"
#include "popcount.inl"

#include "bitsliced_conv.inl"
#include "concat.inl"
#include "flatten.inl"
#include "input_conv.inl"
#include "lanes.inl"
#include "lanes_arrange.inl"
#include "lanes_conv.inl"
#include "masked_linear.inl"
#include "max_pool.inl"
#include "number_average.inl"
#include "number_max_pool.inl"
#include "pack.inl"
#include "pooled_linear.inl"
#include "popcount_conv.inl"
#include "popcount_linear.inl"
#include "residual_add.inl"
#include "unpack.inl"

// Python finds kernels by these names. The table is constant: code that ran when the library is
// loaded would be compiled for an instruction set that the machine may not have.
#define KERNEL(name) {#name, run_##name}
static constexpr KernelEntry KERNELS[] = {
    KERNEL(bitsliced_conv),
    KERNEL(concat),
    KERNEL(flatten),
    KERNEL(input_conv),
    KERNEL(lanes_arrange),
    KERNEL(lanes_conv),
    KERNEL(masked_linear),
    KERNEL(max_pool),
    KERNEL(number_average),
    KERNEL(number_max_pool),
    KERNEL(pack),
    KERNEL(pooled_linear),
    KERNEL(popcount_conv),
    KERNEL(popcount_linear),
    KERNEL(residual_add),
    KERNEL(unpack),
};
#undef KERNEL
