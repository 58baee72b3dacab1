#include "device/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

TEST(MemoryBudget, CountsWhatIsHeld) {
    MemoryBudget budget(10 * kMiB);
    const auto weights = budget.reserve(MemoryCategory::kWeights, "embed", 4 * kMiB);
    const auto pool = budget.reserve(MemoryCategory::kKvPool, "pages", 6 * kMiB);
    ASSERT_TRUE(weights.ok());
    ASSERT_TRUE(pool.ok());
    EXPECT_EQ(budget.available(), 0);
    EXPECT_EQ(budget.used(MemoryCategory::kWeights), 4 * kMiB);
    EXPECT_EQ(budget.used(MemoryCategory::kKvPool), 6 * kMiB);
    budget.release(*weights);
    EXPECT_EQ(budget.used(), 6 * kMiB);
    EXPECT_EQ(budget.used(MemoryCategory::kWeights), 0);
    EXPECT_TRUE(budget.reserve(MemoryCategory::kGraphs, "decode", 4 * kMiB).ok());
}

TEST(MemoryBudget, RefusesWithTheNumbers) {
    MemoryBudget budget(10 * kMiB);
    ASSERT_TRUE(budget.reserve(MemoryCategory::kWeights, "embed", 8 * kMiB).ok());
    const auto refused = budget.reserve(MemoryCategory::kKvPool, "pages", 3 * kMiB);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
    for (const char* part :
         {"pages (KV pool) needs 3.0 MiB", "8.0 MiB of 10.0 MiB", "2.0 MiB are left", "1.0 MiB too"}) {
        EXPECT_THAT(refused.status().message(), HasSubstr(part));
    }
    EXPECT_EQ(budget.used(), 8 * kMiB);
}

TEST(MemoryBudget, NothingIsEnteredOnceSealed) {
    MemoryBudget budget(kMiB);
    const auto held = budget.reserve(MemoryCategory::kWorkspace, "scratch", 100);
    budget.seal();
    EXPECT_THAT(budget.reserve(MemoryCategory::kWorkspace, "late", 1).status().message(),
                HasSubstr("after start"));
    budget.release(*held);
    EXPECT_EQ(budget.used(), 0);
}

TEST(MemoryBudget, TableAddsUpNamesAndFoldsSmallEntries) {
    MemoryBudget budget(int64_t{4} << 30);
    for (int layer = 0; layer < 2; ++layer) {
        ASSERT_TRUE(budget.reserve(MemoryCategory::kWeights, "experts", int64_t{1} << 30).ok());
    }
    for (int i = 0; i < 9; ++i) {
        ASSERT_TRUE(budget.reserve(MemoryCategory::kWorkspace, "w" + std::to_string(i), 1024 * (i + 1)).ok());
    }
    const std::string table = budget.table();
    EXPECT_THAT(table, HasSubstr("2.00 GiB"));
    EXPECT_THAT(table, HasSubstr("experts"));
    EXPECT_THAT(table, HasSubstr("others"));
    EXPECT_THAT(table, Not(HasSubstr("w0")));  // the smallest
    EXPECT_THAT(table, HasSubstr("of 4.00 GiB"));
}

TEST(MemoryBudget, ReleasingTwiceIsADefect) {
    MemoryBudget budget(kMiB);
    const auto held = budget.reserve(MemoryCategory::kWeights, "x", 1);
    budget.release(*held);
    EXPECT_DEATH(budget.release(*held), "released twice");
}

TEST(FormatBytes, PicksItsUnit) {
    EXPECT_EQ(format_bytes(17), "17 B");
    EXPECT_EQ(format_bytes(12 << 10), "12.0 KiB");
    EXPECT_EQ(format_bytes(640 * kMiB), "640.0 MiB");
    EXPECT_EQ(format_bytes(3 * (int64_t{1} << 29)), "1.50 GiB");
}

}  // namespace
}  // namespace tessera
