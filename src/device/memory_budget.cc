#include "device/memory_budget.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <map>
#include <utility>

#include "base/check.h"

namespace tessera {
namespace {

constexpr std::array kCategories{MemoryCategory::kWeights, MemoryCategory::kKvPool,
                                 MemoryCategory::kWorkspace, MemoryCategory::kGraphs};
constexpr size_t kEntriesShown = 6;  // in a category of the table

}  // namespace

std::string_view memory_category_name(MemoryCategory category) {
    switch (category) {
        case MemoryCategory::kWeights:
            return "weights";
        case MemoryCategory::kKvPool:
            return "KV pool";
        case MemoryCategory::kWorkspace:
            return "workspaces";
        case MemoryCategory::kGraphs:
            return "graphs";
    }
    return "unknown";
}

std::string format_bytes(int64_t bytes) {
    const double value = static_cast<double>(bytes);
    if (bytes >= int64_t{1} << 30) {
        return fmt::format("{:.2f} GiB", value / 0x1p30);
    }
    if (bytes >= 1 << 20) {
        return fmt::format("{:.1f} MiB", value / 0x1p20);
    }
    if (bytes >= 1 << 10) {
        return fmt::format("{:.1f} KiB", value / 0x1p10);
    }
    return fmt::format("{} B", bytes);
}

MemoryBudget::MemoryBudget(int64_t limit_bytes) : limit_(limit_bytes) {
    check(limit_bytes >= 0, "MemoryBudget: a negative limit");
}

Result<MemoryBudget::EntryId> MemoryBudget::reserve(MemoryCategory category, std::string_view name,
                                                    int64_t bytes) {
    check(bytes >= 0, "MemoryBudget: a negative size");
    if (sealed_) {
        return resource_exhausted(
            fmt::format("device memory for {} ({}) was asked for after start", name, format_bytes(bytes)));
    }
    if (bytes > available()) {
        return resource_exhausted(fmt::format(
            "device memory: {} ({}) needs {}, but {} of {} are taken and {} are left: {} too little", name,
            memory_category_name(category), format_bytes(bytes), format_bytes(used_), format_bytes(limit_),
            format_bytes(available()), format_bytes(bytes - available())));
    }
    EntryId id = 0;
    if (free_.empty()) {
        id = static_cast<EntryId>(entries_.size());
        entries_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
    }
    entries_[static_cast<size_t>(id)] = {category, std::string(name), bytes, true};
    used_ += bytes;
    return id;
}

void MemoryBudget::release(EntryId entry) {
    check(entry >= 0 && static_cast<size_t>(entry) < entries_.size(), "MemoryBudget: no such entry");
    Entry& e = entries_[static_cast<size_t>(entry)];
    check(e.live, "MemoryBudget: an entry released twice");
    used_ -= e.bytes;
    e = Entry();
    free_.push_back(entry);
}

int64_t MemoryBudget::used(MemoryCategory category) const {
    int64_t sum = 0;
    for (const Entry& e : entries_) {
        sum += e.live && e.category == category ? e.bytes : 0;
    }
    return sum;
}

std::string MemoryBudget::table() const {
    std::string out;
    for (const MemoryCategory category : kCategories) {
        std::map<std::string, int64_t> by_name;
        for (const Entry& e : entries_) {
            if (e.live && e.category == category) {
                by_name[e.name] += e.bytes;
            }
        }
        out += fmt::format("{:<32}{:>12}\n", memory_category_name(category), format_bytes(used(category)));
        std::vector<std::pair<std::string, int64_t>> rows(by_name.begin(), by_name.end());
        std::stable_sort(rows.begin(), rows.end(),
                         [](const auto& a, const auto& b) { return a.second > b.second; });
        int64_t rest = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            if (i < kEntriesShown) {
                out += fmt::format("  {:<30}{:>12}\n", rows[i].first, format_bytes(rows[i].second));
            } else {
                rest += rows[i].second;
            }
        }
        if (rest > 0) {
            out += fmt::format("  {:<30}{:>12}\n", "others", format_bytes(rest));
        }
    }
    out += fmt::format("{:<32}{:>12} of {}\n", "sum", format_bytes(used_), format_bytes(limit_));
    return out;
}

}  // namespace tessera
