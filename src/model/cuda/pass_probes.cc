#include "model/cuda/pass_probes.h"

#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "model/cuda/step_kernels.h"

namespace tessera {

void OperatorTimer::begin(cudaStream_t stream) {
    marks_.clear();
    record(stream, PassOperator::kPrepare);
}

void OperatorTimer::operator_entered(cudaStream_t stream, PassOperator op) {
    record(stream, op);
}

void OperatorTimer::record(cudaStream_t stream, PassOperator op) {
    marks_.push_back({Event(Event::Timing::kOn), op});
    // External: in a capture, a node that records, and no mere dependency.
    cuda_check(cudaEventRecordWithFlags(marks_.back().event.get(), stream, cudaEventRecordExternal));
}

OperatorTimes OperatorTimer::times() const {
    OperatorTimes us{};
    for (size_t i = 1; i < marks_.size(); ++i) {
        us[static_cast<size_t>(marks_[i].op)] += Event::elapsed_us(marks_[i - 1].event, marks_[i].event);
    }
    return us;
}

Result<ExpertCounter> ExpertCounter::create(int64_t layers, int64_t experts) {
    Result<PinnedBuffer> flags = PinnedBuffer::allocate("experts touched", layers * experts);
    if (!flags.ok()) {
        return flags.status();
    }
    return ExpertCounter(flags.take(), experts);
}

void ExpertCounter::experts_chosen(cudaStream_t stream, const int32_t* chosen, int64_t count) {
    check((layer_ + 1) * experts_ <= flags_.bytes(), "ExpertCounter: more layers than it was made for");
    mark_experts_cuda(stream, {.chosen = chosen,
                               .count = count,
                               .experts = experts_,
                               .touched = flags_.as<uint8_t>() + layer_ * experts_});
    ++layer_;
}

int64_t ExpertCounter::take() {
    auto* flags = flags_.as<uint8_t>();
    const auto touched = std::count(flags, flags + flags_.bytes(), uint8_t{1});
    std::fill(flags, flags + flags_.bytes(), uint8_t{0});
    return touched;
}

}  // namespace tessera
