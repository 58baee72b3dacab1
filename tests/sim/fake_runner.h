// FakeRunner: executes plans as the contract of types/step_plan.h says, on shadow pages instead of a model,
// and aborts on a plan that breaks the contract. Results wait in a queue, so that up to max_in_flight() are
// uncollected.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sched/scheduler.h"
#include "sim/random.h"
#include "sim/script.h"
#include "sim/shadow_pages.h"
#include "types/step_plan.h"

namespace tessera::sim {

inline constexpr std::string_view kPrefillError = "prefill failed";
inline constexpr std::string_view kSampleError = "NaN in the logits";

struct FakeRunnerConfig {
    int32_t slots = 0;
    int32_t pages = 0;
    int32_t max_model_len = 0;
    int32_t prefill_errors_one_in = 0;  // 0 = never
};

class FakeRunner {
  public:
    FakeRunner(const FakeRunnerConfig& config, const Scripts& scripts, uint64_t seed);

    void launch(const StepPlan& plan);
    StepResult collect();
    int32_t in_flight() const { return static_cast<int32_t>(results_.size()); }

    // Forbids that pages of the request's present stay with tokens at or past `kept` are found in the cache
    // again.
    void withdraw_pages(uint64_t request_seed, int32_t kept);

  private:
    // A slot as a device would hold it.
    struct Slot {
        bool used = false;
        bool failed = false;
        uint32_t generation = 0;
        SamplingParams sampling;
        const Script* script = nullptr;
        int32_t prompt = 0;
        std::vector<TokenId> tokens;   // known: prompt and output
        std::vector<uint64_t> hashes;  // of the salt and tokens[0, i], as shadow pages hold them
        std::vector<PageId> table;
        int32_t length = 0;  // tokens computed

        void append(TokenId token);
    };

    void retire(SlotId id);
    void init(const SlotInit& init);
    void take_pages(Slot& slot, const StepRow& row);
    void check_bounds(const Slot& slot, const StepRow& row) const;
    void read_context(const Slot& slot) const;
    void write(Slot& slot, int32_t position, uint64_t hash);
    void prefill(Slot& slot, const StepRow& row, RowResult& result);
    void decode(Slot& slot, const StepRow& row, RowResult& result);
    bool sample(Slot& slot, RowResult& result);  // false: it brought no token
    void execute(const StepRow& row, RowResult& result);

    const FakeRunnerConfig config_;
    const Scripts& scripts_;
    Random random_;
    ShadowPages pages_;
    std::vector<Slot> slots_;
    std::deque<StepResult> results_;
    uint64_t last_step_ = 0;
};

}  // namespace tessera::sim
