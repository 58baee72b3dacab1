#include <cmath>

#include "ops/rms_norm/rms_norm.h"

namespace tessera {

void rms_norm_ref(const RmsNormArgs& args) {
    for (int64_t r = 0; r < args.rows; ++r) {
        const float* x = args.x + r * args.x_stride;
        float chains[16] = {};
        for (int64_t k = 0; k < args.width; ++k) {
            chains[k % 16] = std::fma(x[k], x[k], chains[k % 16]);
        }
        for (int half = 8; half >= 1; half /= 2) {
            for (int i = 0; i < half; ++i) {
                chains[i] += chains[i + half];
            }
        }
        const float scale = 1.0f / std::sqrt(chains[0] / static_cast<float>(args.width) + args.eps);
        float* y = args.y + r * args.y_stride;
        for (int64_t k = 0; k < args.width; ++k) {
            y[k] = x[k] * scale * args.weight[k];
        }
    }
}

}  // namespace tessera
