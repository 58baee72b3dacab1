// attention on CUDA: causal grouped-query attention over paged K and V, output bfloat16, softmax in float32.
//
// Query i of a sequence has position p = position + i and attends the slots [first_slot, first_slot + p];
// slot s lies in page s / 64 at place s % 64. What lies in any other slot counts for nothing, NaN included.
// Everything that changes from step to step (positions, page tables, lengths of prompts) lies in device
// memory.
//
// Decode and prefill each have a plan: work lists made on the device once a step for all layers of one
// first_slot.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "base/dtype.h"
#include "ops/attention/decode_plan.h"

namespace tessera {

inline constexpr int32_t kAttentionCudaGroupMax = 16;  // query heads of a KV head; any number up to it

struct AttentionCudaShape {
    int32_t q_heads = 0;
    int32_t kv_heads = 0;  // q_heads / kv_heads = the group
    // The head dimension is 128.
};

// One layer's K and V, and the sequences' pages.
struct PagedKvCuda {
    const std::byte* pool = nullptr;  // page p begins at pool + p * page_stride; 16-byte aligned
    int64_t page_stride = 0;          // bytes, a multiple of 16
    // Bytes from a page's begin to this layer's blocks, multiples of 16: each [kv_heads][64][128] of dtype.
    int64_t k_offset = 0;
    int64_t v_offset = 0;
    DType dtype = DType::kBFloat16;  // kBFloat16 or kFloat8E4M3
    // e4m3: value = stored * scale. The four forms of scales are those that qkv_post_cuda() writes.
    float k_scale = 1;
    float v_scale = 1;
    // In place of k_scale, one for each token and head: bytes from a page's begin to this layer's [kv_heads]
    // [64] float32, a multiple of 16 (PageFormat: after V). < 0: none.
    int64_t k_scales_offset = -1;
    const float* v_scales = nullptr;       // [kv_heads], in place of v_scale; or null
    const int32_t* page_tables = nullptr;  // [sequences, pages_max]
    int32_t pages_max = 0;
};

// ---- decode: the same q_len (1 to 4) for every sequence
// ------------------------------------------------------------

struct DecodePlanCudaArgs {
    AttentionCudaShape shape;
    const int32_t* positions = nullptr;  // [batch]: of each sequence's first query; < 0 = an empty row
    int32_t batch = 0;                   // <= 1024
    int32_t q_len = 1;  // 1 to 4; not 3 with a group of 11, 13 or 15, whose rows make no two equal parts
    int32_t first_slot = 0;
    int32_t slots_max = 0;           // of a sequence: the model's limit, a host constant
    int32_t sm_count = 0;            // of the device
    std::byte* workspace = nullptr;  // decode_cuda_workspace_bytes() of the largest batch, 256-byte aligned;
                                     // kept until the step's end
};

inline constexpr int32_t kDecodeCudaRowsOfE4m3 = 16;  // of a KV head, q_len * group, that out8 may have

struct DecodeCudaArgs {
    DecodePlanCudaArgs plan;  // as given to decode_plan_cuda()
    PagedKvCuda kv;
    const void* q =
        nullptr;  // [batch * q_len, q_heads * 128] bfloat16: query i of sequence b is row b * q_len + i
    int64_t q_stride = 0;    // elements between rows, a multiple of 8
    void* out = nullptr;     // [batch * q_len, q_heads * 128] bfloat16; empty rows become zeros
    int64_t out_stride = 0;  // elements between rows, of out8 as well
    // [batch * q_len, q_heads * 128] e4m3, or null. Written in place of out, which may then be null: out's
    // bfloat16 divided by out8_scale. Not for more than kDecodeCudaRowsOfE4m3 rows of a KV head.
    uint8_t* out8 = nullptr;
    float out8_scale = 1;  // > 0
    float* lse = nullptr;  // [batch * q_len, q_heads], or null: the logarithm of the sum of e^score; empty
                           // rows get -infinity
    float scale = 0;       // 1 / sqrt(head_dim)
    // The plan, positions, page tables and the slots before each sequence's first query were complete before
    // the kernel before this one lets this one start (qkv_post waits for its own predecessor first): they are
    // then read while that kernel still runs.
    bool settled = false;
};

// Grows with the device, not with the batch. `largest`: all but the pointers.
int64_t decode_cuda_workspace_bytes(const DecodePlanCudaArgs& largest);
// After decode_plan_cuda() the workspace begins with DecodeBin [bins + 1]: how each head's blocks share the
// sequences.
int32_t decode_cuda_bins(const DecodePlanCudaArgs& args);
void decode_plan_cuda(cudaStream_t stream, const DecodePlanCudaArgs& args);
// Both kernels may start before the one before them in the stream has ended (programmatic dependent launch),
// and wait for it before they write anything, or read anything but what `settled` names.
void attention_decode_cuda(cudaStream_t stream, const DecodeCudaArgs& args);

// ---- prefill: any number of queries a sequence
// ---------------------------------------------------------------

struct PrefillPlanCudaArgs {
    const int32_t* first_rows =
        nullptr;  // [sequences + 1]: sequence b's queries are rows [b] .. [b + 1] - 1 of q
    const int32_t* positions = nullptr;  // [sequences]: of each sequence's first query (tokens cached before
                                         // it); -1 before a single query: an empty row, which becomes zeros
    int32_t first_slot = 0;
    int32_t sequences = 0;  // <= 1024
    int32_t rows_max = 0;   // bound of the rows in all, known to the host
    AttentionCudaShape shape;
    std::byte* workspace = nullptr;  // prefill_cuda_workspace_bytes(), kept until the step's end
};

// Which tiles of K and V each tile of queries sees, beside the causal rule. A query tile is
// prefill_cuda_tile_queries() queries of a sequence for one KV head, counted from the sequence's first; its
// list is number (row of its first query) / tile_queries + (its sequence). A KV tile is 128 slots: two pages.
struct PrefillKvTiles {
    const int32_t* tiles =
        nullptr;  // [lists][kv_heads][tiles_max]: ascending KV tiles, none past the tile's end
    const int32_t* counts = nullptr;  // [lists][kv_heads]; null: every query tile sees all
    int32_t tiles_max = 0;
};

// bfloat16 K and V: products in bfloat16. e4m3: q becomes e4m3 with a scale for each row and head, the scores
// are float16, the softmax's weights become e4m3, and the products of each 1,024 slots are added up in
// float32.
struct PrefillCudaArgs {
    PrefillPlanCudaArgs plan;  // as given to prefill_plan_cuda()
    PagedKvCuda kv;
    PrefillKvTiles kv_tiles;
    const void* q = nullptr;  // [rows_max, q_heads * 128] bfloat16; all of it may be read
    int64_t q_stride = 0;     // elements between rows, a multiple of 8
    void* out = nullptr;      // [rows, q_heads * 128] bfloat16, 16-byte aligned
    int64_t out_stride = 0;
    float scale = 0;
    int sm_count = 0;
    // The plan, page tables and lists of KV tiles were complete before the kernel before this one lets this
    // one start: they are then read while that kernel still runs, as in DecodeCudaArgs.
    bool settled = false;
};

int32_t prefill_cuda_tile_queries(const AttentionCudaShape& shape);
int64_t prefill_cuda_workspace_bytes(const AttentionCudaShape& shape, int32_t sequences_max,
                                     int32_t rows_max);
void prefill_plan_cuda(cudaStream_t stream, const PrefillPlanCudaArgs& args);
// May start before the kernel before it in the stream has ended (programmatic dependent launch), and waits
// for it before it writes anything, or reads anything but what `settled` names.
void attention_prefill_cuda(cudaStream_t stream, const PrefillCudaArgs& args);

}  // namespace tessera
