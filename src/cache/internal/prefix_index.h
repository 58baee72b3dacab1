// PrefixIndex: which page is published under which key, in both directions. A key names one page at most, a
// page carries one key at most.
#pragma once

#include <cstring>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cache/kv_cache.h"

namespace tessera {

class PrefixIndex {
  public:
    explicit PrefixIndex(int32_t pages);

    PageId find(const PageKey& key) const;  // -1 = not published
    bool published(PageId page) const { return key_of_[static_cast<size_t>(page)].has_value(); }
    // False when the key names another page already: then nothing changes.
    bool insert(const PageKey& key, PageId page);  // REQUIRES: the page has no other key
    void erase(PageId page);                       // REQUIRES: published(page)
    int32_t size() const { return static_cast<int32_t>(pages_.size()); }

    void check_integrity() const;

  private:
    // A key is a piece of a cryptographic digest: any eight of its bytes are a good hash.
    struct KeyHash {
        size_t operator()(const PageKey& key) const {
            size_t value = 0;
            std::memcpy(&value, key.bytes.data(), sizeof value);
            return value;
        }
    };

    std::unordered_map<PageKey, PageId, KeyHash> pages_;
    std::vector<std::optional<PageKey>> key_of_;
};

}  // namespace tessera
