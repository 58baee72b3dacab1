#include "cache/kv_cache.h"

#include "base/check.h"
#include "cache/internal/page_pool.h"
#include "cache/internal/prefix_index.h"

namespace tessera {

struct KvCache::Impl {
    Impl(int32_t pages, bool caching) : prefix_caching(caching), pool(pages), index(pages) {}

    // Forgets a cached page; it becomes free.
    void evict(PageId page) {
        index.erase(page);
        pool.remove_cached(page);
        pool.put_free(page);
    }

    const bool prefix_caching;
    PagePool pool;
    PrefixIndex index;
    int64_t queried_tokens = 0;
    int64_t hit_tokens = 0;
    int64_t evicted_pages = 0;
};

KvCache::KvCache(int32_t pages, bool prefix_caching) : impl_(std::make_unique<Impl>(pages, prefix_caching)) {}

KvCache::~KvCache() = default;

CacheMatch KvCache::match(const PageKey& root, std::span<const TokenId> tokens) {
    CacheMatch found;
    if (!impl_->prefix_caching || tokens.empty()) {
        return found;
    }
    const size_t page_tokens = kPageTokens;
    const size_t pages_max = (tokens.size() - 1) / page_tokens;
    PageKey key = root;
    while (found.pages.size() < pages_max) {
        key = next_key(key, tokens.subspan(found.pages.size() * page_tokens, page_tokens));
        const PageId page = impl_->index.find(key);
        if (page < 0) {
            break;
        }
        impl_->pool.add_reference(page);
        found.pages.push_back(page);
        found.keys.push_back(key);
    }
    found.tokens = static_cast<int32_t>(found.pages.size() * page_tokens);
    return found;
}

void KvCache::count_lookup(int64_t queried_tokens, int64_t hit_tokens) {
    impl_->queried_tokens += queried_tokens;
    impl_->hit_tokens += hit_tokens;
}

std::optional<std::vector<PageId>> KvCache::allocate(int32_t n) {
    check(n >= 0, "cannot allocate a negative number of pages");
    if (n > available()) {
        return std::nullopt;
    }
    std::vector<PageId> pages;
    pages.reserve(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) {
        if (impl_->pool.free_count() == 0) {
            impl_->evict(impl_->pool.oldest_cached());
            ++impl_->evicted_pages;
        }
        pages.push_back(impl_->pool.take_free());
    }
    return pages;
}

void KvCache::commit(PageId page, const PageKey& key) {
    check(impl_->pool.state(page) == PageState::kReferenced, "only a referenced page can be published");
    if (impl_->prefix_caching) {
        impl_->index.insert(key, page);
    }
}

void KvCache::withdraw(std::span<const PageKey> keys) {
    for (const PageKey& key : keys) {
        const PageId page = impl_->index.find(key);
        if (page < 0) {
            continue;
        }
        if (impl_->pool.state(page) == PageState::kCached) {
            impl_->evict(page);
        } else {
            impl_->index.erase(page);
        }
    }
}

void KvCache::release(std::span<const PageId> pages) {
    for (size_t i = pages.size(); i > 0; --i) {
        const PageId page = pages[i - 1];
        if (!impl_->pool.drop_reference(page)) {
            continue;
        }
        if (impl_->index.published(page)) {
            impl_->pool.put_cached(page);
        } else {
            impl_->pool.put_free(page);
        }
    }
}

int32_t KvCache::available() const {
    return impl_->pool.free_count() + impl_->pool.cached_count();
}

void KvCache::clear_cached() {
    while (impl_->pool.cached_count() > 0) {
        impl_->evict(impl_->pool.oldest_cached());
    }
}

CacheStats KvCache::stats() const {
    const PagePool& pool = impl_->pool;
    return {.pages_total = pool.total(),
            .pages_free = pool.free_count(),
            .pages_cached = pool.cached_count(),
            .pages_referenced = pool.total() - available(),
            .queried_tokens = impl_->queried_tokens,
            .hit_tokens = impl_->hit_tokens,
            .evicted_pages = impl_->evicted_pages};
}

void KvCache::check_integrity() const {
    impl_->pool.check_integrity();
    impl_->index.check_integrity();
    for (PageId page = 0; page < impl_->pool.total(); ++page) {
        const PageState state = impl_->pool.state(page);
        check(state != PageState::kCached || impl_->index.published(page), "a cached page without a key");
        check(state != PageState::kFree || !impl_->index.published(page), "a free page with a key");
    }
}

}  // namespace tessera
