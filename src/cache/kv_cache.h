// KvCache: which page of the device pool holds what. Pure bookkeeping: it moves no bytes and knows no
// requests, only token spans, page ids and keys. Single-threaded (the engine's loop).
//
// A page is free, referenced (count > 0), or cached (count 0 but its key is published; evictable, least
// recently used first, the tail of a chain before its head). commit() publishes a complete page under its
// key.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "types/model_config.h"
#include "types/page_format.h"

namespace tessera {

// First 128 bits of SHA-256 over (previous key, 64 token ids as little-endian int32).
struct PageKey {
    std::array<uint8_t, 16> bytes{};
    bool operator==(const PageKey&) const = default;
};

// What makes pages of two engines interchangeable; hashed into the root of every chain
// (docs/formats/kv_page.md).
struct CacheIdentity {
    std::array<uint8_t, 32> weights_fingerprint{};
    PageFormat format;
    std::vector<float> kv_scales;
    int32_t tp_size = 1, tp_rank = 0;
    bool deterministic = true;
    bool quantised_communication = false;
};

PageKey root_key(const CacheIdentity& identity, std::string_view salt);
PageKey next_key(const PageKey& previous, std::span<const TokenId> tokens);  // REQUIRES: 64 tokens

struct CacheMatch {
    std::vector<PageId> pages;  // referenced for the caller
    std::vector<PageKey> keys;  // of those pages
    int32_t tokens = 0;         // 64 * pages.size()
};

struct CacheStats {
    int32_t pages_total = 0, pages_free = 0, pages_cached = 0, pages_referenced = 0;
    int64_t queried_tokens = 0, hit_tokens = 0, evicted_pages = 0;
};

class KvCache {
  public:
    explicit KvCache(int32_t pages, bool prefix_caching = true);
    ~KvCache();

    // The longest published prefix of `tokens` that leaves at least one token to compute; takes a reference
    // on each page. Does not count in the statistics: count_lookup() does, once a request.
    CacheMatch match(const PageKey& root, std::span<const TokenId> tokens);
    void count_lookup(int64_t queried_tokens, int64_t hit_tokens);
    // n fresh pages with one reference each, evicting cached ones; all or nothing.
    std::optional<std::vector<PageId>> allocate(int32_t n);
    // Publishes a complete page. If the key is published already the other page stays the published one.
    void commit(PageId page, const PageKey& key);
    // Unpublishes these keys where they are published (content not to be trusted, or not to be kept). Whoever
    // holds the page keeps it; an unreferenced one becomes free.
    void withdraw(std::span<const PageKey> keys);
    // Drops one reference of each; `pages` in chain order, so that the tail is evicted before the head.
    void release(std::span<const PageId> pages);
    int32_t available() const;  // free + cached
    void clear_cached();        // forgets every cached page that is not referenced
    CacheStats stats() const;
    // Aborts (check) when the bookkeeping contradicts itself. For tests and debug builds.
    void check_integrity() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
