#include "runner/slot_table.h"

#include <algorithm>

#include "base/check.h"

namespace tessera {

bool uses_penalties(const SamplingParams& sampling) {
    return sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 ||
           sampling.frequency_penalty != 0.0;
}

TokenId Slot::forced_token() const {
    const auto& tokens = sampling.forced.tokens;
    if (forced_next < 0 || static_cast<size_t>(forced_next) >= tokens.size()) {
        return -1;
    }
    return tokens[static_cast<size_t>(forced_next)];
}

bool Slot::stops_early(TokenId sampled) const {
    return forced_next < 0 && std::find(stop_ids.begin(), stop_ids.end(), sampled) != stop_ids.end();
}

void Slot::append_output(TokenId token) {
    last_token = token;
    ++outputs;
    if (!output_counts.empty()) {
        ++output_counts[static_cast<size_t>(token)];
    }
    if (forced_next < 0) {
        forced_next = token == sampling.forced.after ? 0 : -1;
    } else if (static_cast<size_t>(forced_next) < sampling.forced.tokens.size()) {
        ++forced_next;
    }
}

SlotTable::SlotTable(int32_t slots, int64_t vocab) : vocab_(vocab), slots_(static_cast<size_t>(slots)) {}

void SlotTable::init(const SlotInit& init) {
    check(init.slot >= 0 && static_cast<size_t>(init.slot) < slots_.size(), "runner: no such slot");
    Slot& slot = slots_[static_cast<size_t>(init.slot)];
    slot = Slot();
    slot.generation = init.generation;
    slot.sampling = init.sampling;
    slot.stop_ids = init.stop_ids;
    slot.forced_next = !init.sampling.forced.tokens.empty() && init.sampling.forced.after >= 0 ? -1 : 0;
    if (uses_penalties(init.sampling)) {
        slot.prompt_seen.assign(static_cast<size_t>((vocab_ + 63) / 64), 0);
        slot.output_counts.assign(static_cast<size_t>(vocab_), 0);
        for (const TokenId token : init.prompt) {
            slot.prompt_seen[static_cast<size_t>(token) / 64] |= uint64_t{1}
                                                                 << (static_cast<size_t>(token) % 64);
        }
    }
    for (const TokenId token : init.output) {
        slot.append_output(token);
    }
}

Slot& SlotTable::enter(const StepRow& row) {
    check(row.slot >= 0 && static_cast<size_t>(row.slot) < slots_.size(), "runner: no such slot");
    Slot& slot = slots_[static_cast<size_t>(row.slot)];
    check(slot.generation == row.generation, "runner: a row of a slot's earlier tenancy");
    check(static_cast<int32_t>(slot.pages.size()) == row.page_table_length,
          "runner: the page table's length differs from the plan's");
    if (slot.pages.empty() && row.kind != RowKind::kDecode) {
        slot.length = row.position_lower;  // the tenancy's first row: a cached prefix may lie before it
    }
    slot.pages.insert(slot.pages.end(), row.new_pages.begin(), row.new_pages.end());
    check(row.position_lower <= slot.length && slot.length <= row.position_upper,
          "runner: the slot's length is outside the plan's bounds");
    return slot;
}

void SlotTable::retire(SlotId slot) {
    check(slot >= 0 && static_cast<size_t>(slot) < slots_.size(), "runner: no such slot");
    slots_[static_cast<size_t>(slot)] = Slot();
}

}  // namespace tessera
