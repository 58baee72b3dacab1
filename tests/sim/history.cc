#include "sim/history.h"

#include <algorithm>
#include <deque>
#include <map>

#include "base/check.h"
#include "sim/fake_runner.h"
#include "sim/workload.h"

namespace tessera::sim {
namespace {

// What the driver knows of a request, from its plans and events alone.
struct Client {
    Request request;
    Script script;
    int32_t length_max = 0;
    std::vector<GeneratedToken> tokens;
    FinishReason finish = FinishReason::kNone;
    int32_t finish_at = -1;  // finish(id, n) was called
    std::string error;
    int32_t cached_tokens = 0;
    TokenId stop_token = -1;

    SlotId slot = -1;  // the stay that the latest plans speak of
    uint32_t generation = 0;
    bool prefill_planned = false;
    int32_t in_flight_max = 0;  // tokens that uncommitted rows may bring
    int64_t last_progress = 0;  // step

    bool live() const { return finish == FinishReason::kNone; }
    int32_t outputs_max() const { return length_max - static_cast<int32_t>(request.prompt.size()); }
};

class History {
  public:
    History(uint64_t seed, Coverage& coverage)
        : random_(seed),
          coverage_(coverage),
          setting_(random_setting(random_)),
          cache_(setting_.pages, setting_.prefix_caching),
          scheduler_(setting_.scheduler, cache_),
          runner_({.slots = setting_.scheduler.max_num_seqs,
                   .pages = setting_.pages,
                   .max_model_len = setting_.scheduler.max_model_len,
                   .prefill_errors_one_in = setting_.faults ? 60 : 0},
                  scripts_, seed),
          maker_(setting_, scripts_, random_) {}

    void run() {
        const int32_t arrivals_one_in = random_.one_in(2) ? 1 : random_.between(2, 20);
        while (submitted_ < setting_.requests || !scheduler_.idle()) {
            now_ += random_.between(0, 3);
            if (submitted_ < setting_.requests && random_.one_in(arrivals_one_in)) {
                submit();
            }
            if (setting_.interruptions && random_.one_in(12)) {
                interrupt();
            }
            step();
            take_events();
            scheduler_.check_integrity();
            cache_.check_integrity();
        }
        check_end();
    }

  private:
    void submit() {
        const auto id = static_cast<RequestId>(++submitted_);
        Client client;
        client.request = maker_.make(id, now_, scheduler_);
        client.script = scripts_.at(id);
        client.length_max =
            std::min(static_cast<int32_t>(client.request.prompt.size()) + client.request.sampling.max_tokens,
                     setting_.scheduler.max_model_len);
        client.last_progress = steps_;
        work_ += client.length_max;
        scheduler_.submit(client.request, now_);
        clients_.emplace(id, std::move(client));
    }

    // Any request, ended ones too: these calls race with the end in an engine.
    void interrupt() {
        if (clients_.empty()) {
            return;
        }
        auto& [id, client] =
            *std::next(clients_.begin(), random_.between(0, static_cast<int32_t>(clients_.size()) - 1));
        if (random_.one_in(2)) {
            scheduler_.cancel(id, FinishReason::kAbort, now_);
            scheduler_.cancel(9999, FinishReason::kAbort, now_);
            return;
        }
        const int32_t seen = static_cast<int32_t>(client.tokens.size());
        const int32_t n = random_.one_in(2) ? seen : random_.between(0, seen);
        if (client.live()) {
            client.finish_at = n;
            runner_.withdraw_pages(id, static_cast<int32_t>(client.request.prompt.size()) + n);
            coverage_.cut_answers += n < seen;
        }
        scheduler_.finish(id, n, now_);
    }

    void step() {
        const bool room = runner_.in_flight() < setting_.scheduler.steps_in_flight;
        if (room && !random_.one_in(4) && plan()) {
            return;
        }
        if (runner_.in_flight() > 0) {
            collect();
        } else if (room) {
            plan();
        }
    }

    bool plan() {
        const std::optional<StepPlan> plan = scheduler_.next(now_);
        take_events();  // deadlines
        if (!plan) {
            check(runner_.in_flight() > 0 || !scheduler_.has_work(),
                  "sim: work waits, nothing runs, and no plan");
            return false;
        }
        ++steps_;
        coverage_.overlapped_plans += runner_.in_flight() > 0;
        note_stays(*plan);
        check_budget(*plan);
        if (setting_.ample) {
            check_no_wait(*plan);
        }
        note_rows(*plan);
        check_progress();
        runner_.launch(*plan);
        return true;
    }

    void note_stays(const StepPlan& plan) {
        for (const SlotInit& init : plan.inits) {
            Client& client = clients_.at(init.sampling.seed);
            check(client.live(), "sim: an ended request was given a slot");
            check(init.prompt == client.request.prompt, "sim: a slot with another prompt");
            check(init.output.size() == client.tokens.size(), "sim: a slot with another number of outputs");
            check(std::any_of(plan.rows.begin(), plan.rows.end(),
                              [&](const StepRow& r) { return r.slot == init.slot; }),
                  "sim: a slot was given without a first row");
            client.slot = init.slot;
            client.generation = init.generation;
            client.prefill_planned = false;
            check(client.in_flight_max == 0, "sim: readmitted with rows in flight");
        }
    }

    Client* client_of(SlotId slot, uint32_t generation) {
        for (auto& [id, client] : clients_) {
            if (client.slot == slot && client.generation == generation) {
                return &client;
            }
        }
        return nullptr;
    }

    void note_rows(const StepPlan& plan) {
        auto& planned = planned_.emplace_back();
        for (const StepRow& row : plan.rows) {
            Client* client = client_of(row.slot, row.generation);
            check(client != nullptr && client->live(), "sim: a row of an ended or unknown request");
            client->last_progress = steps_;
            client->prefill_planned |= row.kind == RowKind::kPrefillLast;
            const int32_t tokens_max = row.kind == RowKind::kPrefill ? 0 : 1 + row.draft_count;
            client->in_flight_max += tokens_max;
            planned.emplace_back(client, tokens_max);
            coverage_.drafted_rows += row.draft_count > 0;
        }
    }

    void check_budget(const StepPlan& plan) const {
        const SchedulerConfig& config = setting_.scheduler;
        check(plan.token_count <= config.max_num_batched_tokens, "sim: a plan over the token budget");
        StepShape shape;
        for (const StepRow& row : plan.rows) {
            const bool decode = row.kind == RowKind::kDecode;
            shape.decode_rows += decode;
            shape.prefill_tokens += decode ? 0 : row.q_len_max;
            shape.context_tokens += row.position_upper + row.q_len_max;
            check(row.draft_count <= config.draft_tokens_max, "sim: a row with too many drafts");
        }
        constexpr int32_t kAlwaysAllowed = 16;  // prefill tokens, however slow the decode rows are
        if (config.step_time && shape.decode_rows > 0 && shape.prefill_tokens > kAlwaysAllowed) {
            check(config.step_time(shape) <= config.target_tpot_s, "sim: a plan over the target time");
        }
    }

    // With pages and budget for all, every sequence that can decode has a row in every step, and no token of
    // the budget is left while a prefill could use it.
    void check_no_wait(const StepPlan& plan) {
        bool waits = false;
        for (auto& [id, client] : clients_) {
            const bool stays = client.live() && client.slot >= 0;
            const auto row = std::find_if(plan.rows.begin(), plan.rows.end(), [&](const StepRow& r) {
                return r.slot == client.slot && r.generation == client.generation;
            });
            const bool has_row = row != plan.rows.end();
            const int32_t outputs_planned = static_cast<int32_t>(client.tokens.size()) + client.in_flight_max;
            if (stays && client.prefill_planned && outputs_planned < client.outputs_max()) {
                check(has_row, "sim: a decoding sequence was left out of a step");
            }
            waits |= stays && !client.prefill_planned && !(has_row && row->kind == RowKind::kPrefillLast);
        }
        waits |= scheduler_.stats().waiting > 0 && scheduler_.stats().slots_free > 0;
        check(!waits || setting_.scheduler.step_time ||
                  plan.token_count == setting_.scheduler.max_num_batched_tokens,
              "sim: budget was left while a prefill waits");
    }

    // The work of all requests bounds how long one can wait for the others: each step does a token of it at
    // least, but for prefills repeated after preemptions.
    void check_progress() const {
        const int64_t bound = 100 + 4 * work_ + 600 * scheduler_.stats().preemptions;
        for (const auto& [id, client] : clients_) {
            check(!client.live() || steps_ - client.last_progress <= bound, "sim: a request starves");
        }
    }

    void collect() {
        const StepResult result = runner_.collect();
        for (auto& [client, tokens_max] : planned_.front()) {
            client->in_flight_max -= tokens_max;
        }
        planned_.pop_front();
        scheduler_.commit(result, now_);
        take_events();
    }

    void take_events() {
        for (TokenEvent& event : scheduler_.take_events()) {
            Client& client = clients_.at(event.id);
            check(client.live(), "sim: an event after the last one");
            check(event.prompt_tokens == static_cast<int32_t>(client.request.prompt.size()),
                  "sim: wrong prompt_tokens");
            check(event.cached_tokens % kPageTokens == 0 && event.cached_tokens < event.prompt_tokens,
                  "sim: impossible cached_tokens");
            check(event.time == now_, "sim: wrong event time");
            check(!event.tokens.empty() || event.finish != FinishReason::kNone, "sim: an empty event");
            for (GeneratedToken& token : event.tokens) {
                const auto place = static_cast<int32_t>(client.tokens.size());
                check(token.token == client.script.token(place),
                      "sim: a wrong, lost or repeated output token");
                check(token.logprob == static_cast<float>(place), "sim: a token with another's logprob");
                client.tokens.push_back(std::move(token));
            }
            client.cached_tokens = event.cached_tokens;
            client.finish = event.finish;
            client.stop_token = event.stop_token;
            client.error = event.error;
            if (event.finish == FinishReason::kError) {
                runner_.withdraw_pages(event.id, 0);
            }
            if (event.finish != FinishReason::kNone) {
                check_answer(client);
            }
        }
    }

    void check_answer(const Client& client) const {
        const auto outputs = static_cast<int32_t>(client.tokens.size());
        const Script& script = client.script;
        const bool past_stop = script.stop_at >= 0 && outputs > script.stop_at + 1;
        check(!past_stop && outputs <= client.outputs_max(), "sim: an answer past its end");
        check(script.error_at < 0 || outputs <= script.error_at, "sim: an answer past a failed row");
        switch (client.finish) {
            case FinishReason::kStop:
                if (client.stop_token >= 0) {
                    check(outputs == script.stop_at + 1 && client.stop_token == script.stop_token,
                          "sim: a wrong stop");
                } else {
                    check(client.finish_at >= 0 && client.finish_at <= outputs,
                          "sim: a stop that nobody asked for");
                }
                break;
            case FinishReason::kLength:
                check(outputs == client.outputs_max() && outputs != script.stop_at + 1,
                      "sim: a wrong end by length");
                break;
            case FinishReason::kError:
                check(setting_.faults && (client.error == kPrefillError || outputs == script.error_at),
                      "sim: a wrong error");
                break;
            case FinishReason::kDeadline:
                check(client.request.deadline != 0 && client.request.deadline <= now_,
                      "sim: a deadline too early");
                break;
            default:
                check(client.finish == FinishReason::kAbort && setting_.interruptions, "sim: a wrong abort");
        }
    }

    void check_end() {
        int64_t generated = 0;
        int64_t cached = 0;
        std::map<FinishReason, int64_t> ends;
        for (const auto& [id, client] : clients_) {
            check(!client.live(), "sim: a request without its last event");
            ++ends[client.finish];
            const bool cut = client.finish == FinishReason::kStop && client.stop_token < 0;
            generated += cut ? client.finish_at : static_cast<int64_t>(client.tokens.size());
            cached += client.cached_tokens;
        }
        const SchedulerStats stats = scheduler_.stats();
        check(ends[FinishReason::kStop] == stats.finished_stop &&
                  ends[FinishReason::kLength] == stats.finished_length &&
                  ends[FinishReason::kAbort] == stats.finished_abort &&
                  ends[FinishReason::kDeadline] == stats.finished_deadline &&
                  ends[FinishReason::kError] == stats.finished_error,
              "sim: finished requests are miscounted");
        check(generated == stats.generated_tokens && cached == stats.cached_tokens,
              "sim: tokens are miscounted");
        check(stats.running == 0 && stats.waiting == 0 && stats.waiting_tokens == 0 &&
                  stats.slots_free == setting_.scheduler.max_num_seqs,
              "sim: something was not given back");
        check(!setting_.ample || stats.preemptions == 0, "sim: preempted with room for all");
        const CacheStats pages = cache_.stats();
        check(pages.pages_referenced == 0 && pages.hit_tokens == cached, "sim: a page was not given back");
        add_coverage(stats, pages);
    }

    void add_coverage(const SchedulerStats& stats, const CacheStats& pages) {
        coverage_.steps += steps_;
        coverage_.requests += submitted_;
        coverage_.generated += stats.generated_tokens;
        coverage_.preemptions += stats.preemptions;
        coverage_.cached_tokens += stats.cached_tokens;
        coverage_.evicted_pages += pages.evicted_pages;
        coverage_.finished_stop += stats.finished_stop;
        coverage_.finished_length += stats.finished_length;
        coverage_.finished_abort += stats.finished_abort;
        coverage_.finished_deadline += stats.finished_deadline;
        coverage_.finished_error += stats.finished_error;
    }

    Random random_;
    Coverage& coverage_;
    const Setting setting_;
    Scripts scripts_;
    KvCache cache_;
    Scheduler scheduler_;
    FakeRunner runner_;
    RequestMaker maker_;
    std::map<RequestId, Client> clients_;
    std::deque<std::vector<std::pair<Client*, int32_t>>>
        planned_;  // of each uncommitted plan: rows, tokens at most
    int32_t submitted_ = 0;
    TimeNs now_ = 1;
    int64_t steps_ = 0;
    int64_t work_ = 0;  // tokens of all requests
};

}  // namespace

void run_history(uint64_t seed, Coverage& coverage) {
    History(seed, coverage).run();
}

}  // namespace tessera::sim
