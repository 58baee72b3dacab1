// Experts with grouped weights in the device's layouts (ops/moe/w4_layout.h, w8_layout.h), made on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "types/model_config.h"
#include "weights/model_weights.h"

namespace tessera {

// Whether the device's kernels of grouped weights can compute these: all int4, or all e4m3 in blocks, and
// sizes that their tiles fit.
bool int4_experts_fit(const std::vector<MlpWeights>& experts);
bool block_experts_fit(const std::vector<MlpWeights>& experts);

// One expert: w4_gate_up_bytes() and w4_down_bytes(), or the same of w8_layout.h.
struct PackedExpert {
    std::vector<uint8_t> gate_up;
    std::vector<uint8_t> down;
};
void pack_int4_expert(const MlpWeights& expert, ThreadPool& pool, PackedExpert& out);
void pack_block_expert(const MlpWeights& expert, ThreadPool& pool, PackedExpert& out);

// An int4 weight's values as bfloat16, row by row: for backends without int4.
void int4_to_bf16(const LinearWeights& linear, std::vector<uint16_t>& out);

}  // namespace tessera
