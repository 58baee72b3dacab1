// PassObserver: told of every operator while a pass is entered into a stream, so that a benchmark can put
// work of its own between them. Serving has none.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "device/cuda/profile_range.h"
#include "model/pass_operator.h"

namespace tessera {

class PassObserver {
  public:
    virtual ~PassObserver() = default;
    // All launches of `op` have been entered.
    virtual void operator_entered(cudaStream_t stream, PassOperator op) = 0;
    // A layer's routing: [tokens, k] expert ids in device memory.
    virtual void experts_chosen(cudaStream_t stream, const int32_t* chosen, int64_t count) = 0;
};

// The scope in which an operator's launches are entered: a range for profilers, and the observer's call.
class PassSection {
  public:
    PassSection(PassObserver* observer, cudaStream_t stream, PassOperator op)
        : range_(pass_operator_name(op)), observer_(observer), stream_(stream), op_(op) {}
    ~PassSection() {
        if (observer_ != nullptr) {
            observer_->operator_entered(stream_, op_);
        }
    }
    PassSection(const PassSection&) = delete;
    PassSection& operator=(const PassSection&) = delete;

  private:
    ProfileRange range_;
    PassObserver* observer_;
    cudaStream_t stream_;
    PassOperator op_;
};

}  // namespace tessera
