// Concatenation of channels: copies one input to where it belongs in the output.

static void run_concat(const Step& step, const Buffers& buffers, ThreadPool&) {
  uint8_t* out = buffers.at<uint8_t>(step.output) + step.span;
  std::memcpy(out, buffers.at<uint8_t>(step.input), (size_t)step.length);
}
