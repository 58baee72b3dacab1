// Command-line parsing shared by the subcommands: help on standard output, errors on standard error with
// status 2.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tessera {

// The exit status to end with (help was asked for, or the usage is wrong), or nothing: go on.
std::optional<int> parse_arguments(CLI::App& app, int argc, char** argv);
// A check of an option that is a real number. CLI::Range lets NaN through, and prints 1e-9 as 0.000000.
CLI::Validator number_range(double min, double max);
// A check of an option that is a number from 0 to max: CLI11 reads -1 and what is too large as other numbers.
CLI::Validator whole_number(uint64_t max = UINT64_MAX);
// "32768", "32k" (decimal), "32K" (binary), "4GiB", "1.5G": the number, or nothing when it is none or too
// large, or when a unit is given and less than 1 is left.
std::optional<int64_t> parse_size(std::string_view text);
// Of an option that is a size: it becomes plain digits before the option reads it.
CLI::Validator size_value();
// Writes untrusted text (a model's, a file's) to `stream`; on a terminal its control characters are made
// visible.
void print_text(std::FILE* stream, std::string_view text);
// Prints the error and gives the exit status: 2 is for usage alone, so this is 1.
int fail(const Status& status);

}  // namespace tessera
