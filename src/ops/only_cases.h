// OnlyCases: which cases `tessera ops bench --only TEXT` times, on each kind of device.
#pragma once

#include <fmt/format.h>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tessera {

// Takes the cases that have the text in "SHAPE DTYPE"; an empty text is in all.
class OnlyCases {
  public:
    explicit OnlyCases(std::string_view text) : text_(text) {}

    bool takes(std::string_view shape, std::string_view dtype) {
        const bool taken = fmt::format("{} {}", shape, dtype).find(text_) != std::string::npos;
        any_ = any_ || taken;
        return taken;
    }
    // Once all cases were asked for: an error when a text is in none.
    Status status() const {
        if (any_ || text_.empty()) {
            return {};
        }
        return invalid_argument(fmt::format("no case has '{}' in its shape or dtype", text_));
    }

  private:
    std::string_view text_;
    bool any_ = false;
};

}  // namespace tessera
