// The cases of router_topk.
#pragma once

#include <fmt/format.h>
#include <memory>
#include <vector>

#include "ops/op_case.h"
#include "ops/router_topk/router_topk.h"

namespace tessera {

struct RouterTopkCase {
    RouterTopkCase(int64_t token_count, int64_t expert_count, int64_t chosen_count, bool with_bias,
                   uint64_t seed = 5)
        : tokens(token_count), experts(expert_count), k(chosen_count), bias_used(with_bias) {
        OpRandom random(seed);
        logits.resize(static_cast<size_t>(tokens * experts));
        bias.resize(static_cast<size_t>(experts));
        random.fill(logits, 4);
        random.fill(bias, 0.1f);
        for (size_t i = 0; i + 1 < logits.size(); i += 3) {
            logits[i + 1] = logits[i];  // ties, where there is no bias
        }
    }
    RouterTopkArgs args() {
        chosen.assign(static_cast<size_t>(tokens * k), -1);
        weights.assign(static_cast<size_t>(tokens * k), -1.0f);
        return {.logits = logits.data(),
                .logits_stride = experts,
                .bias = bias_used ? bias.data() : nullptr,
                .tokens = tokens,
                .experts = experts,
                .k = k,
                .normalise = true,
                .scale = 2.826f,
                .chosen = chosen.data(),
                .weights = weights.data()};
    }
    // Experts and weights as one list of floats.
    std::vector<float> result() const {
        std::vector<float> out(chosen.begin(), chosen.end());
        out.insert(out.end(), weights.begin(), weights.end());
        return out;
    }

    int64_t tokens, experts, k;
    bool bias_used;
    std::vector<float> logits, bias, weights;
    std::vector<int32_t> chosen;
};

inline std::vector<OpCase> router_topk_cases() {
    std::vector<OpCase> cases;
    const auto add = [&](int64_t tokens, int64_t experts, int64_t k, bool bench) {
        for (bool bias : {true, false}) {
            OpCase c;
            c.shape = fmt::format("tokens={} experts={} k={}{}", tokens, experts, k, bias ? " bias" : "");
            c.dtype = "float32";
            c.bench = bench && bias;
            c.prepare = [=] {
                auto data = std::make_shared<RouterTopkCase>(tokens, experts, k, bias);
                const RouterTopkArgs args = data->args();
                OpCaseRun run;
                run.bytes = tokens * (experts + 2 * k) * 4;
                run.flops = tokens * experts * 20;
                run.run = [data, args](OpContext& context) { router_topk(context, args); };
                run.check = [data](OpContext& context) {
                    router_topk(context, data->args());
                    const std::vector<float> got = data->result();
                    router_topk_ref(data->args());
                    return compare(got, data->result(), 0);
                };
                return run;
            };
            cases.push_back(std::move(c));
        }
    };
    add(1, 1, 1, false);
    add(65, 63, 63, false);
    add(127, 129, 7, false);
    add(1, 16, 4, true);
    add(2048, 16, 4, true);
    add(256, 192, 8, true);
    return cases;
}

}  // namespace tessera
