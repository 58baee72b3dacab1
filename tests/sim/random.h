// The simulator's randomness: one 64-bit seed makes a whole history, on every machine the same.
#pragma once

#include <cstdint>

namespace tessera::sim {

constexpr uint64_t mix(uint64_t value) {
    value += 0x9E3779B97F4A7C15U;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    return value ^ (value >> 31);
}

constexpr uint64_t mix(uint64_t a, uint64_t b) {
    return mix(mix(a) ^ b);
}

class Random {
  public:
    explicit Random(uint64_t seed) : state_(mix(seed)) {}

    uint64_t next() { return mix(state_++); }
    // Uniform in [low, high].
    int32_t between(int32_t low, int32_t high) {
        return low + static_cast<int32_t>(next() % static_cast<uint64_t>(high - low + 1));
    }
    bool one_in(int32_t n) { return between(1, n) == 1; }

  private:
    uint64_t state_;
};

}  // namespace tessera::sim
