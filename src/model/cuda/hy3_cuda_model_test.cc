#include "model/cuda/hy3_cuda_model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "device/cuda/device_props.h"
#include "device/memory_budget.h"
#include "model/tiny_model.h"

namespace tessera {
namespace {

constexpr int32_t kTokens = 200;

class CudaModelTest : public ::testing::Test {
  protected:
    Result<std::unique_ptr<CudaModel>> create(const ModelConfig& config, const ModelWeights& weights,
                                              const DeviceProps& device) {
        return CudaModel::create(
            config, weights,
            {.model = {.kv_dtype = DType::kBFloat16, .tokens_max = 256}, .positions_max = 1024}, device,
            budget_);
    }

    MemoryBudget budget_{int64_t{1} << 34};
};

// Of the last token of a prompt in two chunks.
std::vector<float> logits_of(Hy3Model& model, PagePoolView pool) {
    std::vector<TokenId> tokens;
    for (int32_t i = 0; i < kTokens; ++i) {
        tokens.push_back((i * 37 + i / 7) % 256);
    }
    std::vector<PageId> pages(static_cast<size_t>(kTokens / kPageTokens + 1));
    std::iota(pages.rbegin(), pages.rend(), 0);
    std::vector<float> logits(256);
    for (const auto& [first, count] : {std::pair{0, 130}, {130, kTokens - 130}}) {
        const SequenceSpan span{0, count, first, pages};
        const int32_t row = count - 1;
        model.forward({{tokens.data() + first, static_cast<size_t>(count)}, {&span, 1}, {&row, 1}, pool},
                      {logits.data(), nullptr});
    }
    return logits;
}

// Every row differs where a query head read the K and V of another group. bfloat16 activations differ from
// the CPU's float32 ones by about a hundredth.
TEST_F(CudaModelTest, computes_what_the_cpu_does_with_1_to_16_query_heads_for_each_kv_head) {
    ThreadPool threads(2);
    const Result<DeviceProps> device = open_device(0);
    ASSERT_TRUE(device.ok()) << device.status().message();
    for (const int64_t group : {1, 7, 8, 12, 16}) {
        const TinyModel tiny({.device_group = group});
        const auto cpu = Hy3Model::create(tiny.config, tiny.weights, {.kv_dtype = DType::kBFloat16}, threads);
        ASSERT_TRUE(cpu.ok()) << cpu.status().message();
        const auto cuda = create(tiny.config, tiny.weights, *device);
        ASSERT_TRUE(cuda.ok()) << cuda.status().message();
        std::vector<float> logits[2];
        int i = 0;
        for (Hy3Model* model : {cpu->get(), static_cast<Hy3Model*>(cuda->get())}) {
            const auto pool = model->make_pool(8);
            ASSERT_TRUE(pool.ok()) << pool.status().message();
            logits[i++] = logits_of(*model, (*pool)->view());
        }
        double difference = 0;
        double norm = 0;
        for (size_t t = 0; t < logits[0].size(); ++t) {
            difference += std::pow(static_cast<double>(logits[0][t]) - logits[1][t], 2);
            norm += std::pow(static_cast<double>(logits[0][t]), 2);
        }
        const double error = std::sqrt(difference / norm);
        std::printf("group %d: relative error of the logits %.2e\n", static_cast<int>(group), error);
        EXPECT_LT(error, 5e-2) << "group " << group;
    }
}

TEST_F(CudaModelTest, refuses_other_numbers_of_query_heads_and_says_which_it_takes) {
    const auto refusal = [&](const ModelConfig& refused) {  // before it looks at a device
        const auto made = create(refused, {}, {});
        return made.ok() ? "accepted" : made.status().message();
    };
    ModelConfig config = TinyModel({.device_group = 8}).config;
    const auto needs = ::testing::HasSubstr("the CUDA backend needs 1 to 16 times num_key_value_heads (2)");
    for (const int64_t heads : {0, 13, 34, 64}) {
        config.num_heads = heads;
        EXPECT_THAT(refusal(config), needs) << heads;
        EXPECT_THAT(refusal(config), ::testing::HasSubstr("num_attention_heads is")) << heads;
    }
    config.num_kv_heads = 0;
    EXPECT_THAT(refusal(config), ::testing::HasSubstr("num_attention_heads is"));
}

}  // namespace
}  // namespace tessera
