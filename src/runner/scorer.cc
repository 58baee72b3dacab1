#include "runner/scorer.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <numeric>

#include "base/check.h"

namespace tessera {

namespace {

// log_softmax in float32 with a float64 sum.
float log_sum_exp(std::span<const float> logits) {
    const float top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const float logit : logits) {
        sum += std::exp(static_cast<double>(logit - top));
    }
    return top + static_cast<float>(std::log(sum));
}

}  // namespace

std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, int32_t count) {
    std::vector<TokenId> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    const auto end = ids.begin() + std::min<std::ptrdiff_t>(count, static_cast<std::ptrdiff_t>(ids.size()));
    std::partial_sort(ids.begin(), end, ids.end(), [&](TokenId a, TokenId b) {
        const float x = logits[static_cast<size_t>(a)];
        const float y = logits[static_cast<size_t>(b)];
        return x != y ? x > y : a < b;
    });
    const float norm = log_sum_exp(logits);
    std::vector<TokenLogprob> top;
    for (auto id = ids.begin(); id != end; ++id) {
        top.push_back({*id, logits[static_cast<size_t>(*id)] - norm});
    }
    return top;
}

TokenId argmax(std::span<const float> logits) {
    return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

Result<Scorer> Scorer::create(Hy3Model& model, int32_t chunk_tokens, int32_t tokens_max) {
    // One slot more than tokens: the MTP layer's entry of the last position lies in the next slot.
    const int64_t pages = (tokens_max + 1 + kPageTokens - 1) / kPageTokens;
    Result<std::unique_ptr<PagePool>> pool = model.make_pool(pages);
    if (!pool.ok()) {
        return pool.status();
    }
    Memory memory;
    const ModelConfig& config = model.config();
    for (const auto& [buffer, width] : {std::pair{&memory.logits, config.vocab_size},
                                        {&memory.mtp_logits, config.vocab_size},
                                        {&memory.hidden, config.hidden_size}}) {
        Result<HostBuffer> made = HostBuffer::allocate(
            chunk_tokens * width * 4, fmt::format("the logits of {} tokens", chunk_tokens),
            "it is fixed: free memory, or raise this process's limit");
        if (!made.ok()) {
            return made.status();
        }
        *buffer = made.take();
    }
    return Scorer(model, chunk_tokens, pages, pool.take(), std::move(memory));
}

Scorer::Scorer(Hy3Model& model, int32_t chunk_tokens, int64_t pages, std::unique_ptr<PagePool> pool,
               Memory memory)
    : model_(model), chunk_tokens_(chunk_tokens), pool_(std::move(pool)), memory_(std::move(memory)) {
    pages_.resize(static_cast<size_t>(pages));
    std::iota(pages_.begin(), pages_.end(), 0);
}

Status Scorer::run(std::span<const TokenId> tokens, int32_t first_visited, bool mtp, const Visit& visit) {
    const auto length = static_cast<int32_t>(tokens.size());
    check(length >= 1 && length < static_cast<int32_t>(pages_.size() * kPageTokens),
          "scorer: sequence too long");
    const auto vocab = static_cast<size_t>(model_.config().vocab_size);
    std::vector<int32_t> rows;
    for (int32_t begin = 0; begin < length; begin += chunk_tokens_) {
        const int32_t end = std::min(length, begin + chunk_tokens_);
        rows.clear();
        for (int32_t position = std::max(begin, first_visited); position < end; ++position) {
            rows.push_back(position - begin);
        }
        if (mtp && end == length && (rows.empty() || rows.back() != end - 1 - begin)) {
            rows.push_back(end - 1 - begin);  // the greedy token after the last position feeds the MTP layer
        }
        const SequenceSpan sequence{.first = 0, .q_len = end - begin, .position = begin, .pages = pages_};
        const ForwardBatch batch{
            .tokens = tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
            .sequences = std::span(&sequence, 1),
            .logit_rows = rows,
            .pool = pool_->view()};
        model_.forward(batch, {.logits = memory_.logits.as<float>(),
                               .hidden = mtp ? memory_.hidden.as<float>() : nullptr});
        if (mtp) {
            run_mtp(tokens, {begin, end}, rows, length);
        }
        for (size_t i = 0; i < rows.size(); ++i) {
            const int32_t position = begin + rows[i];
            if (position < first_visited) {
                continue;
            }
            const std::span logits(memory_.logits.as<float>() + i * vocab, vocab);
            const float sum = log_sum_exp(logits);
            if (std::isnan(sum)) {
                return data_loss(fmt::format("the logits at position {} are not numbers (NaN)", position));
            }
            visit({.position = position,
                   .logits = logits,
                   .log_sum_exp = sum,
                   .mtp = {memory_.mtp_logits.as<float>() + i * vocab, mtp ? vocab : 0}});
        }
    }
    return {};
}

void Scorer::run_mtp(std::span<const TokenId> tokens, Chunk chunk, std::span<const int32_t> rows,
                     int32_t sequence_length) {
    const auto vocab = static_cast<size_t>(model_.config().vocab_size);
    std::vector<TokenId> next;
    for (int32_t position = chunk.begin; position < chunk.end; ++position) {
        const bool last = position + 1 == sequence_length;
        next.push_back(last ? argmax({memory_.logits.as<float>() + (rows.size() - 1) * vocab, vocab})
                            : tokens[static_cast<size_t>(position) + 1]);
    }
    const SequenceSpan sequence{
        .first = 0, .q_len = chunk.end - chunk.begin, .position = chunk.begin, .pages = pages_};
    const MtpBatch batch{.hidden = memory_.hidden.as<float>(),
                         .next_tokens = next,
                         .sequences = std::span(&sequence, 1),
                         .logit_rows = rows,
                         .pool = pool_->view()};
    model_.mtp_forward(batch, {.logits = memory_.mtp_logits.as<float>(), .hidden = nullptr});
}

}  // namespace tessera
