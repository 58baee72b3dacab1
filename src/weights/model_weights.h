// The weights of a model as views of the checkpoint's memory: what src/model binds to operators. Shapes are
// checked by the loader; a view never owns (LoadedModel in loader.h does).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"

namespace tessera {

// Row-major host tensor; rank 1 or 2. data is aligned to the element size only.
struct WeightView {
    const void* data = nullptr;
    DType dtype = DType::kBFloat16;
    int64_t rows = 0;  // [rows, cols], or [cols] with rows = 1
    int64_t cols = 0;
};

// How the codes of an int4 weight lie in its tensor. Rows and columns are the weight's, [out, in].
enum class Int4Layout : uint8_t {
    kBytes,        // [rows, cols / 2]: low nibble = even column; two's complement
    kOffsetBytes,  // the same, each code + 8 (eight in an int32 word)
    kWordsDown,    // int32 [cols / 8, rows]: nibble i of word r = column 8 r + i; each code + 8
    kRowPairs,     // [rows / 2, cols]: low nibble = even row; two's complement
};

inline constexpr int64_t kInt4Group = 128;  // columns that share a scale

struct Int4Form {
    Int4Layout layout = Int4Layout::kBytes;
    const void* scales = nullptr;  // bfloat16 [rows, groups]; [groups, rows] with kWordsDown
};

inline constexpr int64_t kFp8Block = 128;  // rows and columns that share a scale

// e4m3 weights with a scale for each block of 128 x 128; the activation is quantised to e4m3 with a scale of
// its own for each token.
struct Fp8Blocks {
    const float* scales = nullptr;  // [ceil(rows / 128), ceil(cols / 128)]
};

// y = x W^T; W [out, in] = [rows, cols]. An FP8 weight dequantises as w * weight_scale; where input_scale is
// set the activation is quantised to e4m3 as round(x / input_scale) first (static, per tensor).
// With `blocks` a weight is e4m3 * the scale of its block; fp8_blocks_to_bf16() widens it.
// An int4 weight (`int4` set, weight.data = its codes) is code * the scale of its group of 128 columns; the
// activation is quantised to e4m3 with a scale of its own for each token. int4_rows() reads it.
struct LinearWeights {
    WeightView weight;
    std::optional<float> weight_scale;
    std::optional<float> input_scale;
    std::optional<Int4Form> int4;
    std::optional<Fp8Blocks> blocks;  // routed experts only; weight_scale and input_scale are unset then
};

struct MlpWeights {
    LinearWeights gate, up;  // [width, hidden]
    LinearWeights down;      // [hidden, width]
};

struct AttentionWeights {
    LinearWeights q;                 // [heads * head_dim, hidden]
    LinearWeights k, v;              // [kv_heads * head_dim, hidden]
    LinearWeights o;                 // [hidden, heads * head_dim]
    WeightView q_norm, k_norm;       // [head_dim]
    float k_scale = 1, v_scale = 1;  // static KV scales of an FP8 checkpoint
};

struct MoeWeights {
    WeightView router;       // [experts, hidden]
    WeightView expert_bias;  // [experts] float32
    std::vector<MlpWeights> experts;
    MlpWeights shared;
};

struct LayerWeights {
    WeightView input_norm, post_attention_norm;  // [hidden]
    AttentionWeights attention;
    std::optional<MlpWeights> dense;  // exactly one of dense and moe is set
    std::optional<MoeWeights> moe;
};

struct MtpWeights {
    WeightView embedding_norm, hidden_norm, final_norm;  // enorm, hnorm, final_layernorm: [hidden]
    LinearWeights projection;                            // eh_proj [hidden, 2 * hidden]: embedding half first
    LayerWeights layer;
};

struct ModelWeights {
    WeightView embedding;   // [vocab, hidden]
    LinearWeights lm_head;  // [vocab, hidden]
    WeightView final_norm;  // [hidden]
    std::vector<LayerWeights> layers;
    std::optional<MtpWeights> mtp;
    bool kv_scales_static = false;  // the checkpoint carries k_scale and v_scale
};

}  // namespace tessera
