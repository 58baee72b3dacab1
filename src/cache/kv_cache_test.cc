#include "cache/kv_cache.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <numeric>
#include <rapidcheck.h>

namespace tessera {
namespace {

std::vector<TokenId> text(int32_t tokens, TokenId first = 0) {
    std::vector<TokenId> ids(static_cast<size_t>(tokens));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

std::vector<PageKey> chain(const PageKey& root, std::span<const TokenId> tokens) {
    std::vector<PageKey> keys;
    for (size_t at = 0; at + kPageTokens <= tokens.size(); at += kPageTokens) {
        keys.push_back(next_key(keys.empty() ? root : keys.back(), tokens.subspan(at, kPageTokens)));
    }
    return keys;
}

// Computes and publishes all complete pages of a text; the caller holds them.
std::vector<PageId> compute(KvCache& cache, const PageKey& root, std::span<const TokenId> tokens) {
    const auto keys = chain(root, tokens);
    auto pages = cache.allocate(static_cast<int32_t>(keys.size()));
    EXPECT_TRUE(pages.has_value());
    for (size_t i = 0; i < keys.size(); ++i) {
        cache.commit((*pages)[i], keys[i]);
    }
    return *pages;
}

TEST(KvCache, FindsTheLongestPublishedPrefixAndLeavesATokenToCompute) {
    KvCache cache(8);
    const PageKey root = root_key({}, "");
    const auto tokens = text(192);
    const auto pages = compute(cache, root, tokens);
    const std::vector<std::pair<int32_t, size_t>> lengths = {{0, 0},   {1, 0},   {64, 0}, {65, 1},
                                                             {128, 1}, {129, 2}, {192, 2}};
    for (const auto& [length, hits] : lengths) {
        const auto found = cache.match(root, std::span(tokens).first(static_cast<size_t>(length)));
        EXPECT_EQ(found.pages, std::vector(pages.begin(), pages.begin() + static_cast<int64_t>(hits)))
            << length;
        EXPECT_EQ(found.keys.size(), hits);
        EXPECT_EQ(found.tokens, static_cast<int32_t>(64 * hits));
        cache.release(found.pages);
    }
    auto other = tokens;
    other[70] = -1;
    other.push_back(0);
    EXPECT_EQ(cache.match(root, other).tokens, 64);
    EXPECT_EQ(cache.match(root_key({}, "salt"), tokens).tokens, 0);
    cache.check_integrity();
}

TEST(KvCache, AllocatesAllOrNothing) {
    KvCache cache(4);
    const auto three = cache.allocate(3);
    ASSERT_TRUE(three);
    EXPECT_FALSE(cache.allocate(2));
    EXPECT_EQ(cache.available(), 1);
    EXPECT_TRUE(cache.allocate(0)->empty());
    cache.release(*three);
    EXPECT_EQ(cache.available(), 4);
    EXPECT_EQ(cache.stats().pages_free, 4);
}

TEST(KvCache, EvictsTheTailOfAChainBeforeItsHead) {
    KvCache cache(4);
    const PageKey root = root_key({}, "");
    const auto tokens = text(257);
    cache.release(compute(cache, root, tokens));
    for (int32_t evicted = 1; evicted <= 4; ++evicted) {
        ASSERT_TRUE(cache.allocate(1));
        const auto left = cache.match(root, tokens);
        EXPECT_EQ(left.tokens, 64 * (4 - evicted));
        cache.release(left.pages);
        EXPECT_EQ(cache.stats().evicted_pages, evicted);
    }
    EXPECT_FALSE(cache.allocate(1));
}

TEST(KvCache, EvictsTheLeastRecentlyUsedChain) {
    KvCache cache(4);
    const PageKey root = root_key({}, "");
    const auto a = text(129, 0);
    const auto b = text(129, 5000);
    cache.release(compute(cache, root, a));
    cache.release(compute(cache, root, b));
    cache.release(cache.match(root, a).pages);  // a is now the younger
    ASSERT_TRUE(cache.allocate(2));
    EXPECT_EQ(cache.match(root, b).tokens, 0);
    EXPECT_EQ(cache.match(root, a).tokens, 128);
}

TEST(KvCache, NeverEvictsAReferencedPage) {
    KvCache cache(3);
    const PageKey root = root_key({}, "");
    const auto tokens = text(129);
    const auto pages = compute(cache, root, tokens);
    const auto shared = cache.match(root, tokens);
    cache.release(pages);
    EXPECT_EQ(cache.available(), 1);
    EXPECT_FALSE(cache.allocate(2));
    cache.release(shared.pages);
    EXPECT_EQ(cache.stats().pages_cached, 2);
    EXPECT_TRUE(cache.allocate(3));
}

TEST(KvCache, TheFirstPageUnderAKeyStaysThePublishedOne) {
    KvCache cache(4);
    const PageKey root = root_key({}, "");
    const auto tokens = text(65);
    const auto first = compute(cache, root, tokens);
    const auto second = compute(cache, root, tokens);
    EXPECT_EQ(cache.match(root, tokens).pages, first);
    cache.release(second);
    EXPECT_EQ(cache.stats().pages_free, 3);
    cache.commit(first[0], chain(root, tokens)[0]);  // again: nothing changes
    EXPECT_EQ(cache.match(root, tokens).pages, first);
    cache.check_integrity();
}

TEST(KvCache, WithdrawnPagesAreFoundNoMore) {
    KvCache cache(4);
    const PageKey root = root_key({}, "");
    const auto tokens = text(193);
    const auto keys = chain(root, tokens);
    const auto pages = compute(cache, root, tokens);
    cache.withdraw(std::span(keys).subspan(2));
    EXPECT_EQ(cache.stats().pages_referenced, 3);
    cache.release(pages);
    EXPECT_EQ(cache.stats().pages_cached, 2);
    EXPECT_EQ(cache.stats().pages_free, 2);
    cache.withdraw(keys);  // the third is unknown by now
    EXPECT_EQ(cache.stats().pages_free, 4);
    EXPECT_EQ(cache.match(root, tokens).tokens, 0);
    cache.check_integrity();
}

TEST(KvCache, ForgetsCachedPagesOnRequest) {
    KvCache cache(4);
    const PageKey root = root_key({}, "");
    const auto held = compute(cache, root, text(65));
    cache.release(compute(cache, root, text(129, 500)));
    cache.clear_cached();
    EXPECT_EQ(cache.stats().pages_free, 3);
    EXPECT_EQ(cache.match(root, text(65)).pages, held);
    EXPECT_EQ(cache.stats().evicted_pages, 0);
}

TEST(KvCache, WithoutPrefixCachingNothingIsFound) {
    KvCache cache(4, false);
    const PageKey root = root_key({}, "");
    const auto tokens = text(129);
    cache.release(compute(cache, root, tokens));
    EXPECT_EQ(cache.match(root, tokens).tokens, 0);
    EXPECT_EQ(cache.stats().pages_free, 4);
}

TEST(KvCache, CountsLookupsWhenToldTo) {
    KvCache cache(4);
    cache.count_lookup(100, 64);
    cache.count_lookup(10, 0);
    EXPECT_EQ(cache.stats().queried_tokens, 110);
    EXPECT_EQ(cache.stats().hit_tokens, 64);
}

TEST(KvCacheDeathTest, RefusesToReleaseWhatNobodyHolds) {
    KvCache cache(2);
    const auto pages = cache.allocate(1);
    cache.release(*pages);
    EXPECT_DEATH(cache.release(*pages), "nobody holds");
    EXPECT_DEATH(cache.release(std::vector<PageId>{7}), "outside the pool");
}

// Random users of a small pool against a plain model of it: who holds which page, and what each page was
// given for.
TEST(KvCache, AgreesWithAPlainModelUnderRandomUse) {
    const bool ok = rc::check([] {
        const auto total = *rc::gen::inRange(1, 12);
        KvCache cache(total);
        const PageKey root = root_key({}, "");
        struct Holder {
            std::vector<TokenId> tokens;
            std::vector<PageId> pages;
        };
        std::vector<Holder> holders;
        std::map<PageId, std::vector<TokenId>> content;  // of each page: the text up to its end
        for (int step = 0; step < 60; ++step) {
            if (!holders.empty() && *rc::gen::inRange(0, 2) == 0) {
                const auto who = *rc::gen::inRange<size_t>(0, holders.size());
                cache.release(holders[who].pages);
                holders.erase(holders.begin() + static_cast<int64_t>(who));
            } else {
                Holder holder;
                holder.tokens = text(64 * *rc::gen::inRange(1, 6) + 1, 1000 * *rc::gen::inRange(0, 3));
                const auto keys = chain(root, holder.tokens);
                auto match = cache.match(root, holder.tokens);
                holder.pages = match.pages;
                const auto fresh = cache.allocate(static_cast<int32_t>(keys.size() - match.pages.size()));
                if (!fresh) {
                    cache.release(match.pages);
                    continue;
                }
                for (size_t i = 0; i < keys.size(); ++i) {
                    const std::vector<TokenId> upto(holder.tokens.begin(),
                                                    holder.tokens.begin() + 64 * static_cast<int64_t>(i + 1));
                    if (i < match.pages.size()) {
                        RC_ASSERT(content.at(match.pages[i]) == upto);
                        continue;
                    }
                    const PageId page = (*fresh)[i - match.pages.size()];
                    for (const Holder& other : holders) {
                        RC_ASSERT(std::count(other.pages.begin(), other.pages.end(), page) == 0);
                    }
                    content[page] = upto;
                    cache.commit(page, keys[i]);
                    holder.pages.push_back(page);
                }
                holders.push_back(std::move(holder));
            }
            cache.check_integrity();
        }
        for (const Holder& holder : holders) {
            cache.release(holder.pages);
        }
        RC_ASSERT(cache.available() == total);
    });
    EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace tessera
