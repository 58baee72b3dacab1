// A fixed set of threads for data-parallel loops, and for nothing else: one loop at a time, started by one
// owner thread, which takes part in it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace tessera {

// Ownership: whoever builds it joins its threads by destroying it. parallel_for() may be called by one thread
// at a time and must not be nested. Workers spin for some microseconds between loops and then sleep, so that
// the dozens of short loops of a decode step cost about a microsecond each and an idle engine costs nothing.
class ThreadPool {
  public:
    // threads >= 1, the caller of parallel_for() included.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(item, thread) once for each item in [0, items), with thread in [0, size()); returns when all
    // are done. Thread t begins with items t, t + size(), ... in this order, and then helps the others: so
    // item i of one loop mostly meets in its core's cache what item i of another left there, and a thread
    // that sleeps or is slow holds up nobody. Items are claimed one by one: make each worth a microsecond or
    // more. REQUIRES: items < 2^24.
    template <typename Body>
    void parallel_for(int64_t items, Body&& body) {
        using Stored = std::remove_reference_t<Body>;
        run(items, &body,
            [](void* context, int64_t item, int thread) { (*static_cast<Stored*>(context))(item, thread); });
    }

    // Of n items that parallel_for() offers to the threads in turn: a place for item i such that each
    // thread's items are neighbours, in order.
    int64_t place(int64_t i, int64_t n) const {
        const int64_t thread = i % size();
        return thread * (n / size()) + std::min(thread, n % size()) + i / size();
    }

  private:
    using Call = void (*)(void* context, int64_t item, int thread);
    struct Shared;

    void run(int64_t items, const void* context, Call call);
    void work(int thread);

    std::unique_ptr<Shared> shared_;
    std::vector<std::thread> workers_;
};

}  // namespace tessera
