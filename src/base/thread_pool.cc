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

// One loop is one generation. The owner writes the loop, then publishes it by raising `generation`; a worker
// that has seen the generation claims items through `next` and reports by raising `finished`.
struct ThreadPool::Shared {
    alignas(64) std::atomic<uint64_t> generation{0};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> finished{0};
    int64_t items = 0;
    void* context = nullptr;
    Call call = nullptr;
    std::atomic<bool> stop{false};
    std::atomic<int> sleepers{0};
    std::mutex mutex;
    std::condition_variable wake;

    void claim(int thread) {
        for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < items;
             i = next.fetch_add(1, std::memory_order_relaxed)) {
            call(context, i, thread);
        }
    }
};

ThreadPool::ThreadPool(int threads) : shared_(std::make_unique<Shared>()) {
    check(threads >= 1, "a thread pool needs at least one thread");
    for (int i = 1; i < threads; ++i) {
        workers_.emplace_back([this, i] { work(i); });
    }
}

ThreadPool::~ThreadPool() {
    shared_->stop.store(true);
    {
        std::lock_guard lock(shared_->mutex);
        shared_->generation.fetch_add(1);
    }
    shared_->wake.notify_all();
    for (std::thread& worker : workers_) {
        worker.join();
    }
}

void ThreadPool::run(int64_t items, const void* context, Call call) {
    if (items <= 0) {
        return;
    }
    Shared& s = *shared_;
    void* body = const_cast<void*>(context);
    if (workers_.empty() || items == 1) {
        for (int64_t i = 0; i < items; ++i) {
            call(body, i, 0);
        }
        return;
    }
    s.items = items;
    s.context = body;
    s.call = call;
    s.next.store(0, std::memory_order_relaxed);
    s.finished.store(0, std::memory_order_relaxed);
    s.generation.fetch_add(1);  // sequentially consistent: pairs with the worker's check before it sleeps
    if (s.sleepers.load() > 0) {
        std::lock_guard lock(s.mutex);
        s.wake.notify_all();
    }
    s.claim(0);
    const int others = static_cast<int>(workers_.size());
    for (int spins = 0; s.finished.load(std::memory_order_acquire) != others; ++spins) {
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
    for (;;) {
        for (int spins = 0; s.generation.load(std::memory_order_acquire) == seen; ++spins) {
            if (spins < kSpins) {
                pause_once();
                continue;
            }
            std::unique_lock lock(s.mutex);
            s.sleepers.fetch_add(1);
            s.wake.wait(lock, [&] { return s.generation.load() != seen; });
            s.sleepers.fetch_sub(1);
        }
        if (s.stop.load()) {
            return;
        }
        seen = s.generation.load(std::memory_order_acquire);
        s.claim(thread);
        s.finished.fetch_add(1, std::memory_order_release);
    }
}

}  // namespace tessera
