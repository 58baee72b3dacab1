// tessera bench: picks the benchmark.
#include "bench.h"

#include <cstdio>
#include <string_view>

#include "subcommands.h"

namespace tessera {
namespace {

struct Benchmark {
    std::string_view name;
    std::string_view summary;
    int (*run)(int argc, char** argv);
};

constexpr Benchmark kBenchmarks[] = {
    {"engine", "prefill and decode without a server, beside this machine's floor", run_bench_engine},
    {"serve", "load test of an OpenAI-compatible server over HTTP", run_bench_serve},
};

void print_help(std::FILE* out) {
    std::fputs("usage: tessera bench NAME [ARGUMENTS]\n\n", out);
    for (const Benchmark& benchmark : kBenchmarks) {
        std::fprintf(out, "  %-8.*s %.*s\n", static_cast<int>(benchmark.name.size()), benchmark.name.data(),
                     static_cast<int>(benchmark.summary.size()), benchmark.summary.data());
    }
    std::fputs("\n`tessera bench NAME --help` explains a benchmark, with examples.\n", out);
}

}  // namespace

int run_bench(int argc, char** argv) {
    const std::string_view name = argc > 1 ? argv[1] : "";
    for (const Benchmark& benchmark : kBenchmarks) {
        if (benchmark.name == name) {
            return benchmark.run(argc - 1, argv + 1);
        }
    }
    if (name == "--help" || name == "-h") {
        print_help(stdout);
        return 0;
    }
    if (argc > 1) {
        std::fprintf(stderr, "tessera bench: unknown benchmark '%s'\n\n", argv[1]);
    }
    print_help(stderr);
    return 2;
}

}  // namespace tessera
