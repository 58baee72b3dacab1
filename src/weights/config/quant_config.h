// quantization_config of config.json: the official FP8 release's format (per-tensor e4m3 weights, static
// scales).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace tessera {

struct QuantConfig {
    bool fp8 = false;               // false: no quantization_config; no tensor may be FP8
    bool static_kv_scales = false;  // kv_cache_scheme "static": every layer must carry k_scale and v_scale
    std::vector<std::string> ignored_layers;  // canonical module names

    // True when the linear `module` (canonical, without ".weight") must be stored in FP8: q/k/v/o, gate, up
    // and down projections that ignored_layers does not list by their whole name.
    bool quantises(std::string_view module) const;
};

// `config` is the whole config.json.
Result<QuantConfig> parse_quant_config(const json::Value& config, const std::string& file);

}  // namespace tessera
