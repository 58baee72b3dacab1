// The runner's slots: what a running request is, between steps (contract: slots.*). On a GPU this state lives
// in device memory; here it is plain host memory, touched by the compute thread alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "types/step_plan.h"

namespace tessera {

struct Slot {
    uint32_t generation = 0;
    SamplingParams sampling;
    std::vector<TokenId> stop_ids;
    std::vector<PageId> pages;
    int32_t length = 0;      // tokens whose K and V are in the pages: the next token's position
    TokenId last_token = 0;  // sampled and not computed yet; meaningful from the first output on
    int32_t outputs = 0;     // output tokens made, those before a preemption included

    // Penalties. Empty unless the request uses them.
    std::vector<uint64_t> prompt_seen;  // [ceil(vocab / 64)] bit i % 64 of word i / 64: id i is in the prompt
    std::vector<int32_t> output_counts;  // [vocab] how often an id occurs in the output

    // Forced tokens: how many have been emitted, or -1 while `after` has not come.
    int32_t forced_next = 0;

    // Whether the next token is laid down, and which: `forced`, or -1.
    TokenId forced_token() const;
    // A stop token while `after` is awaited would end the request before the forced tokens come: `after`
    // takes its place.
    bool stops_early(TokenId sampled) const;
    // Takes an output token into the state (counts, forced position).
    void append_output(TokenId token);
};

class SlotTable {
  public:
    SlotTable(int32_t slots, int64_t vocab);

    void init(const SlotInit& init);
    const Slot& at(SlotId slot) const { return slots_[static_cast<size_t>(slot)]; }
    // Adds the row's new pages to its slot's table and checks the row against the slot's truth.
    Slot& enter(const StepRow& row);
    // The tenancy is over: gives its memory back.
    void retire(SlotId slot);

  private:
    const int64_t vocab_;
    std::vector<Slot> slots_;
};

bool uses_penalties(const SamplingParams& sampling);

}  // namespace tessera
