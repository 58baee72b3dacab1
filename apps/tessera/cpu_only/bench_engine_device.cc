#include "bench_engine.h"

namespace tessera {

Status bench_engine_on_device(const BenchEngineArguments&) {
    return unimplemented("--device cuda: this build of tessera has no CUDA backend; build the preset cuda");
}

}  // namespace tessera
