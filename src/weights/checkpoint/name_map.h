// Tensor names: the published ("inner") layout, the transformers ("outer") layout, and old spellings, all
// brought to one canonical name, which is the inner one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// The canonical name of a tensor or of a module (a tensor's name without ".weight").
//   mlp.gate.wg.X, mlp.gate.X        -> mlp.router.gate.X
//   mlp.e_score_correction_bias      -> mlp.expert_bias
//   mlp.shared_experts.X             -> mlp.shared_mlp.X
//   self_attn.{k,v}_cache.scale, self_attn.{k,v}_proj.{k,v}_scale, self_attn.attn.{k,v}_scale
//                                    -> self_attn.{k,v}_scale
// A name that needs no change is returned as it is, known or not.
std::string canonical_name(std::string_view name);

// Tensors that some writers store and no engine needs: rotary inv_freq buffers, and an MTP layer's own copies
// of the embedding and of the head (mtp_layer = index of the MTP layer). `name` is canonical.
bool is_ignored_tensor(std::string_view name, int64_t mtp_layer);

// Canonical names of one layer's tensors.
std::string layer_prefix(int64_t layer);  // "model.layers.3."

}  // namespace tessera
