// The passes of quantizers and their estimators over [begin, end) of an array; part of ticket.cpp.

FOR_EACH_CPU void signs(const float* x, float* out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) out[i] = x[i] < 0 ? -1.0f : 1.0f;
}

FOR_EACH_CPU void sign_gradient(
    const float* grad, const float* x, float* out, int64_t begin, int64_t end, float width) {
  const float height = 2 / width, fall = height / width;
  for (int64_t i = begin; i < end; i++) {
    const float slope = height - fall * float_of(magnitude(x[i]));
    out[i] = slope > 0 ? grad[i] * slope : 0.0f;
  }
}

template <int kBits>
FOR_EACH_CPU bool pack_levels(
    const float* x, uint8_t* packed, int64_t begin, int64_t end, const Levels& levels) {
  uint8_t codes[kCodes] = {};
  const float inverse = 1 / levels.step;
  for (int64_t start = begin; start < end; start += kCodes) {
    const int count = (int)std::min(kCodes, end - start);
    if (!codes_of(x + start, count, levels, inverse, codes)) return false;
    pack_codes<kBits>(codes, packed + start * kBits / 8);
  }
  return true;
}

template <int kBits>
FOR_EACH_CPU void unpack_levels(
    const uint8_t* packed, float* out, int64_t begin, int64_t end, const Levels& levels) {
  uint8_t codes[kCodes];
  for (int64_t start = begin; start < end; start += kCodes) {
    unpack_codes<kBits>(packed + start * kBits / 8, codes);
    levels_of(codes, (int)std::min(kCodes, end - start), levels, out + start);
  }
}

// The levels of x * inverse, times `step`, and where it was not clipped. A NaN stays one, as in torch.
FOR_EACH_CPU void round_levels(
    const float* x, float* out, uint8_t* inside, int64_t begin, int64_t end, float inverse,
    float lowest, float highest, float step) {
  uint8_t codes[kCodes] = {};
  for (int64_t start = begin; start < end; start += kCodes) {
    const int count = (int)std::min(kCodes, end - start);
    for (int i = 0; i < count; i++) {
      const float scaled = x[start + i] * inverse;
      const float raised = scaled < lowest ? lowest : scaled;
      const float clipped = raised > highest ? highest : raised;
      codes[i] = clipped == scaled;
      const float rounded = (clipped + 12582912.0f) - 12582912.0f;
      out[start + i] = float_of(bits_of(rounded) | (bits_of(clipped) & kSign)) * step;
    }
    pack_codes<1>(codes, inside + start / 8);
  }
}

FOR_EACH_CPU void round_gradient(
    const float* grad, const uint8_t* inside, float* out, int64_t begin, int64_t end,
    float inverse, float step) {
  uint8_t codes[kCodes];
  for (int64_t start = begin; start < end; start += kCodes) {
    const int count = (int)std::min(kCodes, end - start);
    unpack_codes<1>(inside + start / 8, codes);
    for (int i = 0; i < count; i++)
      out[start + i] = grad[start + i] * step * (float)codes[i] * inverse;
  }
}
