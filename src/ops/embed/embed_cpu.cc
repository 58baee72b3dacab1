#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "ops/common/half.h"
#include "ops/embed/embed.h"

namespace tessera {
namespace {

void widen_row(const EmbedArgs& args, int64_t row, float* y) {
    const int64_t first = static_cast<int64_t>(args.tokens[row]) * args.width;
    if (args.dtype == DType::kFloat32) {
        std::memcpy(y, static_cast<const float*>(args.table) + first, static_cast<size_t>(args.width) * 4);
        return;
    }
    const uint16_t* table = static_cast<const uint16_t*>(args.table) + first;
    const bool bf16 = args.dtype == DType::kBFloat16;
    for (int64_t i = 0; i < args.width; ++i) {
        y[i] = bf16 ? bf16_to_f32(table[i]) : f16_to_f32(table[i]);
    }
}

}  // namespace

void embed(const OpContext& context, const EmbedArgs& args) {
    check(args.dtype == DType::kBFloat16 || args.dtype == DType::kFloat16 || args.dtype == DType::kFloat32,
          "embed: the table's dtype is none of bfloat16, float16, float32");
    constexpr int64_t kRows = 64;
    context.threads.parallel_for((args.rows + kRows - 1) / kRows, [&](int64_t item, int) {
        const int64_t end = std::min(args.rows, (item + 1) * kRows);
        for (int64_t r = item * kRows; r < end; ++r) {
            widen_row(args, r, args.y + r * args.y_stride);
        }
    });
}

}  // namespace tessera
