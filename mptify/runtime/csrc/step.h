// What Python tells the library: the structures that both share, described for Python by `layout`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

namespace {

// A convolution on images of one size. `in_bytes` and `out_bytes` are the bytes of a plane's row,
// `phases` the number of first rows that taps have (see expand.inl).
#define CONV_SHAPE(NUMBER)                                                                \
  NUMBER(channels) NUMBER(height) NUMBER(width) NUMBER(in_bytes)                          \
  NUMBER(out_height) NUMBER(out_width) NUMBER(out_bytes)                                  \
  NUMBER(kernel_h) NUMBER(kernel_w) NUMBER(stride_h) NUMBER(stride_w)                     \
  NUMBER(pad_h) NUMBER(pad_w) NUMBER(dilation_h) NUMBER(dilation_w) NUMBER(phases)

// The arguments of a layer. A buffer is given by its number, -1 for none.
#define CONV_ARGUMENTS(STRUCT, BUFFER, NUMBER)                                            \
  STRUCT(ConvShape, shape)                                                                \
  /* Survivors: what each filter adds, and where its lists start. */                      \
  BUFFER(index) BUFFER(starts) BUFFER(flipped)                                            \
  /* Bit-sliced layers: see BitslicedArguments. */                                        \
  BUFFER(init) BUFFER(odd) BUFFER(unions) BUFFER(present)                                 \
  /* Expanded planes: see Expansion. */                                                   \
  BUFFER(masks) BUFFER(phases)                                                            \
  /* Layers that count bits: see PopcountArguments. */                                    \
  BUFFER(weights) BUFFER(kept) BUFFER(base) BUFFER(pixel_classes)                         \
  BUFFER(workspace)                                                                       \
  NUMBER(unit) NUMBER(stride) NUMBER(in_stride) NUMBER(union_stride)                      \
  NUMBER(class_groups) NUMBER(class_count) NUMBER(sets) NUMBER(bits)                      \
  NUMBER(tile) NUMBER(plane)                                                              \
  NUMBER(groups) /* of the convolution */

// The arguments of a layer on lanes, and of what arranges its input: see lanes_conv.inl and
// lanes_arrange.inl. Origins, rows and channels are counted in elements; `in_channel` and the
// offsets of taps in bytes.
#define LANE_ARGUMENTS(BUFFER, NUMBER)                                                    \
  NUMBER(bytes) /* of a lane */                                                           \
  NUMBER(tile_bytes) /* of the lanes of a tile */                                         \
  NUMBER(row) NUMBER(rows) /* of the lanes of a plane */                                  \
  NUMBER(column_phases) NUMBER(phase) NUMBER(tail)                                        \
  NUMBER(taps) NUMBER(group_channels) NUMBER(filter_block)                                \
  NUMBER(most) /* taps until a byte is full, or 0 */                                      \
  NUMBER(in_type) NUMBER(in_origin) NUMBER(in_channel) NUMBER(in_margin)                  \
  NUMBER(out_type) NUMBER(out_origin) NUMBER(out_channel) NUMBER(out_row)                 \
  NUMBER(out_column) NUMBER(out_margin) NUMBER(flat)                                      \
  NUMBER(other_type) NUMBER(other_origin) NUMBER(other_channel) NUMBER(other_row)         \
  NUMBER(other_column)                                                                    \
  NUMBER(lowest) NUMBER(highest) /* levels of the input */                                \
  NUMBER(fused) /* whether norms round once */                                            \
  NUMBER(clips) /* whether the output is clipped to a range */                            \
  NUMBER(code) /* the address of the layer's LaneCode, or 0 */                            \
  BUFFER(tap_offsets) BUFFER(counts) BUFFER(phase_ends)                                   \
  BUFFER(levels) BUFFER(factors) BUFFER(alpha) BUFFER(beta)                               \
  BUFFER(last_alpha) BUFFER(last_beta)

// One step of a program.
#define STEP(STRUCT, BUFFER, NUMBER, STRIDES)                                             \
  NUMBER(kernel) NUMBER(filters)                                                          \
  /* The second input is a shortcut, or what the second layer reads. */                   \
  BUFFER(input) BUFFER(second_input) BUFFER(output)                                       \
  STRUCT(ConvArguments, conv) STRUCT(ConvArguments, second_conv)                          \
  STRUCT(LaneArguments, lanes)                                                            \
  BUFFER(table) BUFFER(thresholds) BUFFER(falling) BUFFER(gain) BUFFER(bias)              \
  NUMBER(span) NUMBER(length)                                                             \
  /* Of numbers: from a channel, row and column to the next, in elements. */              \
  STRIDES(strides)

#define STRUCT_MEMBER(type, name) type name;
#define NUMBER_MEMBER(name) int64_t name;
#define STRIDES_MEMBER(name) int64_t name[3];
struct ConvShape {
  CONV_SHAPE(NUMBER_MEMBER)
};
struct ConvArguments {
  CONV_ARGUMENTS(STRUCT_MEMBER, NUMBER_MEMBER, NUMBER_MEMBER)
};
struct LaneArguments {
  LANE_ARGUMENTS(NUMBER_MEMBER, NUMBER_MEMBER)
};
struct Step {
  STEP(STRUCT_MEMBER, NUMBER_MEMBER, NUMBER_MEMBER, STRIDES_MEMBER)
};
#undef STRUCT_MEMBER
#undef NUMBER_MEMBER
#undef STRIDES_MEMBER

// Lines of `struct NAME SIZE`, each followed by one line for each field: `KIND NAME OFFSET`.
inline const std::string& layout() {
  static const std::string text = [] {
    std::string lines;
    const auto line = [&](const char* kind, const char* name, size_t number) {
      lines += std::string(kind) + " " + name + " " + std::to_string(number) + "\n";
    };
#define STRUCT_LINE(type, name) line(#type, #name, offsetof(Struct, name));
#define BUFFER_LINE(name) line("buffer", #name, offsetof(Struct, name));
#define NUMBER_LINE(name) line("number", #name, offsetof(Struct, name));
#define STRIDES_LINE(name) line("strides", #name, offsetof(Struct, name));
    {
      using Struct = ConvShape;
      line("struct", "ConvShape", sizeof(Struct));
      CONV_SHAPE(NUMBER_LINE)
    }
    {
      using Struct = ConvArguments;
      line("struct", "ConvArguments", sizeof(Struct));
      CONV_ARGUMENTS(STRUCT_LINE, BUFFER_LINE, NUMBER_LINE)
    }
    {
      using Struct = LaneArguments;
      line("struct", "LaneArguments", sizeof(Struct));
      LANE_ARGUMENTS(BUFFER_LINE, NUMBER_LINE)
    }
    {
      using Struct = Step;
      line("struct", "Step", sizeof(Struct));
      STEP(STRUCT_LINE, BUFFER_LINE, NUMBER_LINE, STRIDES_LINE)
    }
#undef STRUCT_LINE
#undef BUFFER_LINE
#undef NUMBER_LINE
#undef STRIDES_LINE
    return lines;
  }();
  return text;
}

// The buffers of a program, for one image.
struct Buffers {
  uint8_t* const* addresses;
  const int64_t* strides;
  int64_t image;

  template <class Type>
  Type* at(int64_t buffer) const {
    return buffer < 0 ? nullptr : (Type*)(addresses[buffer] + image * strides[buffer]);
  }
};

// Memory of one thread, aligned to the widest vectors.
template <class Number>
class AlignedBuffer {
 public:
  explicit AlignedBuffer(int64_t count)
      : memory_((Number*)::operator new((size_t)count * sizeof(Number), std::align_val_t(64))) {}
  AlignedBuffer(const AlignedBuffer&) = delete;
  ~AlignedBuffer() { ::operator delete(memory_, std::align_val_t(64)); }

  Number* data() const { return memory_; }

 private:
  Number* const memory_;
};

// From a layer's sums to its output. Rounds twice, as torch does.
struct Scale {
  const float gain;
  const float* const bias;  // [filters], or null

  Scale(const Step& step, const Buffers& buffers)
      : gain(step.gain < 0 ? 1 : *buffers.at<float>(step.gain)),
        bias(buffers.at<float>(step.bias)) {}

  float of(float sum, int64_t f) const { return sum * gain + (bias ? bias[f] : 0); }

  template <class Sum>
  void write(const Sum* sums, int64_t f, int64_t count, float* out) const {
    for (int64_t i = 0; i < count; i++) out[i] = of((float)sums[i], f);
  }
};

}  // namespace
