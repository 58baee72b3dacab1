#include "base/thread_pool.h"

#include <condition_variable>
#include <mutex>

#include "base/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {
namespace {

constexpr int kSpins = 4000;  // about 50 us of pause instructions before a worker sleeps

void pause_once() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

}  // namespace

// Cache lines that go from core to core are what a short loop costs, so there are few: one from the owner
// with all that a worker must know, and one back from each worker with how many items it has done. The owner
// takes part and waits until the items are done, not for workers: one that did not wake in time holds up
// nobody.
//
// Threads claim items by counters that bear the number of the loop. Nobody resets them: a counter of an older
// loop stands for zero, and one of a newer loop tells a late worker that its own loop is over.
struct ThreadPool::Shared {
    static constexpr int kCountBits = 24;
    static constexpr int64_t kCountMax = (int64_t{1} << kCountBits) - 1;
    static constexpr uint64_t kRenewMask = 0xFFFFFF;

    struct alignas(64) Counter {
        std::atomic<uint64_t> value{0};  // number of the loop << kCountBits | count
    };

    struct Job {
        std::atomic<int64_t> items{0};
        std::atomic<void*> context{nullptr};
        std::atomic<Call> call{nullptr};
    };

    explicit Shared(int threads)
        : claimed(static_cast<size_t>(threads)), done(static_cast<size_t>(threads)) {}

    alignas(64) std::atomic<uint64_t> loop{0};  // number of the newest
    Job jobs[2];                                // of the newest and of the one before, by parity
    std::atomic<bool> stop{false};

    std::vector<Counter> claimed;  // of each thread's own items, by anyone
    std::vector<Counter> done;     // by each thread
    alignas(64) std::atomic<int> sleepers{0};
    std::mutex mutex;
    std::condition_variable wake;

    // `count` is the counter's when it is of this loop. Negative: of a newer one.
    static int64_t count_in(uint64_t value, uint64_t number) {
        const auto age = static_cast<int64_t>((number << kCountBits) - (value & ~uint64_t{kCountMax}));
        if (age == 0) {
            return static_cast<int64_t>(value & kCountMax);
        }
        return age > 0 ? 0 : -1;
    }

    // Claims one of the owner's items; -1: there is none left.
    int64_t claim(int64_t owner, uint64_t number, int64_t items) {
        std::atomic<uint64_t>& counter = claimed[static_cast<size_t>(owner)].value;
        uint64_t now = counter.load(std::memory_order_relaxed);
        for (;;) {
            const int64_t count = count_in(now, number);
            const int64_t item = owner + static_cast<int64_t>(claimed.size()) * count;
            if (count < 0 || item >= items) {
                return -1;
            }
            const uint64_t next = number << kCountBits | static_cast<uint64_t>(count + 1);
            if (counter.compare_exchange_weak(now, next, std::memory_order_relaxed)) {
                return item;
            }
        }
    }

    // First the thread's own items, then what is left of the others'.
    void take_part(uint64_t number, int thread) {
        const Job& job = jobs[number % 2];
        const int64_t items = job.items.load(std::memory_order_acquire);
        void* context = job.context.load(std::memory_order_acquire);
        const Call call = job.call.load(std::memory_order_acquire);
        if (loop.load(std::memory_order_acquire) != number) {
            return;  // what was read may be of a newer loop
        }
        const auto threads = static_cast<int64_t>(claimed.size());
        uint64_t count = 0;
        for (int64_t v = 0; v < threads; ++v) {
            const int64_t owner = (thread + v) % threads;
            for (int64_t item = claim(owner, number, items); item >= 0; item = claim(owner, number, items)) {
                call(context, item, thread);
                ++count;
            }
        }
        if (count > 0) {
            done[static_cast<size_t>(thread)].value.store(number << kCountBits | count,
                                                          std::memory_order_release);
        }
    }

    int64_t items_done(uint64_t number) const {
        int64_t sum = 0;
        for (const Counter& counter : done) {
            sum += count_in(counter.value.load(std::memory_order_acquire), number);
        }
        return sum;
    }

    // The owner's: opens a loop.
    uint64_t open(int64_t items, void* context, Call call) {
        const uint64_t number = loop.load(std::memory_order_relaxed) + 1;
        if ((number & kRenewMask) == 0) {  // a counter must not grow so old that it looks newer
            for (size_t t = 0; t < claimed.size(); ++t) {
                claimed[t].value.store(number << kCountBits, std::memory_order_relaxed);
                done[t].value.store(number << kCountBits, std::memory_order_relaxed);
            }
        }
        Job& job = jobs[number % 2];
        job.items.store(items, std::memory_order_release);
        job.context.store(context, std::memory_order_release);
        job.call.store(call, std::memory_order_release);
        loop.store(number);
        if (sleepers.load() > 0) {
            std::lock_guard lock(mutex);
            wake.notify_all();
        }
        return number;
    }

    // The number of a loop other than `seen`, or `seen` when the pool ends.
    uint64_t wait_for_loop(uint64_t seen) {
        const auto news = [&] { return loop.load() != seen || stop.load(); };
        for (int spins = 0; spins < kSpins; ++spins) {
            if (news()) {
                return stop.load() ? seen : loop.load();
            }
            pause_once();
        }
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, news);
        sleepers.fetch_sub(1);
        return stop.load() ? seen : loop.load();
    }
};

ThreadPool::ThreadPool(int threads) {
    check(threads >= 1, "a thread pool needs at least one thread");
    shared_ = std::make_unique<Shared>(threads);
    for (int i = 1; i < threads; ++i) {
        workers_.emplace_back([this, i] { work(i); });
    }
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard lock(shared_->mutex);
        shared_->stop.store(true);
    }
    shared_->wake.notify_all();
    for (std::thread& worker : workers_) {
        worker.join();
    }
}

void ThreadPool::run(int64_t items, const void* context, Call call) {
    Shared& s = *shared_;
    void* mutable_context = const_cast<void*>(context);
    if (workers_.empty() || items <= 1) {
        for (int64_t i = 0; i < items; ++i) {
            call(mutable_context, i, 0);
        }
        return;
    }
    check(items <= Shared::kCountMax, "thread pool: too many items");
    const uint64_t number = s.open(items, mutable_context, call);
    s.take_part(number, 0);
    for (int spins = 0; s.items_done(number) != items; ++spins) {
        if (spins < kSpins) {
            pause_once();
        } else {
            std::this_thread::yield();  // a busy machine: let the worker have the core
        }
    }
}

void ThreadPool::work(int thread) {
    Shared& s = *shared_;
    uint64_t seen = 0;
    while (!s.stop.load()) {
        const uint64_t number = s.wait_for_loop(seen);
        if (number != seen) {
            s.take_part(number, thread);
        }
        seen = number;
    }
}

}  // namespace tessera
