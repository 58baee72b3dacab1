#include "base/thread_pool.h"

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
