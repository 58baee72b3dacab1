// Writes a model folder in the official FP8 release's format from bfloat16 (or wider) weights and measured
// scales: docs/formats/checkpoint.md, "FP8".
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "weights/loader.h"

namespace tessera {

// The largest magnitude that each input of a layer's linears, K and V must hold: scale = limit / 448.
struct LayerLimits {
    float attention_input = 0;  // of q, k and v
    float output_input = 0;     // of o
    float key = 0, value = 0;
    float mlp_input = 0;          // of gate and up: every expert's, the shared one's, or the dense layer's
    float expert_down_input = 0;  // of down of every routed expert; not used in a dense layer
    float shared_down_input = 0;  // of down of the shared expert or of the dense layer
};

struct Fp8Export {
    std::vector<LayerLimits> layers;  // the trunk's, then the MTP layer's
    int64_t shard_bytes_max = int64_t{5} << 30;
    // Bytes written; false stops, and nothing is left. May be empty.
    std::function<bool(int64_t done, int64_t total)> progress;
};

// check_export_folder(), and an error when the model cannot be written in this format (it is FP8 already).
Status check_fp8_export(const LoadedModel& model, const std::string& folder);

// Makes `folder` with everything in it, or leaves nothing: it is written under another name beside it and
// renamed when it is complete. Files of the model's folder that hold no weights are copied.
Status export_fp8(const LoadedModel& model, const Fp8Export& options, const std::string& folder,
                  ThreadPool& pool);

}  // namespace tessera
