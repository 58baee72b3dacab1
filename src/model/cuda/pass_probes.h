// Observers for benchmarks: the time of each operator of a pass, and the experts that it touches. Both are
// made for a pass that is captured in a graph and replayed.
#pragma once

#include <array>
#include <vector>

#include "device/cuda/buffer.h"
#include "device/cuda/stream.h"
#include "model/cuda/pass_observer.h"

namespace tessera {

using OperatorTimes = std::array<double, kPassOperators>;  // us, by PassOperator

// An event node after each operator. A node costs some time of its own, which counts to the operator before
// it.
class OperatorTimer final : public PassObserver {
  public:
    // Before the first operator.
    void begin(cudaStream_t stream);
    void operator_entered(cudaStream_t stream, PassOperator op) override;
    void experts_chosen(cudaStream_t, const int32_t*, int64_t) override {}
    // Of the last replay, which must have ended.
    OperatorTimes times() const;

  private:
    struct Mark {
        Event event;
        PassOperator op = PassOperator::kPrepare;
    };
    void record(cudaStream_t stream, PassOperator op);

    std::vector<Mark> marks_;
};

// A flag for each expert of each layer, in page-locked memory that a small kernel writes.
class ExpertCounter final : public PassObserver {
  public:
    static Result<ExpertCounter> create(int64_t layers, int64_t experts);
    void operator_entered(cudaStream_t, PassOperator) override {}
    void experts_chosen(cudaStream_t stream, const int32_t* chosen, int64_t count) override;
    // Experts touched since the last call, summed over the layers; replays must have ended.
    int64_t take();

  private:
    ExpertCounter(PinnedBuffer flags, int64_t experts) : flags_(std::move(flags)), experts_(experts) {}

    PinnedBuffer flags_;  // [layers, experts] bytes
    int64_t experts_ = 0;
    int64_t layer_ = 0;
};

}  // namespace tessera
