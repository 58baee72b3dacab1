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

// One loop is one epoch: odd while it is open, even once it is closed. The owner writes the loop and opens
// it; a worker announces itself in `active`, looks whether the epoch is still the open one, and only then
// claims items. The owner takes part, closes the epoch when all items are claimed, and waits
// for those that came in; a worker that did not wake in time holds up nobody. (The order active++, read epoch
// against close epoch, read active, both sequentially consistent, makes one of the two see the other.)
struct ThreadPool::Shared {
    struct alignas(64) Hand {
        std::atomic<int64_t> next{0};  // the thread's own items that were claimed so far
    };

    explicit Shared(int threads) : hands(static_cast<size_t>(threads)) {}

    alignas(64) std::atomic<uint64_t> epoch{0};
    alignas(64) std::atomic<int> active{0};
    std::vector<Hand> hands;
    int64_t items = 0;
    void* context = nullptr;
    Call call = nullptr;
    std::atomic<bool> stop{false};
    std::atomic<int> sleepers{0};
    std::mutex mutex;
    std::condition_variable wake;

    // First the thread's own hand, then what is left of the others'.
    void claim(int thread) {
        const auto threads = static_cast<int64_t>(hands.size());
        for (int64_t v = 0; v < threads; ++v) {
            const int64_t owner = (thread + v) % threads;
            std::atomic<int64_t>& next = hands[static_cast<size_t>(owner)].next;
            for (;;) {
                const int64_t item = owner + threads * next.fetch_add(1, std::memory_order_relaxed);
                if (item >= items) {
                    break;
                }
                call(context, item, thread);
            }
        }
    }

    void wake_sleepers() {
        if (sleepers.load() > 0) {
            std::lock_guard lock(mutex);
            wake.notify_all();
        }
    }

    // An open epoch other than `seen`, or `seen` when the pool ends.
    uint64_t wait_for_epoch(uint64_t seen) {
        const auto news = [&] {
            const uint64_t now = epoch.load();
            return (now % 2 == 1 && now != seen) || stop.load();
        };
        for (int spins = 0; spins < kSpins; ++spins) {
            if (news()) {
                return stop.load() ? seen : epoch.load();
            }
            pause_once();
        }
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, news);
        sleepers.fetch_sub(1);
        return stop.load() ? seen : epoch.load();
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
    s.context = const_cast<void*>(context);
    if (workers_.empty() || items <= 1) {
        for (int64_t i = 0; i < items; ++i) {
            call(s.context, i, 0);
        }
        return;
    }
    s.items = items;
    s.call = call;
    for (Shared::Hand& hand : s.hands) {
        hand.next.store(0, std::memory_order_relaxed);
    }
    s.epoch.fetch_add(1);
    s.wake_sleepers();
    s.claim(0);
    s.epoch.fetch_add(1);
    for (int spins = 0; s.active.load() != 0; ++spins) {
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
        const uint64_t epoch = s.wait_for_epoch(seen);
        s.active.fetch_add(1);
        if (epoch % 2 == 1 && epoch != seen && s.epoch.load() == epoch) {
            s.claim(thread);
        }
        s.active.fetch_sub(1);
        seen = epoch;
    }
}

}  // namespace tessera
