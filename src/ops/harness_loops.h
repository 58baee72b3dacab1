// The two loops that measure the machine, in the best instruction set of the processor. Private to the
// harness.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

// Multiply-adds from registers alone; returns how many it did (float32 elements).
int64_t fma_loop(int64_t iterations);
// Reads `bytes` (a multiple of 256) once.
void read_loop(const std::byte* data, int64_t bytes);

}  // namespace tessera
