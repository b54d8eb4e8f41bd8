// Runs programs that tapes.py wrote, with each buffer in memory of its own and just as large as it
// must be. So a sanitizer sees every access outside, and other processors can run programs that
// this one has built.

#include <cstdio>
#include <memory>

#include "../../mptify/runtime/csrc/packed.cpp"

static int64_t number() {
  int64_t value = 0;
  if (std::fread(&value, 8, 1, stdin) != 1) std::exit(3);
  return value;
}

static std::vector<std::unique_ptr<uint8_t[]>> memory;

static uint8_t* buffer(int64_t size) {
  memory.emplace_back(new uint8_t[(size_t)std::max<int64_t>(size, 1)]);
  return memory.back().get();
}

static uint8_t* bytes(int64_t size) {
  uint8_t* to = buffer(size);
  if (size && std::fread(to, 1, (size_t)size, stdin) != (size_t)size) std::exit(3);
  return to;
}

int main() {
  for (int64_t tape = number(); tape > 0; tape--) {
    const int64_t cpu = number(), threads = number(), images = number(), count = number();
    if (cpu >= mptify_packed_cpus()) return 4;
    const Step* steps = (const Step*)bytes(count * (int64_t)sizeof(Step));
    std::vector<uint8_t*> buffers;
    std::vector<int64_t> strides, sizes;
    std::vector<size_t> outputs;
    for (int64_t left = number(); left > 0; left--) {
      const int64_t what = number(), size = number();  // 0: given, 1: workspace, 2: printed
      strides.push_back(number());
      sizes.push_back(size);
      if (what == 2) outputs.push_back(buffers.size());
      buffers.push_back(what ? buffer(size) : bytes(size));
    }
    mptify_packed_run(
        steps, count, buffers.data(), strides.data(), images, (int)cpu, (int)threads);
    for (const size_t output : outputs) std::fwrite(buffers[output], 1, (size_t)sizes[output], stdout);
    memory.clear();
  }
}
