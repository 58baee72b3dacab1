// `tessera bench engine`: its arguments, and the measurement on each kind of device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "model_setup.h"

namespace tessera {

struct BenchEngineArguments {
    ModelSetup setup;  // without a folder: model_config
    // CUDA only: a config whose weights are drawn at random.
    std::string model_config;
    int32_t layers = 0;  // 0 = all
    std::string dtype;   // of the projections: bf16 (= empty) or fp8

    std::vector<int32_t> prompt_tokens;
    std::vector<int32_t> contexts;
    std::vector<int32_t> batches;
    int32_t steps = 48;  // of decode, in one round
    int32_t rounds = 5;
    bool json = false;
    TimeNs started = 0;  // of the command

    // In tokens. REQUIRES: none of the lists is empty.
    int64_t longest_sequence() const;
};

Status bench_engine_on_cpu(const BenchEngineArguments& arguments);
// One definition in a build with CUDA, another in a build without it.
Status bench_engine_on_device(const BenchEngineArguments& arguments);

}  // namespace tessera
