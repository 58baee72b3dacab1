#include "server/page_files.h"

#include <array>
#include <fmt/format.h>
#include <memory>
#include <openssl/sha.h>
#include <string>
#include <utility>

namespace tessera {
namespace {

constexpr std::string_view kContentSecurityPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

std::string_view content_type(std::string_view name) {
    static constexpr std::pair<std::string_view, std::string_view> kTypes[] = {
        {".html", "text/html; charset=utf-8"},
        {".css", "text/css; charset=utf-8"},
        {".js", "text/javascript; charset=utf-8"},
        {".svg", "image/svg+xml"},
        {".png", "image/png"},
        {".ico", "image/x-icon"},
        {".woff2", "font/woff2"},
    };
    for (const auto& [suffix, type] : kTypes) {
        if (name.ends_with(suffix)) {
            return type;
        }
    }
    return "application/octet-stream";
}

std::string etag(std::string_view content) {
    std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
    SHA256(reinterpret_cast<const unsigned char*>(content.data()), content.size(), digest.data());
    return fmt::format("\"{:02x}\"", fmt::join(digest.begin(), digest.begin() + 8, ""));
}

// If-None-Match: a list of tags, weak or not, or *.
bool matches(std::string_view if_none_match, std::string_view tag) {
    return if_none_match == "*" || if_none_match.find(tag) != std::string_view::npos;
}

void answer(HttpExchange& exchange, const EmbeddedFile& file, const std::string& tag) {
    HttpHeaders headers = {
        {"ETag", tag},
        {"Cache-Control", "no-cache"},  // kept, and asked about each time: a new version shows at once
        {"Content-Security-Policy", std::string(kContentSecurityPolicy)},
        {"Referrer-Policy", "no-referrer"},
        {"X-Frame-Options", "DENY"},
        {"Cross-Origin-Opener-Policy", "same-origin"},
        {"Cross-Origin-Resource-Policy", "same-origin"},
    };
    if (matches(exchange.request().header("if-none-match"), tag)) {
        exchange.respond(304, "", "", std::move(headers));
    } else {
        exchange.respond(200, std::string(content_type(file.name)), std::string(file.content),
                         std::move(headers));
    }
}

}  // namespace

std::vector<HttpRoute> page_routes(std::span<const EmbeddedFile> files) {
    std::vector<HttpRoute> routes;
    for (const EmbeddedFile& file : files) {
        const HttpHandler handler =
            [file, tag = etag(file.content)](const std::shared_ptr<HttpExchange>& exchange) {
                answer(*exchange, file, tag);
            };
        routes.push_back(
            {.method = "GET", .path = fmt::format("/{}", file.name), .handler = handler, .open = true});
        if (file.name == "index.html") {
            routes.push_back({.method = "GET", .path = "/", .handler = handler, .open = true});
        }
    }
    return routes;
}

}  // namespace tessera
