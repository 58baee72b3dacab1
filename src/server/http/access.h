// Who may ask what: API keys, the Host and Origin checks that keep other web pages away from a local server,
// and the CORS answers for the origins that the operator has listed.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http.h"

namespace tessera {

using Sha256 = std::array<uint8_t, 32>;

Sha256 sha256(std::string_view text);
std::string hex(const Sha256& digest);

struct BoundAddress {
    std::string address;  // as a number
    int port = 0;
    bool loopback = false;
    bool tls = false;
};

// Immutable; thread-safe.
class AccessRules {
  public:
    AccessRules(const HttpServerConfig& config, BoundAddress bound);

    bool keys_required() const { return !key_digests_.empty(); }
    // The tenant of an Authorization header's `Bearer KEY`; nothing when the key is not one of ours. Every
    // key is compared, in constant time over digests.
    std::optional<std::string> tenant(std::string_view authorization) const;

    // Bound to loopback only this machine can ask, and it calls us by a name that we know: any other name is
    // a rebinding attack. Bound elsewhere our names are not all known, and every Host passes.
    bool host_allowed(std::string_view host) const;
    // A browser's Origin is our own page's, or listed. host: the request's Host header.
    bool origin_allowed(std::string_view origin, std::string_view host) const;
    // Listed by the operator: gets CORS headers.
    bool origin_listed(std::string_view origin) const;

  private:
    BoundAddress bound_;
    std::vector<Sha256> key_digests_;
    std::vector<std::string> allowed_origins_;
    std::vector<std::string> allowed_hosts_;  // lower case, "name" (any port) or "name:port"
};

}  // namespace tessera
