#include "server/http/access.h"

#include <algorithm>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <utility>

namespace tessera {
namespace {

std::string lower_case(std::string_view text) {
    std::string lower(text);
    std::ranges::transform(lower, lower.begin(), [](char c) {
        return static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
    });
    return lower;
}

// "name:port" without the port; a bare IPv6 address in brackets keeps them.
std::string_view without_port(std::string_view host) {
    const size_t colon = host.rfind(':');
    const size_t bracket = host.rfind(']');
    const bool port =
        colon != std::string_view::npos && (bracket == std::string_view::npos || colon > bracket);
    return port ? host.substr(0, colon) : host;
}

std::string bracketed(const std::string& address) {
    return address.find(':') == std::string::npos ? address : "[" + address + "]";
}

}  // namespace

Sha256 sha256(std::string_view text) {
    Sha256 digest;
    SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
    return digest;
}

std::string hex(const Sha256& digest) {
    std::string text;
    for (const uint8_t byte : digest) {
        fmt::format_to(std::back_inserter(text), "{:02x}", byte);
    }
    return text;
}

AccessRules::AccessRules(const HttpServerConfig& config, BoundAddress bound)
    : bound_(std::move(bound)), allowed_origins_(config.allowed_origins) {
    for (const std::string& key : config.api_keys) {
        key_digests_.push_back(sha256(key));
    }
    // With any port: a forwarded one differs from the bound one, and no page of another name can send these.
    allowed_hosts_ = {"localhost", "127.0.0.1", "[::1]"};
    for (const std::string& name : {bracketed(bound_.address), bracketed(config.host)}) {
        allowed_hosts_.push_back(lower_case(fmt::format("{}:{}", name, bound_.port)));
        if (bound_.port == (bound_.tls ? 443 : 80)) {
            allowed_hosts_.push_back(lower_case(name));
        }
    }
    for (const std::string& name : config.allowed_hosts) {
        allowed_hosts_.push_back(lower_case(name));
    }
}

std::optional<std::string> AccessRules::tenant(std::string_view authorization) const {
    constexpr std::string_view kScheme = "bearer ";
    if (authorization.size() <= kScheme.size() ||
        lower_case(authorization.substr(0, kScheme.size())) != kScheme) {
        return std::nullopt;
    }
    std::string_view key = authorization.substr(kScheme.size());
    while (key.starts_with(' ')) {
        key.remove_prefix(1);
    }
    const Sha256 digest = sha256(key);
    bool known = false;
    for (const Sha256& candidate : key_digests_) {
        known |= CRYPTO_memcmp(candidate.data(), digest.data(), digest.size()) == 0;
    }
    if (!known) {
        return std::nullopt;
    }
    // Another digest than the one compared above: a tenant's name may reach logs and cache keys.
    return hex(sha256(fmt::format("tessera tenant {}", key)));
}

bool AccessRules::host_allowed(std::string_view host) const {
    if (!bound_.loopback) {
        return true;
    }
    const std::string name = lower_case(host);
    const std::string_view bare = without_port(name);
    return std::ranges::any_of(allowed_hosts_, [&](const std::string& allowed) {
        const bool any_port = without_port(allowed) == allowed;
        return allowed == name || (any_port && allowed == bare) || allowed == "*";
    });
}

bool AccessRules::origin_listed(std::string_view origin) const {
    return std::ranges::any_of(
        allowed_origins_, [&](const std::string& allowed) { return allowed == "*" || allowed == origin; });
}

bool AccessRules::origin_allowed(std::string_view origin, std::string_view host) const {
    return origin_listed(origin) ||
           lower_case(origin) == lower_case(fmt::format("{}://{}", bound_.tls ? "https" : "http", host));
}

}  // namespace tessera
