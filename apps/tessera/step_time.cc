#include "step_time.h"

#include <algorithm>
#include <vector>

#include "base/clock.h"
#include "device/host_buffer.h"
#include "engine_cost.h"

namespace tessera {
namespace {

double multiply_adds(const ModelConfig& config, const StepShape& shape) {
    const PassShape pass{.tokens = shape.decode_rows + shape.prefill_tokens,
                         .logit_rows = shape.decode_rows,
                         .attended = shape.attended};
    return pass_cost(config, pass, ModelBytes{}).fmas;
}

}  // namespace

std::function<double(const StepShape&)> measure_step_time(Hy3Model& model, int32_t tokens_max) {
    const ModelConfig& config = model.config();
    const auto tokens = static_cast<int32_t>(std::min<int64_t>(tokens_max, kPageTokens));
    std::vector<TokenId> ids(static_cast<size_t>(tokens));
    for (size_t i = 0; i < ids.size(); ++i) {
        ids[i] =
            static_cast<TokenId>(static_cast<int64_t>(i * 7919) % config.vocab_size);  // spread over experts
    }
    const HostBuffer page(model.page_format().page_bytes());
    const PageId pages[] = {0};
    const SequenceSpan sequence{.first = 0, .q_len = tokens, .position = 0, .pages = pages};
    const ForwardBatch batch{.tokens = ids,
                             .sequences = std::span(&sequence, 1),
                             .logit_rows = {},
                             .pool = {page.data(), model.page_format().page_bytes()}};
    TimeNs best = 0;
    for (int run = 0; run < 3; ++run) {  // the first one brings the weights into the caches
        const TimeNs start = now_ns();
        model.forward(batch, {});
        const TimeNs time = now_ns() - start;
        best = best == 0 ? time : std::min(best, time);
    }
    const StepShape measured{.prefill_tokens = tokens, .attended = int64_t{tokens} * (tokens + 1) / 2};
    const double rate = multiply_adds(config, measured) / std::max(seconds(best), 1e-9);
    return [config, rate](const StepShape& shape) { return multiply_adds(config, shape) / rate; };
}

}  // namespace tessera
