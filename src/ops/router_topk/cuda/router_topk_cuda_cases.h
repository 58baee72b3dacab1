// The cases of the router on the device: the logits, and the choice.
#pragma once

#include <algorithm>
#include <fmt/format.h>

#include "ops/cuda/cuda_case.h"
#include "ops/router_topk/cuda/router_topk_cuda.h"
#include "ops/router_topk/router_topk_cases.h"

namespace tessera {

struct RouterLogitsCudaSpec {
    int64_t tokens = 1;
    int64_t experts = 1;
    int64_t width = 8;
    DType dtype = DType::kBFloat16;
};

class RouterLogitsCudaCase {
  public:
    RouterLogitsCudaCase(const CudaCaseData& data, const RouterLogitsCudaSpec& spec)
        : spec_(spec),
          random_(data.seed),
          host_x_(random_bf16(random_, spec.tokens * spec.width)),
          host_weight_(weights()),
          x_(data.budget, host_x_, data.sets),
          weight_(data.budget, stored(), data.sets),
          logits_(data.budget, std::vector<float>(static_cast<size_t>(spec.tokens * spec.experts)),
                  data.sets) {}

    void launch(cudaStream_t stream, int set) { launch_some(stream, set, spec_.tokens); }
    OpError check(cudaStream_t stream) {
        logits_.poison();
        launch(stream, 0);
        std::vector<float> want;
        for (int64_t t = 0; t < spec_.tokens; ++t) {
            for (int64_t e = 0; e < spec_.experts; ++e) {
                double sum = 0;
                for (int64_t i = 0; i < spec_.width; ++i) {
                    sum +=
                        static_cast<double>(bf16_to_f32(host_x_[static_cast<size_t>(t * spec_.width + i)])) *
                        host_weight_[static_cast<size_t>(e * spec_.width + i)];
                }
                want.push_back(static_cast<float>(sum));
            }
        }
        const std::vector<float> got = logits_.download();
        OpError error = compare_close(got, want, 1e-6 * std::sqrt(static_cast<double>(spec_.width)), 1e-6);
        error += check_company(stream, got);
        return error;
    }

  private:
    void launch_some(cudaStream_t stream, int set, int64_t tokens) {
        router_logits_cuda(stream, {.x = reinterpret_cast<const __nv_bfloat16*>(x_.at(set)),
                                    .x_stride = spec_.width,
                                    .weight = weight_.at(set),
                                    .weight_dtype = spec_.dtype,
                                    .tokens = tokens,
                                    .experts = spec_.experts,
                                    .width = spec_.width,
                                    .logits = logits_.at(set),
                                    .logits_stride = spec_.experts});
    }
    // The first tokens alone and in smaller batches give the same bits.
    OpError check_company(cudaStream_t stream, const std::vector<float>& whole) {
        OpError error;
        for (const int64_t tokens : {int64_t{1}, int64_t{100}}) {
            if (tokens < spec_.tokens) {
                logits_.poison();
                launch_some(stream, 0, tokens);
                std::vector<float> some = logits_.download();
                const size_t count = static_cast<size_t>(tokens * spec_.experts);
                error += compare_close({some.data(), count}, {whole.data(), count}, 0, 0);
            }
        }
        return error;
    }
    std::vector<float> weights() {
        std::vector<float> out(static_cast<size_t>(spec_.experts * spec_.width));
        for (float& value : out) {
            value = spec_.dtype == DType::kFloat32 ? random_.uniform() : rounded_bf16(random_.uniform());
        }
        return out;
    }
    std::vector<uint8_t> stored() const {
        std::vector<uint8_t> out(host_weight_.size() * static_cast<size_t>(dtype_size(spec_.dtype)));
        for (size_t i = 0; i < host_weight_.size(); ++i) {
            if (spec_.dtype == DType::kFloat32) {
                std::memcpy(out.data() + 4 * i, &host_weight_[i], 4);
            } else {
                const uint16_t bits = f32_to_bf16(host_weight_[i]);
                std::memcpy(out.data() + 2 * i, &bits, 2);
            }
        }
        return out;
    }

    RouterLogitsCudaSpec spec_;
    OpRandom random_;
    std::vector<uint16_t> host_x_;
    std::vector<float> host_weight_;
    DeviceArray<uint16_t> x_;
    DeviceArray<uint8_t> weight_;
    DeviceArray<float> logits_;
};

inline std::vector<CudaOpCase> router_logits_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](const RouterLogitsCudaSpec& spec, bool bench) {
        const int64_t bytes = spec.tokens * (spec.width * 2 + spec.experts * 4) +
                              spec.experts * spec.width * dtype_size(spec.dtype);
        cases.push_back({fmt::format("tokens={} experts={} width={}", spec.tokens, spec.experts, spec.width),
                         std::string(dtype_name(spec.dtype)), bench,
                         [=](const CudaCaseData& data) {
                             auto run = std::make_shared<RouterLogitsCudaCase>(data, spec);
                             return make_cuda_run(std::move(run), data.sets,
                                                  {bytes, 2 * spec.tokens * spec.experts * spec.width});
                         },
                         bytes});
    };
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        add({1, 1, 8, dtype}, false);
        add({5, 63, 256, dtype}, false);
        add({131, 17, 1032, dtype}, false);
        add({1, 192, 4096, dtype}, true);
        add({64, 192, 4096, dtype}, true);
        add({2048, 192, 4096, dtype}, true);
    }
    return cases;
}

struct RouterTopkCudaSpec {
    int64_t tokens = 1;
    int64_t experts = 1;
    int64_t k = 1;
    bool bias = true;
    bool padding = false;  // every third token
};

// Over the data of the CPU backend's cases, and with the same bits.
class RouterTopkCudaCase {
  public:
    RouterTopkCudaCase(const CudaCaseData& data, const RouterTopkCudaSpec& spec)
        : host_(spec.tokens, spec.experts, spec.k, spec.bias, data.seed),
          host_positions_(make_positions(spec)),
          positions_(data.budget, host_positions_, 1),
          logits_(data.budget, host_.logits, data.sets),
          bias_(data.budget, host_.bias, 1),
          chosen_(data.budget, std::vector<int32_t>(static_cast<size_t>(spec.tokens * spec.k)), data.sets),
          weights_(data.budget, std::vector<float>(static_cast<size_t>(spec.tokens * spec.k)), data.sets) {}

    void launch(cudaStream_t stream, int set) {
        router_topk_cuda(stream, {.logits = logits_.at(set),
                                  .logits_stride = host_.experts,
                                  .bias = host_.bias_used ? bias_.at(0) : nullptr,
                                  .positions = positions_.at(0),
                                  .tokens = host_.tokens,
                                  .experts = host_.experts,
                                  .k = host_.k,
                                  .normalise = true,
                                  .scale = 2.826f,
                                  .chosen = chosen_.at(set),
                                  .weights = weights_.at(set)});
    }
    OpError check(cudaStream_t stream) {
        chosen_.poison();
        weights_.poison();
        launch(stream, 0);
        router_topk_ref(host_.args());
        const std::vector<int32_t> chosen = chosen_.download();
        std::vector<float> got(chosen.begin(), chosen.end());
        const std::vector<float> weights = weights_.download();
        got.insert(got.end(), weights.begin(), weights.end());
        return compare_close(got, wanted(), 0, 0);
    }

  private:
    static std::vector<int32_t> make_positions(const RouterTopkCudaSpec& spec) {
        std::vector<int32_t> positions(static_cast<size_t>(spec.tokens));
        for (size_t i = 0; i < positions.size(); ++i) {
            positions[i] = spec.padding && i % 3 == 1 ? -1 : static_cast<int32_t>(i);
        }
        return positions;
    }
    // The reference's, with nothing chosen by padding.
    std::vector<float> wanted() const {
        std::vector<float> values = host_.result();
        const auto k = static_cast<size_t>(host_.k);
        for (size_t token = 0; token < host_positions_.size(); ++token) {
            for (size_t i = token * k; host_positions_[token] < 0 && i < (token + 1) * k; ++i) {
                values[i] = -1;
                values[host_positions_.size() * k + i] = 0;
            }
        }
        return values;
    }

    RouterTopkCase host_;
    const std::vector<int32_t> host_positions_;
    DeviceArray<int32_t> positions_;
    DeviceArray<float> logits_, bias_;
    DeviceArray<int32_t> chosen_;
    DeviceArray<float> weights_;
};

inline std::vector<CudaOpCase> router_topk_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](RouterTopkCudaSpec spec, bool bench) {
        for (const bool bias : {true, false}) {
            spec.bias = bias;
            const int64_t bytes = spec.tokens * (spec.experts + 2 * spec.k) * 4;
            cases.push_back({fmt::format("tokens={} experts={} k={}{}{}", spec.tokens, spec.experts, spec.k,
                                         bias ? " bias" : "", spec.padding ? " padding" : ""),
                             "float32", bench && bias,
                             [=](const CudaCaseData& data) {
                                 auto run = std::make_shared<RouterTopkCudaCase>(data, spec);
                                 return make_cuda_run(std::move(run), data.sets,
                                                      {bytes, spec.tokens * spec.experts * 20});
                             },
                             bytes});
        }
    };
    add({1, 1, 1}, false);
    add({3, 16, 4}, false);
    add({65, 63, 32}, false);
    add({127, 129, 7}, false);
    add({9, 512, 8}, false);
    add({.tokens = 70, .experts = 192, .k = 8, .padding = true}, false);
    add({64, 192, 8}, true);
    add({8192, 192, 8}, true);
    return cases;
}

}  // namespace tessera
