// What the CUDA backend refuses, before it touches a device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/cuda/hy3_cuda_model.h"
#include "ops/moe/cuda/moe_cuda.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelConfig served_config() {
    ModelConfig config;
    config.vocab_size = 1024;
    config.hidden_size = 256;
    config.intermediate_size = 256;
    config.moe_intermediate_size = 128;
    config.num_layers = 2;
    config.num_heads = 4;
    config.num_kv_heads = 1;
    config.head_dim = 128;
    config.num_experts = 8;
    config.num_experts_per_token = 2;
    config.num_shared_experts = 1;
    config.first_k_dense = 1;
    return config;
}

// The kernels take bfloat16 pages and one sequence.
CudaModelOptions served_options() {
    CudaModelOptions options;
    options.model.kv_dtype = DType::kBFloat16;
    options.positions_max = 64;
    return options;
}

std::string refusal(const ModelConfig& config, const CudaModelOptions& options) {
    MemoryBudget budget(0);
    return CudaModel::create(config, {}, options, {}, budget).status().message();
}

TEST(CudaModelRefuses, more_tokens_in_a_step_than_the_experts_take) {
    CudaModelOptions options = served_options();
    options.model.tokens_max = static_cast<int32_t>(kMoeCudaTokensMax + 1);
    EXPECT_THAT(refusal(served_config(), options),
                AllOf(HasSubstr("--max-num-batched-tokens) is 65536"), HasSubstr("at most 65535")));
}

// So what is refused above is refused for nothing else; nor is a sum in float32, which has the same bits.
TEST(CudaModelRefuses, none_of_it_when_only_the_cache_is_wrong) {
    CudaModelOptions options = served_options();
    options.model.tokens_max = static_cast<int32_t>(kMoeCudaTokensMax);
    options.model.kv_dtype = DType::kFloat32;
    ModelConfig config = served_config();
    config.moe_fp32_combine = true;
    EXPECT_THAT(refusal(config, options), HasSubstr("the KV cache's dtype is float32"));
}

}  // namespace
}  // namespace tessera
