// Machine code for layers on lanes, where the processor and the system allow it.
//
// A kept weight is one instruction: the sums of up to 30 filters stay in registers, a vector of
// the input is loaded once for all of them, and the code adds it where a filter has kept the tap.
// (Lists of taps, which lanes.inl adds, load a vector for each kept weight.) Code is made from
// these lists, so that programs stay data.
//
// Processors run code twice as fast while it is short enough for their cache of decoded
// instructions. So the code of a block of filters is cut into pieces, and each piece runs for all
// vectors of a tile before the next one does. Between pieces, sums are in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "step.h"
#include "x86_assembler.h"

#if defined(__x86_64__) && defined(__unix__)
#define MPTIFY_LANE_CODE
#include <sys/mman.h>
#endif

namespace {

// How many taps a filter has of each sign, among some channels.
struct TapCounts {
  uint16_t added, subtracted;
};
static constexpr int64_t UNIT = 8;  // offsets of taps count units of so many bytes

// The code of one layer.
struct LaneCode {
  // Of some filters: the sums of one vector of lanes. `sums` and `wide` are those of the first
  // filter; those of the next are one tile, or two tiles, behind.
  typedef void (*Function)(const uint8_t* input, void* sums, void* wide);

  struct Block {
    int64_t filter, count;
    int64_t at, bytes;            // in the code
    std::vector<int64_t> pieces;  // where they start in the code
    std::vector<Function> functions;

    // Reads the code, as data: processors read ahead much faster than they fetch instructions.
    void prefetch() const {
      const volatile uint8_t* code = (const volatile uint8_t*)(intptr_t)functions[0];
      for (int64_t at = 0; at < bytes; at += 64) (void)code[at];
    }
  };

  int vector_bytes;
  int64_t lane_bytes;
  int64_t tile;  // vectors of a tile
  bool is_wide;  // sums are in `wide`
  std::vector<Block> blocks;

  // Wide sums of bytes are two vectors, `all` and `upper`: the sums of pairs of bytes as 16 bits,
  // and those of the upper byte of each pair. Bytes start from 128, so both are without sign. Each
  // filter was added `flushes` times.
  std::vector<int32_t> flushes;
  static constexpr int MIDDLE = 128;

  int64_t largest() const {
    int64_t count = 0;
    for (const Block& block : blocks) count = std::max(count, block.count);
    return count;
  }
};

// Writes the code of one layer.
class LaneCompiler {
 public:
  LaneCompiler(
      const Step& step, uint8_t* const* addresses, int vector_bytes, std::vector<uint8_t>& code)
      : step_(step),
        lanes_(step.lanes),
        taps_((const uint16_t*)addresses[step.conv.index]),
        counts_((const TapCounts*)addresses[lanes_.counts]),
        starts_((const int32_t*)addresses[step.conv.starts]),
        tap_offsets_((const int64_t*)addresses[lanes_.tap_offsets]),
        vector_bytes_(vector_bytes),
        code_(code),
        assembler_(vector_bytes, code),
        groups_(step.conv.groups),
        filters_(step.filters / groups_),
        channels_(step.conv.shape.channels / groups_),
        parts_((channels_ + lanes_.group_channels - 1) / lanes_.group_channels),
        lists_((filters_ + lanes_.filter_block - 1) / lanes_.filter_block) {}

  // Null if there is a layer that it can't compute.
  std::unique_ptr<LaneCode> compile() {
    const int64_t reach = step_.conv.shape.channels * lanes_.in_channel;
    if (reach + *std::max_element(tap_offsets_, tap_offsets_ + lanes_.taps) > INT32_MAX)
      return nullptr;
    lane_bytes_ = choose_lanes();
    if (lane_bytes_ == 0) return nullptr;
    is_wide_ = lane_bytes_ < 4 && most_ > limit(lane_bytes_);
    largest_block_ = assembler_.registers() - (lane_bytes_ == 1 && is_wide_ ? 3 : 2);
    auto made = std::make_unique<LaneCode>();
    tile_ = choose_tile();
    made->vector_bytes = vector_bytes_, made->lane_bytes = lane_bytes_;
    made->tile = tile_, made->is_wide = is_wide_;
    for (int64_t first = 0; first < step_.filters; first += largest_block_) {
      code_.resize((code_.size() + 63) / 64 * 64);
      const int64_t count = std::min<int64_t>(largest_block_, step_.filters - first);
      const int64_t at = (int64_t)code_.size();
      compile_block(first, count);
      made->blocks.push_back({first, count, at, (int64_t)code_.size() - at, pieces_, {}});
      made->flushes.insert(made->flushes.end(), flushes_.begin(), flushes_.end());
    }
    return made;
  }

 private:
  const Step& step_;
  const LaneArguments& lanes_;
  const uint16_t* const taps_;
  const TapCounts* const counts_;
  const int32_t* const starts_;
  const int64_t* const tap_offsets_;
  const int vector_bytes_;
  std::vector<uint8_t>& code_;
  X86Assembler assembler_;
  int64_t largest_block_ = 0;
  const int64_t groups_, filters_, channels_, parts_, lists_;  // lists of a group
  int64_t lane_bytes_ = 0;
  int64_t tile_ = 0;
  int64_t most_ = 0;  // the largest magnitude that a sum of levels can have
  bool is_wide_ = false;
  struct Range {
    int64_t low, high;
  };
  std::vector<Range> ranges_;  // of the sums in registers

  // The largest magnitude that lanes hold on both sides of 0.
  static int64_t limit(int64_t bytes) { return ((int64_t)1 << (8 * bytes - 1)) - 1; }

  // The taps of a filter: call(plane, sign), where a plane is what one tap of one channel sees.
  template <class Call>
  void for_each_tap(int64_t filter, const Call& call) const {
    const int64_t group = filter / filters_, inside = filter % filters_;
    const int64_t units = lanes_.tile_bytes / UNIT;
    for (int64_t part = 0; part < parts_; part++) {
      const int64_t list = (group * lists_ + inside / lanes_.filter_block) * parts_ + part;
      const TapCounts* counts = counts_ + list * lanes_.filter_block;
      const uint16_t* tap = taps_ + starts_[list];
      for (int64_t f = 0; f < inside % lanes_.filter_block; f++)
        tap += counts[f].added + counts[f].subtracted;
      const TapCounts mine = counts[inside % lanes_.filter_block];
      const int64_t first = (group * channels_ + part * lanes_.group_channels) * lanes_.taps;
      for (int64_t i = 0; i < mine.added + mine.subtracted; i++)
        call(first + tap[i] / units, i < mine.added);
    }
  }

  // The width of lanes for which additions take the least time, or 0 if their sums could overflow.
  int64_t choose_lanes() {
    if (lanes_.in_type == 0) return 4;
    int64_t additions = 0;
    double flushes = 0;
    for (int64_t filter = 0; filter < step_.filters; filter++) {
      int64_t added = 0, all = 0;
      for_each_tap(filter, [&](int64_t, bool adds) { added += adds, all++; });
      const int64_t subtracted = all - added;
      const int64_t high = added * lanes_.highest - subtracted * lanes_.lowest;
      const int64_t low = subtracted * lanes_.highest - added * lanes_.lowest;
      most_ = std::max({most_, high, low});
      additions += all;
      flushes += 1 + (double)std::max(high, low) / (double)limit(1);
    }
    const int64_t largest = std::max(-lanes_.lowest, lanes_.highest);
    const bool fits_bytes = largest <= limit(1) && most_ <= limit(2);
    const double of_bytes = (double)additions + FLUSH * flushes;
    if (fits_bytes && of_bytes < 2.0 * (double)additions) return 1;
    return most_ <= limit(4) ? 2 : 0;
  }

  static constexpr int FLUSH = 7;  // instructions

  // Enough vectors for a piece of code to be worth fetching, and some tiles for threads to share.
  int64_t choose_tile() const {
    const int64_t lanes = vector_bytes_ / lane_bytes_;
    const int64_t vectors = (step_.conv.shape.out_height * lanes_.row + lanes - 1) / lanes;
    const int64_t tiles = std::max((vectors + LARGEST_TILE - 1) / LARGEST_TILE,
                                   std::min<int64_t>(2, vectors / 4));
    return tiles < 2 ? vectors : (vectors + tiles - 1) / tiles;
  }

  static constexpr int64_t LARGEST_TILE = 16;  // vectors; 30 filters' sums are in the L1 cache

  void compile_block(int64_t first, int64_t count) {
    const int64_t planes = step_.conv.shape.channels * lanes_.taps;
    std::vector<uint32_t> added((size_t)planes), subtracted((size_t)planes);
    int64_t instructions = 0;
    for (int64_t f = 0; f < count; f++)
      for_each_tap(first + f, [&](int64_t plane, bool adds) {
        instructions += 1 + !(added[(size_t)plane] | subtracted[(size_t)plane]);
        (adds ? added : subtracted)[(size_t)plane] |= 1u << f;
      });
    const int64_t pieces = tile_ > 1 ? (instructions + LARGEST_PIECE - 1) / LARGEST_PIECE : 1;
    const int64_t at_once = instructions / std::max<int64_t>(1, pieces) + count;
    ranges_.assign((size_t)count, {});
    flushes_.assign((size_t)count, 0);
    pieces_.clear();
    begin_piece();
    for (int f = 0; f < count; f++) start(f);
    int64_t taken = 0;
    for (int64_t plane = 0; plane < planes; plane++) {
      const uint32_t all = added[(size_t)plane] | subtracted[(size_t)plane];
      if (!all) continue;
      if (taken >= at_once) {
        for (int f = 0; f < count; f++) move_sum(x86::STORE, f);
        assembler_.end();
        begin_piece();
        for (int f = 0; f < count; f++) move_sum(x86::LOAD, f);
        taken = 0;
      }
      add_plane(plane, added[(size_t)plane], subtracted[(size_t)plane]);
      taken += 1 + __builtin_popcount(all);
    }
    for (int f = 0; f < count; f++) {
      if (is_wide_) flush(f);
      else move_sum(x86::STORE, f);
    }
    assembler_.end();
  }

  static constexpr int64_t LARGEST_PIECE = 3500;  // instructions

  void begin_piece() {
    pieces_.push_back((int64_t)code_.size());
    assembler_.begin();
    if (lane_bytes_ == 4) assembler_.ones(ones());
    if (lane_bytes_ == 1 && is_wide_) assembler_.middles(middles());
  }

  // From or to memory.
  void move_sum(const x86::Op& op, int f) {
    assembler_.on_memory(op, f, 0, X86Assembler::SECOND, (int32_t)(tile_ * f) * vector_bytes_);
  }

  int input() const { return (int)largest_block_; }
  int ones() const { return (int)largest_block_ + 1; }  // for float32
  int half() const { return (int)largest_block_ + 1; }  // for integers
  int middles() const { return (int)largest_block_ + 2; }
  std::vector<int64_t> pieces_;   // of the block
  std::vector<int32_t> flushes_;  // of each filter
  bool multiplies_ = false;

  // Sets a sum to nothing.
  void start(int f) {
    if (lane_bytes_ == 1 && is_wide_) assembler_.copy(f, middles());
    else assembler_.clear(f);
  }

  // Adds what one tap sees to the sums of all filters that kept it.
  void add_plane(int64_t plane, uint32_t added, uint32_t subtracted) {
    const int64_t channel = plane / lanes_.taps;
    const int32_t at = (int32_t)(channel * lanes_.in_channel + tap_offsets_[plane % lanes_.taps]);
    const uint32_t all = added | subtracted;
    const bool is_alone = (all & (all - 1)) == 0 && lane_bytes_ != 2;
    if (!is_alone) assembler_.on_memory(load(), input(), 0, X86Assembler::FIRST, at);
    for (int f = 0; all >> f; f++) {
      if (!(all >> f & 1)) continue;
      const bool adds = added >> f & 1;
      if (lane_bytes_ < 4) keep_in_range(f, adds);
      if (is_alone) {
        assembler_.on_memory(sum(adds), f, f, X86Assembler::FIRST, at);
      } else if (lane_bytes_ == 4 && (multiplies_ = !multiplies_)) {
        // Some processors have other units for multiply-add than for additions.
        assembler_.on_registers(
            adds ? x86::MULTIPLY_ADD : x86::MULTIPLY_SUBTRACT, f, input(), ones());
      } else {
        assembler_.on_registers(sum(adds), f, f, input());
      }
    }
  }

  X86Op load() const {
    if (lane_bytes_ != 2) return x86::LOAD;
    return lanes_.lowest < 0 ? x86::WIDEN_BYTES : x86::WIDEN_UNSIGNED_BYTES;
  }

  X86Op sum(bool adds) const {
    if (lane_bytes_ == 4) return adds ? x86::ADD_FLOATS : x86::SUBTRACT_FLOATS;
    if (lane_bytes_ == 2) return adds ? x86::ADD_WORDS : x86::SUBTRACT_WORDS;
    return adds ? x86::ADD_BYTES : x86::SUBTRACT_BYTES;
  }

  // Moves a sum to memory before it could overflow.
  void keep_in_range(int f, bool adds) {
    Range& range = ranges_[(size_t)f];
    const int64_t high = adds ? lanes_.highest : -lanes_.lowest;
    const int64_t low = adds ? lanes_.lowest : -lanes_.highest;
    if (is_wide_ && (range.high + high > limit(lane_bytes_) ||
                     range.low + low < -limit(lane_bytes_))) {
      flush(f);
      start(f);
      range = {};
    }
    range.low += low, range.high += high;
  }

  // Adds the sum of a filter to its sum of wider lanes.
  void flush(int f) {
    const bool is_first = flushes_[(size_t)f]++ == 0;
    for (int upper = 0; upper < 2; upper++) {
      const int32_t at = (int32_t)(2 * tile_ * f + upper) * vector_bytes_;
      int sum = half();
      if (lane_bytes_ == 1) {
        if (upper) assembler_.upper_bytes(sum, f);
        else sum = f;
      } else {
        if (upper) assembler_.upper_half(half(), f);
        assembler_.on_registers(x86::WIDEN_WORDS, half(), 0, upper ? half() : f);
      }
      const x86::Op add = lane_bytes_ == 1 ? x86::ADD_WORDS : x86::ADD_INTS;
      if (!is_first) assembler_.on_memory(add, half(), sum, X86Assembler::THIRD, at);
      assembler_.on_memory(x86::STORE, is_first ? sum : half(), 0, X86Assembler::THIRD, at);
    }
  }
};

// The code of all layers on lanes of a program, in memory that can be executed.
class ProgramCode {
 public:
  // Whether there is code for vectors of so many bytes.
  static bool is_possible(int vector_bytes) {
#ifdef MPTIFY_LANE_CODE
    return vector_bytes >= 32;
#else
    return (void)vector_bytes, false;
#endif
  }

  // Makes the code and sets `lanes.code` of the steps; null if the system does not allow it.
  static ProgramCode* compile(
      Step* steps, int64_t count, uint8_t* const* addresses, int kernel, int vector_bytes) {
#ifdef MPTIFY_LANE_CODE
    if (!is_possible(vector_bytes)) return nullptr;
    auto program = std::unique_ptr<ProgramCode>(new ProgramCode);
    std::vector<uint8_t> code;
    for (Step* step = steps; step < steps + count; step++) {
      step->lanes.code = 0;
      if (step->kernel != kernel) continue;
      const size_t before = code.size();
      auto layer = LaneCompiler(*step, addresses, vector_bytes, code).compile();
      if (!layer) code.resize(before);
      else program->layers_.push_back({step, std::move(layer)});
    }
    if (code.empty() || !program->load(code)) return nullptr;
    for (auto& [step, layer] : program->layers_) {
      for (LaneCode::Block& block : layer->blocks)
        for (const int64_t at : block.pieces)
          block.functions.push_back((LaneCode::Function)(program->memory_ + at));
      step->lanes.code = (int64_t)(intptr_t)layer.get();
    }
    return program.release();
#else
    (void)steps, (void)count, (void)addresses, (void)kernel, (void)vector_bytes;
    return nullptr;
#endif
  }

  ~ProgramCode() {
#ifdef MPTIFY_LANE_CODE
    if (memory_) munmap(memory_, size_);
#endif
  }

 private:
  std::vector<std::pair<Step*, std::unique_ptr<LaneCode>>> layers_;
  uint8_t* memory_ = nullptr;
  size_t size_ = 0;

  ProgramCode() = default;

#ifdef MPTIFY_LANE_CODE
  // Memory is never writable and executable at once.
  bool load(const std::vector<uint8_t>& code) {
    size_ = (code.size() + PAGES - 1) / PAGES * PAGES;
    void* memory =
        mmap(nullptr, size_ + PAGES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    memory_ = (uint8_t*)(((uintptr_t)memory + PAGES - 1) / PAGES * PAGES);
    munmap(memory, (size_t)(memory_ - (uint8_t*)memory));
#ifdef MADV_HUGEPAGE
    madvise(memory_, size_, MADV_HUGEPAGE);  // long code needs many entries of the page tables
#endif
    std::memcpy(memory_, code.data(), code.size());
    return mprotect(memory_, size_, PROT_READ | PROT_EXEC) == 0;
  }

  static constexpr size_t PAGES = 1 << 21;
#endif
};

}  // namespace
