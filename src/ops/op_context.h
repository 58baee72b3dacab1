// OpContext: where an operator runs. Handed to every operator beside its Args.
#pragma once

#include "base/thread_pool.h"

namespace tessera {

struct OpContext {
    ThreadPool& threads;  // CPU: outputs are split over these; reductions never are
};

}  // namespace tessera
