#include "cli.h"

#include <cstdio>
#include <iostream>

namespace tessera {

std::optional<int> parse_arguments(CLI::App& app, int argc, char** argv) {
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
        return app.exit(error, std::cout, std::cerr) == 0 ? 0 : 2;
    }
    return std::nullopt;
}

int fail(const Status& status) {
    std::fprintf(stderr, "tessera: %s\n", status.message().c_str());
    return 1;
}

}  // namespace tessera
