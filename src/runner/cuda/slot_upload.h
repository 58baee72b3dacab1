// What a new tenant brings to its slot on the device: sampling state, biases, forced tokens, and the history
// that penalties need.
#pragma once

#include <string>

#include "device/cuda/stream.h"
#include "runner/cuda/step_memory.h"
#include "runner/slot_table.h"

namespace tessera {

// What the sampler's arrays cannot hold; empty when they can.
std::string tenant_too_large(const SlotInit& init);

// Enters the copies of one tenant into the stream, from page-locked memory of the step, so that nothing
// waits: several tenants with penalties whose prompts together are longer than a context are the exception.
// `slot` is the tenant's as it was at init.
void upload_tenant(const Stream& stream, const StepSizes& sizes, const SlotInit& init, const SampleSlot& slot,
                   const StepMemory& memory, StepStaging& staging);

// The sampler's view of a slot.
SampleSlot sample_slot(const Slot& slot);

}  // namespace tessera
