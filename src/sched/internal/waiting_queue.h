// WaitingQueue: requests without a slot, in the order in which they will be admitted. A preempted sequence
// returns to its old place, which is before all of its priority that came later.
#pragma once

#include <set>

#include "base/check.h"
#include "sched/internal/sequence.h"

namespace tessera {

class WaitingQueue {
  public:
    bool empty() const { return order_.empty(); }
    int32_t size() const { return static_cast<int32_t>(order_.size()); }
    int64_t tokens() const { return tokens_; }  // to prefill, over all that wait
    Sequence& front() const { return **order_.begin(); }

    // The sequence's tokens must not change while it waits.
    void push(Sequence& sequence) {
        check(order_.insert(&sequence).second, "a sequence waits twice");
        tokens_ += sequence.length();
    }
    void remove(Sequence& sequence) {
        check(order_.erase(&sequence) == 1, "removed a sequence that does not wait");
        tokens_ -= sequence.length();
    }

  private:
    std::set<Sequence*, RunsBefore> order_;
    int64_t tokens_ = 0;
};

}  // namespace tessera
