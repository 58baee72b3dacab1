// The checks that a request's header allows, before its body is read.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "server/http.h"
#include "server/http/access.h"
#include "server/http/route_table.h"
#include "server/http_error.h"

namespace tessera {

// What the header decided. A preflight is answered with 204 and `headers`; an error with its status and
// `headers`; otherwise `route` is set, `headers` go with the answer and request.tenant is set.
struct HeaderVerdict {
    const HttpRoute* route = nullptr;
    bool preflight = false;
    HttpError error;  // when neither
    HttpHeaders headers;
};

HeaderVerdict check_header(const RouteTable& routes, const AccessRules& access, HttpRequest& request);

// The client's X-Request-Id when it is printable ASCII of 1 to 128 bytes, else a fresh one.
std::string request_id(std::string_view given);

}  // namespace tessera
