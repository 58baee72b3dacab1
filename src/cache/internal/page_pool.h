// PagePool: reference counts, the free list and the eviction order of a fixed number of pages. It knows pages
// by id alone; what they hold is the prefix index's matter. Every operation is O(1).
#pragma once

#include <cstdint>
#include <vector>

#include "types/page_format.h"

namespace tessera {

enum class PageState : uint8_t { kFree, kReferenced, kCached };

// A referenced page becomes cached or free when its last reference goes: the owner says which. Cached pages
// form a doubly linked list through the pages themselves, next to be evicted first.
class PagePool {
  public:
    explicit PagePool(int32_t pages);

    int32_t total() const { return static_cast<int32_t>(pages_.size()); }
    int32_t free_count() const { return static_cast<int32_t>(free_.size()); }
    int32_t cached_count() const { return cached_count_; }
    bool contains(PageId page) const { return page >= 0 && page < total(); }
    PageState state(PageId page) const { return at(page).state; }

    PageId take_free();               // REQUIRES: free_count() > 0; one reference
    void add_reference(PageId page);  // REQUIRES: referenced or cached
    // True when that was the last reference; the page is then in neither list and one of the next two must
    // follow.
    [[nodiscard]] bool drop_reference(PageId page);  // REQUIRES: referenced
    void put_cached(PageId page);                    // newest in the eviction order
    void put_free(PageId page);
    PageId oldest_cached() const { return oldest_; }  // -1 = none
    void remove_cached(PageId page);                  // REQUIRES: cached; one of the two put_*() must follow

    void check_integrity() const;

  private:
    struct Page {
        PageState state = PageState::kFree;
        int32_t references = 0;
        PageId older = -1;  // neighbours in the eviction order, when cached
        PageId newer = -1;
    };

    Page& at(PageId page);
    const Page& at(PageId page) const;
    void unlink(Page& page);

    std::vector<Page> pages_;
    std::vector<PageId> free_;  // a stack: the page used last is the warmest
    PageId oldest_ = -1;
    PageId newest_ = -1;
    int32_t cached_count_ = 0;
};

}  // namespace tessera
