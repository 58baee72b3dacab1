// qkv_post: what happens between the q/k/v projections and attention, fused: RMSNorm of every q and k head,
// RoPE (NeoX halves: element i turns with element i + head_dim / 2), and the store of K and V into the KV
// pages.
//
// One token's result depends on that token alone, and is the same bits on every instruction set. Reductions
// run over 16 interleaved lanes that are then added in a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "ops/op_context.h"

namespace tessera {

// Where a token's K and V go: slot `slot` (0..63) of the page that begins at `page`.
struct KvTarget {
    std::byte* page = nullptr;
    int32_t slot = 0;
};

struct QkvPostArgs {
    int64_t tokens = 0;
    int64_t q_heads = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;      // a multiple of 16, at most 512
    float* q = nullptr;        // [tokens, q_heads * head_dim]: normed and rotated in place
    int64_t q_stride = 0;      // elements between the rows of two tokens
    const float* k = nullptr;  // [tokens, kv_heads * head_dim]: raw projections, left as they are
    int64_t k_stride = 0;
    const float* v = nullptr;  // [tokens, kv_heads * head_dim]
    int64_t v_stride = 0;
    const float* q_norm = nullptr;  // [head_dim], may be null: no norm
    const float* k_norm = nullptr;  // [head_dim], may be null: no norm
    float eps = 0;
    const float* cos = nullptr;         // [tokens, head_dim / 2], from rope_angles()
    const float* sin = nullptr;         // [tokens, head_dim / 2]
    const KvTarget* targets = nullptr;  // [tokens]
    // Bytes from a page's begin to this layer's blocks: K and V are each [kv_heads][64][head_dim] of
    // kv_dtype.
    int64_t k_offset = 0;
    int64_t v_offset = 0;
    DType kv_dtype = DType::kFloat32;  // kFloat32, or kBFloat16 (rounded to nearest even)
};

void qkv_post(OpContext& context, const QkvPostArgs& args);
// The plain reference: the same bits, one element at a time.
void qkv_post_ref(const QkvPostArgs& args);

struct RopeArgs {
    const int32_t* positions = nullptr;  // [tokens]
    int64_t tokens = 0;
    int64_t head_dim = 0;
    double theta = 0;
    float* cos = nullptr;  // [tokens, head_dim / 2]
    float* sin = nullptr;  // [tokens, head_dim / 2]
};

// Once a step, for all layers. inv_freq_i = float32(theta^(-2i / head_dim)); angle = float32(position) *
// inv_freq_i, rounded to float32; then cosine and sine of that float32 angle. Wider angles differ from the
// reference model.
void rope_angles(OpContext& context, const RopeArgs& args);

}  // namespace tessera
