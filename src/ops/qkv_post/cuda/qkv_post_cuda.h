// qkv_post on the device: RMSNorm of every q and k head, RoPE (NeoX halves), and the store of K and V into
// their pages.
//
// As in the reference model the norm rounds twice to bfloat16 (before and after the weight); the rotation is
// float32 with float32 angles and rounds once. FP8 pages hold e4m3(bf16 value / scale), saturating. One
// token's result depends on that token alone.
//
// Options, in this order: the norm may come after the rotation (which then rounds before it); q and k may be
// multiplied by the orthonormal 128-point Hadamard matrix (float32, rounded once); q may be stored as e4m3
// with a scale for each token and head, K with one too: the largest |value| / 448. A quotient by such a scale
// may be two units of its last place off, before it is rounded to its code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "base/dtype.h"

namespace tessera {

struct QkvPostCudaArgs {
    int64_t tokens = 0;
    int64_t q_heads = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;              // 64, 128 or 256
    const __nv_bfloat16* q = nullptr;  // [tokens, q_heads * head_dim]: raw projections
    const __nv_bfloat16* k = nullptr;  // [tokens, kv_heads * head_dim]
    const __nv_bfloat16* v = nullptr;  // [tokens, kv_heads * head_dim]
    int64_t q_stride = 0;              // elements between the rows of two tokens, a multiple of 4
    int64_t kv_stride = 0;             // of k and of v
    __nv_bfloat16* q_out = nullptr;    // [tokens, q_heads * head_dim]; may be q
    int64_t q_out_stride = 0;
    const __nv_bfloat16* q_norm = nullptr;  // [head_dim]; null: no norm
    const __nv_bfloat16* k_norm = nullptr;  // [head_dim]; null: no norm
    float eps = 0;
    const float* rope = nullptr;         // [positions_max, head_dim]: cosines, then sines; rope_table()
    const int32_t* positions = nullptr;  // [tokens], below positions_max; < 0: padding, nothing is written
    // The token's K and V go to slot (position + slot_shift) % 64 of page (position + slot_shift) / 64 of its
    // sequence.
    int32_t slot_shift = 0;               // the MTP layer: 1
    const int32_t* sequences = nullptr;   // [tokens]: the row of the page table
    const int32_t* page_table = nullptr;  // [sequences, page_table_stride]: page ids
    int64_t page_table_stride = 0;
    std::byte* pages = nullptr;  // page p begins at p * page_stride
    int64_t page_stride = 0;     // bytes
    int64_t k_offset = 0;        // bytes from a page's begin to this layer's K: [kv_heads][64][head_dim]
    int64_t v_offset = 0;
    DType kv_dtype = DType::kBFloat16;  // kBFloat16 or kFloat8E4M3
    float k_scale = 1;                  // FP8 only
    float v_scale = 1;
    const float* v_head_scale = nullptr;  // [kv_heads], FP8 only; null: v_scale
    // FP8 only: bytes from a page's begin to this layer's [kv_heads][64] float32 scales of K, which are
    // written and used in place of k_scale; < 0: k_scale.
    int64_t k_scale_offset = -1;
    bool norm_after_rope = false;
    bool hadamard = false;      // head_dim 128 only
    uint8_t* q8 = nullptr;      // [tokens, q_heads * head_dim] e4m3, in place of q_out; may be null
    int64_t q8_stride = 0;      // a multiple of 4
    float* q8_scale = nullptr;  // [tokens, q_heads]
    // A token's bits do not depend on the number of tokens; otherwise many of them are added up in another
    // order.
    bool batch_invariant = false;
};

void qkv_post_cuda(cudaStream_t stream, const QkvPostCudaArgs& args);

// The table of angles for positions 0 .. positions - 1, on the host, for one copy to the device at start: the
// same numbers as rope_angles() gives the CPU backend.
std::vector<float> rope_table(int64_t positions, int64_t head_dim, double theta);

}  // namespace tessera
