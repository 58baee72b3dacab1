// The benchmarks behind `tessera bench`; argv[0] is the benchmark's name.
#pragma once

namespace tessera {

int run_bench_serve(int argc, char** argv);
int run_bench_engine(int argc, char** argv);

}  // namespace tessera
