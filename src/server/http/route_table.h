// Which handler answers (method, path).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/http.h"

namespace tessera {

struct RouteMatch {
    const HttpRoute* route = nullptr;  // null: see allowed_methods
    std::string allowed_methods;       // of the path, "GET, HEAD, OPTIONS"; empty: no such path
};

// Immutable while it is read; reading is thread-safe.
class RouteTable {
  public:
    // A path that ends in '*' takes every path with that prefix; an exact path goes before it.
    void add(HttpRoute route);
    // HEAD finds the GET route.
    RouteMatch find(std::string_view method, std::string_view path) const;

  private:
    std::vector<HttpRoute> routes_;
};

}  // namespace tessera
