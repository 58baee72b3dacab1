// quantization_config of config.json, and hf_quant_config.json: the official FP8 release's format (per-tensor
// e4m3 weights, static scales), FP8 with dynamic activations (weights per tensor or in blocks), and four
// forms of int4 experts with e4m3 activations.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace tessera {

// How routed experts with int4 weights are stored (docs/formats/checkpoint.md, "W4A8").
enum class Int4Checkpoint : uint8_t { kNone, kGptq, kTrtLlm, kCompressedTensors, kModelOpt };

struct QuantConfig {
    bool fp8 = false;             // every projection that is not ignored is e4m3
    bool dynamic_inputs = false;  // with fp8: a scale for each token; else each projection has a static one
    // Projections are e4m3 with a scale for each 128 x 128 block; beside int4 they may be.
    bool fp8_blocks = false;
    bool static_kv_scales = false;  // kv_cache_scheme "static": every layer must carry k_scale and v_scale
    std::vector<std::string> ignored_layers;  // canonical module names
    // Projections of routed experts may be int4: they are where their packed tensors are.
    Int4Checkpoint int4 = Int4Checkpoint::kNone;

    // True when the linear `module` (canonical, without ".weight") must be stored in FP8: q/k/v/o, gate, up
    // and down projections that ignored_layers does not list by their whole name.
    bool quantises(std::string_view module) const;
};

// `config` is the whole config.json.
Result<QuantConfig> parse_quant_config(const json::Value& config, const std::string& file);
// ModelOpt's hf_quant_config.json, read where config.json has no quantization_config.
Result<QuantConfig> parse_hf_quant_config(const json::Value& config, const std::string& file);

}  // namespace tessera
