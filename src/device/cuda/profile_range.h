// ProfileRange: a named range on the calling thread's time line, for profilers that read NVTX (Nsight Systems
// and Nsight Compute). Without one attached it costs a load and a branch.
#pragma once

#include <nvtx3/nvToolsExt.h>

namespace tessera {

class ProfileRange {
  public:
    explicit ProfileRange(const char* name) { nvtxRangePushA(name); }
    ~ProfileRange() { nvtxRangePop(); }
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;
};

}  // namespace tessera
