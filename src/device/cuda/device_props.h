// DeviceProps: what a device is, read once at start.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace tessera {

struct DeviceProps {
    int index = 0;
    std::string name;
    int compute_major = 0;
    int compute_minor = 0;
    int sm_count = 0;
    int64_t l2_bytes = 0;
    int64_t shared_bytes_max = 0;  // of one block, when it asks for it
    int64_t memory_bytes = 0;
    int64_t free_bytes = 0;  // when it was read
};

// What a process may take: `utilization` of the memory, but nothing that others hold.
int64_t usable_bytes(const DeviceProps& device, double utilization);

// Makes the device current for the calling thread and reads it. Refused when there is none, or when it is no
// Hopper (compute capability 9.0), which the kernels are built for.
Result<DeviceProps> open_device(int index);
// For every further thread that launches on the device.
void use_device(const DeviceProps& device);

}  // namespace tessera
