#include "server/openai/error.h"

#include <fmt/format.h>
#include <utility>

#include "server/http_error.h"

namespace tessera {
namespace {

constexpr int kRetryFullS = 1;
constexpr int kRetryDrainingS = 5;

}  // namespace

ApiError invalid_field(std::string param, std::string message, std::string code) {
    ApiError error;
    error.message = std::move(message);
    error.param = std::move(param);
    error.code = std::move(code);
    return error;
}

ApiError api_error(const Status& status) {
    ApiError error;
    error.message = status.message();
    switch (status.code()) {
        case StatusCode::kInvalidArgument:
            break;
        case StatusCode::kNotFound:
            error.status = 404;
            error.code = "not_found";
            break;
        case StatusCode::kResourceExhausted:
            error.status = 429;
            error.type = "rate_limit_error";
            error.code = "queue_full";
            error.retry_after_s = kRetryFullS;
            break;
        case StatusCode::kUnavailable:
        case StatusCode::kCancelled:
            error.status = 503;
            error.type = "service_unavailable_error";
            error.code = "shutting_down";
            error.retry_after_s = kRetryDrainingS;
            break;
        case StatusCode::kDeadlineExceeded:
            error.status = 504;
            error.type = "timeout";
            error.code = "deadline_exceeded";
            break;
        default:
            error.status = 500;
            error.type = "server_error";
            error.code = "internal_error";
            break;
    }
    return error;
}

std::string error_json(const ApiError& error) {
    return http_error_body({.status = error.status,
                            .message = error.message,
                            .type = error.type,
                            .param = error.param,
                            .code = error.code});
}

void respond_error(HttpExchange& exchange, const ApiError& error) {
    HttpHeaders headers;
    if (error.retry_after_s > 0) {
        headers.emplace_back("Retry-After", fmt::format("{}", error.retry_after_s));
    }
    exchange.respond(error.status, "application/json", error_json(error), std::move(headers));
}

void respond_json(HttpExchange& exchange, std::string body) {
    exchange.respond(200, "application/json", std::move(body));
}

}  // namespace tessera
