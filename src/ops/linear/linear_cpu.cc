#include <algorithm>

#include "base/check.h"
#include "ops/common/gemm.h"
#include "ops/common/gemm_own.h"
#include "ops/linear/linear.h"

namespace tessera {
namespace {

// Some rows by a block of outputs, or by half of one.
struct Item {
    int64_t row = 0;
    int64_t rows = 0;
    int64_t block = 0;
    int64_t first = 0;  // of the block's columns
    int64_t columns = kBlockOutputs;
    const std::byte* next = nullptr;  // what this thread reads then, as gemm_block() takes it
    const std::byte* also = nullptr;
};

// A few large items would leave threads without work at the end of the loop; rows enough for the arithmetic
// to count lose nothing by half a block.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kHalvedRowsMin = 8;
constexpr int64_t kHalf = kBlockOutputs / 2;

int64_t columns_of(const LinearArgs& args, const Item& item) {
    return std::min(item.columns, args.outputs - item.block * kBlockOutputs - item.first);
}

// Asks for the item's lines of y before it is computed: another thread may have written them last.
void own_rows(const LinearArgs& args, const Item& item) {
    const int64_t column = item.block * kBlockOutputs + item.first;
    for (int64_t r = 0; r < item.rows; ++r) {
        own_lines(args.y + (item.row + r) * args.y_stride + column, columns_of(args, item));
    }
}

void store_rows(const LinearArgs& args, const Item& item, const float* out) {
    const int64_t column = item.block * kBlockOutputs + item.first;
    const int64_t columns = columns_of(args, item);
    for (int64_t r = 0; r < item.rows; ++r) {
        float* y = args.y + (item.row + r) * args.y_stride + column;
        const float* from = out + r * kBlockOutputs + item.first;
        if (args.accumulate) {
            for (int64_t c = 0; c < columns; ++c) {
                y[c] += from[c];
            }
        } else {
            std::copy_n(from, columns, y);
        }
    }
}

void one_item(const LinearArgs& args, const Item& item) {
    if (columns_of(args, item) <= 0) {  // the last block may have no second half
        return;
    }
    const float* pointers[kGemmRowsMax];
    for (int64_t r = 0; r < item.rows; ++r) {
        const int64_t x_row = args.x_rows == nullptr ? item.row + r : args.x_rows[item.row + r];
        pointers[r] = args.x + x_row * args.x_stride;
    }
    if (item.rows <= kOwnRowsMax) {
        own_rows(args, item);
    }
    alignas(64) float out[kGemmRowsMax * kBlockOutputs];
    gemm_block(
        {pointers, item.rows, args.weight, item.block, out, item.next, item.also, item.first, item.columns});
    store_rows(args, item, out);
}

// One row is all reading, and two streams of memory are read faster than one: each block of the first half
// with its counterpart in the second.
void one_row(const OpContext& context, const LinearArgs& args, int64_t blocks) {
    const int64_t pairs = (blocks + 1) / 2;
    const float* x = args.x + (args.x_rows == nullptr ? 0 : args.x_rows[0]) * args.x_stride;
    context.threads.parallel_for(pairs, [&](int64_t i, int) {
        const int64_t place = context.threads.place(i, pairs);
        const int64_t count = place + pairs < blocks ? 2 : 1;
        // Only of this thread's own next blocks.
        const bool more = i + context.threads.size() < pairs && place + pairs + 1 < blocks;
        alignas(64) float out[2][kBlockOutputs];
        GemmBlockArgs parts[2];
        for (int64_t p = 0; p < count; ++p) {
            const int64_t block = place + p * pairs;
            own_rows(args, {.rows = 1, .block = block});
            parts[p] = {.rows = &x,
                        .row_count = 1,
                        .weight = args.weight,
                        .block = block,
                        .out = out[p],
                        .next = more ? args.weight->block_data(block + 1) : nullptr};
        }
        if (count == 2) {
            gemm_block_pair(parts[0], parts[1]);
        } else {
            gemm_block(parts[0]);
        }
        for (int64_t p = 0; p < count; ++p) {
            store_rows(args, {.rows = 1, .block = place + p * pairs}, out[p]);
        }
    });
}

}  // namespace

void linear(const OpContext& context, const LinearArgs& args) {
    check(args.outputs <= args.weight->outputs, "linear: more outputs than the weight has");
    const int64_t blocks = (args.outputs + kBlockOutputs - 1) / kBlockOutputs;
    const int64_t chunks = (args.rows + kGemmRowsMax - 1) / kGemmRowsMax;
    if (args.rows == 1 && blocks >= 2 * context.threads.size()) {
        return one_row(context, args, blocks);
    }
    const bool halves =
        args.rows >= kHalvedRowsMin && chunks * blocks < kItemsPerThread * context.threads.size();
    // A thread goes from block to block: while one is computed the next one is fetched. Neighbouring items
    // share their rows, which stay in the cache; a block is read once per chunk of rows.
    const int64_t parts = blocks * (halves ? 2 : 1);
    const int64_t items = chunks * parts;
    context.threads.parallel_for(items, [&](int64_t i, int thread) {
        const int64_t place = context.threads.place(i, items);
        const int64_t chunk = place / parts;
        Item item{.row = args.rows * chunk / chunks, .block = place % parts};
        item.rows = args.rows * (chunk + 1) / chunks - item.row;
        int64_t second = 0;
        if (halves) {
            second = item.block % 2;
            item.block /= 2;
            item.first = second * kHalf;
            item.columns = kHalf;
        }
        // Half a block's next words are those of its neighbour, at the place of its own.
        constexpr int64_t kHalfBytes = kHalf * 4;
        if (halves && second == 0) {
            item.next = args.weight->block_data(item.block) + kHalfBytes;
        } else if (item.block + 1 < blocks) {
            item.next = args.weight->block_data(item.block + 1) - second * kHalfBytes;
        }
        item.also = args.ahead == nullptr ? nullptr : args.ahead->take(thread);
        one_item(args, item);
    });
}

}  // namespace tessera
