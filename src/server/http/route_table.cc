#include "server/http/route_table.h"

#include <utility>

#include "base/check.h"

namespace tessera {
namespace {

bool is_prefix(const HttpRoute& route) {
    return route.path.ends_with('*');
}

bool takes(const HttpRoute& route, std::string_view path) {
    if (is_prefix(route)) {
        return path.starts_with(std::string_view(route.path).substr(0, route.path.size() - 1));
    }
    return route.path == path;
}

}  // namespace

void RouteTable::add(HttpRoute route) {
    check(route.path.starts_with('/') && route.handler != nullptr, "a route needs a path and a handler");
    // Exact paths stand before prefixes.
    const auto place = is_prefix(route) ? routes_.end() : routes_.begin();
    routes_.insert(place, std::move(route));
}

RouteMatch RouteTable::find(std::string_view method, std::string_view path) const {
    RouteMatch match;
    const std::string_view wanted = method == "HEAD" ? "GET" : method;
    for (const HttpRoute& route : routes_) {
        if (!takes(route, path)) {
            continue;
        }
        if (route.method == wanted) {
            match.route = &route;
            return match;
        }
        match.allowed_methods += match.allowed_methods.empty() ? "" : ", ";
        match.allowed_methods += route.method == "GET" ? "GET, HEAD" : route.method;
    }
    return match;
}

}  // namespace tessera
