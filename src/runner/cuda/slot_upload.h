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

// What the tenants of one step are entered with. The copies come from page-locked memory of the step, so that
// nothing waits: several tenants with penalties whose prompts together are longer than a context are the
// exception.
struct TenantUpload {
    const Stream& stream;
    const StepSizes& sizes;
    const StepMemory& memory;
    StepStaging& staging;

    // `slot` is the tenant's as it was at init.
    void enter(const SlotInit& init, const SampleSlot& slot) const;

  private:
    void copy(void* to, const void* from, int64_t bytes) const;
    void enter_history(const SlotInit& init) const;
    int32_t* stage_history(const SlotInit& init) const;
};

// The sampler's view of a slot.
SampleSlot sample_slot(const Slot& slot);

}  // namespace tessera
