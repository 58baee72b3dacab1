#include "ops/cuda/cuda_report.h"

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
int test_operator(const CudaOpEntry& entry, const DeviceProps& device, cudaStream_t stream) {
    OpError worst;
    int failed = 0;
    const std::vector<CudaOpCase> cases = entry.cases();
    for (const CudaOpCase& op_case : cases) {
        MemoryBudget budget(device.free_bytes);
        const OpError error = op_case.prepare(budget, 1).check(stream);
        worst += error;
        if (error.mismatches > 0) {
            ++failed;
            fmt::print("FAILED {} [{}] {}: {} of {} elements differ, max_abs {:.3g}, max_rel {:.3g}\n",
                       entry.name, op_case.shape, op_case.dtype, error.mismatches, error.compared,
                       error.max_abs, error.max_rel);
        }
    }
    fmt::print("{:<14} cuda {:>4} cases {:>11} elements  max_abs {:.2e}  max_rel {:.2e}  {:<24} {}\n",
               entry.name, cases.size(), worst.compared, worst.max_abs, worst.max_rel, entry.agreement,
               failed == 0 ? "ok" : "FAILED");
    std::fflush(stdout);
    return failed;
}

struct BenchLine {
    const CudaOpEntry& entry;
    const CudaOpCase& op_case;
    const CudaCaseRun& run;
    CudaTiming timing;
    double floor_us = 0;
    double error = 0;
};

void print_line(const BenchLine& line, bool json) {
    const CudaTiming& t = line.timing;
    if (!json) {
        fmt::print("{:<14} {:<46} {:<9} {:>10.2f} {:>10.2f} {:>10.2f} {:>10.2f} {:>10.2f} {:>7.2f}\n",
                   line.entry.name, line.op_case.shape, line.op_case.dtype, t.us, t.p10_us, t.p90_us,
                   t.hot_us, line.floor_us, t.us / line.floor_us);
    } else {
        const auto rounded = [](double value) { return std::round(value * 1000) / 1000; };
        fmt::print("{}\n", json::dump(json::Value::object({{"op", line.entry.name},
                                                           {"shape", line.op_case.shape},
                                                           {"dtype", line.op_case.dtype},
                                                           {"variant", "cuda"},
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

}  // namespace

Result<int> test_cuda_operators(std::string_view name) {
    Result<std::vector<const CudaOpEntry*>> chosen = chosen_operators(name);
    if (!chosen.ok()) {
        return chosen.status();
    }
    const Result<DeviceProps> device = open_device(0);
    if (!device.ok()) {
        return device.status();
    }
    const Stream stream;
    int failed = 0;
    for (const CudaOpEntry* entry : *chosen) {
        failed += test_operator(*entry, *device, stream.get());
    }
    return failed;
}

Status bench_cuda_operators(std::string_view name, bool json) {
    Result<std::vector<const CudaOpEntry*>> chosen = chosen_operators(name);
    if (!chosen.ok()) {
        return chosen.status();
    }
    const Result<DeviceProps> device = open_device(0);
    if (!device.ok()) {
        return device.status();
    }
    if (!json) {
        fmt::print("{:<14} {:<46} {:<9} {:>10} {:>10} {:>10} {:>10} {:>10} {:>7}\n", "operator", "shape",
                   "dtype", "us", "p10_us", "p90_us", "hot_us", "floor_us", "ratio");
    }
    const Stream stream;
    for (const CudaOpEntry* entry : *chosen) {
        for (const CudaOpCase& op_case : entry->cases()) {
            if (!op_case.bench) {
                continue;
            }
            MemoryBudget budget(device->free_bytes);
            const CudaCaseRun run = op_case.prepare(budget, cuda_case_sets(op_case, device->l2_bytes));
            const OpError error = run.check(stream.get());
            const CudaTiming timing = time_cuda_case(run, stream.get());
            print_line({*entry, op_case, run, timing, cuda_floor_us(run, CudaRates{}), error.max_abs}, json);
        }
    }
    return {};
}

}  // namespace tessera
