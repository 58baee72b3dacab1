// OpCase: one shape of one operator, with its data, its reference and its costs. Each operator directory
// lists its cases once, in <op>_cases.h; its test, `tessera ops test` and `tessera ops bench` all read that
// list.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "ops/op_context.h"

namespace tessera {

// How far an operator's result lies from its reference.
struct OpError {
    double max_abs = 0;
    double max_rel = 0;  // |a - b| / max(|b|, 1e-6)
    double rms = 0;      // |a - b| / |b|, 2-norms over all elements; only the device's cases measure it
    int64_t mismatches =
        0;  // elements beyond the case's tolerance; for exact operators, elements that differ at all
    int64_t compared = 0;
};

// A case whose data exists. The functions share it; run() may be called any number of times.
struct OpCaseRun {
    std::function<void(OpContext&)> run;       // the operator itself
    std::function<OpError(OpContext&)> check;  // runs operator and reference on fresh outputs, and compares
    int64_t bytes = 0;                         // read and written at least once
    int64_t flops = 0;                         // 2 for a multiply-add
};

struct OpCase {
    std::string shape;  // "tokens=16 hidden=256"
    std::string dtype;  // of the weights or the KV cache, where that is what varies
    bool bench = true;  // false: only a test
    std::function<OpCaseRun()> prepare;
};

// Compares elementwise; tolerance 0 asks for equal values (NaN equals NaN).
inline OpError compare(std::span<const float> got, std::span<const float> want, double tolerance) {
    OpError error;
    error.compared = static_cast<int64_t>(want.size());
    if (got.size() != want.size()) {
        error.mismatches = error.compared + 1;
        return error;
    }
    for (size_t i = 0; i < want.size(); ++i) {
        if (std::isnan(got[i]) && std::isnan(want[i])) {
            continue;
        }
        const double difference = std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
        if (got[i] == want[i]) {
            continue;
        }
        const double relative = difference / std::fmax(std::fabs(static_cast<double>(want[i])), 1e-6);
        error.max_abs = std::fmax(error.max_abs, difference);
        error.max_rel = std::fmax(error.max_rel, relative);
        if (!(difference <= tolerance)) {
            ++error.mismatches;
        }
    }
    return error;
}

// Deterministic test data: values in [-1, 1), the same on every machine.
class OpRandom {
  public:
    explicit OpRandom(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
    uint64_t next() {  // splitmix64
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    float uniform() { return static_cast<float>(static_cast<int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }
    int64_t below(int64_t limit) { return static_cast<int64_t>(next() % static_cast<uint64_t>(limit)); }
    void fill(std::span<float> out, float scale = 1) {
        for (float& value : out) {
            value = uniform() * scale;
        }
    }

  private:
    uint64_t state_;
};

}  // namespace tessera
