#include "ops/attention/cuda/prefill_plan.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <set>
#include <vector>

#include "device/cuda/stream.h"
#include "ops/common/cuda/device_testing.h"

namespace tessera {
namespace {

struct Batch {
    AttentionCudaShape heads;
    int32_t first_slot = 0;
    std::vector<int32_t> first_rows{0};
    std::vector<int32_t> positions;  // -1: an empty row

    int32_t sequences() const { return static_cast<int32_t>(positions.size()); }
    int32_t queries_of(int32_t sequence) const {
        const auto b = static_cast<size_t>(sequence);
        return first_rows[b + 1] - first_rows[b];
    }
    void add(int32_t position, int32_t queries) {
        positions.push_back(position);
        first_rows.push_back(first_rows.back() + queries);
    }
};

struct Plan {
    int32_t item_tiles = 1;
    int64_t items_max = 0;
    std::vector<cuda::PrefillItem> items;
    int32_t next = -1;
    int32_t finished = -1;
};

Plan plan_on_device(const Batch& batch, int32_t rows_max) {
    DeviceArena arena;
    Stream stream;
    PrefillPlanCudaArgs args{.first_rows = arena.upload(batch.first_rows),
                             .positions = arena.upload(batch.positions),
                             .first_slot = batch.first_slot,
                             .sequences = batch.sequences(),
                             .rows_max = rows_max,
                             .shape = batch.heads};
    args.workspace =
        arena.poisoned<std::byte>(prefill_cuda_workspace_bytes(batch.heads, args.sequences, rows_max));
    prefill_plan_cuda(stream.get(), args);
    stream.synchronize();
    const cuda::PrefillPlan plan = cuda::make_prefill_plan(args);
    const int32_t count = DeviceArena::download(plan.count, 1)[0];
    check(count >= 0 && count <= plan.items_max, "more items than the workspace has room for");
    return {plan.item_tiles, plan.items_max, DeviceArena::download(plan.items, count),
            DeviceArena::download(plan.next, 1)[0], DeviceArena::download(plan.finished, 1)[0]};
}

// KV tiles up to the item's last query, as far as the plan tells lengths apart.
int32_t length_of(const cuda::PrefillItem& item) {
    const int32_t tiles = (item.first + item.queries + cuda::kPrefillKvSlots - 1) / cuda::kPrefillKvSlots;
    return std::min(tiles, 2 * cuda::kPrefillSequences - 1);
}

// Every query in one item, at the item's begin a multiple of its tiles; the longest items first; and no two
// tiles with the same number among the lists of KV tiles (PrefillKvTiles).
void check_plan(const Batch& batch, int32_t rows_max, const Plan& plan) {
    const int32_t tile = prefill_cuda_tile_queries(batch.heads);
    const int32_t most = tile * plan.item_tiles;
    std::vector<int> seen(static_cast<size_t>(batch.first_rows.back()));
    std::set<int32_t> lists;
    for (size_t i = 0; i < plan.items.size(); ++i) {
        const cuda::PrefillItem& item = plan.items[i];
        ASSERT_TRUE(item.sequence >= 0 && item.sequence < batch.sequences()) << i;
        const int32_t query = item.row - batch.first_rows[static_cast<size_t>(item.sequence)];
        ASSERT_TRUE(query >= 0 && query % most == 0) << i;
        ASSERT_EQ(item.queries, std::min(most, batch.queries_of(item.sequence) - query)) << i;
        ASSERT_EQ(item.first, batch.first_slot + batch.positions[static_cast<size_t>(item.sequence)] + query)
            << i;
        ASSERT_TRUE(i == 0 || length_of(plan.items[i - 1]) >= length_of(item)) << i;
        for (int32_t j = 0; j < item.queries; ++j) {
            seen[static_cast<size_t>(item.row + j)] += 1;
        }
        for (int32_t j = 0; j < item.queries; j += tile) {
            const int32_t list = (item.row + j) / tile + item.sequence;
            ASSERT_LT(list, rows_max / tile + batch.sequences()) << i;
            ASSERT_TRUE(lists.insert(list).second) << i;
        }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), batch.first_rows.back());
    EXPECT_EQ(plan.next, 0);
    EXPECT_EQ(plan.finished, 0);
}

TEST(PrefillPlanCuda, has_every_query_once_and_the_longest_tiles_first) {
    std::mt19937 random(7);
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
    int pairs = 0;
    int singles = 0;
    for (const int32_t group : {1, 8, 11, 12, 16}) {
        for (const int32_t sequences : {1, 2, 15, 64, 512, 1024}) {
            for (const int32_t longest : {1, 20, 900}) {
                Batch batch{.heads = {2 * group, 2}, .first_slot = below(2)};
                for (int32_t b = 0; b < sequences; ++b) {
                    const int32_t kind = below(8);
                    if (kind == 0) {
                        batch.add(-1, 1);
                    } else {  // also no query at all
                        batch.add(below(kind == 1 ? 300000 : 3000),
                                  kind == 2 ? below(2) : 1 + below(longest));
                    }
                }
                batch.add(below(100), 1);
                if (batch.sequences() > cuda::kPrefillSequences) {
                    batch.positions.pop_back();
                    batch.first_rows.pop_back();
                }
                const int32_t rows_max = std::max(batch.first_rows.back(), 1) + below(3) * 50;
                const Plan plan = plan_on_device(batch, rows_max);
                (plan.item_tiles == 2 ? pairs : singles) += 1;
                SCOPED_TRACE(testing::Message() << "group " << group << ", " << batch.sequences()
                                                << " sequences of up to " << longest);
                check_plan(batch, rows_max, plan);
            }
        }
    }
    EXPECT_GT(pairs, 10);
    EXPECT_GT(singles, 10);
}

TEST(PrefillPlanCuda, of_one_token_each_has_an_item_a_sequence) {
    Batch batch{.heads = {64, 8}};
    for (int32_t b = 0; b < 1024; ++b) {
        batch.add(b % 9 == 4 ? -1 : b * 97 % 5000, 1);
    }
    const Plan plan = plan_on_device(batch, 1024);
    EXPECT_EQ(plan.items.size(), 1024u);
    EXPECT_EQ(plan.item_tiles, 1);
    check_plan(batch, 1024, plan);
}

}  // namespace
}  // namespace tessera
