// The cases of the router on the device: the logits, and the choice.
#pragma once

#include <algorithm>
#include <fmt/format.h>
#include <memory>
#include <numeric>

#include "device/cuda/device_props.h"
#include "ops/cuda/cuda_case.h"
#include "ops/router_topk/cuda/router_topk_cuda.h"
#include "ops/router_topk/router_topk_cases.h"

namespace tessera {

struct RouterLogitsCudaSpec {
    int64_t tokens = 1;
    int64_t experts = 1;
    int64_t width = 8;
    bool float32 = false;  // weights of float32, in two parts
    bool deterministic = false;
    bool workspace = true;
    bool ties = false;  // some experts have equal logits, which any order of the sums gives exactly
};

// Groups of three or four experts each, which lie anywhere.
inline std::vector<size_t> tied_groups(int64_t experts, uint64_t seed) {
    OpRandom random(seed);
    std::vector<size_t> order(static_cast<size_t>(experts));
    std::iota(order.begin(), order.end(), size_t{0});
    for (size_t i = 1; i < order.size(); ++i) {
        std::swap(order[i], order[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
    }
    for (size_t& place : order) {
        place %= std::max<size_t>(order.size() / 3, 1);
    }
    return order;
}

// The router's inputs: activations of variance 1, and weights that give logits of about `deviation`. With
// ties small whole numbers, times a power of two.
class RouterCudaData {
  public:
    RouterCudaData(const CudaCaseData& data, const RouterLogitsCudaSpec& spec, double deviation)
        : spec_(spec),
          random_(data.seed),
          host_x_(make_x()),
          host_weight_(make_weights(deviation, data.seed)),
          x_(data.budget, host_x_, data.sets),
          logits_(data.budget, std::vector<float>(static_cast<size_t>(spec.tokens * spec.experts)),
                  data.sets),
          workspace_(data.budget,
                     std::vector<uint8_t>(static_cast<size_t>(std::max<int64_t>(
                                              router_cuda_workspace_bytes(spec.experts, spec.width), 1)),
                                          0xFF),
                     1) {
        std::vector<uint16_t> high;
        std::vector<uint16_t> low;
        for (float& weight : host_weight_) {
            high.push_back(f32_to_bf16(weight));
            low.push_back(f32_to_bf16(weight - bf16_to_f32(high.back())));
            weight = spec.float32 ? weight : bf16_to_f32(high.back());
        }
        high_ = std::make_unique<DeviceArray<uint16_t>>(data.budget, high, data.sets);
        low_ = std::make_unique<DeviceArray<uint16_t>>(data.budget, low, spec.float32 ? data.sets : 1);
        const Result<DeviceProps> device = open_device(0);
        tessera::check(device.ok(), device.status().message());
        sm_count_ = device->sm_count;
    }

    RouterLogitsCudaArgs args(int set, int64_t tokens) const {
        return {.x = reinterpret_cast<const __nv_bfloat16*>(x_.at(set)),
                .x_stride = spec_.width,
                .high = reinterpret_cast<const __nv_bfloat16*>(high_->at(set)),
                .low = spec_.float32 ? reinterpret_cast<const __nv_bfloat16*>(low_->at(set)) : nullptr,
                .tokens = tokens,
                .experts = spec_.experts,
                .width = spec_.width,
                .logits = logits_.at(set),
                .logits_stride = spec_.experts,
                .workspace = spec_.workspace ? reinterpret_cast<std::byte*>(workspace_.at(0)) : nullptr,
                .deterministic = spec_.deterministic,
                .sm_count = sm_count_};
    }
    void poison() { logits_.poison(); }
    std::vector<float> logits() const { return logits_.download(); }
    // As it was before the first use.
    bool workspace_is_clean() const {
        const std::vector<uint8_t> bytes = workspace_.download();
        return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0xFF; });
    }
    double exact_logit(int64_t token, int64_t expert) const {
        double sum = 0;
        const uint16_t* x = host_x_.data() + token * spec_.width;
        const float* weight = host_weight_.data() + expert * spec_.width;
        for (int64_t i = 0; i < spec_.width; ++i) {
            sum += static_cast<double>(bf16_to_f32(x[i])) * static_cast<double>(weight[i]);
        }
        return sum;
    }
    // About so many of all tokens, the last among them, for the reference. They lie anywhere in a tile.
    std::vector<int64_t> some_tokens(int64_t count) const {
        std::vector<int64_t> tokens;
        for (int64_t t = 0; t < spec_.tokens; t += spec_.tokens / count | 1) {
            tokens.push_back(t);
        }
        tokens.push_back(spec_.tokens - 1);
        return tokens;
    }

  private:
    std::vector<uint16_t> make_x() {
        const int64_t count = spec_.tokens * spec_.width;
        if (!spec_.ties) {
            return random_bf16(random_, count, 1.732f);
        }
        std::vector<uint16_t> x;
        for (int64_t i = 0; i < count; ++i) {  // of every fifth token zeros: all its logits are equal
            const int64_t value = i / spec_.width % 5 == 4 ? 0 : random_.below(5) - 2;
            x.push_back(f32_to_bf16(static_cast<float>(value)));
        }
        return x;
    }
    std::vector<float> make_weights(double deviation, uint64_t seed) {
        const auto scale =
            static_cast<float>(deviation * 1.732 / std::sqrt(static_cast<double>(spec_.width)));
        std::vector<float> weights;
        for (int64_t i = 0; i < spec_.experts * spec_.width; ++i) {
            const float weight = spec_.ties ? tied_weight() : random_.uniform() * scale;
            weights.push_back(weight);
        }
        if (!spec_.ties) {
            return weights;
        }
        // An expert's are those of the one whose number its group has.
        std::vector<float> tied;
        for (const size_t group : tied_groups(spec_.experts, seed)) {
            const auto first = weights.begin() + static_cast<int64_t>(group) * spec_.width;
            tied.insert(tied.end(), first, first + spec_.width);
        }
        return tied;
    }
    // Logits of about 1 at a width of 512. The low part, 2^-9 of the high one, has few bits as well.
    float tied_weight() {
        const auto high = static_cast<float>(random_.below(9) - 4);
        const auto low = static_cast<float>(random_.below(9) - 4);
        return (high + (spec_.float32 ? low * 0x1p-9f : 0.0f)) * 0x1p-6f;
    }

    RouterLogitsCudaSpec spec_;
    OpRandom random_;
    std::vector<uint16_t> host_x_;
    std::vector<float> host_weight_;
    DeviceArray<uint16_t> x_;
    std::unique_ptr<DeviceArray<uint16_t>> high_, low_;
    DeviceArray<float> logits_;
    DeviceArray<uint8_t> workspace_;
    int sm_count_ = 0;
};

class RouterLogitsCudaCase {
  public:
    RouterLogitsCudaCase(const CudaCaseData& data, const RouterLogitsCudaSpec& spec)
        : spec_(spec), data_(data, spec, 1) {}

    void launch(cudaStream_t stream, int set) { router_logits_cuda(stream, data_.args(set, spec_.tokens)); }
    OpError check(cudaStream_t stream) {
        data_.poison();
        launch(stream, 0);
        const std::vector<float> all = data_.logits();
        std::vector<float> got;
        std::vector<float> want;
        for (const int64_t t : data_.some_tokens(60)) {
            for (int64_t e = 0; e < spec_.experts; ++e) {
                got.push_back(all[static_cast<size_t>(t * spec_.experts + e)]);
                want.push_back(static_cast<float>(data_.exact_logit(t, e)));
            }
        }
        // Two bfloat16 hold 17 bits of a weight.
        OpError error = compare_close(got, want, spec_.float32 ? 2e-5 : 4e-6, 1e-6);
        error.mismatches +=
            std::any_of(all.begin(), all.end(), [](float v) { return std::isnan(v); }) ? 1 : 0;
        error += check_company(stream, all);
        error += check_clusters(stream, all);
        error.mismatches += data_.workspace_is_clean() ? 0 : 1;
        return error;
    }

  private:
    // With `deterministic` clusters give the bits that blocks give which meet in the workspace.
    OpError check_clusters(cudaStream_t stream, const std::vector<float>& whole) {
        if (!spec_.deterministic) {
            return {};
        }
        data_.poison();
        RouterLogitsCudaArgs args = data_.args(0, spec_.tokens);
        args.workspace = nullptr;
        router_logits_cuda(stream, args);
        return compare_close(data_.logits(), whole, 0, 0);
    }
    // The first tokens alone and in smaller batches give the same bits.
    OpError check_company(cudaStream_t stream, const std::vector<float>& whole) {
        OpError error;
        for (const int64_t tokens : {1, 33, 100, 600, 1500}) {
            const bool same = spec_.deterministic || (spec_.tokens <= 24 && spec_.workspace);
            if (tokens < spec_.tokens && same) {
                data_.poison();
                router_logits_cuda(stream, data_.args(0, tokens));
                std::vector<float> some = data_.logits();
                const auto count = static_cast<size_t>(tokens * spec_.experts);
                error += compare_close({some.data(), count}, {whole.data(), count}, 0, 0);
            }
        }
        return error;
    }

    RouterLogitsCudaSpec spec_;
    RouterCudaData data_;
};

inline CudaOpCase router_logits_cuda_case(const RouterLogitsCudaSpec& spec, bool bench) {
    const int64_t products = spec.float32 ? 2 : 1;
    const int64_t bytes =
        spec.tokens * (spec.width * 2 + spec.experts * 4) + products * spec.experts * spec.width * 2;
    return {fmt::format("tokens={} experts={} width={}{}{}", spec.tokens, spec.experts, spec.width,
                        spec.deterministic ? " deterministic" : "", spec.workspace ? "" : " no workspace"),
            spec.float32 ? "float32" : "bfloat16", bench,
            [=](const CudaCaseData& data) {
                auto run = std::make_shared<RouterLogitsCudaCase>(data, spec);
                return make_cuda_run(
                    std::move(run), data.sets,
                    {bytes, products * 2 * spec.tokens * spec.experts * spec.width, CudaUnit::kBFloat16});
            },
            bytes};
}

inline std::vector<CudaOpCase> router_logits_cuda_cases() {
    std::vector<CudaOpCase> cases;
    for (const bool float32 : {false, true}) {
        cases.push_back(router_logits_cuda_case({1, 1, 8, float32}, false));
        cases.push_back(router_logits_cuda_case({5, 63, 256, float32}, false));
        cases.push_back(router_logits_cuda_case({131, 17, 1032, float32}, false));
        cases.push_back(router_logits_cuda_case({7, 16, 512, float32}, false));
        cases.push_back(router_logits_cuda_case({63, 208, 1024, float32}, false));
        cases.push_back(router_logits_cuda_case({17, 48, 4608, float32}, false));
        cases.push_back(router_logits_cuda_case({65, 5, 576, float32}, false));
        cases.push_back(router_logits_cuda_case({129, 198, 512, float32}, false));
        for (const int64_t tokens : {127, 513, 1025, 2049, 3500}) {
            cases.push_back(router_logits_cuda_case({tokens, 192, 640, float32, true}, false));
        }
        for (const int64_t tokens : {511, 700, 1500}) {
            cases.push_back(router_logits_cuda_case({tokens, 130, 1088, float32}, false));
        }
        for (const int64_t tokens : {2049, 3500, 4095, 5100}) {
            cases.push_back(router_logits_cuda_case({tokens, 192, 640, float32}, false));
        }
        cases.push_back(router_logits_cuda_case({2200, 90, 576, float32}, false));
        for (const int64_t tokens : {511, 1025, 4200}) {  // more experts than blocks that meet take: clusters
            cases.push_back(router_logits_cuda_case({tokens, 208, 640, float32}, false));
        }
        for (const int64_t tokens : {3, 64, 600}) {
            cases.push_back(
                router_logits_cuda_case({tokens, 192, 576, float32, false, /*workspace=*/false}, false));
        }
        for (const int64_t tokens : {1, 8, 64, 128, 512, 1024, 2048, 4096, 8192}) {
            cases.push_back(router_logits_cuda_case({tokens, 192, 4096, float32}, true));
        }
    }
    cases.push_back(router_logits_cuda_case({1, 192, 4096, false, true}, true));
    cases.push_back(router_logits_cuda_case({64, 192, 4096, false, true}, true));
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

struct RouterCudaSpec {
    RouterLogitsCudaSpec product;
    int64_t k = 8;
    bool bias = true;
};

// Logits and choice together. The chosen experts are those of a float64 reference wherever its last chosen
// and its first not chosen differ by more than 1e-6, or not at all: then the lower one is chosen.
class RouterCudaCase {
  public:
    RouterCudaCase(const CudaCaseData& data, const RouterCudaSpec& spec)
        : spec_(spec),
          data_(data, spec.product, 1.5),
          host_bias_(make_bias(data.seed)),
          bias_(data.budget, host_bias_, 1),
          positions_(data.budget, make_positions(), 1),
          chosen_(data.budget, std::vector<int32_t>(static_cast<size_t>(spec.product.tokens * spec.k)),
                  data.sets),
          weights_(data.budget, std::vector<float>(static_cast<size_t>(spec.product.tokens * spec.k)),
                   data.sets) {}

    void launch(cudaStream_t stream, int set) { launch(stream, set, spec_.product.tokens); }
    void launch(cudaStream_t stream, int set, int64_t tokens) {
        router_cuda(stream, data_.args(set, tokens),
                    {.bias = spec_.bias ? bias_.at(0) : nullptr,
                     .positions = positions_.at(0),
                     .tokens = tokens,
                     .experts = spec_.product.experts,
                     .k = spec_.k,
                     .normalise = true,
                     .scale = kScale,
                     .chosen = chosen_.at(set),
                     .weights = weights_.at(set)});
    }
    OpError check(cudaStream_t stream) {
        data_.poison();
        chosen_.poison();
        weights_.poison();
        launch(stream, 0);
        launch(stream, 0);  // the workspace is left as it was
        const std::vector<int32_t> chosen = chosen_.download();
        const std::vector<float> weights = weights_.download();
        OpError error;
        for (const int64_t token : data_.some_tokens(500)) {
            const auto first = static_cast<size_t>(token * spec_.k);
            const auto k = static_cast<size_t>(spec_.k);
            error += check_token(token, {chosen.data() + first, k}, {weights.data() + first, k});
        }
        error.mismatches +=
            std::any_of(weights.begin(), weights.end(), [](float v) { return std::isnan(v); }) ? 1 : 0;
        error += check_company(stream, chosen, weights);
        error.mismatches += data_.workspace_is_clean() ? 0 : 1;
        return error;
    }

  private:
    static constexpr float kScale = 2.826f;

    // With `deterministic` the first tokens in smaller batches get the same choice and the same bits.
    OpError check_company(cudaStream_t stream, const std::vector<int32_t>& chosen,
                          const std::vector<float>& weights) {
        OpError error;
        for (const int64_t tokens : {1, 100, 300}) {
            if (!spec_.product.deterministic || tokens >= spec_.product.tokens) {
                continue;
            }
            chosen_.poison();
            weights_.poison();
            launch(stream, 0, tokens);
            const auto count = static_cast<size_t>(tokens * spec_.k);
            const std::vector<int32_t> some = chosen_.download();
            const std::vector<float> some_weights = weights_.download();
            error.mismatches +=
                std::equal(some.begin(), some.begin() + static_cast<int64_t>(count), chosen.begin()) ? 0 : 1;
            error += compare_close({some_weights.data(), count}, {weights.data(), count}, 0, 0);
        }
        return error;
    }

    std::vector<float> make_bias(uint64_t seed) const {
        OpRandom random(seed + 1);
        std::vector<float> bias(static_cast<size_t>(spec_.product.experts));
        random.fill(bias, spec_.bias ? 0.1f : 0.0f);
        if (!spec_.product.ties) {
            return bias;
        }
        std::vector<float> tied;
        for (const size_t group : tied_groups(spec_.product.experts, seed)) {
            tied.push_back(bias[group]);
        }
        return tied;
    }
    // Whether rounding could decide who is the last chosen. order: the experts by their keys.
    static bool is_close(const std::vector<double>& key, const std::vector<int32_t>& order, size_t k) {
        if (k == order.size()) {
            return false;
        }
        const double last = key[static_cast<size_t>(order[k - 1])];
        const double next = key[static_cast<size_t>(order[k])];
        const auto near = [last](double other) {
            const double apart = std::fabs(other - last);
            return apart > 0 && apart <= 1e-6;
        };
        return last == next ? std::any_of(key.begin(), key.end(), near) : near(next);
    }
    // Token 1 is padding.
    std::vector<int32_t> make_positions() const {
        std::vector<int32_t> positions(static_cast<size_t>(spec_.product.tokens), 5);
        if (positions.size() > 1) {
            positions[1] = -1;
        }
        return positions;
    }
    OpError check_token(int64_t token, std::span<const int32_t> chosen,
                        std::span<const float> weights) const {
        const auto experts = static_cast<size_t>(spec_.product.experts);
        const auto k = static_cast<size_t>(spec_.k);
        std::vector<float> want_chosen(k, -1);
        std::vector<float> want_weights(k, 0);
        if (token != 1) {
            std::vector<double> score;
            std::vector<double> key;
            for (size_t e = 0; e < experts; ++e) {
                score.push_back(1 / (1 + std::exp(-data_.exact_logit(token, static_cast<int64_t>(e)))));
                key.push_back(score.back() + static_cast<double>(host_bias_[e]));
            }
            std::vector<int32_t> order(experts);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
                return key[static_cast<size_t>(a)] > key[static_cast<size_t>(b)];
            });
            if (is_close(key, order, k)) {
                return {};
            }
            std::sort(order.begin(), order.begin() + static_cast<int64_t>(k));
            double sum = 0;
            for (size_t i = 0; i < k; ++i) {
                sum += score[static_cast<size_t>(order[i])];
            }
            for (size_t i = 0; i < k; ++i) {
                want_chosen[i] = static_cast<float>(order[i]);
                want_weights[i] = static_cast<float>(score[static_cast<size_t>(order[i])] / sum) * kScale;
            }
        }
        const std::vector<float> got(chosen.begin(), chosen.end());
        OpError error = compare_close(got, want_chosen, 0, 0);
        error += compare_close(weights, want_weights, 0, 3e-5);
        return error;
    }

    RouterCudaSpec spec_;
    RouterCudaData data_;
    std::vector<float> host_bias_;
    DeviceArray<float> bias_;
    DeviceArray<int32_t> positions_, chosen_;
    DeviceArray<float> weights_;
};

inline std::vector<CudaOpCase> router_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](const RouterCudaSpec& spec, bool bench) {
        const RouterLogitsCudaSpec& p = spec.product;
        const int64_t products = p.float32 ? 2 : 1;
        const int64_t bytes = p.tokens * (p.width * 2 + spec.k * 8) + products * p.experts * p.width * 2;
        cases.push_back({fmt::format("tokens={} experts={} width={} k={}{}{}{}", p.tokens, p.experts, p.width,
                                     spec.k, p.workspace ? "" : " no workspace", p.ties ? " ties" : "",
                                     spec.bias ? "" : " no bias"),
                         p.float32 ? "float32" : "bfloat16", bench,
                         [=](const CudaCaseData& data) {
                             auto run = std::make_shared<RouterCudaCase>(data, spec);
                             return make_cuda_run(
                                 std::move(run), data.sets,
                                 {bytes, products * 2 * p.tokens * p.experts * p.width, CudaUnit::kBFloat16});
                         },
                         bytes});
    };
    for (const bool float32 : {false, true}) {
        add({{1, 16, 512, float32}, 4}, false);
        add({{33, 64, 1024, float32}, 32}, false);
        add({{64, 256, 1536, float32}, 7}, false);
        add({{65, 192, 512, float32}, 8}, false);
        add({{9, 10, 72, float32}, 10}, false);
        add({{300, 100, 1088, float32}, 8}, false);
        for (const int64_t tokens : {40, 400, 1100}) {
            add({{tokens, 192, 640, float32, true}, 8}, false);
        }
        for (const int64_t tokens : {130, 999, 2047, 2500}) {
            add({{tokens, 180, 1088, float32}, 8}, false);
        }
        add({{2049, 63, 576, float32}, 32}, false);
        for (const int64_t tokens : {40, 600}) {
            add({{tokens, 192, 640, float32, false, /*workspace=*/false}, 8}, false);
        }
        for (const int64_t tokens : {4097, 6000}) {
            add({{tokens, 192, 1088, float32}, 8}, false);
        }
        // Each kernel that chooses in one launch with the product, and those that do not.
        for (const int64_t tokens : {9, 100, 500, 1000, 2000, 2500, 4200}) {
            for (const bool bias : {false, true}) {
                add({{.tokens = tokens, .experts = 192, .width = 512, .float32 = float32, .ties = true},
                     8,
                     bias},
                    false);
            }
        }
        for (const int64_t tokens : {1, 8, 64, 128, 512, 1024, 2048, 4096}) {
            add({{tokens, 192, 4096, float32}, 8}, true);
        }
    }
    add({{65536, 192, 512}, 8}, false);
    return cases;
}

}  // namespace tessera
