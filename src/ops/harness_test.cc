#include "ops/harness.h"

#include <gtest/gtest.h>

#include "ops/harness_loops.h"
#include "ops/harness_simd.h"
#include "ops/registry.h"

namespace tessera {
namespace {

TEST(HarnessTest, FloorIsTheLargerOfBytesAndOperations) {
    const MachineRates rates{.fma_per_s = 1e9, .bytes_per_s = 1e9};
    OpCaseRun run;
    run.bytes = 3000;
    run.flops = 2000;
    EXPECT_DOUBLE_EQ(floor_us(run, rates), 3.0);
    run.flops = 20'000;
    EXPECT_DOUBLE_EQ(floor_us(run, rates), 10.0);
}

TEST(HarnessTest, RatesAreMeasured) {
    ThreadPool threads(2);
    const double fma = measure_fma_rate(threads, 0.01);
    EXPECT_GT(fma, 1e6);
    EXPECT_LT(fma, 2 * 6e9 * 64);  // two units of 32 lanes at 6 GHz: more is a loop that does nothing
    const double bytes = measure_read_bandwidth(threads, 1 << 20, 0.01);
    EXPECT_GT(bytes, 1e6);
    EXPECT_LT(bytes, 1e13);
}

TEST(HarnessTest, TimingIsOrdered) {
    ThreadPool threads(1);
    OpContext context{threads};
    OpCaseRun run;
    int runs = 0;
    run.run = [&](OpContext&) {
        ++runs;
        fma_loop(1000);
    };
    const OpTiming timing = time_case(run, context, 0.01);
    EXPECT_GT(runs, 10);
    EXPECT_LE(timing.p10_us, timing.us);
    EXPECT_LE(timing.us, timing.p90_us);
    EXPECT_GT(timing.hot_us, 0);
}

TEST(RegistryTest, EveryOperatorHasCasesForTestsAndBenchmarks) {
    for (const OpEntry& entry : op_registry()) {
        const std::vector<OpCase> cases = entry.cases();
        int benched = 0;
        for (const OpCase& c : cases) {
            EXPECT_FALSE(c.shape.empty());
            benched += c.bench ? 1 : 0;
        }
        EXPECT_GT(benched, 0) << entry.name;
        EXPECT_LT(benched, static_cast<int>(cases.size())) << entry.name << " has no case that is a corner";
    }
}

TEST(SimdTest, TheReferenceIsAlwaysSupportedAndLast) {
    const std::vector<SimdVariant> variants = simd_variants();
    ASSERT_FALSE(variants.empty());
    EXPECT_EQ(variants.back().name, "reference");
    EXPECT_TRUE(variants.back().supported);
}

TEST(SimdTest, ForcingATargetHidesNone) {
    const std::vector<SimdVariant> before = simd_variants();
    force_simd(before.back().target);
    const std::vector<SimdVariant> after = simd_variants();
    force_simd(0);
    ASSERT_EQ(after.size(), before.size());
    for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_EQ(after[i].supported, before[i].supported);
    }
}

}  // namespace
}  // namespace tessera
