#include "device/cuda/cuda_check.h"
#include "runner/cuda/prepare_step.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;

// One block a row. Floor: 8 bytes a page of context and 16 a token over 4.27 TB/s; the launch itself is more.
__global__ void prepare_step_kernel(PrepareStepArgs args) {
    const int row = static_cast<int>(blockIdx.x);
    const int thread = static_cast<int>(threadIdx.x);
    const int32_t slot = args.slots[row];
    if (slot < 0) {
        if (thread == 0) {
            args.tokens[row] = -1;
            args.token_positions[row] = -1;
            args.token_rows[row] = row;
        }
        return;
    }
    const int32_t first = args.first_tokens[row];
    const int32_t count = args.first_tokens[row + 1] - first;
    for (int32_t i = thread; i < count; i += kThreads) {
        const int32_t t = first + i;
        args.tokens[t] =
            row < args.decode_rows ? args.last_tokens[slot] : args.prefill_tokens[t - args.decode_rows];
        args.token_positions[t] = args.positions[row] + i;
        args.token_rows[t] = row;
    }
    const int32_t length = args.table_lengths[row];
    const int32_t* added = args.new_pages + args.first_new_pages[row];
    const int32_t total = length + args.first_new_pages[row + 1] - args.first_new_pages[row];
    int32_t* slot_table = args.slot_tables + static_cast<int64_t>(slot) * args.pages_max;
    int32_t* row_table = args.row_tables + static_cast<int64_t>(row) * args.pages_max;
    for (int32_t i = thread; i < total; i += kThreads) {
        const int32_t page = i < length ? slot_table[i] : added[i - length];
        row_table[i] = page;
        if (i >= length) {
            slot_table[i] = page;
        }
    }
}

}  // namespace

void prepare_step_cuda(cudaStream_t stream, const PrepareStepArgs& args) {
    prepare_step_kernel<<<static_cast<unsigned>(args.rows), kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

}  // namespace tessera
