#include "sim/fake_runner.h"

#include <algorithm>
#include <set>

#include "base/check.h"

namespace tessera::sim {
namespace {

constexpr uint64_t kRejected = 1;  // what a rejected draft leaves in a page

}  // namespace

void FakeRunner::Slot::append(TokenId token) {
    const uint64_t before = hashes.empty() ? mix(script->salt) : hashes.back();
    tokens.push_back(token);
    hashes.push_back(mix(before, static_cast<uint64_t>(token)));
}

FakeRunner::FakeRunner(const FakeRunnerConfig& config, const Scripts& scripts, uint64_t seed)
    : config_(config),
      scripts_(scripts),
      random_(seed),
      pages_(config.pages),
      slots_(static_cast<size_t>(config.slots)) {}

void FakeRunner::launch(const StepPlan& plan) {
    check(plan.step == last_step_ + 1, "sim: a step number was skipped");
    last_step_ = plan.step;
    check(!plan.rows.empty(), "sim: a plan without rows");
    for (const SlotId slot : plan.retired) {
        retire(slot);
    }
    for (const SlotInit& slot_init : plan.inits) {
        init(slot_init);
    }
    StepResult result;
    result.step = plan.step;
    std::set<SlotId> seen;
    int32_t tokens = 0;
    for (const StepRow& row : plan.rows) {
        check(seen.insert(row.slot).second, "sim: two rows of one slot in a plan");
        tokens += row.q_len_max;
        result.rows.push_back({.slot = row.slot, .generation = row.generation, .tokens = {}, .error = {}});
        execute(row, result.rows.back());
    }
    check(tokens == plan.token_count, "sim: token_count is not the sum over the rows");
    results_.push_back(std::move(result));
}

StepResult FakeRunner::collect() {
    check(!results_.empty(), "sim: nothing to collect");
    StepResult result = std::move(results_.front());
    results_.pop_front();
    return result;
}

void FakeRunner::retire(SlotId id) {
    check(id >= 0 && static_cast<size_t>(id) < slots_.size(), "sim: no such slot");
    Slot& slot = slots_[static_cast<size_t>(id)];
    check(slot.used, "sim: an unused slot was retired");
    for (const StepResult& result : results_) {
        for (const RowResult& row : result.rows) {
            check(row.slot != id, "sim: a slot was retired while a row of it is uncommitted");
        }
    }
    for (const PageId page : slot.table) {
        pages_.leave(page);
    }
    const uint32_t generation = slot.generation;
    slot = Slot();
    slot.generation = generation;
}

void FakeRunner::init(const SlotInit& init) {
    check(init.slot >= 0 && static_cast<size_t>(init.slot) < slots_.size(), "sim: no such slot");
    Slot& slot = slots_[static_cast<size_t>(init.slot)];
    check(!slot.used, "sim: a slot was given again before it was retired");
    check(init.generation > slot.generation, "sim: a slot was given again without a new generation");
    slot.used = true;
    slot.generation = init.generation;
    slot.sampling = init.sampling;
    slot.script = &scripts_.at(init.sampling.seed);
    slot.prompt = static_cast<int32_t>(init.prompt.size());
    for (const TokenId token : init.prompt) {
        slot.append(token);
    }
    for (size_t place = 0; place < init.output.size(); ++place) {
        check(init.output[place] == slot.script->token(static_cast<int32_t>(place)),
              "sim: a preempted request came back with another output");
        slot.append(init.output[place]);
    }
}

void FakeRunner::take_pages(Slot& slot, const StepRow& row) {
    check(row.page_table_length == static_cast<int32_t>(slot.table.size()),
          "sim: page table of another length");
    size_t cached = 0;
    if (slot.table.empty() && slot.length == 0) {
        check(row.position_lower % kPageTokens == 0, "sim: a cached prefix ends inside a page");
        cached = static_cast<size_t>(row.position_lower / kPageTokens);
        slot.length = row.position_lower;
    }
    for (size_t i = 0; i < row.new_pages.size(); ++i) {
        const PageId page = row.new_pages[i];
        check(std::find(slot.table.begin(), slot.table.end(), page) == slot.table.end(),
              "sim: a page twice in one table");
        i < cached ? pages_.enter_cached(page) : pages_.enter_fresh(page);
        slot.table.push_back(page);
    }
}

void FakeRunner::check_bounds(const Slot& slot, const StepRow& row) const {
    const int32_t length_max = std::min(slot.prompt + slot.sampling.max_tokens, config_.max_model_len);
    const int32_t end = row.position_upper + row.q_len_max;
    check(row.q_len_max >= 1, "sim: an empty row");
    check(end <= length_max - 1, "sim: a row past the request's last position");
    check(static_cast<int64_t>(slot.table.size()) * kPageTokens >= end,
          "sim: a row without pages for its tokens");
    if (!slot.failed) {
        check(row.position_lower <= slot.length && slot.length <= row.position_upper,
              "sim: the true position is outside the row's bounds");
    }
}

void FakeRunner::read_context(const Slot& slot) const {
    for (int32_t position = 0; position < slot.length; ++position) {
        const PageId page = slot.table[static_cast<size_t>(position / kPageTokens)];
        check(pages_.read(page, position % kPageTokens) == slot.hashes[static_cast<size_t>(position)],
              "sim: a page does not hold what its table says");
    }
}

void FakeRunner::write(Slot& slot, int32_t position, uint64_t hash) {
    pages_.write(slot.table[static_cast<size_t>(position / kPageTokens)], position % kPageTokens, hash);
}

void FakeRunner::execute(const StepRow& row, RowResult& result) {
    check(row.slot >= 0 && static_cast<size_t>(row.slot) < slots_.size(), "sim: no such slot");
    Slot& slot = slots_[static_cast<size_t>(row.slot)];
    check(slot.used && slot.generation == row.generation, "sim: a row of a slot's other generation");
    take_pages(slot, row);
    check_bounds(slot, row);
    if (slot.failed) {  // the scheduler will ignore this row
        result.error = kSampleError;
        return;
    }
    read_context(slot);
    row.kind == RowKind::kDecode ? decode(slot, row, result) : prefill(slot, row, result);
}

void FakeRunner::prefill(Slot& slot, const StepRow& row, RowResult& result) {
    check(row.position_lower == row.position_upper && row.draft_count == 0,
          "sim: a prefill row with loose bounds");
    check(static_cast<int32_t>(row.tokens.size()) == row.q_len_max &&
              row.position_lower + row.q_len_max <= static_cast<int32_t>(slot.tokens.size()),
          "sim: a prefill row of a wrong length");
    check(std::equal(row.tokens.begin(), row.tokens.end(), slot.tokens.begin() + slot.length),
          "sim: a prefill row with wrong tokens");
    for (int32_t i = 0; i < row.q_len_max; ++i, ++slot.length) {
        write(slot, slot.length, slot.hashes[static_cast<size_t>(slot.length)]);
    }
    const bool last = slot.length == static_cast<int32_t>(slot.tokens.size());
    check(last == (row.kind == RowKind::kPrefillLast), "sim: only the last chunk of a prefill samples");
    if (config_.prefill_errors_one_in > 0 && random_.one_in(config_.prefill_errors_one_in)) {
        slot.failed = true;
        result.error = kPrefillError;
    } else if (last) {
        sample(slot, result);
    }
}

// The slot's last token and its drafts are computed; some drafts turn out right.
void FakeRunner::decode(Slot& slot, const StepRow& row, RowResult& result) {
    check(slot.length == static_cast<int32_t>(slot.tokens.size()) - 1,
          "sim: a decode row before the prefill's end");
    check(row.tokens.empty() && row.q_len_max == 1 + row.draft_count, "sim: a decode row of a wrong length");
    const int32_t accepted = random_.between(0, row.draft_count);
    for (int32_t i = 0; i <= row.draft_count; ++i) {
        write(slot, slot.length + i, kRejected);
    }
    for (int32_t i = 0; i <= accepted; ++i) {
        write(slot, slot.length, slot.hashes.back());
        ++slot.length;
        if (!sample(slot, result)) {
            --slot.length;  // as if that draft had been rejected
            break;
        }
    }
}

bool FakeRunner::sample(Slot& slot, RowResult& result) {
    const auto place = static_cast<int32_t>(slot.tokens.size()) - slot.prompt;
    if (place == slot.script->error_at) {
        if (result.tokens.empty()) {
            slot.failed = true;
            result.error = kSampleError;
        }
        return false;
    }
    const TokenId token = slot.script->token(place);
    slot.append(token);
    result.tokens.push_back({.token = token, .logprob = static_cast<float>(place), .top = {}});
    return true;
}

void FakeRunner::withdraw_pages(uint64_t request_seed, int32_t kept) {
    for (const Slot& slot : slots_) {
        if (slot.used && slot.sampling.seed == request_seed) {
            for (size_t page = static_cast<size_t>(kept / kPageTokens); page < slot.table.size(); ++page) {
                pages_.withdraw(slot.table[page]);
            }
        }
    }
}

}  // namespace tessera::sim
