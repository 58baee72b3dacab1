// The chat page's files (web/), embedded in the binary at build time.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "server/http.h"

namespace tessera {

struct EmbeddedFile {
    std::string_view name;  // relative to web/
    std::string_view content;
};

extern const std::span<const EmbeddedFile> kEmbeddedFiles;

// GET /NAME for every file, and GET / for index.html: open to all, since they hold no secret, with the
// headers that keep a page from running or loading anything that is not its own.
std::vector<HttpRoute> page_routes(std::span<const EmbeddedFile> files = kEmbeddedFiles);

}  // namespace tessera
