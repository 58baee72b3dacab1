// ActivationObserver: the magnitudes that a forward pass on the CPU shows to each quantised linear and to the
// KV cache. Calibration (`tessera quantize`) turns them into static scales.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

// A histogram of |x| in 8 bins an octave (exact for the largest value). Zeros count for nothing.
class Magnitudes {
  public:
    void add(const float* x, int64_t count);

    uint64_t count() const { return count_; }
    float largest() const { return largest_; }
    // False as soon as an infinity or a NaN was seen.
    bool finite() const { return finite_; }
    // The least magnitude, up to its bin's end, that `share` of all values do not exceed; largest() with
    // share = 1. REQUIRES: share in (0, 1]
    float quantile(double share) const;

  private:
    static constexpr int kShift = 20;  // of a float32's bits: the exponent and 3 bits of the mantissa stay
    std::array<uint64_t, size_t{1} << (31 - kShift)> bins_{};
    uint64_t count_ = 0;
    float largest_ = 0;
    bool finite_ = true;
};

struct LayerMagnitudes {
    Magnitudes attention_input;  // of q, k and v
    Magnitudes key, value;       // as the KV cache stores them: K after its norm and RoPE
    Magnitudes output_input;     // of o
    // Of gate and up of every expert: each token goes to the shared expert and to some routed ones.
    Magnitudes mlp_input;
    Magnitudes expert_down_input;  // of down, over all routed experts; empty in a dense layer
    Magnitudes shared_down_input;  // of down of the shared expert or of the dense layer
};

// Filled by one model at a time (ModelOptions::observer).
struct ActivationObserver {
    std::vector<LayerMagnitudes> layers;  // the trunk's, then the MTP layer's
};

}  // namespace tessera
