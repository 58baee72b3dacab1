#include <cstring>
#include <numeric>

#include "ops/qkv_post/cuda/qkv_post_cuda.h"
#include "ops/qkv_post/qkv_post.h"

namespace tessera {

std::vector<float> rope_table(int64_t positions, int64_t head_dim, double theta) {
    const int64_t half = head_dim / 2;
    const size_t count = static_cast<size_t>(positions * half);
    std::vector<int32_t> all(static_cast<size_t>(positions));
    std::iota(all.begin(), all.end(), 0);
    std::vector<float> cos(count);
    std::vector<float> sin(count);
    ThreadPool threads(1);
    OpContext context{threads};
    rope_angles(context, {.positions = all.data(),
                          .tokens = positions,
                          .head_dim = head_dim,
                          .theta = theta,
                          .cos = cos.data(),
                          .sin = sin.data()});
    std::vector<float> table(2 * count);
    for (int64_t p = 0; p < positions; ++p) {
        const size_t bytes = static_cast<size_t>(half) * sizeof(float);
        std::memcpy(table.data() + p * head_dim, cos.data() + p * half, bytes);
        std::memcpy(table.data() + p * head_dim + half, sin.data() + p * half, bytes);
    }
    return table;
}

}  // namespace tessera
