// tessera ops: the operator library from the command line: what there is, whether it is right, how fast it
// is.
#include <algorithm>
#include <cstdio>
#include <fmt/format.h>
#include <optional>

#include "base/clock.h"
#include "base/json.h"
#include "cli.h"
#include "device_ops.h"
#include "model_setup.h"
#include "ops/harness.h"
#include "ops/harness_simd.h"
#include "ops/only_cases.h"
#include "ops/registry.h"
#include "subcommands.h"

namespace tessera {
namespace {

struct Arguments {
    std::string name;  // empty = all operators
    std::string device = "cpu";
    std::string variant;  // empty = all that the processor has (test), the best (bench)
    int32_t threads = 0;
    bool json = false;
    std::string only;  // bench: the cases with this in shape or dtype; empty: all
    // CUDA only.
    bool small = false;
    std::optional<uint64_t> seed;  // fresh inputs when left out
};

std::vector<const OpEntry*> chosen_operators(const Arguments& arguments) {
    std::vector<const OpEntry*> chosen;
    for (const OpEntry& entry : op_registry()) {
        if (arguments.name.empty() || arguments.name == entry.name) {
            chosen.push_back(&entry);
        }
    }
    return chosen;
}

// The variants asked for, best first. Empty: an unknown or unsupported one was named.
std::vector<SimdVariant> chosen_variants(const Arguments& arguments, bool all) {
    std::vector<SimdVariant> chosen;
    for (const SimdVariant& variant : simd_variants()) {
        const bool wanted =
            arguments.variant.empty() ? (all || chosen.empty()) : arguments.variant == variant.name;
        // The reference against itself tells nothing: only by name.
        const bool itself =
            all && arguments.variant.empty() && variant.name == "reference" && !chosen.empty();
        if (variant.supported && wanted && !itself) {
            chosen.push_back(variant);
        }
    }
    return chosen;
}

int list_operators() {
    const std::vector<SimdVariant> variants = simd_variants();
    fmt::print("{:<12} {:<44} {:<12}", "operator", "what it computes", "agreement");
    for (const SimdVariant& variant : variants) {
        fmt::print(" {:<10}", variant.name);
    }
    bool active = true;  // the first supported variant is the one that runs
    std::string support;
    for (const SimdVariant& variant : variants) {
        support += fmt::format(" {:<10}", !variant.supported ? "no" : (active ? "yes, used" : "yes"));
        active = active && !variant.supported;
    }
    fmt::print("\n");
    for (const OpEntry& entry : op_registry()) {
        fmt::print("{:<12} {:<44} {:<12}{}\n", entry.name, entry.summary, entry.agreement, support);
    }
    fmt::print("\n");
    for (const SimdVariant& variant : variants) {
        fmt::print("{} requires: {}\n", variant.name,
                   variant.requires_.empty() ? "nothing" : variant.requires_);
    }
    return 0;
}

int test_operators(const Arguments& arguments, OpContext& context) {
    int failures = 0;
    for (const OpEntry* entry : chosen_operators(arguments)) {
        for (const SimdVariant& variant : chosen_variants(arguments, true)) {
            force_simd(variant.target);
            OpError worst;
            int failed = 0;
            const std::vector<OpCase> cases = entry->cases();
            for (const OpCase& op_case : cases) {
                const OpError error = op_case.prepare().check(context);
                worst.compared += error.compared;
                worst.max_abs = std::max(worst.max_abs, error.max_abs);
                worst.max_rel = std::max(worst.max_rel, error.max_rel);
                if (error.mismatches > 0) {
                    ++failed;
                    fmt::print(
                        "FAILED {} {} [{}] {}: {} of {} elements differ, max_abs {:.3g}, max_rel {:.3g}\n",
                        entry->name, variant.name, op_case.shape, op_case.dtype, error.mismatches,
                        error.compared, error.max_abs, error.max_rel);
                }
            }
            fmt::print("{:<12} {:<10} {:>3} cases {:>10} elements  max_abs {:.2e}  max_rel {:.2e}  {}\n",
                       entry->name, variant.name, cases.size(), worst.compared, worst.max_abs, worst.max_rel,
                       failed == 0 ? "ok" : "FAILED");
            std::fflush(stdout);
            failures += failed;
        }
    }
    force_simd(0);
    return failures == 0 ? 0 : 1;
}

struct BenchLine {
    const OpEntry& entry;
    const OpCase& op_case;
    const SimdVariant& variant;
    const OpCaseRun& run;
    const OpTiming& timing;
    double floor_us = 0;
    double error = 0;
};

void print_bench_line(const BenchLine& line, bool json) {
    const OpTiming& t = line.timing;
    if (!json) {
        fmt::print("{:<12} {:<52} {:<9} {:<8} {:>11.2f} {:>11.2f} {:>10.2f} {:>6.2f}\n", line.entry.name,
                   line.op_case.shape, line.op_case.dtype, line.variant.name, t.us, t.hot_us, line.floor_us,
                   t.us / line.floor_us);
    } else {
        const auto rounded = [](double us) { return std::round(us * 1000) / 1000; };
        fmt::print("{}\n", json::dump(json::Value::object({{"op", line.entry.name},
                                                           {"shape", line.op_case.shape},
                                                           {"dtype", line.op_case.dtype},
                                                           {"variant", line.variant.name},
                                                           {"us", rounded(t.us)},
                                                           {"p10_us", rounded(t.p10_us)},
                                                           {"p90_us", rounded(t.p90_us)},
                                                           {"hot_us", rounded(t.hot_us)},
                                                           {"bytes", line.run.bytes},
                                                           {"flops", line.run.flops},
                                                           {"floor_us", rounded(line.floor_us)},
                                                           {"ratio", rounded(t.us / line.floor_us)},
                                                           {"peer", nullptr},
                                                           {"peer_us", nullptr},
                                                           {"error", line.error}})));
    }
    std::fflush(stdout);
}

int bench_operators(const Arguments& arguments, OpContext& context) {
    if (!arguments.json) {
        fmt::print("{:<12} {:<52} {:<9} {:<8} {:>11} {:>11} {:>10} {:>6}\n", "operator", "shape", "dtype",
                   "variant", "us", "hot_us", "floor_us", "ratio");
    }
    OnlyCases only(arguments.only);
    for (const SimdVariant& variant : chosen_variants(arguments, false)) {
        force_simd(variant.target);
        for (const OpEntry* entry : chosen_operators(arguments)) {
            for (const OpCase& op_case : entry->cases()) {
                if (!op_case.bench || !only.takes(op_case.shape, op_case.dtype)) {
                    continue;
                }
                const OpCaseRun run = op_case.prepare();
                // Beside the case, since other work on the machine changes what it can do.
                const MachineRates rates{measure_fma_rate(context.threads, 0.02),
                                         measure_read_bandwidth(context.threads, run.bytes, 0.02)};
                const OpTiming timing = time_case(run, context);
                const OpError error = run.check(context);
                print_bench_line({*entry, op_case, variant, run, timing, floor_us(run, rates), error.max_abs},
                                 arguments.json);
            }
        }
    }
    force_simd(0);
    const Status status = only.status();
    return status.ok() ? 0 : fail(status);
}

void add_device(CLI::App& command, Arguments& arguments) {
    command.add_option("--device", arguments.device, "where they run")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
}

void add_common(CLI::App& command, Arguments& arguments) {
    command.add_option("NAME", arguments.name, "one operator; all when left out");
    add_device(command, arguments);
    command.add_option("--seed", arguments.seed, "cuda: of the random inputs; fresh ones when left out")
        ->check(whole_number());
    command.add_option("--variant", arguments.variant, "cpu: avx512, avx2 or reference")
        ->check(CLI::IsMember({"avx512", "avx2", "reference"}));
    command.add_option("--threads", arguments.threads, "cpu: 0 = all the cores that the process may use")
        ->check(CLI::Range(0, 1024));
}

std::vector<std::string_view> operator_names(bool cuda) {
    if (cuda) {
        return cuda_op_names();
    }
    std::vector<std::string_view> names;
    for (const OpEntry& entry : op_registry()) {
        names.emplace_back(entry.name);
    }
    return names;
}

// What is wrong with the choice, or nothing.
std::optional<Status> check_choice(const Arguments& arguments) {
    const bool cuda = arguments.device == "cuda";
    if (!cuda && (arguments.small || arguments.seed)) {
        return invalid_argument("--small and --seed need --device cuda: the CPU's cases have fixed inputs");
    }
    if (cuda && (!arguments.variant.empty() || arguments.threads != 0)) {
        return invalid_argument("--variant and --threads need --device cpu: a device has one form of each");
    }
    const std::vector<std::string_view> names = operator_names(cuda);
    if (!names.empty() && !arguments.name.empty() &&
        std::ranges::find(names, arguments.name) == names.end()) {
        return invalid_argument(fmt::format("no {}operator is called '{}'; there are: {}",
                                            cuda ? "CUDA " : "", arguments.name, fmt::join(names, " ")));
    }
    if (cuda) {
        return std::nullopt;
    }
    if (chosen_variants(arguments, true).empty()) {
        return invalid_argument(fmt::format(
            "this processor lacks what --variant {} requires; see `tessera ops list`", arguments.variant));
    }
    return std::nullopt;
}

enum class Action : uint8_t { kList, kTest, kBench };

int run_on_cuda(const Arguments& arguments, Action action) {
    if (action == Action::kList) {
        const Status done = list_cuda_ops();
        return done.ok() ? 0 : fail(done);
    }
    const DeviceOpsArgs args{.name = arguments.name,
                             .seed = arguments.seed.value_or(static_cast<uint64_t>(now_ns()) % 1'000'000),
                             .small = arguments.small,
                             .json = arguments.json,
                             .only = arguments.only};
    if (action == Action::kBench) {
        const Status done = bench_cuda_ops(args);
        return done.ok() ? 0 : fail(done);
    }
    const Result<int> failed = test_cuda_ops(args);
    if (!failed.ok()) {
        return fail(failed.status());
    }
    return *failed == 0 ? 0 : 1;
}

}  // namespace

int run_ops(int argc, char** argv) {
    Arguments arguments;
    CLI::App app("The operator library: what there is, whether it is right, how fast it is.");
    app.name("tessera ops");
    app.require_subcommand(1);
    CLI::App* list =
        app.add_subcommand("list", "operators and the instruction sets that they are compiled for");
    CLI::App* test = app.add_subcommand("test", "every case of the operators against their references");
    CLI::App* bench = app.add_subcommand("bench", "time of the operators beside the floor of this machine");
    add_device(*list, arguments);
    add_common(*test, arguments);
    add_common(*bench, arguments);
    test->add_flag("--small", arguments.small,
                   "cuda: the small cases alone, as compute-sanitizer wants them");
    bench->add_flag("--json", arguments.json, "one JSON object a line");
    bench->add_option("--only", arguments.only,
                      "once: the cases with this in their shape or dtype, such as 'tokens=64 '");
    app.footer(
        "us = median with cold level-2 caches, hot_us = straight after one another; floor_us = the larger\n"
        "of bytes over the measured read bandwidth and multiply-adds over the measured FMA rate;\n"
        "ratio = us / floor_us. On cuda: replayed graphs whose inputs rotate past 3 x the level-2 cache;\n"
        "bytes_us and flops_us are the floor by bytes and by operations at the rates that an H200 reaches;\n"
        "of_floor = the larger / us. Launches of over 100 us are replayed for 0.15 s, to settled clocks;\n"
        "burst_us: of those that compute, the first two milliseconds after a pause.\n\n"
        "examples:\n"
        "  tessera ops list\n"
        "  tessera ops test attention\n"
        "  tessera ops bench linear --variant avx2 --json\n"
        "  tessera ops bench rms_norm --only 'rows=1 '");
    if (const std::optional<int> status = parse_arguments(app, argc, argv)) {
        return *status;
    }
    if (const std::optional<Status> wrong = check_choice(arguments)) {
        fail(*wrong);
        return 2;
    }
    if (arguments.device == "cuda") {
        return run_on_cuda(arguments, list->parsed()   ? Action::kList
                                      : test->parsed() ? Action::kTest
                                                       : Action::kBench);
    }
    if (list->parsed()) {
        return list_operators();
    }
    ThreadPool threads(resolve_threads(arguments.threads));
    OpContext context{threads};
    return test->parsed() ? test_operators(arguments, context) : bench_operators(arguments, context);
}

}  // namespace tessera
