// tessera: one binary, a subcommand a file (subcommands.h).
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string_view>
#include <system_error>

#include "subcommands.h"

namespace {

struct Subcommand {
    std::string_view name;
    std::string_view summary;
    int (*run)(int argc, char** argv);
};

// A line is added here when its file exists.
constexpr Subcommand kSubcommands[] = {
    {"serve", "the OpenAI-compatible server and its chat page", tessera::run_serve},
    {"chat", "a conversation in the terminal", tessera::run_chat},
    {"generate", "complete prompts offline", tessera::run_generate},
    {"score", "log-probabilities of given token ids", tessera::run_score},
    {"eval", "exact answers on task sets", tessera::run_eval},
    {"tokenize", "text to token ids and back", tessera::run_tokenize},
    {"quantize", "a copy of a model in FP8, or with int4 experts", tessera::run_quantize},
    {"bench", "load test of a server; benchmark of the engine", tessera::run_bench},
    {"ops", "the operator library: list, test, bench", tessera::run_ops},
    {"render", "conversations to prompt text", tessera::run_render},
};

void print_help(std::FILE* out) {
    std::fputs(
        "usage: tessera COMMAND [ARGUMENTS]\n\nAn inference engine for Hy3-class models.\n\ncommands:\n",
        out);
    for (const Subcommand& command : kSubcommands) {
        std::fprintf(out, "  %-10.*s %.*s\n", static_cast<int>(command.name.size()), command.name.data(),
                     static_cast<int>(command.summary.size()), command.summary.data());
    }
    std::fputs("\n`tessera COMMAND --help` explains a command, with examples.\n", out);
}

// What no buffer's own error tells: many small things that together are too much. It must not allocate.
[[noreturn]] void out_of_memory() {
    std::fputs("tessera: out of memory: the system gives this process no more\n", stderr);
    std::_Exit(1);
}

// Threads are the one thing of the standard library that the system may refuse by an exception.
[[noreturn]] void ended() {
    try {
        if (const std::exception_ptr error = std::current_exception(); error != nullptr) {
            std::rethrow_exception(error);
        }
    } catch (const std::system_error& error) {
        if (error.code() == std::errc::resource_unavailable_try_again) {
            std::fputs(
                "tessera: the system starts no more threads: lower --threads, or raise this process's "
                "limits\n",
                stderr);
            std::_Exit(1);
        }
        std::fprintf(stderr, "tessera: %s\n", error.what());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "tessera: %s\n", error.what());
    } catch (...) {
        std::fputs("tessera: an unknown exception\n", stderr);
    }
    std::abort();
}

}  // namespace

int main(int argc, char** argv) {
    std::set_new_handler(out_of_memory);
    std::set_terminate(ended);
    const std::string_view name = argc > 1 ? argv[1] : "";
    if (name == "--help" || name == "-h" || name == "help") {
        print_help(stdout);
        return 0;
    }
    if (name == "--version") {
        std::puts("tessera " TESSERA_VERSION);
        return 0;
    }
    for (const Subcommand& command : kSubcommands) {
        if (command.name == name) {
            return command.run(argc - 1, argv + 1);
        }
    }
    if (argc > 1) {
        std::fprintf(stderr, "tessera: unknown command '%s'\n\n", argv[1]);
    }
    print_help(stderr);
    return 2;
}
