#include "ops/cuda/cuda_harness.h"

#include <algorithm>
#include <vector>

#include "device/cuda/graph.h"
#include "device/cuda/stream.h"

namespace tessera {
namespace {

constexpr int kSetsMax = 512;
constexpr int kReplays = 25;
constexpr double kReplayUs = 2000;  // about, of one graph
constexpr int kLaunchesMax = 2048;  // of one graph

double percentile(std::vector<double>& values, double fraction) {
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(fraction * static_cast<double>(values.size() - 1) + 0.5)];
}

// Microseconds a launch, for each replay of a graph of `launches` that takes the sets in turn.
std::vector<double> replay(const CudaCaseRun& run, cudaStream_t stream, int launches, int sets, int replays) {
    const Graph graph = Graph::capture(stream, [&] {
        for (int i = 0; i < launches; ++i) {
            run.launch(stream, i % sets);
        }
    });
    Event begin(Event::Timing::kOn);
    Event end(Event::Timing::kOn);
    graph.launch(stream);
    std::vector<double> us;
    for (int i = 0; i < replays; ++i) {
        begin.record(stream);
        graph.launch(stream);
        end.record(stream);
        end.wait();
        us.push_back(Event::elapsed_us(begin, end) / launches);
    }
    return us;
}

}  // namespace

int cuda_case_sets(const CudaOpCase& op_case, int64_t l2_bytes) {
    const int64_t wanted = 3 * l2_bytes / std::max<int64_t>(op_case.bytes, 1) + 1;
    return static_cast<int>(std::min<int64_t>(wanted, kSetsMax));
}

CudaTiming time_cuda_case(const CudaCaseRun& run, cudaStream_t stream) {
    run.launch(stream, 0);
    std::vector<double> first = replay(run, stream, 4, 1, 5);
    const double estimate = std::max(percentile(first, 0.5), 0.5);
    const int wanted = static_cast<int>(std::min(kReplayUs / estimate, double{kLaunchesMax}));
    const int launches = std::max(wanted / run.sets * run.sets, run.sets);
    std::vector<double> cold = replay(run, stream, launches, run.sets, kReplays);
    std::vector<double> hot = replay(run, stream, std::max(wanted, 4), 1, kReplays);
    CudaTiming timing;
    timing.us = percentile(cold, 0.5);
    timing.p10_us = percentile(cold, 0.1);
    timing.p90_us = percentile(cold, 0.9);
    timing.hot_us = percentile(hot, 0.5);
    return timing;
}

CudaFloor cuda_floor(const CudaCaseRun& run, const CudaRates& rates) {
    const double flops = run.unit == CudaUnit::kFloat8
                             ? rates.fp8_flops
                             : (run.unit == CudaUnit::kBFloat16 ? rates.bf16_flops : rates.float32_flops);
    return {.bytes_us = static_cast<double>(run.bytes) / rates.bytes_per_s * 1e6,
            .flops_us = static_cast<double>(run.flops) / flops * 1e6};
}

}  // namespace tessera
