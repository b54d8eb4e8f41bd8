// Two bit-sliced layers, and the signs of what their outputs add up to. `table` [filters][span] has
// the threshold of the first layer's sum for each sum of the second, from -(span / 2) on.

// Signs of `bytes` * 8 pixels. `limit` is the largest sum of the second layer; behind the image
// sums may be anything. `least` is workspace.
static void compare_sums(
    const int16_t* first, const int16_t* second, const int16_t* table, int16_t limit,
    int64_t bytes, int16_t* least, uint8_t* out) {
  const int64_t pixels = 8 * bytes;
  for (int64_t i = 0; i < pixels; i++)
    least[i] = std::max<int16_t>((int16_t)-limit, std::min(limit, second[i]));
  for (int64_t i = 0; i < pixels; i++) least[i] = table[least[i]];
#if CPU_BYTES >= 32
  for (int64_t at = 0; at < bytes; at += 4) {
    const auto is_below = [&](int64_t i) __attribute__((always_inline)) {
      const __m256i threshold = _mm256_loadu_si256((const __m256i*)(least + i));
      return _mm256_cmpgt_epi16(threshold, _mm256_loadu_si256((const __m256i*)(first + i)));
    };
    const __m256i bytes_of_both = _mm256_packs_epi16(is_below(8 * at), is_below(8 * at + 16));
    const __m256i in_order = _mm256_permute4x64_epi64(bytes_of_both, 0xd8);
    const uint32_t reached = ~(uint32_t)_mm256_movemask_epi8(in_order);
    __builtin_memcpy(out + at, &reached, 4);
  }
#else
  for (int64_t at = 0; at < bytes; at++) {
    unsigned reached = 0;
    for (int k = 0; k < 8; k++)
      reached |= (unsigned)(first[8 * at + k] >= least[8 * at + k]) << k;
    out[at] = (uint8_t)reached;
  }
#endif
}

static void run_residual_add(const Step& step, const Buffers& buffers, ThreadPool& pool) {
  const BitslicedLayer first(step.conv, step.filters, buffers, step.input);
  const BitslicedLayer second(step.second_conv, step.filters, buffers, step.second_input);
  const int16_t* table = buffers.at<int16_t>(step.table) + step.span / 2;
  uint8_t* out = buffers.at<uint8_t>(step.output);
  const int64_t tile = std::gcd(step.conv.tile, step.second_conv.tile);
  share_pieces(step.conv.shape, tile, step.filters, pool, [&](Pieces& pieces) {
    TilePlanes first_planes(first), second_planes(second);
    const int64_t span = step.span, stride = step.conv.stride;
    while (pieces.next()) {
      PieceSums sums(first_planes.arguments_for(pieces), pieces);
      PieceSums second_sums(second_planes.arguments_for(pieces), pieces);
      const int64_t bytes = std::min(pieces.kernel->bytes, stride);
      int16_t workspace[8 * MAX_WORD];
      for (int64_t f = pieces.begin; f < pieces.end; f++)
        compare_sums(
            sums.of(f), second_sums.of(f), table + f * span, (int16_t)(span / 2), bytes, workspace,
            out + f * stride + pieces.at);
    }
  });
}
