// PassOperator: the operators that a step's time is told by, in the order of a pass.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera {

enum class PassOperator : uint8_t {
    kPrepare,  // the rows' state, the attention's work lists, the pages' trailers
    kEmbed,
    kNorm,
    kQkv,
    kQkvPost,
    kAttention,
    kAttentionOut,
    kRouter,
    kDenseMlp,
    kExperts,  // routed and shared
    kHead,
    kSample,
};

inline constexpr size_t kPassOperators = 12;
inline constexpr std::array<const char*, kPassOperators> kPassOperatorNames = {
    "prepare", "embed",  "norm",      "qkv",     "qkv_post", "attention",
    "o",       "router", "dense_mlp", "experts", "lm_head",  "sample"};

constexpr const char* pass_operator_name(PassOperator op) {
    return kPassOperatorNames[static_cast<size_t>(op)];
}

}  // namespace tessera
