#include "engine/engine.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <fmt/format.h>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/bounded_queue.h"
#include "base/check.h"
#include "engine/stage_histogram.h"

namespace tessera {
namespace {

constexpr size_t kDeliveryBatchesMax = 256;  // contract: delivery.bound

struct SubmitCommand {
    Request request;
};
struct CancelCommand {
    RequestId id;
    FinishReason reason;
};
struct FinishCommand {
    RequestId id;
    int32_t n_tokens;
};
using Command = std::variant<SubmitCommand, CancelCommand, FinishCommand>;

}  // namespace

struct Engine::Impl {
    Impl(EngineConfig engine_config, std::unique_ptr<Runner> engine_runner)
        : config(std::move(engine_config)),
          runner(std::move(engine_runner)),
          cache(config.num_pages, config.prefix_caching),
          scheduler(config.scheduler, cache),
          deliveries(kDeliveryBatchesMax) {
        check(config.scheduler.steps_in_flight <= runner->max_in_flight(),
              "engine: more steps in flight than the runner takes");
        published.cache = cache.stats();
        published.scheduler = scheduler.stats();
        delivery_thread = std::thread([this] { deliver_loop(); });
        loop_thread = std::thread([this] { loop(); });
    }

    ~Impl() {
        {
            std::lock_guard lock(mutex);
            stopping = true;
        }
        wake.notify_all();
        loop_thread.join();
        deliveries.close();
        delivery_thread.join();
    }

    // --- callers' side -------------------------------------------------------------------------------------

    Status submit(Request request, EventSink sink) {
        if (Status fit = scheduler.fits(request); !fit.ok()) {
            return fit;
        }
        const RequestId id = request.id;
        std::lock_guard lock(mutex);
        if (stopping || draining) {
            return unavailable("the server is shutting down and takes no new requests");
        }
        const int32_t waiting = published.scheduler.waiting;
        const auto tokens = static_cast<int64_t>(request.prompt.size());
        if (config.max_queued_requests > 0 && waiting >= config.max_queued_requests) {
            return resource_exhausted(fmt::format("{} requests are waiting, which is the limit", waiting));
        }
        if (config.max_queued_tokens > 0 && waiting > 0 &&
            published.scheduler.waiting_tokens + tokens > config.max_queued_tokens) {
            return resource_exhausted(
                fmt::format("{} prompt tokens are waiting; with this request's {} the limit of {} is passed",
                            published.scheduler.waiting_tokens, tokens, config.max_queued_tokens));
        }
        check(sinks.emplace(id, std::make_shared<EventSink>(std::move(sink))).second,
              "engine: a request id was used twice");
        published.scheduler.waiting += 1;  // until the loop publishes the true numbers
        published.scheduler.waiting_tokens += tokens;
        if (commands.empty() && progress_ns == 0) {
            progress_ns = now_ns();
        }
        commands.push_back(SubmitCommand{std::move(request)});
        wake.notify_one();
        return {};
    }

    void post(Command command) {
        {
            std::lock_guard lock(mutex);
            commands.push_back(std::move(command));
        }
        wake.notify_one();
    }

    // --- the loop (docs/contracts/engine.md, loop) -------------------------------------------------------

    void loop() {
        int in_flight = 0;
        bool aborted = false;
        for (;;) {
            aborted = take_commands(aborted);
            bool launched = false;
            while (in_flight < config.scheduler.steps_in_flight && launch_next()) {
                ++in_flight;
                launched = true;
            }
            hand_over_events();
            publish(in_flight, launched);
            if (in_flight > 0) {
                collect_oldest();
                --in_flight;
                continue;
            }
            if (!sleep_until_work(aborted)) {
                return;
            }
        }
    }

    // Hands the callers' commands to the scheduler. Once stopping, cancels everything (and says so).
    bool take_commands(bool aborted) {
        std::deque<Command> taken;
        bool abort_now = false;
        std::vector<RequestId> live;
        {
            std::lock_guard lock(mutex);
            taken.swap(commands);
            abort_now = std::exchange(abort_requested, false) || (stopping && !aborted);
            if (abort_now) {
                for (const auto& [id, sink] : sinks) {
                    live.push_back(id);
                }
            }
            aborted = aborted || stopping;
        }
        const TimeNs now = now_ns();
        for (Command& command : taken) {
            apply(command, now);
        }
        for (const RequestId id : live) {
            scheduler.cancel(id, FinishReason::kAbort, now);
        }
        return aborted;
    }

    void apply(Command& command, TimeNs now) {
        if (auto* submitted = std::get_if<SubmitCommand>(&command)) {
            scheduler.submit(std::move(submitted->request), now);
        } else if (const auto* cancelled = std::get_if<CancelCommand>(&command)) {
            scheduler.cancel(cancelled->id, cancelled->reason, now);
        } else {
            const auto& finished = std::get<FinishCommand>(command);
            scheduler.finish(finished.id, finished.n_tokens, now);
        }
    }

    bool launch_next() {
        std::optional<StepPlan> plan;
        {
            StageTimer timer(local.plan);
            plan = scheduler.next(now_ns());
        }
        if (!plan) {
            return false;
        }
        record(local.step_tokens, plan->token_count);
        StageTimer timer(local.launch);
        runner->launch(std::move(*plan));
        return true;
    }

    void collect_oldest() {
        StepResult result;
        {
            StageTimer timer(local.collect);
            result = runner->collect();
        }
        record(local.step, result.finished - result.started);
        ++local.steps;
        StageTimer timer(local.commit);
        scheduler.commit(result, now_ns());
    }

    void hand_over_events() {
        std::vector<TokenEvent> events = scheduler.take_events();
        if (events.empty()) {
            return;
        }
        while (!deliveries.try_push(std::move(events))) {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }

    void publish(int in_flight, bool launched) {
        std::lock_guard lock(mutex);
        const StageHistogram deliver = published.deliver;  // the delivery thread's own
        int32_t queued = 0;
        int64_t queued_tokens = 0;
        for (const Command& command : commands) {
            if (const auto* submitted = std::get_if<SubmitCommand>(&command)) {
                ++queued;
                queued_tokens += static_cast<int64_t>(submitted->request.prompt.size());
            }
        }
        published = local;
        published.deliver = deliver;
        published.scheduler = scheduler.stats();
        published.scheduler.waiting += queued;
        published.scheduler.waiting_tokens += queued_tokens;
        published.cache = cache.stats();
        const bool work = in_flight > 0 || scheduler.has_work() || queued > 0;
        if (!work) {
            progress_ns = 0;
        } else if (launched || local.steps != progress_steps || progress_ns == 0) {
            progress_ns = now_ns();
        }
        progress_steps = local.steps;
    }

    // False when the engine is to end.
    bool sleep_until_work(bool aborted) {
        std::unique_lock lock(mutex);
        const auto ready = [&] { return !commands.empty() || abort_requested || stopping; };
        if (scheduler.has_work()) {
            // Nothing can run and nothing is in flight: only time (a deadline) or a caller can change that.
            wake.wait_for(lock, std::chrono::milliseconds(1), ready);
        } else if (!ready()) {
            wake.wait(lock, ready);
        }
        return !(stopping && aborted && commands.empty() && !scheduler.has_work());
    }

    // --- delivery ----------------------------------------------------------------------------------------

    void deliver_loop() {
        while (std::optional<std::vector<TokenEvent>> batch = deliveries.pop()) {
            const TimeNs start = now_ns();
            for (TokenEvent& event : *batch) {
                deliver(std::move(event));
            }
            std::lock_guard lock(mutex);
            record(published.deliver, now_ns() - start);
        }
    }

    void deliver(TokenEvent&& event) {
        std::shared_ptr<EventSink> sink;
        {
            std::lock_guard lock(mutex);
            const auto found = sinks.find(event.id);
            if (found == sinks.end()) {
                return;
            }
            sink = found->second;
            if (event.finish != FinishReason::kNone) {
                sinks.erase(found);
            }
        }
        (*sink)(std::move(event));
    }

    const EngineConfig config;
    const std::unique_ptr<Runner> runner;
    KvCache cache;        // loop thread
    Scheduler scheduler;  // loop thread, but for fits()
    EngineStats local;    // loop thread: stages and step counts

    mutable std::mutex mutex;  // guards everything down to `deliveries`
    std::condition_variable wake;
    std::deque<Command> commands;
    std::unordered_map<RequestId, std::shared_ptr<EventSink>> sinks;
    EngineStats published;
    TimeNs progress_ns = 0;  // of the last launch or commit while there is work; 0 = idle
    uint64_t progress_steps = 0;
    bool draining = false;
    bool abort_requested = false;
    bool stopping = false;

    BoundedQueue<std::vector<TokenEvent>> deliveries;
    std::atomic<RequestId> next_id{1};
    std::thread delivery_thread;
    std::thread loop_thread;
};

Engine::Engine(EngineConfig config, std::unique_ptr<Runner> runner)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(runner))) {}

Engine::~Engine() = default;

Status Engine::submit(Request request, EventSink sink) {
    return impl_->submit(std::move(request), std::move(sink));
}

RequestId Engine::new_request_id() {
    return impl_->next_id.fetch_add(1, std::memory_order_relaxed);
}

void Engine::cancel(RequestId id, FinishReason reason) {
    impl_->post(CancelCommand{id, reason});
}

void Engine::finish(RequestId id, int32_t n_tokens) {
    impl_->post(FinishCommand{id, n_tokens});
}

EngineStats Engine::stats() const {
    std::lock_guard lock(impl_->mutex);
    return impl_->published;
}

void Engine::stop_admission() {
    std::lock_guard lock(impl_->mutex);
    impl_->draining = true;
}

bool Engine::draining() const {
    std::lock_guard lock(impl_->mutex);
    return impl_->draining;
}

bool Engine::idle() const {
    std::lock_guard lock(impl_->mutex);
    return impl_->sinks.empty();
}

void Engine::abort_all() {
    {
        std::lock_guard lock(impl_->mutex);
        impl_->abort_requested = true;
    }
    impl_->wake.notify_all();
}

double Engine::stalled_s() const {
    std::lock_guard lock(impl_->mutex);
    return impl_->progress_ns == 0 ? 0.0 : seconds(now_ns() - impl_->progress_ns);
}

}  // namespace tessera
