#include "model/observer.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>

#include "model/hy3_model.h"
#include "model/tiny_model.h"

namespace tessera {
namespace {

TEST(Magnitudes, quantiles_are_within_an_eighth_octave_above) {
    std::vector<float> values;
    for (int i = 1; i <= 1000; ++i) {
        values.push_back(static_cast<float>(i % 2 == 0 ? i : -i));
    }
    values.push_back(0);
    Magnitudes seen;
    seen.add(values.data(), 500);
    seen.add(values.data() + 500, 501);
    EXPECT_EQ(seen.count(), 1000);
    EXPECT_EQ(seen.largest(), 1000);
    EXPECT_EQ(seen.quantile(1), 1000);
    for (const double share : {0.001, 0.1, 0.5, 0.9, 0.999}) {
        const double exact = 1000 * share;
        EXPECT_GE(seen.quantile(share), exact);
        EXPECT_LE(seen.quantile(share), exact * 1.126);
    }
    EXPECT_TRUE(seen.finite());
}

TEST(Magnitudes, what_is_not_finite_is_told_and_is_not_the_largest) {
    for (const float wrong :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
        const float values[] = {2, wrong, -3};
        Magnitudes seen;
        seen.add(values, 3);
        EXPECT_FALSE(seen.finite());
        EXPECT_EQ(seen.largest(), 3);
        EXPECT_EQ(seen.quantile(1), 3);
    }
    EXPECT_EQ(Magnitudes().quantile(1), 0);
}

// One sequence through the tiny model, trunk and MTP layer.
struct Observed {
    explicit Observed(int32_t chunk) {
        Result<std::unique_ptr<Hy3Model>> model =
            Hy3Model::create(tiny.config, tiny.weights, {.tokens_max = 70, .observer = &observer}, threads);
        EXPECT_TRUE(model.ok()) << model.status().message();
        Result<std::unique_ptr<PagePool>> pool = (*model)->make_pool(2);
        std::vector<TokenId> tokens(70);
        std::iota(tokens.begin(), tokens.end(), 3);
        const std::vector<PageId> pages = {1, 0};
        std::vector<float> hidden(70 * static_cast<size_t>(tiny.config.hidden_size));
        for (int32_t begin = 0; begin < 70; begin += chunk) {
            const int32_t count = std::min(chunk, 70 - begin);
            const SequenceSpan span{.first = 0, .q_len = count, .position = begin, .pages = pages};
            const auto part =
                std::span(tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(count));
            (*model)->forward(
                {.tokens = part, .sequences = {&span, 1}, .logit_rows = {}, .pool = (*pool)->view()},
                {.logits = nullptr, .hidden = hidden.data()}, begin == 0 ? &trace : nullptr);
            (*model)->mtp_forward({.hidden = hidden.data(),
                                   .next_tokens = part,
                                   .sequences = {&span, 1},
                                   .logit_rows = {},
                                   .pool = (*pool)->view()},
                                  {});
        }
        const PagePoolView view = (*pool)->view();
        const PageFormat& format = (*model)->page_format();
        // The largest |K| and |V| of layer 1 in the pages.
        for (int32_t t = 0; t < 70; ++t) {
            const std::byte* page = view.data + pages[static_cast<size_t>(t / 64)] * view.stride_bytes;
            for (int64_t head = 0; head < format.kv_heads; ++head) {
                for (int64_t d = 0; d < format.head_dim; ++d) {
                    const int64_t at = (head * 64 + t % 64) * format.head_dim + d;
                    key = std::max(key,
                                   std::fabs(reinterpret_cast<const float*>(page + format.k_offset(1))[at]));
                    value = std::max(
                        value, std::fabs(reinterpret_cast<const float*>(page + format.v_offset(1))[at]));
                }
            }
        }
    }

    TinyModel tiny;
    ThreadPool threads{2};
    ActivationObserver observer;
    ForwardTrace trace;
    float key = 0, value = 0;
};

TEST(ActivationObserver, every_linear_of_every_layer_is_seen) {
    const Observed run(70);
    const ModelConfig& config = run.tiny.config;
    ASSERT_EQ(run.observer.layers.size(), 4);
    for (size_t i = 0; i < 4; ++i) {
        const LayerMagnitudes& layer = run.observer.layers[i];
        EXPECT_EQ(layer.attention_input.count(), 70 * config.hidden_size) << i;
        EXPECT_EQ(layer.output_input.count(), 70 * config.q_width()) << i;
        EXPECT_EQ(layer.key.count(), 70 * config.kv_width()) << i;
        EXPECT_EQ(layer.value.count(), 70 * config.kv_width()) << i;
        EXPECT_EQ(layer.mlp_input.count(), 70 * config.hidden_size) << i;
        // The padding of the SwiGLU outputs is zero and does not count.
        const int64_t shared =
            config.is_moe(static_cast<int64_t>(i)) ? config.shared_width() : config.intermediate_size;
        EXPECT_EQ(layer.shared_down_input.count(), 70 * shared) << i;
        EXPECT_EQ(layer.expert_down_input.count(), i == 0 ? 0 : 70 * 2 * config.moe_intermediate_size) << i;
        EXPECT_GT(layer.shared_down_input.largest(), 0) << i;
    }
    EXPECT_EQ(run.observer.layers[1].key.largest(), run.key);
    EXPECT_EQ(run.observer.layers[1].value.largest(), run.value);
}

TEST(ActivationObserver, chunks_change_nothing) {
    const Observed whole(70);
    const Observed pieces(9);
    for (size_t i = 0; i < 4; ++i) {
        for (const auto member : {&LayerMagnitudes::attention_input, &LayerMagnitudes::output_input,
                                  &LayerMagnitudes::key, &LayerMagnitudes::value, &LayerMagnitudes::mlp_input,
                                  &LayerMagnitudes::expert_down_input, &LayerMagnitudes::shared_down_input}) {
            EXPECT_EQ((whole.observer.layers[i].*member).count(),
                      (pieces.observer.layers[i].*member).count());
            EXPECT_EQ((whole.observer.layers[i].*member).largest(),
                      (pieces.observer.layers[i].*member).largest());
        }
    }
}

TEST(ActivationObserver, a_narrow_cache_is_refused) {
    const TinyModel tiny;
    ThreadPool threads(1);
    ActivationObserver observer;
    const auto model = Hy3Model::create(tiny.config, tiny.weights,
                                        {.kv_dtype = DType::kBFloat16, .observer = &observer}, threads);
    ASSERT_FALSE(model.ok());
    EXPECT_NE(model.status().message().find("calibration"), std::string::npos);
}

}  // namespace
}  // namespace tessera
