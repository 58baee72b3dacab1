// Timing of operator cases, and what this machine can do at best.
#pragma once

#include <cstdint>

#include "ops/op_case.h"

namespace tessera {

// Rates of this machine, over all threads of a pool.
struct MachineRates {
    double fma_per_s = 0;    // float32 multiply-adds from registers
    double bytes_per_s = 0;  // sequential reads of a buffer
};

// Runs for about `budget_s`; the median of several short trials, as the times beside it are medians: what
// slows the machine for a while slows both.
double measure_fma_rate(ThreadPool& threads, double budget_s = 0.2);
// Reads a buffer of `bytes` again and again, each thread its own part: a small one stays in a cache, as data
// of that size would.
double measure_read_bandwidth(ThreadPool& threads, int64_t bytes, double budget_s = 0.2);

struct OpTiming {
    double us = 0;  // median, with cold level-1 and level-2 caches
    double p10_us = 0;
    double p90_us = 0;
    double hot_us = 0;  // median of runs straight after one another
};

// REQUIRES: nothing else runs on the pool.
OpTiming time_case(const OpCaseRun& run, OpContext& context, double budget_s = 0.5);

// The least time that the case can take: its bytes over the bandwidth or its multiply-adds over the FMA rate.
double floor_us(const OpCaseRun& run, const MachineRates& rates);

}  // namespace tessera
