// Slots: which of the runner's slots are free, their generations, and which retirements the runner has not
// been told.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "base/check.h"
#include "types/step_plan.h"

namespace tessera {

class Slots {
  public:
    explicit Slots(int32_t count) : generation_(static_cast<size_t>(count)) {
        for (SlotId slot = 0; slot < count; ++slot) {
            free_.push_back(slot);
        }
    }

    int32_t free_count() const { return static_cast<int32_t>(free_.size()); }

    // The slot that has been free longest, and its raised generation. Its retirement, if it was in use
    // before, is in this plan or an earlier one; a plan's retirements come before its inits.
    std::pair<SlotId, uint32_t> take() {
        check(!free_.empty(), "no free slot to take");
        const SlotId slot = free_.front();
        free_.pop_front();
        return {slot, ++generation_[static_cast<size_t>(slot)]};
    }

    // REQUIRES: every plan with a row of this slot has been committed.
    void give_back(SlotId slot) {
        free_.push_back(slot);
        retired_.push_back(slot);
    }

    std::vector<SlotId> take_retired() { return std::exchange(retired_, {}); }

  private:
    std::deque<SlotId> free_;
    std::vector<uint32_t> generation_;
    std::vector<SlotId> retired_;
};

}  // namespace tessera
