#include "server/openai/context.h"

#include <fmt/format.h>
#include <random>
#include <utility>

#include "server/openai/chat_request.h"

namespace tessera {
namespace {

// SplitMix64: distinct inputs give distinct, well-mixed outputs.
uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
}

uint64_t random_base() {
    std::random_device device;
    return (uint64_t{device()} << 32) | device();
}

// The operator's default effort may be one of OpenAI's levels, as in a request.
OpenAiConfig with_model_effort(OpenAiConfig config) {
    const json::Value* effort = config.default_chat_template_kwargs.find("reasoning_effort");
    if (effort != nullptr && effort->is_string()) {
        if (auto mapped = model_reasoning_effort(effort->as_string())) {
            config.default_chat_template_kwargs.set("reasoning_effort", std::move(*mapped));
        }
    }
    return config;
}

}  // namespace

Status check_default_template_kwargs(const json::Value& kwargs) {
    for (const auto& [key, value] : kwargs.members()) {
        if (key == "messages" || key == "tools") {
            return invalid_argument(fmt::format("'{}' is a field of requests, which has no default", key));
        }
        if (key == "reasoning_effort" && !(value.is_string() && model_reasoning_effort(value.as_string()))) {
            return invalid_argument(fmt::format(
                "'reasoning_effort' must be no_think, low or high, or a level of OpenAI's, not {}",
                describe(value)));
        }
    }
    return {};
}

RandomSource::RandomSource(std::optional<uint64_t> base) : base_(base ? *base : random_base()) {}

uint64_t RandomSource::next() const {
    return mix(base_ + mix(counter_.fetch_add(1, std::memory_order_relaxed)));
}

std::string RandomSource::hex(int digits) const {
    return fmt::format("{:016x}{:016x}", next(), next()).substr(0, static_cast<size_t>(digits));
}

OpenAiService::Context::Context(OpenAiConfig service_config, Engine& service_engine,
                                const Tokenizer& service_tokenizer, ServerMetrics* service_metrics)
    : config(with_model_effort(std::move(service_config))),
      engine(service_engine),
      tokenizer(service_tokenizer),
      metrics(service_metrics),
      tokens(service_tokenizer.token_suffix()),
      think_end(service_tokenizer.added_token(tokens.think_end).value_or(-1)),
      seeds(config.seed) {}

}  // namespace tessera
