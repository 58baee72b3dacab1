#include "cache/internal/prefix_index.h"

#include "base/check.h"

namespace tessera {

PrefixIndex::PrefixIndex(int32_t pages) : key_of_(static_cast<size_t>(pages)) {
    pages_.reserve(key_of_.size());
}

PageId PrefixIndex::find(const PageKey& key) const {
    const auto found = pages_.find(key);
    return found == pages_.end() ? -1 : found->second;
}

bool PrefixIndex::insert(const PageKey& key, PageId page) {
    auto& present = key_of_[static_cast<size_t>(page)];
    check(!present || *present == key, "a published page cannot change its key");
    const auto [where, inserted] = pages_.emplace(key, page);
    if (!inserted) {
        return where->second == page;
    }
    present = key;
    return true;
}

void PrefixIndex::erase(PageId page) {
    auto& key = key_of_[static_cast<size_t>(page)];
    check(key.has_value(), "erased a page that is not published");
    pages_.erase(*key);
    key.reset();
}

void PrefixIndex::check_integrity() const {
    size_t with_key = 0;
    for (size_t page = 0; page < key_of_.size(); ++page) {
        if (key_of_[page]) {
            ++with_key;
            check(find(*key_of_[page]) == static_cast<PageId>(page), "a page's key leads to another page");
        }
    }
    check(with_key == pages_.size(), "a key names a page that does not carry it");
}

}  // namespace tessera
