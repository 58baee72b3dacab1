// sim_test [--seed=N] [--histories=N]: runs histories with the seeds N, N + 1, ... (default: 3000 from 1).
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <gtest/gtest.h>
#include <string_view>

#include "sim/history.h"

namespace tessera::sim {
namespace {

struct Run {
    uint64_t first_seed = 1;
    uint64_t histories = 3000;
};

Run run;
volatile uint64_t current_seed = 0;

// check() aborts where a rule is broken; the seed is what makes it happen again.
void print_seed(int) {
    char line[80];
    std::snprintf(line, sizeof line, "sim: repeat with --seed=%llu --histories=1\n",
                  static_cast<unsigned long long>(current_seed));
    std::fputs(line, stderr);
    std::signal(SIGABRT, SIG_DFL);
}

uint64_t number(std::string_view text) {
    return std::strtoull(std::string(text).c_str(), nullptr, 10);
}

void print(const Coverage& c) {
    std::printf("requests %lld, steps %lld (%lld overlapped), tokens %lld, drafted rows %lld\n",
                static_cast<long long>(c.requests), static_cast<long long>(c.steps),
                static_cast<long long>(c.overlapped_plans), static_cast<long long>(c.generated),
                static_cast<long long>(c.drafted_rows));
    std::printf("preemptions %lld, cached tokens %lld, evicted pages %lld, cut answers %lld\n",
                static_cast<long long>(c.preemptions), static_cast<long long>(c.cached_tokens),
                static_cast<long long>(c.evicted_pages), static_cast<long long>(c.cut_answers));
    std::printf("ends: stop %lld, length %lld, abort %lld, deadline %lld, error %lld\n",
                static_cast<long long>(c.finished_stop), static_cast<long long>(c.finished_length),
                static_cast<long long>(c.finished_abort), static_cast<long long>(c.finished_deadline),
                static_cast<long long>(c.finished_error));
}

TEST(Simulator, RandomHistoriesKeepEveryRule) {
    Coverage coverage;
    for (uint64_t i = 0; i < run.histories; ++i) {
        current_seed = run.first_seed + i;
        run_history(current_seed, coverage);
    }
    print(coverage);
    EXPECT_GE(coverage.requests, static_cast<int64_t>(run.histories));
    if (run.histories < 1000) {
        return;  // too few to meet every situation
    }
    EXPECT_GT(coverage.overlapped_plans, coverage.steps / 4);
    EXPECT_GT(coverage.drafted_rows, 1000);
    EXPECT_GT(coverage.preemptions, 1000);
    EXPECT_GT(coverage.cached_tokens, 1000);
    EXPECT_GT(coverage.evicted_pages, 1000);
    EXPECT_GT(coverage.cut_answers, 100);
    EXPECT_GT(coverage.finished_stop, 1000);
    EXPECT_GT(coverage.finished_length, 1000);
    EXPECT_GT(coverage.finished_abort, 100);
    EXPECT_GT(coverage.finished_deadline, 100);
    EXPECT_GT(coverage.finished_error, 100);
}

}  // namespace
}  // namespace tessera::sim

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    for (int i = 1; i < argc; ++i) {
        const std::string_view flag(argv[i]);
        if (flag.starts_with("--seed=")) {
            tessera::sim::run.first_seed = tessera::sim::number(flag.substr(7));
        } else if (flag.starts_with("--histories=")) {
            tessera::sim::run.histories = tessera::sim::number(flag.substr(12));
        } else {
            std::fprintf(stderr, "sim_test: unknown flag %s\n", argv[i]);
            return 2;
        }
    }
    std::signal(SIGABRT, tessera::sim::print_seed);
    return RUN_ALL_TESTS();
}
