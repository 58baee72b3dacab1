// ShadowPages: what every slot of every page truly holds. The KV entry of a position depends on all tokens up
// to it, so one hash of these (and of the tenant's salt) stands for it; a read of anything else than expected
// is a found defect.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "types/page_format.h"

namespace tessera::sim {

class ShadowPages {
  public:
    explicit ShadowPages(int32_t pages) : pages_(static_cast<size_t>(pages)) {}

    // A page enters a slot's table, for writing or, from the prefix cache, for reading alone.
    void enter_fresh(PageId page) {
        check(at(page).holders == 0, "sim: a page was given out while another slot holds it");
        at(page) = Page();
        at(page).holders = 1;
    }
    void enter_cached(PageId page) {
        check(!at(page).withdrawn, "sim: a withdrawn page came from the prefix cache");
        ++at(page).holders;
    }
    void leave(PageId page) { --at(page).holders; }
    // The page must not come from the prefix cache again before it was written anew.
    void withdraw(PageId page) { at(page).withdrawn = true; }

    void write(PageId page, int64_t slot, uint64_t hash) {
        check(at(page).holders == 1, "sim: a row writes into a shared page");
        at(page).entries[static_cast<size_t>(slot)] = hash;
    }
    uint64_t read(PageId page, int64_t slot) const {
        return pages_[static_cast<size_t>(page)].entries[static_cast<size_t>(slot)];
    }

  private:
    struct Page {
        std::array<uint64_t, kPageTokens> entries{};  // 0 = never written
        int32_t holders = 0;
        bool withdrawn = false;
    };

    Page& at(PageId page) {
        check(page >= 0 && static_cast<size_t>(page) < pages_.size(), "sim: a page id outside the pool");
        return pages_[static_cast<size_t>(page)];
    }

    std::vector<Page> pages_;
};

}  // namespace tessera::sim
