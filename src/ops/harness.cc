#include "ops/harness.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/clock.h"
#include "base/median.h"
#include "device/host_buffer.h"
#include "ops/harness_loops.h"

namespace tessera {
namespace {

// Several items a thread, so that a thread that starts late costs little.
constexpr int64_t kItemsPerThread = 16;
constexpr int64_t kEvictBytes = 8 << 20;  // over any level-2 cache

double percentile(std::vector<double>& values, double fraction) {
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(fraction * static_cast<double>(values.size() - 1) + 0.5)];
}

double run_us(const OpCaseRun& run, OpContext& context) {
    const TimeNs start = now_ns();
    run.run(context);
    return static_cast<double>(now_ns() - start) * 1e-3;
}

}  // namespace

double measure_fma_rate(ThreadPool& threads, double budget_s) {
    const int64_t items = threads.size() * kItemsPerThread;
    std::vector<double> rates;
    const TimeNs end = now_ns() + static_cast<TimeNs>(budget_s * 1e9);
    do {
        std::vector<int64_t> fmas(static_cast<size_t>(items));
        const TimeNs start = now_ns();
        threads.parallel_for(items, [&](int64_t i, int) { fmas[static_cast<size_t>(i)] = fma_loop(20'000); });
        const int64_t total = std::accumulate(fmas.begin(), fmas.end(), int64_t{0});
        rates.push_back(static_cast<double>(total) / seconds(now_ns() - start));
    } while (now_ns() < end);
    return median(std::move(rates));
}

double measure_read_bandwidth(ThreadPool& threads, int64_t bytes, double budget_s) {
    const int64_t part = std::max<int64_t>(4096, bytes / threads.size() / 256 * 256);
    const HostBuffer buffer(part * threads.size());
    std::fill_n(buffer.as<float>(), part * threads.size() / 4, 1.0f);
    const int64_t items = threads.size() * std::clamp<int64_t>((64 << 20) / part, 1, kItemsPerThread);
    const int64_t passes =
        std::max<int64_t>(1, (1 << 18) / part);  // an item lasts some microseconds at least
    std::vector<double> rates;
    const TimeNs end = now_ns() + static_cast<TimeNs>(budget_s * 1e9);
    do {
        const TimeNs start = now_ns();
        threads.parallel_for(items, [&](int64_t, int thread) {
            for (int64_t pass = 0; pass < passes; ++pass) {
                read_loop(buffer.data() + thread * part, part);
            }
        });
        const double moved = static_cast<double>(part * items * passes);
        rates.push_back(moved / seconds(now_ns() - start));
    } while (now_ns() < end);
    return median(std::move(rates));
}

OpTiming time_case(const OpCaseRun& run, OpContext& context, double budget_s) {
    run.run(context);
    const double first_us = run_us(run, context);
    const int64_t budget_runs = static_cast<int64_t>(budget_s * 0.5e6 / std::max(first_us, 1.0));
    const int64_t runs = std::clamp<int64_t>(budget_runs, 5, 200);
    std::vector<double> hot;
    for (int64_t i = 0; i < runs; ++i) {
        hot.push_back(run_us(run, context));
    }
    const int64_t evict = kEvictBytes * context.threads.size();
    const HostBuffer other(evict);
    std::vector<double> cold;
    for (int64_t i = 0; i < std::min<int64_t>(runs, 50); ++i) {
        context.threads.parallel_for(context.threads.size(), [&](int64_t part, int) {
            read_loop(other.data() + part * kEvictBytes, kEvictBytes);
        });
        cold.push_back(run_us(run, context));
    }
    OpTiming timing;
    timing.hot_us = percentile(hot, 0.5);
    timing.us = percentile(cold, 0.5);
    timing.p10_us = percentile(cold, 0.1);
    timing.p90_us = percentile(cold, 0.9);
    return timing;
}

double floor_us(const OpCaseRun& run, const MachineRates& rates) {
    const double memory = static_cast<double>(run.bytes) / rates.bytes_per_s;
    const double compute = static_cast<double>(run.flops) / 2 / rates.fma_per_s;
    return std::max(memory, compute) * 1e6;
}

}  // namespace tessera
