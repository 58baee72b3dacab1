#include "cache/internal/page_pool.h"

#include "base/check.h"

namespace tessera {

PagePool::PagePool(int32_t pages) {
    check(pages >= 0, "a page pool cannot have a negative size");
    pages_.resize(static_cast<size_t>(pages));
    free_.reserve(pages_.size());
    for (PageId page = pages - 1; page >= 0; --page) {
        free_.push_back(page);
    }
}

PagePool::Page& PagePool::at(PageId page) {
    check(contains(page), "page id outside the pool");
    return pages_[static_cast<size_t>(page)];
}

const PagePool::Page& PagePool::at(PageId page) const {
    check(contains(page), "page id outside the pool");
    return pages_[static_cast<size_t>(page)];
}

PageId PagePool::take_free() {
    check(!free_.empty(), "no free page to take");
    const PageId id = free_.back();
    free_.pop_back();
    at(id) = {.state = PageState::kReferenced, .references = 1};
    return id;
}

void PagePool::add_reference(PageId page) {
    Page& entry = at(page);
    check(entry.state != PageState::kFree, "a free page cannot be referenced");
    if (entry.state == PageState::kCached) {
        unlink(entry);
        entry.state = PageState::kReferenced;
    }
    ++entry.references;
}

bool PagePool::drop_reference(PageId page) {
    Page& entry = at(page);
    check(entry.state == PageState::kReferenced && entry.references > 0, "released a page that nobody holds");
    return --entry.references == 0;
}

void PagePool::put_cached(PageId page) {
    Page& entry = at(page);
    check(entry.references == 0 && entry.state == PageState::kReferenced, "page is not ready to be cached");
    entry.state = PageState::kCached;
    entry.older = newest_;
    entry.newer = -1;
    (newest_ < 0 ? oldest_ : at(newest_).newer) = page;
    newest_ = page;
    ++cached_count_;
}

void PagePool::put_free(PageId page) {
    Page& entry = at(page);
    check(entry.references == 0 && entry.state == PageState::kReferenced, "page is not ready to be freed");
    entry.state = PageState::kFree;
    free_.push_back(page);
}

void PagePool::remove_cached(PageId page) {
    Page& entry = at(page);
    check(entry.state == PageState::kCached, "page is not cached");
    unlink(entry);
    entry.state =
        PageState::kReferenced;  // in transit, with no reference, until put_*() or a reference follows
}

void PagePool::unlink(Page& page) {
    (page.older < 0 ? oldest_ : at(page.older).newer) = page.newer;
    (page.newer < 0 ? newest_ : at(page.newer).older) = page.older;
    page.older = page.newer = -1;
    --cached_count_;
}

void PagePool::check_integrity() const {
    std::vector<bool> listed(pages_.size());
    for (PageId page : free_) {
        check(state(page) == PageState::kFree && !listed[static_cast<size_t>(page)], "free list is wrong");
        listed[static_cast<size_t>(page)] = true;
    }
    PageId previous = -1;
    int32_t cached = 0;
    for (PageId page = oldest_; page >= 0; page = at(page).newer) {
        check(state(page) == PageState::kCached && !listed[static_cast<size_t>(page)] &&
                  at(page).older == previous,
              "eviction list is wrong");
        listed[static_cast<size_t>(page)] = true;
        previous = page;
        ++cached;
    }
    check(previous == newest_ && cached == cached_count_, "eviction list has lost its end");
    for (PageId page = 0; page < total(); ++page) {
        const bool referenced = at(page).state == PageState::kReferenced;
        check(referenced != listed[static_cast<size_t>(page)], "a page is lost or in two states");
        check(referenced == (at(page).references > 0), "a page's reference count contradicts its state");
    }
}

}  // namespace tessera
