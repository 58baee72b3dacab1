#include "ops/cuda/cuda_harness.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "device/cuda/graph.h"
#include "device/cuda/stream.h"

namespace tessera {
namespace {

constexpr int kSetsMax = 512;
constexpr int kReplays = 25;
constexpr double kReplayUs = 2000;  // about, of one graph
constexpr int kLaunchesMax = 2048;  // of one graph
// Launches as long as this meet the power limit after some tens of milliseconds, so they are replayed for as
// long as kSustainedUs, and those that compute much also once after each of kBursts pauses.
constexpr double kLongUs = 100;
constexpr double kSustainedUs = 150e3;
constexpr int kBursts = 3;
constexpr auto kPause = std::chrono::milliseconds(110);

double percentile(std::vector<double>& values, double fraction) {
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(fraction * static_cast<double>(values.size() - 1) + 0.5)];
}

// A graph of `launches` that takes the sets in turn, replayed once already.
class Replay {
  public:
    Replay(const CudaCaseRun& run, cudaStream_t stream, int launches, int sets)
        : stream_(stream), launches_(launches), graph_(Graph::capture(stream, [&] {
              for (int i = 0; i < launches; ++i) {
                  run.launch(stream, i % sets);
              }
          })) {
        us();
    }
    // Microseconds a launch.
    double us() {
        begin_.record(stream_);
        graph_.launch(stream_);
        end_.record(stream_);
        end_.wait();
        return Event::elapsed_us(begin_, end_) / launches_;
    }
    std::vector<double> us(int replays) {
        std::vector<double> all;
        for (int i = 0; i < replays; ++i) {
            all.push_back(us());
        }
        return all;
    }

  private:
    cudaStream_t stream_;
    int launches_;
    Graph graph_;
    Event begin_{Event::Timing::kOn};
    Event end_{Event::Timing::kOn};
};

double burst_us(Replay& replay) {
    std::vector<double> all;
    for (int i = 0; i < kBursts; ++i) {
        std::this_thread::sleep_for(kPause);
        all.push_back(replay.us());
    }
    return percentile(all, 0.5);
}

}  // namespace

int cuda_case_sets(const CudaOpCase& op_case, int64_t l2_bytes) {
    const int64_t wanted = 3 * l2_bytes / std::max<int64_t>(op_case.bytes, 1) + 1;
    return static_cast<int>(std::min<int64_t>(wanted, kSetsMax));
}

CudaTiming time_cuda_case(const CudaCaseRun& run, cudaStream_t stream) {
    run.launch(stream, 0);
    std::vector<double> first = Replay(run, stream, 4, 1).us(5);
    const double estimate = std::max(percentile(first, 0.5), 0.5);
    const int wanted = static_cast<int>(std::min(kReplayUs / estimate, double{kLaunchesMax}));
    const int launches = std::max(wanted / run.sets * run.sets, run.sets);
    const bool sustained = estimate >= kLongUs;
    const auto replays = [&](int count) {
        return sustained ? std::max(kReplays, static_cast<int>(kSustainedUs / (estimate * count)) + 1)
                         : kReplays;
    };
    CudaTiming timing;
    Replay in_turn(run, stream, launches, run.sets);
    const CudaFloor floor = cuda_floor(run, CudaRates{});
    if (sustained && 2 * floor.flops_us > floor.bytes_us) {
        timing.burst_us = burst_us(in_turn);
    }
    std::vector<double> cold = in_turn.us(replays(launches));
    const int hot_launches = std::max(wanted, 4);
    std::vector<double> hot = Replay(run, stream, hot_launches, 1).us(replays(hot_launches));
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
