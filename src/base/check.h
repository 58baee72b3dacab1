// check(): an assertion that stays on in every build, for errors of the programmer. It prints the place and
// the message and aborts; what the world can cause is a Status instead (status.h).
#pragma once

#include <source_location>
#include <string_view>

namespace tessera {

[[noreturn]] void check_failed(std::string_view message, std::source_location where);

inline void check(bool condition, std::string_view message,
                  std::source_location where = std::source_location::current()) {
    if (!condition) [[unlikely]] {
        check_failed(message, where);
    }
}

}  // namespace tessera
