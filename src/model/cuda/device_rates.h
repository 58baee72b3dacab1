// What the device reaches at best, measured: the ceilings that a benchmark's floors are made of.
#pragma once

#include "base/status.h"
#include "device/memory_budget.h"

namespace tessera {

struct DeviceRates {
    double copy_bytes_per_s = 0;  // 2 GiB from one place to another, read and written bytes counted
    double read_bytes_per_s = 0;  // nearly 4 GiB read, nothing written
    double bf16_flops = 0;        // cuBLASLt, 8192 x 8192 x 8192, random operands, 2 for a multiply-add
    double fp8_flops = 0;
};

// Some 50 ms of work on 4 GiB that it takes from the budget and gives back. Medians. Blocks.
Result<DeviceRates> measure_device_rates(MemoryBudget& budget);

}  // namespace tessera
