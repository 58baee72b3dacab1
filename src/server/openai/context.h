// What the handlers and the running answers of the OpenAI service share. Private to the server layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "server/openai_service.h"
#include "text/hy3_format.h"

namespace tessera {

// Names and seeds that differ from each other and from those of an earlier process. Thread-safe.
class RandomSource {
  public:
    explicit RandomSource(std::optional<uint64_t> base = std::nullopt);  // unset: differs each time
    uint64_t next() const;
    std::string hex(int digits) const;  // at most 32

  private:
    const uint64_t base_;
    mutable std::atomic<uint64_t> counter_{0};
};

struct OpenAiService::Context {
    Context(OpenAiConfig service_config, Engine& service_engine, const Tokenizer& service_tokenizer,
            ServerMetrics* service_metrics);

    const OpenAiConfig config;
    Engine& engine;
    const Tokenizer& tokenizer;
    ServerMetrics* const metrics;  // may be null
    const Hy3Tokens tokens;
    const TokenId think_end;    // -1: the tokenizer has no such token
    const RandomSource random;  // names
    const RandomSource seeds;   // of requests without one
};

}  // namespace tessera
