#include "base/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <gtest/gtest.h>
#include <numeric>

namespace tessera {
namespace {

TEST(ThreadPool, EveryItemOnceForManyLoops) {
    for (int threads : {1, 2, 3, 8}) {
        ThreadPool pool(threads);
        ASSERT_EQ(pool.size(), threads);
        for (int loop = 0; loop < 300; ++loop) {
            const int64_t items = loop % 37;
            std::vector<std::atomic<int>> hits(static_cast<size_t>(items));
            pool.parallel_for(items, [&](int64_t i, int thread) {
                ASSERT_GE(thread, 0);
                ASSERT_LT(thread, threads);
                hits[static_cast<size_t>(i)].fetch_add(1);
            });
            for (const auto& hit : hits) {
                ASSERT_EQ(hit.load(), 1);
            }
        }
    }
}

// A worker that is held up in its first item leaves the rest of its hand to the others.
TEST(ThreadPool, OthersTakeTheItemsOfASlowThread) {
    ThreadPool pool(2);
    std::atomic<int> done{0};
    std::atomic<int> by_owner{0};
    pool.parallel_for(64, [&](int64_t item, int thread) {
        if (thread == 1) {
            while (done.load() < 32) {  // until the caller has taken all that is its own
                std::this_thread::yield();
            }
        }
        by_owner += item % 2 == thread ? 1 : 0;
        done.fetch_add(1);
    });
    EXPECT_EQ(done.load(), 64);
    EXPECT_GE(by_owner.load(), 32);
}

TEST(ThreadPool, PlacesOfAThreadAreNeighbours) {
    for (int threads : {1, 2, 3, 8}) {
        const ThreadPool pool(threads);
        for (int64_t n = 0; n < 40; ++n) {
            std::vector<int> hits(static_cast<size_t>(n));
            for (int64_t i = 0; i < n; ++i) {
                const int64_t place = pool.place(i, n);
                ASSERT_TRUE(place >= 0 && place < n) << i << " of " << n;
                ++hits[static_cast<size_t>(place)];
                if (i >= threads) {
                    EXPECT_EQ(place, pool.place(i - threads, n) + 1);
                }
            }
            EXPECT_EQ(std::count(hits.begin(), hits.end(), 1), n);
        }
    }
}

TEST(ThreadPool, WakesWorkersThatSleep) {
    ThreadPool pool(2);
    for (int loop = 0; loop < 3; ++loop) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        std::atomic<int64_t> sum{0};
        pool.parallel_for(100, [&](int64_t i, int) { sum += i; });
        EXPECT_EQ(sum.load(), 4950);
    }
}

}  // namespace
}  // namespace tessera
