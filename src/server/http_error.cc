#include "server/http_error.h"

#include "base/json.h"

namespace tessera {

std::string_view http_error_type(int status) {
    switch (status) {
        case 401:
            return "authentication_error";
        case 403:
            return "permission_error";
        case 404:
            return "not_found_error";
        case 429:
            return "rate_limit_error";
        case 503:
            return "service_unavailable_error";
        default:
            return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

std::string http_error_body(const HttpError& error) {
    const auto text_or_null = [](const std::string& text) {
        return text.empty() ? json::Value(nullptr) : json::Value(text);
    };
    json::Value inner = json::Value::object();
    inner.set("message", error.message);
    inner.set("type", error.type.empty() ? std::string(http_error_type(error.status)) : error.type);
    inner.set("param", text_or_null(error.param));
    inner.set("code", text_or_null(error.code));
    json::Value outer = json::Value::object();
    outer.set("error", std::move(inner));
    return json::dump(outer);
}

std::string_view http_status_text(int status) {
    struct Entry {
        int status;
        std::string_view text;
    };
    static constexpr Entry kTexts[] = {
        {100, "Continue"},
        {200, "OK"},
        {204, "No Content"},
        {304, "Not Modified"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {409, "Conflict"},
        {413, "Content Too Large"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {422, "Unprocessable Content"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
        {505, "HTTP Version Not Supported"},
    };
    for (const Entry& entry : kTexts) {
        if (entry.status == status) {
            return entry.text;
        }
    }
    return "Unknown";
}

}  // namespace tessera
