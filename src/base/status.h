// Status and Result<T>: how the library reports what the world can cause (a bad file, a bad request, a full
// queue). Programmer errors go to check() instead; nothing in src/ throws on purpose.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/check.h"

namespace tessera {

enum class StatusCode {
    kOk,
    kInvalidArgument,    // the caller's input is wrong: HTTP 400, exit status 1
    kNotFound,           // no such file, model or request: HTTP 404
    kResourceExhausted,  // a bounded queue or pool is full: HTTP 429
    kUnavailable,        // draining or not ready: HTTP 503
    kDeadlineExceeded,   // the request's own deadline passed
    kCancelled,          // the client went away
    kDataLoss,           // a file is truncated or corrupt
    kUnimplemented,      // known, but not built yet
    kInternal,           // a defect of ours
};

class [[nodiscard]] Status {
  public:
    Status() = default;
    Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

    bool ok() const { return code_ == StatusCode::kOk; }
    StatusCode code() const { return code_; }
    // One sentence that names what was wrong and what would be right.
    const std::string& message() const { return message_; }

  private:
    StatusCode code_ = StatusCode::kOk;
    std::string message_;
};

inline Status invalid_argument(std::string message) {
    return {StatusCode::kInvalidArgument, std::move(message)};
}
inline Status not_found(std::string message) {
    return {StatusCode::kNotFound, std::move(message)};
}
inline Status data_loss(std::string message) {
    return {StatusCode::kDataLoss, std::move(message)};
}
inline Status resource_exhausted(std::string message) {
    return {StatusCode::kResourceExhausted, std::move(message)};
}
inline Status unavailable(std::string message) {
    return {StatusCode::kUnavailable, std::move(message)};
}
inline Status unimplemented(std::string message) {
    return {StatusCode::kUnimplemented, std::move(message)};
}

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
  public:
    Result(T value) : state_(std::move(value)) {}
    Result(Status status) : state_(std::move(status)) {
        check(!std::get<Status>(state_).ok(), "a Result without a value needs an error");
    }

    bool ok() const { return std::holds_alternative<T>(state_); }
    Status status() const { return ok() ? Status() : std::get<Status>(state_); }
    // REQUIRES: ok()
    T& value() {
        check(ok(), "Result::value() on an error");
        return std::get<T>(state_);
    }
    const T& value() const {
        check(ok(), "Result::value() on an error");
        return std::get<T>(state_);
    }
    T& operator*() { return value(); }
    const T& operator*() const { return value(); }
    T* operator->() { return &value(); }
    const T* operator->() const { return &value(); }
    // Moves the value out. REQUIRES: ok()
    T take() { return std::move(value()); }

  private:
    std::variant<T, Status> state_;
};

}  // namespace tessera
