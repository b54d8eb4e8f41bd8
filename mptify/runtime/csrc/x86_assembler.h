// Machine code for x86-64: the few vector instructions that layers on lanes consist of.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// An instruction on vectors: the map of its opcode (0F, 0F38 or 0F3A), its mandatory prefix and its
// opcode. A memory operand has the bytes of a vector, or a half of them.
struct X86Op {
  enum Map : uint8_t { OF = 1, OF38 = 2, OF3A = 3 } map;
  enum Prefix : uint8_t { NONE = 0, X66 = 1 } prefix;
  uint8_t code;
  bool reads_half = false;
  bool wide = false;  // the bit W of EVEX
};

namespace x86 {
typedef X86Op Op;
constexpr Op ADD_FLOATS{Op::OF, Op::NONE, 0x58};
constexpr Op SUBTRACT_FLOATS{Op::OF, Op::NONE, 0x5C};
constexpr Op MULTIPLY_ADD{Op::OF38, Op::X66, 0xB8};
constexpr Op MULTIPLY_SUBTRACT{Op::OF38, Op::X66, 0xBC};
constexpr Op ADD_BYTES{Op::OF, Op::X66, 0xFC};
constexpr Op SUBTRACT_BYTES{Op::OF, Op::X66, 0xF8};
constexpr Op ADD_WORDS{Op::OF, Op::X66, 0xFD};
constexpr Op SUBTRACT_WORDS{Op::OF, Op::X66, 0xF9};
constexpr Op ADD_INTS{Op::OF, Op::X66, 0xFE};
constexpr Op EXCLUSIVE_OR{Op::OF, Op::X66, 0xEF};
constexpr Op LOAD{Op::OF, Op::NONE, 0x10};
constexpr Op STORE{Op::OF, Op::NONE, 0x11};
constexpr Op WIDEN_UNSIGNED_BYTES{Op::OF38, Op::X66, 0x30, true};
constexpr Op WIDEN_BYTES{Op::OF38, Op::X66, 0x20, true};
constexpr Op WIDEN_WORDS{Op::OF38, Op::X66, 0x23, true};
}  // namespace x86

// Appends instructions on vectors of 32 bytes (AVX2: ymm0 to ymm15) or of 64 (AVX-512: zmm0 to
// zmm31) to a buffer. Intel's manual, volume 2, chapter 2, describes the encodings.
class X86Assembler {
 public:
  // Where memory is: the first three arguments of a function.
  enum Base { FIRST = 7 /* rdi */, SECOND = 6 /* rsi */, THIRD = 2 /* rdx */ };

  X86Assembler(int vector_bytes, std::vector<uint8_t>& code)
      : is_512_(vector_bytes == 64), code_(code) {}

  int registers() const { return is_512_ ? 32 : 16; }

  // target = op(first, second), on registers. Operations of one input have no `first`.
  void on_registers(const X86Op& op, int target, int first, int second) {
    start(op, target, first, second);
    byte(0xC0 | (target & 7) << 3 | (second & 7));
  }

  // target = op(first, memory), or memory = target for STORE.
  void on_memory(const X86Op& op, int target, int first, Base base, int32_t at) {
    const int unit = is_512_ ? (op.reads_half ? 32 : 64) : 1;  // EVEX counts one byte in these
    start(op, target, first, 0);
    if (at % unit == 0 && at / unit >= -128 && at / unit < 128) {
      byte(0x40 | (target & 7) << 3 | base);
      byte(at / unit);
    } else {
      byte(0x80 | (target & 7) << 3 | base);
      number(at);
    }
  }

  void clear(int target) { on_registers(x86::EXCLUSIVE_OR, target, target, target); }

  // The upper half of a vector, as the lower half of another.
  void upper_half(int target, int source) {
    const X86Op op{X86Op::OF3A, X86Op::X66, (uint8_t)(is_512_ ? 0x3B : 0x39), true, is_512_};
    start(op, source, 0, target);
    byte(0xC0 | (source & 7) << 3 | (target & 7));
    byte(1);
  }

  void copy(int target, int source) {
    const X86Op op{X86Op::OF, X86Op::X66, 0x6F, false, is_512_};
    on_registers(op, target, 0, source);
  }

  // 1.0 in all lanes: all bits set, shifted.
  void ones(int target) {
    all_bits(target);
    shift(0x72, 2, target, target, 25);
    shift(0x72, 6, target, target, 23);
  }

  // 128 in all bytes.
  void middles(int target) {
    all_bits(target);
    on_registers({X86Op::OF38, X86Op::X66, 0x1C}, target, 0, target);  // 1, the absolute value
    shift(0x71, 6, target, target, 7);
  }

  // The upper byte of each 16 bits.
  void upper_bytes(int target, int source) { shift(0x71, 2, target, source, 8); }

  void all_bits(int target) {
    if (is_512_) {  // vpternlogd
      start({X86Op::OF3A, X86Op::X66, 0x25}, target, target, target);
      byte(0xC0 | (target & 7) << 3 | (target & 7));
      byte(0xFF);
    } else {  // vpcmpeqd
      on_registers({X86Op::OF, X86Op::X66, 0x76}, target, target, target);
    }
  }

  // The start of a function; what jumps to it may be checked.
  void begin() {
    for (const int one : {0xF3, 0x0F, 0x1E, 0xFA}) byte(one);  // endbr64
  }

  void end() {
    for (const int one : {0xC5, 0xF8, 0x77, 0xC3}) byte(one);  // vzeroupper, ret
  }

 private:
  const bool is_512_;
  std::vector<uint8_t>& code_;

  void byte(int value) { code_.push_back((uint8_t)value); }

  void number(int32_t value) {
    uint8_t bytes[4];
    std::memcpy(bytes, &value, 4);
    code_.insert(code_.end(), bytes, bytes + 4);
  }

  // Shifts lanes of 16 bits (code 0x71) or 32 (0x72), right (direction 2) or left (6).
  void shift(uint8_t code, int direction, int target, int source, int bits) {
    start({X86Op::OF, X86Op::X66, code}, 0, target, source);
    byte(0xC0 | direction << 3 | (source & 7));
    byte(bits);
  }

  // The prefixes and the opcode: `reg`, `vvvv` and `rm` are the manual's names of the operands.
  void start(const X86Op& op, int reg, int vvvv, int rm) {
    if (is_512_) {
      byte(0x62);
      byte((~reg >> 3 & 1) << 7 | (~rm >> 4 & 1) << 6 | (~rm >> 3 & 1) << 5 |
           (~reg >> 4 & 1) << 4 | op.map);
      byte(op.wide << 7 | (~vvvv & 15) << 3 | 4 | op.prefix);
      byte(0x40 | (~vvvv >> 4 & 1) << 3);
    } else if (op.map == X86Op::OF && rm < 8) {
      byte(0xC5);
      byte((~reg >> 3 & 1) << 7 | (~vvvv & 15) << 3 | 4 | op.prefix);
    } else {
      byte(0xC4);
      byte((~reg >> 3 & 1) << 7 | 1 << 6 | (~rm >> 3 & 1) << 5 | op.map);
      byte(op.wide << 7 | (~vvvv & 15) << 3 | 4 | op.prefix);
    }
    byte(op.code);
  }
};

}  // namespace
