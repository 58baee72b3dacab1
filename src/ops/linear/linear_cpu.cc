#include <algorithm>

#include "base/check.h"
#include "ops/common/gemm.h"
#include "ops/common/gemm_own.h"
#include "ops/linear/linear.h"

namespace tessera {
namespace {

struct Item {
    int64_t row = 0;
    int64_t rows = 0;
    int64_t block = 0;
    bool next = false;  // there is a following block, and it is this thread's next one
    const std::byte* also = nullptr;
};

// Asks for the item's lines of y before it is computed: another thread may have written them last.
void own_rows(const LinearArgs& args, const Item& item) {
    const int64_t column = item.block * kBlockOutputs;
    const int64_t columns = std::min(kBlockOutputs, args.outputs - column);
    for (int64_t r = 0; r < item.rows; ++r) {
        own_lines(args.y + (item.row + r) * args.y_stride + column, columns);
    }
}

void store_rows(const LinearArgs& args, int64_t row, int64_t rows, int64_t block, const float* out) {
    const int64_t column = block * kBlockOutputs;
    const int64_t columns = std::min(kBlockOutputs, args.outputs - column);
    for (int64_t r = 0; r < rows; ++r) {
        float* y = args.y + (row + r) * args.y_stride + column;
        const float* from = out + r * kBlockOutputs;
        if (args.accumulate) {
            for (int64_t c = 0; c < columns; ++c) {
                y[c] += from[c];
            }
        } else {
            std::copy_n(from, columns, y);
        }
    }
}

void one_block(const LinearArgs& args, const Item& item) {
    const auto [row, rows, block, next, also] = item;
    const float* pointers[kGemmRowsMax];
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t x_row = args.x_rows == nullptr ? row + r : args.x_rows[row + r];
        pointers[r] = args.x + x_row * args.x_stride;
    }
    if (rows <= kOwnRowsMax) {
        own_rows(args, item);
    }
    alignas(64) float out[kGemmRowsMax * kBlockOutputs];
    gemm_block(
        {pointers, rows, args.weight, block, out, next ? args.weight->block_data(block + 1) : nullptr, also});
    store_rows(args, row, rows, block, out);
}

}  // namespace

void linear(const OpContext& context, const LinearArgs& args) {
    check(args.outputs <= args.weight->outputs, "linear: more outputs than the weight has");
    const int64_t blocks = (args.outputs + kBlockOutputs - 1) / kBlockOutputs;
    const int64_t chunks = (args.rows + kGemmRowsMax - 1) / kGemmRowsMax;
    // A thread goes from block to block: while one is computed the next one is fetched. Neighbouring items
    // share their rows, which stay in the cache; a block is read once per chunk of rows.
    const int64_t items = chunks * blocks;
    context.threads.parallel_for(items, [&](int64_t i, int thread) {
        const int64_t item = context.threads.place(i, items);
        const int64_t chunk = item / blocks;
        const int64_t block = item % blocks;
        const int64_t row = args.rows * chunk / chunks;
        const int64_t end = args.rows * (chunk + 1) / chunks;
        const std::byte* also = args.ahead == nullptr ? nullptr : args.ahead->take(thread);
        one_block(args, {row, end - row, block, block + 1 < blocks, also});
    });
}

}  // namespace tessera
