#include "base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace tessera {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
    switch (level) {
        case LogLevel::kDebug:
            return spdlog::level::debug;
        case LogLevel::kInfo:
            return spdlog::level::info;
        case LogLevel::kWarning:
            return spdlog::level::warn;
        case LogLevel::kError:
            return spdlog::level::err;
        case LogLevel::kOff:
            return spdlog::level::off;
    }
    return spdlog::level::info;
}

spdlog::logger& logger() {
    static const std::shared_ptr<spdlog::logger> instance = [] {
        auto made = spdlog::stderr_color_mt("tessera");
        made->set_pattern("%Y-%m-%d %H:%M:%S.%e %^%l%$ %v");
        return made;
    }();
    return *instance;
}

}  // namespace

void set_log_level(LogLevel level) {
    logger().set_level(to_spdlog(level));
}

void log(LogLevel level, std::string_view message) {
    logger().log(to_spdlog(level), message);
}

}  // namespace tessera
