// The model's promises that need no reference outputs: a token's bits depend on its sequence alone, pages
// hold what the format says, and what cannot be computed is refused. On the demonstration model, and on a
// tiny random one.
#include "model/hy3_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <string>

#include "device/host_buffer.h"
#include "model/tiny_model.h"
#include "weights/loader.h"

namespace tessera {
namespace {

class Pool {
  public:
    Pool(const PageFormat& format, int64_t pages) : stride_(format.page_bytes()), memory_(pages * stride_) {
        std::memset(memory_.data(), 0xFF,
                    static_cast<size_t>(memory_.bytes()));  // NaN where nothing is written
    }
    PagePoolView view() const { return {memory_.data(), stride_}; }
    std::vector<PageId> take(int64_t tokens) {
        std::vector<PageId> pages;
        for (int64_t i = 0; i <= tokens / kPageTokens; ++i) {
            pages.push_back(next_++);
        }
        std::reverse(pages.begin(), pages.end());
        return pages;
    }

  private:
    int64_t stride_ = 0;
    HostBuffer memory_;
    PageId next_ = 0;
};

std::vector<TokenId> random_tokens(int64_t count, int64_t vocab, uint64_t seed) {
    std::vector<TokenId> tokens;
    for (int64_t i = 0; i < count; ++i) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        tokens.push_back(static_cast<TokenId>((seed >> 33) % static_cast<uint64_t>(vocab)));
    }
    return tokens;
}

// Hidden states and logits of every token of one sequence, run in chunks of at most `chunk` tokens.
struct Outputs {
    std::vector<float> logits, hidden, mtp_logits;
    bool operator==(const Outputs&) const = default;
};

// The mean magnitude of what differs between the hidden states, over that of `b`'s.
double difference(const Outputs& a, const Outputs& b) {
    double difference = 0;
    double size = 0;
    for (size_t i = 0; i < b.hidden.size(); ++i) {
        difference += std::fabs(static_cast<double>(a.hidden[i]) - b.hidden[i]);
        size += std::fabs(static_cast<double>(b.hidden[i]));
    }
    return difference / size;
}

class HyModelTest : public ::testing::Test {
  protected:
    void open(const ModelOptions& options, int threads = 2) {
        pool_threads_ = std::make_unique<ThreadPool>(threads);
        Result<std::unique_ptr<Hy3Model>> made =
            Hy3Model::create(tiny_.config, tiny_.weights, options, *pool_threads_);
        ASSERT_TRUE(made.ok()) << made.status().message();
        model_ = made.take();
    }

    Outputs run_alone(const std::vector<TokenId>& tokens, size_t chunk) {
        const auto vocab = static_cast<size_t>(tiny_.config.vocab_size);
        const auto hidden = static_cast<size_t>(tiny_.config.hidden_size);
        const auto count = tokens.size();
        Pool pool(model_->page_format(), 16);
        const std::vector<PageId> pages = pool.take(static_cast<int64_t>(count) + 1);
        Outputs out{std::vector<float>(count * vocab), std::vector<float>(count * hidden),
                    std::vector<float>(count * vocab)};
        for (size_t at = 0; at < count; at += chunk) {
            const size_t n = std::min(chunk, count - at);
            std::vector<int32_t> rows(n);
            for (size_t i = 0; i < n; ++i) {
                rows[i] = static_cast<int32_t>(i);
            }
            const SequenceSpan span{0, static_cast<int32_t>(n), static_cast<int32_t>(at), pages};
            model_->forward({{tokens.data() + at, n}, {&span, 1}, rows, pool.view()},
                            {&out.logits[at * vocab], &out.hidden[at * hidden]});
            std::vector<TokenId> next(tokens.begin() + static_cast<int64_t>(at),
                                      tokens.begin() + static_cast<int64_t>(at + n));
            model_->mtp_forward({&out.hidden[at * hidden], next, {&span, 1}, rows, pool.view()},
                                {&out.mtp_logits[at * vocab], nullptr});
        }
        return out;
    }

    TinyModel tiny_;
    std::unique_ptr<ThreadPool> pool_threads_;
    std::unique_ptr<Hy3Model> model_;
};

TEST_F(HyModelTest, ChunkingAndThreadsChangeNoBit) {
    const std::vector<TokenId> tokens = random_tokens(330, tiny_.config.vocab_size, 1);
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        open({.kv_dtype = dtype});
        const Outputs whole = run_alone(tokens, tokens.size());
        for (float value : whole.logits) {
            ASSERT_TRUE(std::isfinite(value));
        }
        for (size_t chunk : {1, 7, 64, 100}) {
            EXPECT_EQ(run_alone(tokens, chunk), whole) << dtype_name(dtype) << " in chunks of " << chunk;
        }
        open({.kv_dtype = dtype}, 5);
        EXPECT_EQ(run_alone(tokens, tokens.size()), whole) << dtype_name(dtype) << " on 5 threads";
    }
}

TEST_F(HyModelTest, CompanyChangesNoBit) {
    open({.kv_dtype = DType::kBFloat16});
    const auto vocab = static_cast<size_t>(tiny_.config.vocab_size);
    constexpr size_t kSequences = 17;
    Pool pool(model_->page_format(), 64);
    std::vector<std::vector<TokenId>> prompts;
    std::vector<std::vector<PageId>> pages;
    std::vector<TokenId> batch;
    std::vector<SequenceSpan> spans;
    std::vector<int32_t> last_rows;
    for (size_t s = 0; s < kSequences; ++s) {
        const auto length = static_cast<int64_t>(1 + s * 11 % 97);
        prompts.push_back(random_tokens(length, tiny_.config.vocab_size, s + 10));
        pages.push_back(pool.take(length + 1));
        spans.push_back({static_cast<int32_t>(batch.size()), static_cast<int32_t>(length), 0, pages.back()});
        batch.insert(batch.end(), prompts.back().begin(), prompts.back().end());
        last_rows.push_back(static_cast<int32_t>(batch.size()) - 1);
    }
    std::vector<float> logits(kSequences * vocab);
    model_->forward({batch, spans, last_rows, pool.view()}, {logits.data(), nullptr});
    // One more token each, as a decode step: token 5.
    std::vector<SequenceSpan> decode;
    std::vector<int32_t> rows;
    for (size_t s = 0; s < kSequences; ++s) {
        decode.push_back({static_cast<int32_t>(s), 1, spans[s].q_len, pages[s]});
        rows.push_back(static_cast<int32_t>(s));
    }
    std::vector<float> decoded(kSequences * vocab);
    model_->forward({std::vector<TokenId>(kSequences, 5), decode, rows, pool.view()},
                    {decoded.data(), nullptr});
    for (size_t s = 0; s < kSequences; ++s) {
        prompts[s].push_back(5);
        const Outputs alone = run_alone(prompts[s], prompts[s].size());
        const size_t length = prompts[s].size();
        EXPECT_EQ(std::memcmp(&alone.logits[(length - 2) * vocab], &logits[s * vocab], vocab * 4), 0) << s;
        EXPECT_EQ(std::memcmp(&alone.logits[(length - 1) * vocab], &decoded[s * vocab], vocab * 4), 0) << s;
    }
}

TEST_F(HyModelTest, APagesTrailerIsTheHiddenStateOfItsLastToken) {
    open({});
    const auto hidden = static_cast<size_t>(tiny_.config.hidden_size);
    const std::vector<TokenId> tokens = random_tokens(150, tiny_.config.vocab_size, 3);
    Pool pool(model_->page_format(), 4);
    const std::vector<PageId> pages = pool.take(150);
    std::vector<float> states(150 * hidden);
    int32_t at = 0;
    for (int32_t n : {30, 34, 70, 16}) {  // ends inside, at, and past the end of a page
        const SequenceSpan span{0, n, at, pages};
        model_->forward({{tokens.data() + at, static_cast<size_t>(n)}, {&span, 1}, {}, pool.view()},
                        {nullptr, &states[static_cast<size_t>(at) * hidden]});
        at += n;
    }
    const PagePoolView view = pool.view();
    const auto trailer = [&](size_t page) {
        return view.data + pages[page] * view.stride_bytes + model_->page_format().trailer_offset();
    };
    EXPECT_EQ(std::memcmp(trailer(0), &states[63 * hidden], hidden * 4), 0);
    EXPECT_EQ(std::memcmp(trailer(1), &states[127 * hidden], hidden * 4), 0);
    float untouched = 0;
    std::memcpy(&untouched, trailer(2), 4);
    EXPECT_TRUE(std::isnan(untouched));
}

TEST_F(HyModelTest, WeightDtypesThatMeanTheSameGiveTheSameBits) {
    open({});
    const std::vector<TokenId> tokens = random_tokens(40, tiny_.config.vocab_size, 4);
    const Outputs bf16 = run_alone(tokens, 40);
    tiny_ = TinyModel({.dtype = DType::kFloat32});
    open({});
    EXPECT_EQ(run_alone(tokens, 40), bf16);
}

// Routed and shared experts are added in float32 whether the checkpoint asks for it or not.
TEST_F(HyModelTest, Fp32CombineChangesNoBit) {
    const std::vector<TokenId> tokens = random_tokens(20, tiny_.config.vocab_size, 6);
    open({});
    const Outputs without = run_alone(tokens, 7);
    tiny_.config.moe_fp32_combine = true;
    open({});
    EXPECT_TRUE(run_alone(tokens, 7) == without);
}

TEST_F(HyModelTest, Fp8EmulationIsCloseToWeightOnlyAndDiffers) {
    tiny_ = TinyModel({.dtype = DType::kFloat8E4M3});
    const std::vector<TokenId> tokens = random_tokens(40, tiny_.config.vocab_size, 4);
    open({});
    const Outputs emulated = run_alone(tokens, 40);
    EXPECT_EQ(run_alone(tokens, 9), emulated);
    open({.weight_only = true});
    const Outputs weight_only = run_alone(tokens, 40);
    EXPECT_NE(emulated, weight_only);
    EXPECT_LT(difference(emulated, weight_only), 0.1);
}

TEST_F(HyModelTest, ExpertsInFp8BlocksDifferFromBFloat16ByTheirActivations) {
    // Blocks of 128 that end early in both directions.
    TinyModelSpec spec{.experts = TinyExperts::kExactBFloat16, .hidden_size = 200, .expert_width = 136};
    tiny_ = TinyModel(spec);
    const std::vector<TokenId> tokens = random_tokens(40, tiny_.config.vocab_size, 4);
    open({});
    const Outputs plain = run_alone(tokens, 40);
    std::vector<Outputs> emulated;
    for (const TinyExperts form : {TinyExperts::kFp8Blocks, TinyExperts::kFp8OneScale}) {
        spec.experts = form;
        tiny_ = TinyModel(spec);
        open({.weight_only = true});
        EXPECT_LT(difference(run_alone(tokens, 40), plain), 1e-5);
        open({});
        emulated.push_back(run_alone(tokens, 40));
        EXPECT_EQ(run_alone(tokens, 9), emulated.back());
        EXPECT_LT(difference(emulated.back(), plain), 0.1);
        EXPECT_GT(difference(emulated.back(), plain), 1e-4);
    }
    // Scales that are powers of two round nothing.
    EXPECT_EQ(emulated[0], emulated[1]);
}

TEST_F(HyModelTest, ExpertsOfTwoFormsAreRefused) {
    tiny_ = TinyModel({.experts = TinyExperts::kFp8Blocks});
    tiny_.weights.layers[1].moe->experts[2].up.blocks.reset();
    ThreadPool threads(1);
    const auto made = Hy3Model::create(tiny_.config, tiny_.weights, {}, threads);
    ASSERT_FALSE(made.ok());
    EXPECT_THAT(made.status().message(), ::testing::HasSubstr("model.layers.1.mlp.experts.2.gate_proj"));
}

TEST_F(HyModelTest, RefusesWhatItCannotCompute) {
    ThreadPool threads(1);
    const auto refusal = [&](const ModelConfig& config, const ModelOptions& options) {
        const auto made = Hy3Model::create(config, tiny_.weights, options, threads);
        return made.ok() ? std::string("accepted") : made.status().message();
    };
    ModelConfig config = tiny_.config;
    config.head_dim = 40;
    EXPECT_THAT(refusal(config, {}), ::testing::HasSubstr("head_dim"));
    config = tiny_.config;
    config.router_sigmoid = false;
    EXPECT_THAT(refusal(config, {}), ::testing::HasSubstr("moe_router_use_sigmoid"));
    config = tiny_.config;
    config.num_experts_per_token = config.num_experts + 1;
    EXPECT_THAT(refusal(config, {}), ::testing::HasSubstr("num_experts_per_tok"));
    EXPECT_THAT(refusal(tiny_.config, {.kv_dtype = DType::kFloat16}), ::testing::HasSubstr("KV cache"));
    EXPECT_THAT(refusal(tiny_.config, {.tokens_max = 0}), ::testing::HasSubstr("batch"));
    tiny_.weights.layers[1].attention.k.input_scale = 0.5f;
    EXPECT_THAT(refusal(tiny_.config, {}), ::testing::HasSubstr("model.layers.1.self_attn"));
}

TEST(DemoModel, LoadsAndIsBatchInvariantInBFloat16Pages) {
    Result<LoadedModel> loaded = load_model(std::string(TESSERA_SOURCE_DIR) + "/models/demo");
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    ThreadPool threads(2);
    auto model =
        Hy3Model::create(loaded->config, loaded->weights, {.kv_dtype = DType::kBFloat16}, threads).take();
    const std::vector<TokenId> tokens = random_tokens(100, 4000, 8);
    std::vector<float> whole(4096);
    std::vector<float> chunked(4096);
    Pool pool(model->page_format(), 4);
    const std::vector<PageId> first = pool.take(100);
    const std::vector<PageId> second = pool.take(100);
    const SequenceSpan all{0, 100, 0, first};
    const int32_t row = 99;
    model->forward({tokens, {&all, 1}, {&row, 1}, pool.view()}, {whole.data(), nullptr});
    const SequenceSpan begin{0, 37, 0, second};
    const SequenceSpan end{0, 63, 37, second};
    const int32_t last = 62;
    model->forward({{tokens.data(), 37}, {&begin, 1}, {}, pool.view()}, {});
    model->forward({{tokens.data() + 37, 63}, {&end, 1}, {&last, 1}, pool.view()}, {chunked.data(), nullptr});
    EXPECT_EQ(whole, chunked);
}

}  // namespace
}  // namespace tessera
