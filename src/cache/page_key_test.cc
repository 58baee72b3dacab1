#include <functional>
#include <gtest/gtest.h>
#include <numeric>
#include <set>

#include "cache/kv_cache.h"

namespace tessera {
namespace {

std::string hex(const PageKey& key) {
    std::string out;
    for (uint8_t byte : key.bytes) {
        out += "0123456789abcdef"[byte >> 4];
        out += "0123456789abcdef"[byte & 15];
    }
    return out;
}

std::vector<TokenId> page(TokenId first) {
    std::vector<TokenId> tokens(kPageTokens);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

CacheIdentity identity() {
    CacheIdentity id;
    id.weights_fingerprint.fill(7);
    id.format = {.layers = 3, .kv_heads = 2, .head_dim = 16, .hidden_size = 64};
    id.kv_scales = {0.5F, 2.0F};
    id.tp_size = 2;
    id.tp_rank = 1;
    return id;
}

// Made with Python's hashlib over the bytes that docs/formats/kv_page.md lists.
TEST(PageKey, KeysAreFixedByteByByte) {
    const PageKey root = root_key(identity(), "salt");
    EXPECT_EQ(hex(root), "c4ab440bff6772e6cc388efa6dc8bf54");
    EXPECT_EQ(hex(next_key(root, page(0))), "006c17660e702756b30f79d1a8eb30c8");
    EXPECT_EQ(hex(next_key(next_key(root, page(0)), page(-5))), "de678d59d70694eef22803238e4d8a8d");
}

TEST(PageKey, EveryFieldOfTheIdentityEntersTheRoot) {
    const std::vector<std::function<void(CacheIdentity&)>> changes = {
        [](CacheIdentity&) {},
        [](CacheIdentity& id) { id.weights_fingerprint[31] ^= 1; },
        [](CacheIdentity& id) { ++id.format.layers; },
        [](CacheIdentity& id) { ++id.format.kv_heads; },
        [](CacheIdentity& id) { ++id.format.head_dim; },
        [](CacheIdentity& id) { ++id.format.hidden_size; },
        [](CacheIdentity& id) { id.format.kv_dtype = DType::kBFloat16; },
        [](CacheIdentity& id) { id.format.scale_kind = KvScaleKind::kPerHead; },
        [](CacheIdentity& id) { id.format.hadamard = true; },
        [](CacheIdentity& id) { id.format.aux_bytes = 64; },
        [](CacheIdentity& id) { id.kv_scales[1] = 2.5F; },
        [](CacheIdentity& id) { id.kv_scales.pop_back(); },
        [](CacheIdentity& id) { id.tp_size = 4; },
        [](CacheIdentity& id) { id.tp_rank = 0; },
        [](CacheIdentity& id) { id.deterministic = false; },
        [](CacheIdentity& id) { id.quantised_communication = true; },
    };
    std::set<std::string> roots;
    for (const auto& change : changes) {
        CacheIdentity id = identity();
        change(id);
        roots.insert(hex(root_key(id, "")));
        roots.insert(hex(root_key(id, "a")));
        roots.insert(hex(root_key(id, "b")));
    }
    EXPECT_EQ(roots.size(), 3 * changes.size());
}

TEST(PageKey, DependsOnEveryTokenAndOnThePages) {
    const PageKey root = root_key({}, "");
    std::set<std::string> keys = {hex(next_key(root, page(0)))};
    for (size_t i = 0; i < kPageTokens; ++i) {
        auto tokens = page(0);
        tokens[i] ^= 1 << (i % 31);
        keys.insert(hex(next_key(root, tokens)));
    }
    keys.insert(hex(next_key(next_key(root, page(0)), page(0))));
    EXPECT_EQ(keys.size(), kPageTokens + 2);
}

}  // namespace
}  // namespace tessera
