#include <vector>

#include "ops/common/gemm.h"
#include "ops/linear/linear.h"

namespace tessera {

void linear_ref(const LinearArgs& args) {
    std::vector<float> out(static_cast<size_t>(kBlockOutputs));
    for (int64_t r = 0; r < args.rows; ++r) {
        const int64_t x_row = args.x_rows == nullptr ? r : args.x_rows[r];
        const float* x = args.x + x_row * args.x_stride;
        for (int64_t block = 0; block < args.weight->blocks(); ++block) {
            gemm_block_ref({&x, 1, args.weight, block, out.data()});
            for (int64_t c = 0; c < kBlockOutputs && block * kBlockOutputs + c < args.outputs; ++c) {
                float& y = args.y[r * args.y_stride + block * kBlockOutputs + c];
                y = args.accumulate ? y + out[static_cast<size_t>(c)] : out[static_cast<size_t>(c)];
            }
        }
    }
}

}  // namespace tessera
