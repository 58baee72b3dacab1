#include "ops/cuda/cuda_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fmt/format.h>
#include <string>
#include <vector>

#include "base/json.h"
#include "device/cuda/device_props.h"
#include "device/cuda/stream.h"
#include "ops/cuda/cuda_harness.h"
#include "ops/cuda/cuda_registry.h"
#include "ops/only_cases.h"

namespace tessera {
namespace {

Result<std::vector<const CudaOpEntry*>> chosen_operators(std::string_view name) {
    std::vector<const CudaOpEntry*> chosen;
    std::string names;
    for (const CudaOpEntry& entry : cuda_op_registry()) {
        names += fmt::format(" {}", entry.name);
        if (name.empty() || name == entry.name) {
            chosen.push_back(&entry);
        }
    }
    if (chosen.empty()) {
        return invalid_argument(fmt::format("no CUDA operator is called '{}'; there are:{}", name, names));
    }
    return chosen;
}

// Prints the operator's line; returns how many of its cases failed.
int test_operator(const CudaOpEntry& entry, const CudaReportArgs& args, const DeviceProps& device,
                  cudaStream_t stream) {
    OpError worst;
    int failed = 0;
    int64_t ran = 0;
    for (const CudaOpCase& op_case : entry.cases()) {
        if (args.small && op_case.bench) {
            continue;
        }
        MemoryBudget budget(device.free_bytes);
        const OpError error = op_case.prepare({budget, 1, args.seed}).check(stream);
        worst += error;
        ++ran;
        if (error.mismatches > 0) {
            ++failed;
            fmt::print(
                "FAILED {} [{}] {}: {} of {} elements differ, rms {:.3g}, max_abs {:.3g}, max_rel {:.3g}\n",
                entry.name, op_case.shape, op_case.dtype, error.mismatches, error.compared, error.rms,
                error.max_abs, error.max_rel);
        }
    }
    fmt::print(
        "{:<17} cuda {:>3} cases {:>10} compared  rms {:.2e}  max_abs {:.2e}  max_rel {:.2e}  {:<22} {}\n",
        entry.name, ran, worst.compared, worst.rms, worst.max_abs, worst.max_rel, entry.agreement,
        failed == 0 ? "ok" : "FAILED");
    std::fflush(stdout);
    return failed;
}

struct BenchLine {
    const CudaOpEntry& entry;
    const CudaOpCase& op_case;
    const CudaCaseRun& run;
    CudaTiming timing;
    CudaFloor floor;
    OpError error;
};

void print_line(const BenchLine& line, const CudaReportArgs& args) {
    const CudaTiming& t = line.timing;
    const double floor = line.floor.us();
    if (!args.json) {
        const std::string burst = t.burst_us > 0 ? fmt::format("{:.2f}", t.burst_us) : "-";
        fmt::print(
            "{:<17} {:<58} {:<8} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9} {:>9.2f} {:>9.2f} {:>6.0f} %\n",
            line.entry.name, line.op_case.shape, line.op_case.dtype, t.us, t.p10_us, t.p90_us, t.hot_us,
            burst, line.floor.bytes_us, line.floor.flops_us, floor / t.us * 100);
    } else {
        const auto rounded = [](double value) { return std::round(value * 1000) / 1000; };
        const json::Value burst = t.burst_us > 0 ? json::Value(rounded(t.burst_us)) : json::Value(nullptr);
        fmt::print("{}\n", json::dump(json::Value::object({{"op", line.entry.name},
                                                           {"shape", line.op_case.shape},
                                                           {"dtype", line.op_case.dtype},
                                                           {"variant", "cuda"},
                                                           {"us", rounded(t.us)},
                                                           {"p10_us", rounded(t.p10_us)},
                                                           {"p90_us", rounded(t.p90_us)},
                                                           {"hot_us", rounded(t.hot_us)},
                                                           {"burst_us", burst},
                                                           {"bytes", line.run.bytes},
                                                           {"flops", line.run.flops},
                                                           {"bytes_us", rounded(line.floor.bytes_us)},
                                                           {"flops_us", rounded(line.floor.flops_us)},
                                                           {"floor_us", rounded(floor)},
                                                           {"of_floor", rounded(floor / t.us)},
                                                           {"peer", nullptr},
                                                           {"peer_us", nullptr},
                                                           {"rms", line.error.rms},
                                                           {"wrong", line.error.mismatches},
                                                           {"seed", args.seed}})));
    }
    std::fflush(stdout);
}

}  // namespace

void list_cuda_operators() {
    fmt::print("{:<17} {:<50} {:<24} {:>6} {:>6}\n", "operator", "what it computes", "agreement", "cases",
               "timed");
    for (const CudaOpEntry& entry : cuda_op_registry()) {
        const std::vector<CudaOpCase> cases = entry.cases();
        const auto timed = std::count_if(cases.begin(), cases.end(), [](const auto& c) { return c.bench; });
        fmt::print("{:<17} {:<50} {:<24} {:>6} {:>6}\n", entry.name, entry.summary, entry.agreement,
                   cases.size(), timed);
    }
}

std::vector<std::string_view> cuda_operator_names() {
    std::vector<std::string_view> names;
    for (const CudaOpEntry& entry : cuda_op_registry()) {
        names.emplace_back(entry.name);
    }
    return names;
}

Result<int> test_cuda_operators(const CudaReportArgs& args) {
    Result<std::vector<const CudaOpEntry*>> chosen = chosen_operators(args.name);
    if (!chosen.ok()) {
        return chosen.status();
    }
    const Result<DeviceProps> device = open_device(0);
    if (!device.ok()) {
        return device.status();
    }
    const Stream stream;
    int failed = 0;
    fmt::print("seed {}{}\n", args.seed, args.small ? ", small cases" : "");
    for (const CudaOpEntry* entry : *chosen) {
        failed += test_operator(*entry, args, *device, stream.get());
    }
    return failed;
}

Status bench_cuda_operators(const CudaReportArgs& args) {
    Result<std::vector<const CudaOpEntry*>> chosen = chosen_operators(args.name);
    if (!chosen.ok()) {
        return chosen.status();
    }
    const Result<DeviceProps> device = open_device(0);
    if (!device.ok()) {
        return device.status();
    }
    if (!args.json) {
        fmt::print("seed {}\n{:<17} {:<58} {:<8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8}\n",
                   args.seed, "operator", "shape", "dtype", "us", "p10_us", "p90_us", "hot_us", "burst_us",
                   "bytes_us", "flops_us", "of_floor");
    }
    const Stream stream;
    int wrong = 0;
    OnlyCases only(args.only);
    for (const CudaOpEntry* entry : *chosen) {
        for (const CudaOpCase& op_case : entry->cases()) {
            if (!op_case.bench || !only.takes(op_case.shape, op_case.dtype)) {
                continue;
            }
            MemoryBudget budget(device->free_bytes);
            const CudaCaseRun run =
                op_case.prepare({budget, cuda_case_sets(op_case, device->l2_bytes), args.seed});
            const OpError error = run.check(stream.get());
            const CudaTiming timing = time_cuda_case(run, stream.get());
            print_line({*entry, op_case, run, timing, cuda_floor(run, CudaRates{}), error}, args);
            if (error.mismatches > 0) {
                ++wrong;
                fmt::print(stderr, "WRONG {} [{}] {}: {} of {} elements differ from the reference\n",
                           entry->name, op_case.shape, op_case.dtype, error.mismatches, error.compared);
            }
        }
    }
    if (Status status = only.status(); !status.ok()) {
        return status;
    }
    return wrong == 0 ? Status()
                      : data_loss(fmt::format("{} cases differ from their references: see `tessera ops test`",
                                              wrong));
}

}  // namespace tessera
