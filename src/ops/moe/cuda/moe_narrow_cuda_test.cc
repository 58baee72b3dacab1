// Narrow fp8 experts of the size that a rank has: the rows of out are more than what is kept, and are dropped
// once they are added.
#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <vector>

#include "device/cuda/graph.h"
#include "device/cuda/stream.h"
#include "ops/common/cuda/device_testing.h"
#include "ops/cuda/cuda_noise.h"
#include "ops/moe/cuda/moe_cuda.h"

namespace tessera {
namespace {

constexpr int64_t kTokens = 930;  // with the shared expert just under what is taken
constexpr int64_t kExperts = 192;
constexpr int64_t kHidden = 4096;
constexpr int64_t kWidth = 192;
constexpr int64_t kK = 8;

class NarrowLayer {
  public:
    explicit NarrowLayer(int64_t shared_width) {
        const auto weights = [this](int64_t count) {
            uint8_t* to = arena_.poisoned<uint8_t>(count);
            fill_noise_cuda(stream_.get(), to, count, {++seed_, 1.0f, DType::kFloat8E4M3});
            return to;
        };
        const auto scales = [this](int64_t count, float scale) {
            return arena_.upload(std::vector<float>(static_cast<size_t>(count), scale));
        };
        weights_ = moe_cuda_bind({.dtype = DType::kFloat8E4M3,
                                  .hidden = kHidden,
                                  .experts = kExperts,
                                  .width = kWidth,
                                  .shared_width = shared_width,
                                  .gate_up = weights(kExperts * 2 * kWidth * kHidden),
                                  .down = weights(kExperts * kWidth * kHidden),
                                  .shared_gate_up = weights(2 * shared_width * kHidden),
                                  .shared_down = weights(shared_width * kHidden),
                                  .gate_up_scale = scales(2 * kExperts, 1.0f / 64),
                                  .down_scale = scales(kExperts, 1.0f / 14),
                                  .down_input_scale = scales(kExperts, 0.02f),
                                  .shared_gate_up_scale = scales(2, 1.0f / 64),
                                  .shared_down_scale = scales(1, 1.0f / 14),
                                  .shared_down_input_scale = scales(1, 0.02f),
                                  .input_scale = 0.011f,
                                  .shared_input_scale = 0.011f});
        x_ = arena_.poisoned<uint16_t>(kTokens * kHidden);
        fill_noise_cuda(stream_.get(), x_, kTokens * kHidden, {++seed_, 1.0f, DType::kBFloat16});
        y_ = arena_.poisoned<uint16_t>(kTokens * kHidden);
        workspace_ = arena_.poisoned<std::byte>(moe_cuda_workspace_bytes(weights_.tensors, kTokens, kK));
        std::mt19937 random(7);
        std::vector<int32_t> ids(kExperts);
        std::iota(ids.begin(), ids.end(), 0);
        for (int64_t t = 0; t < kTokens; ++t) {
            std::shuffle(ids.begin(), ids.end(), random);
            std::sort(ids.begin(), ids.begin() + kK);
            chosen_.insert(chosen_.end(), ids.begin(), ids.begin() + kK);
        }
        d_chosen_ = arena_.upload(chosen_);
        shares_ = scales(kTokens * kK, 0.2f);
    }

    // y of some tokens, after as many calls.
    std::vector<uint16_t> run(int64_t first, int64_t tokens, int calls) {
        fill_noise_cuda(stream_.get(), y_, tokens * kHidden, {99, 1.0f, DType::kBFloat16}, first * kHidden);
        const MoeCudaArgs args{.weights = &weights_,
                               .x = x_ + first * kHidden,
                               .tokens = tokens,
                               .k = kK,
                               .chosen = d_chosen_ + first * kK,
                               .expert_weights = shares_,
                               .y = y_,
                               .workspace = workspace_,
                               .sm_count = device_sm_count(),
                               .batch_invariant = true};
        const Graph graph = Graph::capture(stream_.get(), [&] {
            for (int i = 0; i < calls; ++i) {
                moe_cuda(stream_.get(), args);
            }
        });
        graph.launch(stream_.get());
        stream_.synchronize();
        return DeviceArena::download(y_, tokens * kHidden);
    }

  private:
    DeviceArena arena_;
    Stream stream_;
    uint64_t seed_ = 0;
    MoeCudaWeights weights_;
    uint16_t* x_ = nullptr;
    uint16_t* y_ = nullptr;
    std::byte* workspace_ = nullptr;
    std::vector<int32_t> chosen_;
    const int32_t* d_chosen_ = nullptr;
    const float* shares_ = nullptr;
};

TEST(MoeNarrowCuda, many_tokens_have_the_bits_of_few) {
    for (const int64_t shared_width : {int64_t{0}, kWidth}) {
        NarrowLayer layer(shared_width);
        for (const int64_t tokens : {kTokens, int64_t{300}}) {
            const std::vector<uint16_t> all = layer.run(0, tokens, 3);
            EXPECT_TRUE(
                std::all_of(all.begin(), all.end(), [](uint16_t v) { return (v & 0x7F80) != 0x7F80; }));
            // By clusters whose rows are kept, and by tiles.
            for (const int64_t part : {100, 3}) {
                for (int64_t first = 0; first + part <= tokens; first += 100) {
                    const std::vector<uint16_t> some = layer.run(first, part, 3);
                    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + first * kHidden))
                        << part << " from " << first << " on of " << tokens;
                }
            }
        }
    }
}

}  // namespace
}  // namespace tessera
