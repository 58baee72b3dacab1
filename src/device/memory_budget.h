// MemoryBudget: the byte limit of one device, and who holds how much of it. Every device allocation is
// entered here under a name and a category before it is made, so that "does not fit" is a Status with the
// numbers and not a failure in the middle of a step. Pure arithmetic; one thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tessera {

enum class MemoryCategory : uint8_t { kWeights, kKvPool, kWorkspace, kGraphs };
std::string_view memory_category_name(MemoryCategory category);

class MemoryBudget {
  public:
    using EntryId = int32_t;

    explicit MemoryBudget(int64_t limit_bytes);

    // Enters an allocation. Refused, with the numbers and what would fit, when it is over the limit or when
    // the budget is sealed. REQUIRES: bytes >= 0
    Result<EntryId> reserve(MemoryCategory category, std::string_view name, int64_t bytes);
    void release(EntryId entry);

    // Nothing may be entered from here on: all device memory is taken at start.
    void seal() { sealed_ = true; }
    bool sealed() const { return sealed_; }

    int64_t limit() const { return limit_; }
    int64_t used() const { return used_; }
    int64_t used(MemoryCategory category) const;
    int64_t available() const { return limit_ - used_; }

    // One line for each category with its total, the largest entries below it, then the sum and the limit.
    // Entries of one name are added up.
    std::string table() const;

  private:
    struct Entry {
        MemoryCategory category = MemoryCategory::kWeights;
        std::string name;
        int64_t bytes = 0;
        bool live = false;
    };

    int64_t limit_ = 0;
    int64_t used_ = 0;
    bool sealed_ = false;
    std::vector<Entry> entries_;  // by id; a released entry's place is used again
    std::vector<EntryId> free_;
};

// "1.50 GiB", "640.0 MiB", "12.0 KiB", "17 B".
std::string format_bytes(int64_t bytes);

}  // namespace tessera
