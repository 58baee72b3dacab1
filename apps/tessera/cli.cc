#include "cli.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>
#include <iostream>
#include <numeric>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "base/utf8.h"

namespace tessera {
namespace {

// Insertions, deletions and changes of one letter that lead from a to b.
size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row.back();
}

// The option's name that is nearest to an unknown one; empty when none is near.
std::string nearest_name(const CLI::App& app, std::string unknown) {
    unknown = unknown.substr(0, unknown.find('='));
    std::string nearest;
    size_t best = std::max<size_t>(3, unknown.size() / 3) + 1;
    for (const CLI::Option* option : app.get_options()) {
        for (const std::string& long_name : option->get_lnames()) {
            const size_t distance = edit_distance(unknown, "--" + long_name);
            if (distance < best) {
                best = distance;
                nearest = "--" + long_name;
            }
        }
    }
    return nearest;
}

}  // namespace

std::optional<int> parse_arguments(CLI::App& app, int argc, char** argv) {
    try {
        app.parse(argc, argv);
    } catch (const CLI::RequiredError& error) {
        const std::vector<std::string> unknown = app.remaining(true);
        if (app.get_require_subcommand_min() == 0 || unknown.empty()) {
            return app.exit(error, std::cout, std::cerr) == 0 ? 0 : 2;
        }
        std::string names;
        for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
            names += (names.empty() ? "" : ", ") + command->get_name();
        }
        std::fprintf(stderr, "%s: unknown command '%s'; there are %s\n", app.get_name().c_str(),
                     unknown.front().c_str(), names.c_str());
        return 2;
    } catch (const CLI::ExtrasError&) {
        const std::vector<std::string> unknown = app.remaining(true);  // of a subcommand, too
        const auto flag =
            std::ranges::find_if(unknown, [](const auto& text) { return text.starts_with('-'); });
        const std::string& name = flag != unknown.end() ? *flag : unknown.front();
        const std::string nearest = nearest_name(app, name);
        std::fprintf(stderr, "%s: unknown argument '%s'%s%s%s (--help lists them all)\n",
                     app.get_name().c_str(), name.c_str(), nearest.empty() ? "" : ": did you mean '",
                     nearest.c_str(), nearest.empty() ? "" : "'?");
        return 2;
    } catch (const CLI::ParseError& error) {
        return app.exit(error, std::cout, std::cerr) == 0 ? 0 : 2;
    }
    return std::nullopt;
}

CLI::Validator number_range(double min, double max) {
    return {[min, max](std::string& text) {
                double number = 0;
                const bool inside =
                    CLI::detail::lexical_cast(text, number) && number >= min && number <= max;  // not a NaN
                return inside ? std::string() : fmt::format("{} is not from {} to {}", text, min, max);
            },
            fmt::format("from {} to {}", min, max)};
}

CLI::Validator whole_number(uint64_t max) {
    return {[max](std::string& text) {
                uint64_t number = 0;
                const char* end = text.data() + text.size();
                const auto [stop, error] = std::from_chars(text.data(), end, number);
                return error == std::errc() && stop == end && number <= max
                           ? std::string()
                           : fmt::format("{} is not a whole number from 0 to {}", text, max);
            },
            "a whole number"};
}

std::optional<int64_t> parse_size(std::string_view text) {
    const std::string copy(text);
    char* end = nullptr;
    const double number = std::strtod(copy.c_str(), &end);
    const std::string_view suffix = end;
    if (end == copy.c_str() || !std::isdigit(static_cast<unsigned char>(copy[0]))) {
        return std::nullopt;
    }
    struct Unit {
        std::string_view suffix;
        double factor;
    };
    static constexpr Unit kUnits[] = {{"", 1},         {"k", 1e3},      {"m", 1e6},      {"g", 1e9},
                                      {"t", 1e12},     {"K", 0x1p10},   {"M", 0x1p20},   {"G", 0x1p30},
                                      {"T", 0x1p40},   {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30},
                                      {"TiB", 0x1p40}, {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
                                      {"TB", 1e12},    {"kB", 1e3},     {"B", 1}};
    for (const Unit& unit : kUnits) {
        const double value = number * unit.factor;
        if (suffix == unit.suffix && value < 0x1p62) {
            const bool meant = suffix.empty() ? value == std::floor(value) : value >= 1;
            return meant ? std::optional(static_cast<int64_t>(value)) : std::nullopt;
        }
    }
    return std::nullopt;
}

CLI::Validator size_value() {
    return CLI::Validator(
        [](std::string& text) {
            const std::optional<int64_t> value = parse_size(text);
            if (!value) {
                return fmt::format("'{}' is not a size: give a number, with a suffix like 32k, 32K or 4GiB",
                                   text);
            }
            text = std::to_string(*value);
            return std::string();
        },
        "SIZE");
}

void print_text(std::FILE* stream, std::string_view text) {
    const std::string shown = isatty(fileno(stream)) != 0 ? utf8_for_terminal(text) : std::string(text);
    std::fwrite(shown.data(), 1, shown.size(), stream);
}

int fail(const Status& status) {
    print_text(stderr, fmt::format("tessera: {}\n", status.message()));
    return 1;
}

}  // namespace tessera
