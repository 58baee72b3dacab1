// PageFormat: the layout of one KV page, and the only place that knows offsets inside it (design:
// docs/formats/kv_page.md). A page holds 64 token slots of one sequence for all layers, the MTP layer
// included, as one contiguous piece:
//   per layer: k [kv_heads][64][head_dim], v [kv_heads][64][head_dim], scales [kv_heads][64] float32 where K
//   is scaled per token; then the trailer: the final-normed hidden state of the page's last token, float32
//   [hidden].
// Slot s of a page holds position page_index * 64 + s. In the MTP layer the entry made from (hidden state t,
// token t + 1) lies in slot t + 1 with RoPE position t; slot 0 of a sequence is empty and masked there.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace tessera {

inline constexpr int64_t kPageTokens = 64;
inline constexpr uint32_t kPageFormatVersion = 1;

using PageId = int32_t;

enum class KvScaleKind : uint8_t { kNone, kPerTensor, kPerHead, kPerTokenAndHead };

struct PageFormat {
    int64_t layers = 0;  // trunk layers + MTP layers; the MTP layer is the last
    int64_t kv_heads = 0;
    int64_t head_dim = 0;
    int64_t hidden_size = 0;
    DType kv_dtype = DType::kFloat32;
    KvScaleKind scale_kind = KvScaleKind::kNone;
    bool hadamard = false;
    int64_t aux_bytes = 0;  // reserved by later formats, at the end

    bool operator==(const PageFormat&) const = default;

    // Bytes of one kv head's [64][head_dim] block.
    int64_t head_bytes() const { return kPageTokens * head_dim * dtype_size(kv_dtype); }
    int64_t scale_bytes() const {
        return scale_kind == KvScaleKind::kPerTokenAndHead ? kv_heads * kPageTokens * 4 : 0;
    }
    int64_t layer_bytes() const { return 2 * kv_heads * head_bytes() + scale_bytes(); }
    int64_t k_offset(int64_t layer) const { return layer * layer_bytes(); }
    int64_t v_offset(int64_t layer) const { return k_offset(layer) + kv_heads * head_bytes(); }
    int64_t scale_offset(int64_t layer) const { return v_offset(layer) + kv_heads * head_bytes(); }
    int64_t trailer_offset() const { return layers * layer_bytes(); }
    int64_t trailer_bytes() const { return hidden_size * 4; }
    // A whole number of 64-byte lines.
    int64_t page_bytes() const { return (trailer_offset() + trailer_bytes() + aux_bytes + 63) / 64 * 64; }
};

}  // namespace tessera
