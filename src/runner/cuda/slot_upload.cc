#include "runner/cuda/slot_upload.h"

#include <algorithm>
#include <fmt/format.h>
#include <tuple>

#include "base/check.h"
#include "device/cuda/cuda_check.h"

namespace tessera {

std::string tenant_too_large(const SlotInit& init) {
    const auto refuse = [](std::string_view what, size_t count, int32_t max) {
        return static_cast<int64_t>(count) <= max ? std::string()
                                                  : fmt::format("{} {}; at most {}", count, what, max);
    };
    std::string text = refuse("stop ids", init.stop_ids.size(), kSampleStopsMax);
    text = text.empty() ? refuse("logit biases", init.sampling.logit_bias.size(), kSampleBiasMax) : text;
    return text.empty() ? refuse("forced tokens", init.sampling.forced.tokens.size(), kSampleForcedMax)
                        : text;
}

SampleSlot sample_slot(const Slot& slot) {
    const SamplingParams& params = slot.sampling;
    SampleSlot out;
    out.seed = params.seed;
    out.temperature = static_cast<float>(params.temperature);
    out.top_p = static_cast<float>(params.top_p);
    out.min_p = static_cast<float>(params.min_p);
    out.repetition_penalty = static_cast<float>(params.repetition_penalty);
    out.presence_penalty = static_cast<float>(params.presence_penalty);
    out.frequency_penalty = static_cast<float>(params.frequency_penalty);
    out.top_k = params.top_k;
    out.min_tokens = params.min_tokens;
    out.outputs = slot.outputs;
    out.logprobs = params.logprobs.has_value() ? 1 : 0;
    out.top = params.logprobs.value_or(0);
    out.bias_count = static_cast<int32_t>(params.logit_bias.size());
    out.stop_count = static_cast<int32_t>(slot.stop_ids.size());
    out.forced_count = static_cast<int32_t>(params.forced.tokens.size());
    out.forced_next = slot.forced_next;
    out.forced_after = params.forced.after;
    std::copy(slot.stop_ids.begin(), slot.stop_ids.end(), std::begin(out.stop_ids));
    return out;
}

void TenantUpload::copy(void* to, const void* from, int64_t bytes) const {
    cuda_check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream.get()));
}

void TenantUpload::enter(const SlotInit& init, const SampleSlot& slot) const {
    const auto number = static_cast<int64_t>(staging.count++);
    const int64_t at = init.slot;
    staging.slots[number] = slot;
    copy(memory.samples.slot + at, staging.slots + number, sizeof(SampleSlot));
    const auto biases = static_cast<int64_t>(init.sampling.logit_bias.size());
    if (biases > 0) {
        int32_t* ids = staging.bias_ids + number * kSampleBiasMax;
        float* values = staging.bias_values + number * kSampleBiasMax;
        for (int64_t i = 0; i < biases; ++i) {
            std::tie(ids[i], values[i]) = init.sampling.logit_bias[static_cast<size_t>(i)];
        }
        copy(memory.bias_ids + at * kSampleBiasMax, ids, 4 * biases);
        copy(memory.bias_values + at * kSampleBiasMax, values, 4 * biases);
    }
    const std::vector<TokenId>& forced = init.sampling.forced.tokens;
    if (!forced.empty()) {
        int32_t* ids = staging.forced + number * kSampleForcedMax;
        std::copy(forced.begin(), forced.end(), ids);
        copy(memory.forced + at * kSampleForcedMax, ids, 4 * static_cast<int64_t>(forced.size()));
    }
    if (uses_penalties(init.sampling)) {
        enter_history(init);
    }
}

void TenantUpload::enter_history(const SlotInit& init) const {
    const auto prompt = static_cast<int64_t>(init.prompt.size());
    const auto output = static_cast<int64_t>(init.output.size());
    copy(memory.history, stage_history(init), 4 * (prompt + output));
    sample_history_cuda(stream.get(), {.slots = memory.samples,
                                       .vocab = sizes.vocab,
                                       .slot = init.slot,
                                       .prompt = memory.history,
                                       .prompt_count = prompt,
                                       .output = memory.history + prompt,
                                       .output_count = output});
}

// The ids' place in the step's page-locked memory. Where the tenants before this one have filled it, their
// copies are waited for.
int32_t* TenantUpload::stage_history(const SlotInit& init) const {
    const auto count = static_cast<int64_t>(init.prompt.size() + init.output.size());
    check(count <= history_words(sizes), "runner: a prompt longer than the context");
    if (staging.history_used + count > history_words(sizes)) {
        stream.synchronize();
        staging.history_used = 0;
    }
    int32_t* ids = staging.history + staging.history_used;
    staging.history_used += count;
    std::copy(init.output.begin(), init.output.end(), std::copy(init.prompt.begin(), init.prompt.end(), ids));
    return ids;
}

}  // namespace tessera
