// The model on the CPU in float32 against the reference outputs (data/README.md says how close it must be).
#include <algorithm>
#include <numeric>

#include "model_harness.h"

namespace tessera::golden {
namespace {

constexpr double kClose = 1e-3;
constexpr double kNllClose = 1e-5;
constexpr double kMarginExcused = 2e-3;  // a greedy token may differ where the reference itself nearly ties
constexpr double kRoutingTie = 1e-5;     // a chosen expert may flip at such a margin

struct Case {
    std::string name;
    std::vector<TokenId> prompt;
    std::vector<int32_t> positions;
    std::vector<std::vector<TokenId>> top_ids, mtp_top_ids;
    std::vector<std::vector<double>> top_logprobs;
    double nll_mean = 0;
    std::vector<TokenId> greedy;
    std::vector<double> margins;
};

template <typename T>
std::vector<std::vector<T>> table(const json::Value& rows) {
    std::vector<std::vector<T>> out;
    for (const json::Value& row : rows.items()) {
        out.push_back(numbers<T>(row));
    }
    return out;
}

std::vector<Case> read_cases() {
    const json::Value root = json::parse(read_file(data_path("model.json"))).take();
    std::vector<Case> cases;
    for (const json::Value& item : root.find("cases")->items()) {
        Case c;
        c.name = item.find("name")->as_string();
        c.prompt = numbers<TokenId>(*item.find("prompt_ids"));
        c.positions = numbers<int32_t>(*item.find("positions"));
        c.top_ids = table<TokenId>(*item.find("top_ids"));
        c.mtp_top_ids = table<TokenId>(*item.find("mtp_top_ids"));
        c.top_logprobs = table<double>(*item.find("top_logprobs"));
        c.nll_mean = item.find("nll_mean")->as_double();
        if (const json::Value* greedy = item.find("greedy_ids"); greedy != nullptr) {
            c.greedy = numbers<TokenId>(*greedy);
            c.margins = numbers<double>(*item.find("greedy_margins"));
        }
        if (c.prompt.size() <= 2048) {  // the 31K-token prompt takes minutes: it is run by hand
            cases.push_back(std::move(c));
        }
    }
    return cases;
}

Engine& engine() {
    static Engine instance;
    return instance;
}

// The first position at which some MoE layer chose its experts by a margin below kRoutingTie.
int32_t first_routing_tie(const ForwardTrace& trace, const ModelWeights& weights, const ModelConfig& config) {
    const auto experts = static_cast<size_t>(config.num_experts);
    const auto k = static_cast<size_t>(config.num_experts_per_token);
    int32_t first = std::numeric_limits<int32_t>::max();
    for (size_t layer = 0; layer < trace.router_logits.size(); ++layer) {
        const std::vector<float>& logits = trace.router_logits[layer];
        for (size_t t = 0; t < logits.size() / experts; ++t) {
            std::vector<double> keys(experts);
            for (size_t e = 0; e < experts; ++e) {
                const auto* bias = static_cast<const float*>(weights.layers[layer].moe->expert_bias.data);
                keys[e] = 1 / (1 + std::exp(-double{logits[t * experts + e]})) + bias[e];
            }
            std::sort(keys.rbegin(), keys.rend());
            if (keys[k - 1] - keys[k] < kRoutingTie) {
                first = std::min(first, static_cast<int32_t>(t));
            }
        }
    }
    return first;
}

double max_difference(const std::vector<float>& a, const std::vector<float>& b) {
    EXPECT_EQ(a.size(), b.size());
    double worst = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        const double difference = std::abs(double{a[i]} - double{b[i]});
        worst = difference > worst || std::isnan(difference) ? difference : worst;
    }
    return worst;
}

TEST(GoldenModel, LogProbabilitiesAndNll) {
    Engine& e = engine();
    const auto vocab = static_cast<size_t>(e.loaded.config.vocab_size);
    double worst = 0;
    int flips = 0;
    for (const Case& c : read_cases()) {
        SCOPED_TRACE(c.name);
        Sequence sequence(*e.model, static_cast<int64_t>(c.prompt.size()));
        ForwardTrace trace;
        const Sequence::Output output = sequence.extend(c.prompt, &trace);
        const int32_t tie = first_routing_tie(trace, e.loaded.weights, e.loaded.config);
        for (size_t i = 0; i < c.positions.size(); ++i) {
            const int32_t t = c.positions[i];
            const std::vector<double> logprobs =
                log_softmax(&output.logits[static_cast<size_t>(t) * vocab], vocab);
            double miss = 0;
            for (size_t j = 0; j < c.top_ids[i].size(); ++j) {
                miss = std::max(
                    miss, std::abs(logprobs[static_cast<size_t>(c.top_ids[i][j])] - c.top_logprobs[i][j]));
            }
            if (miss > kClose && t >= tie) {
                ++flips;
                continue;
            }
            EXPECT_LE(miss, kClose) << "at position " << t << ", first routing tie at " << tie;
            worst = std::max(worst, miss);
        }
        double nll = 0;
        for (size_t t = 0; t + 1 < c.prompt.size(); ++t) {
            nll -= log_softmax(&output.logits[t * vocab], vocab)[static_cast<size_t>(c.prompt[t + 1])];
        }
        nll /= static_cast<double>(c.prompt.size() - 1);
        EXPECT_NEAR(nll, c.nll_mean, kNllClose);
    }
    RecordProperty("worst_logprob_error", std::to_string(worst));
    RecordProperty("positions_after_a_routing_flip", flips);
    std::cout << "worst log-probability error " << worst << ", positions past a routing flip " << flips
              << "\n";
}

TEST(GoldenModel, HiddenStatesRouterAndMtpLogitsOfHello) {
    Engine& e = engine();
    auto tensors = read_tensors(data_path("model.safetensors"));
    const std::vector<Case> cases = read_cases();
    const Case& c = cases.front();
    ASSERT_EQ(c.name, "hello");
    Sequence sequence(*e.model, static_cast<int64_t>(c.prompt.size()));
    ForwardTrace trace;
    const Sequence::Output output = sequence.extend(c.prompt, &trace);
    EXPECT_LE(max_difference(output.logits, tensors["hello.logits"]), kClose);
    const auto layers = static_cast<size_t>(e.loaded.config.num_layers);
    ASSERT_EQ(trace.hidden.size(), layers + 1);
    for (size_t layer = 0; layer <= layers; ++layer) {
        EXPECT_LE(max_difference(trace.hidden[layer], tensors["hello.hidden." + std::to_string(layer)]),
                  kClose)
            << "after " << layer << " layers";
    }
    EXPECT_TRUE(trace.router_logits[0].empty());
    for (size_t layer = 1; layer < layers; ++layer) {
        EXPECT_LE(max_difference(trace.router_logits[layer],
                                 tensors["hello.router_logits." + std::to_string(layer)]),
                  kClose)
            << "layer " << layer;
    }
    std::vector<TokenId> next(c.prompt.begin() + 1, c.prompt.end());
    const auto vocab = static_cast<size_t>(e.loaded.config.vocab_size);
    next.push_back(argmax(&output.logits[(c.prompt.size() - 1) * vocab], vocab));
    EXPECT_LE(max_difference(sequence.mtp(output.hidden, next, 0).logits, tensors["hello.mtp_logits"]),
              kClose);
}

TEST(GoldenModel, LastLogitsAndMtp) {
    Engine& e = engine();
    auto tensors = read_tensors(data_path("model.safetensors"));
    const auto vocab = static_cast<size_t>(e.loaded.config.vocab_size);
    for (const Case& c : read_cases()) {
        SCOPED_TRACE(c.name);
        Sequence sequence(*e.model, static_cast<int64_t>(c.prompt.size()) + 1);
        ForwardTrace trace;
        const Sequence::Output output = sequence.extend(c.prompt, &trace);
        const int32_t tie = first_routing_tie(trace, e.loaded.weights, e.loaded.config);
        std::vector<TokenId> next(c.prompt.begin() + 1, c.prompt.end());
        const float* last = &output.logits[(c.prompt.size() - 1) * vocab];
        next.push_back(argmax(last, vocab));
        const Sequence::Output mtp = sequence.mtp(output.hidden, next, 0);
        int compared = 0;
        for (size_t i = 0; i < c.positions.size(); ++i) {
            // recall_1200 has a near tie inside the MTP layer too, at 181: past it the rows may differ.
            if (c.positions[i] >= tie || (c.name == "recall_1200" && c.positions[i] >= 181)) {
                continue;
            }
            const float* row = &mtp.logits[static_cast<size_t>(c.positions[i]) * vocab];
            std::vector<TokenId> order(vocab);
            std::iota(order.begin(), order.end(), 0);
            std::partial_sort(order.begin(), order.begin() + 4, order.end(), [&](TokenId a, TokenId b) {
                return row[a] != row[b] ? row[a] > row[b] : a < b;
            });
            for (size_t j = 0; j < c.mtp_top_ids[i].size(); ++j) {
                EXPECT_LE(std::abs(row[order[j]] - row[c.mtp_top_ids[i][j]]), kClose)
                    << "position " << c.positions[i] << " rank " << j;
            }
            ++compared;
        }
        EXPECT_GT(compared, 0);
        if (tie >= static_cast<int32_t>(c.prompt.size())) {
            EXPECT_LE(max_difference({last, last + vocab}, tensors[c.name + ".last_logits"]), kClose);
            const float* mtp_last = &mtp.logits[(c.prompt.size() - 1) * vocab];
            EXPECT_LE(max_difference({mtp_last, mtp_last + vocab}, tensors[c.name + ".mtp_last_logits"]),
                      kClose);
        }
    }
}

TEST(GoldenModel, GreedyTokens) {
    Engine& e = engine();
    const auto vocab = static_cast<size_t>(e.loaded.config.vocab_size);
    int compared = 0;
    for (const Case& c : read_cases()) {
        SCOPED_TRACE(c.name);
        if (c.greedy.empty()) {
            continue;
        }
        Sequence sequence(*e.model, static_cast<int64_t>(c.prompt.size() + c.greedy.size()));
        Sequence::Output output = sequence.extend(c.prompt);
        for (size_t i = 0; i < c.greedy.size(); ++i) {
            const TokenId token = argmax(&output.logits[output.logits.size() - vocab], vocab);
            if (token != c.greedy[i]) {
                EXPECT_LT(c.margins[i], kMarginExcused) << "generated token " << i;
                break;
            }
            ++compared;
            output = sequence.extend({token});
        }
    }
    EXPECT_GT(compared, 100);
}

}  // namespace
}  // namespace tessera::golden
