// The work list of prefill attention in its workspace: made by the plan kernel, read by the attention kernel.
#pragma once

#include "ops/attention/cuda/attention_cuda.h"

namespace tessera::cuda {

// Rows of a query tile, queries x query heads of one KV head: 64 for each consumer of the kernel.
inline constexpr int kPrefillRows = 128;
inline constexpr int kPrefillKvSlots = 128;  // of a KV tile
inline constexpr int kPrefillSequences = 1024;

struct alignas(16) PrefillItem {
    int32_t row = 0;      // of q: the tile's first query
    int32_t queries = 0;  // of all its tiles
    int32_t first = 0;    // the tile's first query sees slots up to this one
    int32_t sequence = 0;
};

struct PrefillPlan {
    int32_t* count = nullptr;     // of items
    int32_t* next = nullptr;      // work taken beside the first: (KV head * items + item) * tiles + tile
    int32_t* finished = nullptr;  // blocks without work; the last one sets `next` back for the next launch
    PrefillItem* items = nullptr;
    int64_t items_max = 0;
    // Of queries, an item: two side by side where sequences are long enough, which two blocks then attend
    // together, or one block one after the other.
    int32_t item_tiles = 1;
    int64_t bytes = 0;
};

PrefillPlan make_prefill_plan(const PrefillPlanCudaArgs& args);

}  // namespace tessera::cuda
