// Logging to standard error, one line an event. Prompts and keys are never logged.
#pragma once

#include <string_view>

namespace tessera {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

void set_log_level(LogLevel level);
void log(LogLevel level, std::string_view message);

inline void log_debug(std::string_view message) {
    log(LogLevel::kDebug, message);
}
inline void log_info(std::string_view message) {
    log(LogLevel::kInfo, message);
}
inline void log_warning(std::string_view message) {
    log(LogLevel::kWarning, message);
}
inline void log_error(std::string_view message) {
    log(LogLevel::kError, message);
}

}  // namespace tessera
