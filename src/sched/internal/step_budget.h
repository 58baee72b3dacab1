// StepBudget: what one step may still take, in tokens and, beside decode rows, in time.
#pragma once

#include <cstdint>

#include "sched/scheduler.h"

namespace tessera {

// Prefill makes progress in every step that has tokens left, even one that the decode rows alone make too
// slow: the first chunk may always have this many tokens.
inline constexpr int32_t kPrefillChunkMin = 16;

class StepBudget {
  public:
    explicit StepBudget(const SchedulerConfig& config)
        : config_(config), tokens_left_(config.max_num_batched_tokens) {}

    int32_t tokens_left() const { return tokens_left_; }

    void take_decode(int32_t tokens, int64_t context);
    // The most tokens a prefill chunk may have that reads `context` tokens besides its own. Monotone step
    // times are assumed.
    int32_t prefill_limit(int64_t context) const;
    void take_prefill(int32_t tokens, int64_t context);

  private:
    bool in_time(int32_t tokens, int64_t context) const;

    const SchedulerConfig& config_;
    int32_t tokens_left_;
    StepShape shape_;
};

}  // namespace tessera
