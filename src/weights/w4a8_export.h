// Writes a model folder whose routed experts are int4 with scales for groups of 128, for e4m3 activations:
// docs/formats/checkpoint.md, "W4A8". Everything else stays as it is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "base/thread_pool.h"
#include "weights/loader.h"

namespace tessera {

struct W4a8Export {
    int64_t shard_bytes_max = int64_t{5} << 30;
    // Bytes written; false stops, and nothing is left. May be empty.
    std::function<bool(int64_t done, int64_t total)> progress;
};

// check_export_folder(), and an error when the model cannot be written in this format.
Status check_w4a8_export(const LoadedModel& model, const std::string& folder);

// Each weight becomes the nearest code. Makes `folder` with everything in it, or leaves nothing, as
// export_fp8() does.
Status export_w4a8(const LoadedModel& model, const W4a8Export& options, const std::string& folder,
                   ThreadPool& pool);

}  // namespace tessera
