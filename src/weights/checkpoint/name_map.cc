#include "weights/checkpoint/name_map.h"

#include <array>
#include <fmt/format.h>

namespace tessera {
namespace {

struct Rename {
    std::string_view from;
    std::string_view to;
};

// The first that matches is applied; longer ones stand before their prefixes.
constexpr std::array kRenames = std::to_array<Rename>({
    {".mlp.gate.wg.", ".mlp.router.gate."},
    {".mlp.gate.", ".mlp.router.gate."},
    {".mlp.e_score_correction_bias", ".mlp.expert_bias"},
    {".mlp.shared_experts.", ".mlp.shared_mlp."},
    {".self_attn.k_cache.scale", ".self_attn.k_scale"},
    {".self_attn.v_cache.scale", ".self_attn.v_scale"},
    {".self_attn.k_proj.k_scale", ".self_attn.k_scale"},
    {".self_attn.v_proj.v_scale", ".self_attn.v_scale"},
    {".self_attn.attn.k_scale", ".self_attn.k_scale"},
    {".self_attn.attn.v_scale", ".self_attn.v_scale"},
});

}  // namespace

std::string canonical_name(std::string_view name) {
    for (const Rename& rename : kRenames) {
        const size_t place = name.find(rename.from);
        if (place != std::string_view::npos) {
            return fmt::format("{}{}{}", name.substr(0, place), rename.to,
                               name.substr(place + rename.from.size()));
        }
    }
    return std::string(name);
}

bool is_ignored_tensor(std::string_view name, int64_t mtp_layer) {
    if (name.ends_with("rotary_emb.inv_freq")) {
        return true;
    }
    const std::string prefix = layer_prefix(mtp_layer);
    if (!name.starts_with(prefix)) {
        return false;
    }
    name.remove_prefix(prefix.size());
    return name.starts_with("embed_tokens") || name.starts_with("shared_head");
}

std::string layer_prefix(int64_t layer) {
    return fmt::format("model.layers.{}.", layer);
}

}  // namespace tessera
