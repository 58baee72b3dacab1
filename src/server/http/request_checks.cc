#include "server/http/request_checks.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <openssl/rand.h>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kRequestIdBytesMax = 128;

// "application/json" of "application/json; charset=utf-8".
bool is_json(std::string_view content_type) {
    std::string_view type = content_type.substr(0, content_type.find(';'));
    while (type.ends_with(' ') || type.ends_with('\t')) {
        type.remove_suffix(1);
    }
    return std::ranges::equal(type, std::string_view("application/json"), [](char a, char b) {
        return (a >= 'A' && a <= 'Z' ? a + ('a' - 'A') : a) == b;
    });
}

HttpHeaders cors_headers(const AccessRules& access, std::string_view origin) {
    if (origin.empty() || !access.origin_listed(origin)) {
        return {};
    }
    return {{"Access-Control-Allow-Origin", std::string(origin)},
            {"Access-Control-Expose-Headers", "X-Request-Id, Retry-After"},
            {"Vary", "Origin"}};
}

// Headers that decide and come at most once: of two, another program on the way may believe the other one.
std::optional<HttpError> check_repeated(const HttpRequest& request) {
    for (const std::string_view name : {"origin", "authorization", "content-type", "content-encoding"}) {
        const auto count = std::ranges::count_if(
            request.headers, [&](const auto& field) { return std::string_view(field.first) == name; });
        if (count > 1) {
            return HttpError{
                .status = 400,
                .message = fmt::format("a request has at most one {} header, not {}", name, count)};
        }
    }
    return std::nullopt;
}

std::optional<HttpError> check_body_type(const HttpRequest& request) {
    if (const std::string_view type = request.header("content-type"); !is_json(type)) {
        return HttpError{.status = 415,
                         .message = fmt::format("Content-Type must be application/json, not '{}'", type)};
    }
    if (const std::string_view coding = request.header("content-encoding");
        !coding.empty() && coding != "identity") {
        return HttpError{
            .status = 415,
            .message = fmt::format("Content-Encoding '{}' is not taken; send the JSON text itself", coding)};
    }
    return std::nullopt;
}

HeaderVerdict& refuse(HeaderVerdict& verdict, HttpError error) {
    verdict.route = nullptr;
    verdict.error = std::move(error);
    return verdict;
}

// Another site's page, or a name that is not ours.
std::optional<HttpError> check_site(const AccessRules& access, const HttpRequest& request,
                                    std::string_view origin) {
    const std::string_view host = request.header("host");
    if (!access.host_allowed(host)) {
        return HttpError{.status = 403,
                         .message = fmt::format(
                             "Host '{}' is not a name of this server; --allowed-hosts adds names", host),
                         .code = "host_not_allowed"};
    }
    if (!origin.empty() && !access.origin_allowed(origin, host)) {
        return HttpError{
            .status = 403,
            .message = fmt::format("requests from the web origin '{}' are not allowed; --allowed-origins "
                                   "lists the origins that are",
                                   origin),
            .code = "origin_not_allowed"};
    }
    return std::nullopt;
}

}  // namespace

HeaderVerdict check_header(const RouteTable& routes, const AccessRules& access, HttpRequest& request) {
    HeaderVerdict verdict;
    if (std::optional<HttpError> error = check_repeated(request)) {
        return refuse(verdict, std::move(*error));
    }
    const std::string_view origin = request.header("origin");
    verdict.headers = cors_headers(access, origin);
    const RouteMatch match = routes.find(request.method, request.path);
    if (match.route == nullptr && match.allowed_methods.empty()) {
        return refuse(verdict, {.status = 404,
                                .message = fmt::format("unknown path: {} {}", request.method, request.path),
                                .code = "unknown_url"});
    }
    if (match.route == nullptr) {
        if (request.method == "OPTIONS" && !verdict.headers.empty()) {
            verdict.preflight = true;
            verdict.headers.emplace_back("Access-Control-Allow-Methods", match.allowed_methods);
            verdict.headers.emplace_back("Access-Control-Allow-Headers",
                                         "Authorization, Content-Type, X-Request-Id");
            verdict.headers.emplace_back("Access-Control-Max-Age", "600");
            return verdict;
        }
        verdict.headers.emplace_back("Allow", match.allowed_methods);
        return refuse(verdict, {.status = 405,
                                .message = fmt::format("{} does not take {}; it takes {}", request.path,
                                                       request.method, match.allowed_methods),
                                .code = "method_not_allowed"});
    }
    const HttpRoute& route = *match.route;
    if (!route.open || route.json_body) {
        if (std::optional<HttpError> error = check_site(access, request, origin)) {
            return refuse(verdict, std::move(*error));
        }
    }
    if (!route.open && access.keys_required()) {
        std::optional<std::string> tenant = access.tenant(request.header("authorization"));
        if (!tenant) {
            verdict.headers.emplace_back("WWW-Authenticate", "Bearer");
            return refuse(verdict, {.status = 401,
                                    .message = request.header("authorization").empty()
                                                   ? "an API key is needed: send `Authorization: Bearer KEY`"
                                                   : "the API key is not one of this server's",
                                    .code = "invalid_api_key"});
        }
        request.tenant = std::move(*tenant);
    }
    if (route.json_body) {
        if (std::optional<HttpError> error = check_body_type(request)) {
            return refuse(verdict, std::move(*error));
        }
    }
    verdict.route = &route;
    return verdict;
}

std::string request_id(std::string_view given) {
    const bool printable = std::ranges::all_of(given, [](char c) { return c > ' ' && c <= '~'; });
    if (!given.empty() && given.size() <= kRequestIdBytesMax && printable) {
        return std::string(given);
    }
    std::array<unsigned char, 16> bytes{};
    RAND_bytes(bytes.data(), static_cast<int>(bytes.size()));
    return fmt::format("req-{:02x}", fmt::join(bytes, ""));
}

}  // namespace tessera
