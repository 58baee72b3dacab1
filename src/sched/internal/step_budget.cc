#include "sched/internal/step_budget.h"

#include <algorithm>

namespace tessera {
namespace {

void add_prefill(StepShape& shape, int32_t tokens, int64_t context) {
    shape.prefill_tokens += tokens;
    shape.context_tokens += context + tokens;
    shape.attended += tokens * context + int64_t{tokens} * (tokens + 1) / 2;
}

}  // namespace

void StepBudget::take_decode(int32_t tokens, int64_t context) {
    tokens_left_ -= tokens;
    ++shape_.decode_rows;
    shape_.context_tokens += context;
    shape_.attended += tokens * context;
}

void StepBudget::take_prefill(int32_t tokens, int64_t context) {
    tokens_left_ -= tokens;
    add_prefill(shape_, tokens, context);
}

bool StepBudget::in_time(int32_t tokens, int64_t context) const {
    StepShape shape = shape_;
    add_prefill(shape, tokens, context);
    return config_.step_time(shape) <= config_.target_tpot_s;
}

int32_t StepBudget::prefill_limit(int64_t context) const {
    const bool timed = config_.step_time && config_.target_tpot_s > 0 && shape_.decode_rows > 0;
    if (!timed || tokens_left_ == 0 || in_time(tokens_left_, context)) {
        return tokens_left_;
    }
    int32_t fits = 0;
    int32_t too_many = tokens_left_;
    while (too_many - fits > 1) {
        const int32_t middle = fits + (too_many - fits) / 2;
        (in_time(middle, context) ? fits : too_many) = middle;
    }
    return shape_.prefill_tokens > 0 ? fits : std::max(fits, std::min(kPrefillChunkMin, tokens_left_));
}

}  // namespace tessera
