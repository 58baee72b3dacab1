#include "bench_engine.h"
#include "cpu_only/without_cuda.h"

namespace tessera {

Status bench_engine_on_device(const BenchEngineArguments&) {
    return without_cuda();
}

}  // namespace tessera
